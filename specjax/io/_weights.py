"""Reads safetensors one tensor at a time, without torch."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.core import Params
from specjax.models import (
    HEAD_IDS,
    HeadVocabulary,
    ModelConfig,
    param_path,
    tensor_from_hf,
    tensor_shapes,
)

_DTYPES = {
    np.dtype(t) for t in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
}
# Left by older transformers, or implied by the configuration.
_IGNORED = ("rotary_emb.inv_freq", "self_attn.masked_bias", "self_attn.bias")

Tensors = Mapping[str, Callable[[], np.ndarray]]


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not a JSON object.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(path.parent)!r} has no {path.name}; expected the folder of a "
            "Hugging Face model (config.json, *.safetensors, tokenizer files)"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not whole JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{str(path)!r} must hold a JSON object, got {found!r:.40}")
    return found


def shards(folder: Path) -> dict[Path, list[str] | None]:
    """The weight files of a Hugging Face folder, with the tensors wanted from each.

    Returns:
        File -> names (None: all that it has).

    Raises:
        FileNotFoundError: there are none, or the index names one that is absent.
        ValueError: the index is damaged.
    """
    single, index = (
        folder / "model.safetensors",
        folder / "model.safetensors.index.json",
    )
    if single.is_file():
        return {single: None}
    if not index.is_file():
        other = sorted(p.name for p in folder.glob("*.bin")) + sorted(
            p.name for p in folder.glob("*.gguf")
        )
        hint = f"; it has {', '.join(other[:3])}" if other else ""
        raise FileNotFoundError(
            f"{str(folder)!r} has neither model.safetensors nor "
            f"model.safetensors.index.json{hint}; give a folder with safetensors "
            "weights, or the path of a .gguf file"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{str(index)!r} has no weight_map: the index is damaged")
    files: dict[Path, list[str] | None] = {}
    for name, file in weight_map.items():
        names = files.setdefault(folder / file, [])
        assert names is not None
        names.append(name)
    for path in files:
        if not path.is_file():
            raise FileNotFoundError(
                f"{index.name} names the shard {path.name}, which is not in "
                f"{str(folder)!r}; download the folder again"
            )
    return files


def read_shards(files: Mapping[Path, list[str] | None]) -> Iterator[tuple[str, Any]]:
    """Yields `(name, array)` of all tensors, one file open at a time.

    Raises:
        ValueError: a file is truncated, or lacks a tensor that the index promised.
    """
    for path, names in files.items():
        with _opened(path) as file:
            present = set(file.keys())
            for name in file.keys() if names is None else names:
                if name not in present:
                    raise ValueError(
                        f"the index says that {path.name} holds {name!r}, which it "
                        "does not; download the folder again"
                    )
                yield name, file.get_tensor(name)


def read_head(files: Mapping[Path, Any], source: str) -> HeadVocabulary:
    """The ids of a reduced head, which lie among the weights.

    Args:
        files: from `shards`.
        source: whose they are, for messages.

    Raises:
        ValueError: they are missing, or no ids of a head.
    """
    for path in files:
        with _opened(path) as file:
            if HEAD_IDS not in file.keys():
                continue
            ids = file.get_tensor(HEAD_IDS)
        try:
            return HeadVocabulary(ids)
        except ValueError as error:
            raise ValueError(
                f"{source} holds a damaged {HEAD_IDS!r} ({error}); export it again"
            ) from None
    raise ValueError(
        f"{source} says that its head is reduced, but lacks the tensor {HEAD_IDS!r} "
        "that says to which ids; export it again"
    )


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(
            f"{str(path)!r} is not a whole safetensors file ({error}); download or "
            "export it again"
        ) from None


def to_params(
    tensors: Iterator[tuple[str, np.ndarray]],
    config: ModelConfig,
    dtype: Any,
    source: str,
) -> Params:
    """Turns Hugging Face tensors into the parameter tree, on the device.

    One tensor is converted at a time and then dropped: the host needs no second copy.

    Args:
        tensors: `(name, array)` in the Hugging Face layout, any order.
        config: what the shapes must agree with.
        dtype: of every leaf; None: as the embedding is stored.
        source: where they came from, for messages.

    Raises:
        ValueError: a tensor is missing, unknown, of another shape, or not a float.
    """
    wanted, params = tensor_shapes(config), {}
    skipped = {"lm_head.weight"} if config.tie_word_embeddings else set()
    skipped |= {HEAD_IDS} if config.head is not None else set()
    missing = dict(wanted)
    for name, array in tensors:
        if name in skipped or (name.endswith(_IGNORED) and name not in wanted):
            continue
        if name not in wanted:
            raise ValueError(
                f"{source} holds the tensor {name!r}, which its configuration does not "
                "use; the configuration and the weights do not belong together, or an "
                "option is not implemented"
            )
        if array.shape != wanted[name]:
            raise ValueError(
                f"{source}: {name!r} must have the shape {wanted[name]} by the "
                f"configuration, got {array.shape}"
            )
        if array.dtype not in _DTYPES:
            raise ValueError(
                f"{source}: {name!r} must be float32, float16 or bfloat16, got "
                f"{array.dtype} (quantised weights load from .gguf files only)"
            )
        missing.pop(name, None)
        array = tensor_from_hf(name, array, config)
        if dtype is not None:
            array = array.astype(dtype, copy=False)
        _insert(params, param_path(name), _put(array))
    if missing:
        first = next(iter(missing))
        raise ValueError(
            f"{source} lacks {len(missing)} of {len(wanted)} tensors, the first is "
            f"{first!r}; the file is incomplete or its configuration is another model's"
        )
    if dtype is None:
        dtype = params["embed_tokens"].dtype
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    return params


def _put(array: np.ndarray) -> jax.Array:
    # Waiting keeps at most one host copy alive.
    return jax.device_put(np.ascontiguousarray(array)).block_until_ready()


def _insert(tree: dict, path: tuple[str, ...], leaf: jax.Array) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = leaf
