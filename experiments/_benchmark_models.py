"""Models that several parts of the benchmark measure."""

import tempfile
from typing import Any

import specjax
from specjax.core import Checkpoint
from specjax.models import CausalLM, take_layers


def first_layers(target: Checkpoint, number: int) -> Checkpoint:
    """A draft of the target's first layers."""
    config, params = take_layers(target.config, target.params, range(number))
    return Checkpoint(CausalLM(config), params, target.tokenizer, config)


def in_transformers(checkpoint: Checkpoint) -> tuple[Any, Any]:
    """The same weights and tokeniser in transformers, through an exported folder."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        path = specjax.export(checkpoint, f"{folder}/model")
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32
        )
        return model, transformers.AutoTokenizer.from_pretrained(path)
