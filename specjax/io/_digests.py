"""Digests of models and tokenisers: what a file on disk was made with."""

import dataclasses
import hashlib
import json
from typing import Any

import jax
import numpy as np

from specjax.core import Checkpoint


def model_digest(checkpoint: Checkpoint) -> str:
    """SHA-256 of a checkpoint's configuration and of all its parameters.

    The layout of kernels is left out: it changes no number, and each device has its
    own. The type of the parameters counts. One parameter is on the host at a time.

    Args:
        checkpoint: any; without a configuration its model's settings count.

    Returns:
        Hexadecimal digits.
    """
    config, layout = checkpoint.config, None
    settings = repr(checkpoint.model if config is None else config)
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        layout = fields.pop("kernel_layout", None)
        settings = repr(sorted(fields.items()))
    digest = hashlib.sha256(settings.encode())
    leaves = jax.tree_util.tree_leaves_with_path(checkpoint.params)
    for path, leaf in leaves:
        array = np.asarray(jax.device_get(leaf))
        name = jax.tree_util.keystr(path)
        if layout == "io" and name.endswith("['kernel']"):
            array = array.T
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 of a tokeniser's map from token to id; of nothing without a tokeniser.

    Two tokenisers have the same digest where `check_same_tokenizer` lets them pass.
    """
    if tokenizer is None:
        return ""
    vocab = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(vocab).encode()).hexdigest()
