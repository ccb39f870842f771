"""Checkpoints whose head is reduced: whole and byte for byte, or refused."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig

from specjax.core import Checkpoint
from specjax.io import export, load, model_digest
from specjax.models import CausalLM, HeadVocabulary, ModelConfig, reduce_head

IDS = [0, 2, 3, 11, 15]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def checkpoint():
    config = ModelConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        qk_norm=True,
    )
    params = jax.jit(CausalLM(config).init)(jax.random.key(0))
    config, params = reduce_head(config, params, IDS)
    return Checkpoint(CausalLM(config), params, config=config, eos_token_ids=(2,))


@pytest.fixture
def folder(checkpoint, tmp_path):
    return export(checkpoint, tmp_path / "out")


def edit(folder, change):
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def edit_mark(folder, **changes):
    path = folder / "config.json"
    hf = json.loads(path.read_text())
    path.write_text(json.dumps({**hf, "reduced_head": hf["reduced_head"] | changes}))


@pytest.mark.parametrize("max_shard_bytes", [2**30, 600])
def test_it_comes_back_byte_for_byte(checkpoint, tmp_path, max_shard_bytes):
    folder = export(checkpoint, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    assert (folder / WEIGHTS).exists() == (max_shard_bytes > 600)
    again = load(folder)
    assert again.config == checkpoint.config and again.model == checkpoint.model
    assert again.model.head_ids.tolist() == IDS
    assert again.eos_token_ids == (2,)
    assert again.metadata["architecture"] == "Qwen3ForCausalLM"
    jax.tree.map(np.testing.assert_array_equal, again.params, checkpoint.params)
    second = export(again, tmp_path / "second", max_shard_bytes=max_shard_bytes)
    for path in folder.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name
    assert load(folder, dtype="bfloat16").model.head == checkpoint.model.head


def test_transformers_refuses_the_folder_in_a_sentence(folder):
    with pytest.raises(ValueError, match="specjax_reduced_head"):
        AutoConfig.from_pretrained(folder)
    assert "specjax.load can" in (folder / "config.json").read_text()


def put(name, array):
    return lambda folder: edit(folder, lambda tensors: tensors.update({name: array}))


def cut(folder):
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:-9])


DAMAGES = {  # what was done to the folder, and what `load` says
    "lost": (
        lambda folder: edit(folder, lambda tensors: tensors.pop("lm_head.ids")),
        "says that its head is reduced, but lacks the tensor 'lm_head.ids'",
    ),
    "unsorted": (
        put("lm_head.ids", np.array(IDS[::-1], np.int32)),
        "holds a damaged 'lm_head.ids' .*ascending",
    ),
    "floats": (
        put("lm_head.ids", np.ones((5,), np.float32)),
        "holds a damaged 'lm_head.ids'",
    ),
    "another": (
        put("lm_head.ids", np.array([0, 2, 3, 11, 14], np.int32)),
        "was written for a head of 5 ids with SHA-256",
    ),
    "rows": (
        put("lm_head.weight", np.ones((6, 8), np.float32)),
        r"'lm_head.weight' must have the shape \(5, 8\)",
    ),
    "mark": (lambda folder: edit_mark(folder, sha256="0"), "the folder is damaged"),
    "size": (lambda folder: edit_mark(folder, size=4), "head of 4 ids .* hold 5 with"),
    "truncated": (cut, "is not a whole safetensors file"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_head_is_refused(folder, name):
    change, message = DAMAGES[name]
    change(folder)
    with pytest.raises(ValueError, match=message) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_ids_without_a_word_in_the_configuration_are_refused(folder):
    path = folder / "config.json"
    hf = json.loads(path.read_text())
    del hf["reduced_head"]
    path.write_text(json.dumps({**hf, "vocab_size": 5}))
    edit(folder, lambda x: x.update({"model.embed_tokens.weight": np.ones((5, 8))}))
    with pytest.raises(ValueError, match=r"holds the tensor 'lm_head.ids', which its"):
        load(folder)


def test_the_ids_of_a_head_belong_to_the_digest(checkpoint):
    other = HeadVocabulary([0, 2, 3, 11, 14])
    config = dataclasses.replace(checkpoint.config, head=other)
    assert model_digest(dataclasses.replace(checkpoint, config=config)) != (
        model_digest(checkpoint)
    )
