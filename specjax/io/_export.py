"""`export`: writes a checkpoint as a Hugging Face folder, whole or not at all."""

import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from specjax.core import Checkpoint
from specjax.io._paths import replace_folder, sibling_folder, umask
from specjax.models import (
    HEAD_IDS,
    ModelConfig,
    config_to_hf,
    param_path,
    tensor_from_hf,
    tensor_shapes,
    tensor_to_hf,
)

_MARK = "exported_by"  # in config.json: this folder may be replaced by a later export
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"


def export(
    checkpoint: Checkpoint,
    folder: str | Path,
    *,
    max_shard_bytes: int = 5 * 2**30,
) -> Path:
    """Writes a folder that `specjax.load` and transformers read.

    It holds config.json, safetensors weights (in the dtype they have, sharded with an
    index where they are large), generation_config.json and the tokeniser. Everything is
    written beside the folder and then renamed, so nothing half-written is ever there.

    transformers has no reduced heads: a model with one comes with the ids of its head
    among the weights, and a config.json that only `specjax.load` takes.

    Args:
        checkpoint: what to write; its `config` must be a `ModelConfig`.
        folder: where; an earlier export there is replaced.
        max_shard_bytes: the most bytes of weights in one file (one tensor at least).

    Returns:
        The folder.

    Raises:
        ValueError: no architecture of transformers holds the configuration, or the
            parameters do not fit it.
        FileExistsError: there is something else at `folder`.
        OSError: it cannot be written.
    """
    if not isinstance(checkpoint.config, ModelConfig):
        raise ValueError(
            "export needs a checkpoint whose config is a ModelConfig, got "
            f"{type(checkpoint.config).__name__}"
        )
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
    folder = Path(folder).expanduser().absolute()
    _check_target(folder)
    leaves = _leaves(checkpoint.params, checkpoint.config)
    try:
        with sibling_folder(folder) as new:
            _write_configs(checkpoint, new, str(_first_dtype(leaves)))
            _write_weights(leaves, checkpoint.config, new, max_shard_bytes)
            if checkpoint.tokenizer is not None:
                _write_tokenizer(checkpoint.tokenizer, new)
            replace_folder(new, folder)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", str(error))
        if reason is None:  # says all in one sentence already
            raise
        raise OSError(
            f"could not export to {str(folder)!r}: {reason}; nothing was left there"
        ) from error
    return folder


def _check_target(folder: Path) -> None:
    """Refuses to replace anything but an earlier export."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FileExistsError(
            f"export needs a folder, but {str(folder)!r} is a file; choose another name"
        )
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        return
    try:
        marked = _MARK in json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        marked = False
    if not marked:
        raise FileExistsError(
            f"{str(folder)!r} holds files that specjax did not export "
            f"({', '.join(names[:3])}, ...); choose another folder or empty this one"
        )
    strange = [name for name in names if not _is_ours(folder / name)]
    if strange:
        raise FileExistsError(
            f"{str(folder)!r} holds {strange[0]!r} beside an earlier export, which "
            "would be lost; move it or choose another folder"
        )


def _is_ours(path: Path) -> bool:
    known = (".safetensors", ".json", ".jinja", ".model", "merges.txt", "vocab.txt")
    return path.is_file() and path.name.endswith(known)


def _leaves(params: Any, config: ModelConfig) -> dict[str, Any]:
    """Parameters under Hugging Face names, checked against the configuration."""
    leaves: dict[str, Any] = {}
    for name, shape in tensor_shapes(config).items():
        leaf = params
        for key in param_path(name):
            if key not in leaf:
                raise ValueError(
                    f"the parameters lack {'/'.join(param_path(name))}, which the "
                    "configuration of the checkpoint needs"
                )
            leaf = leaf[key]
        expected = tensor_from_hf(name, np.broadcast_to(0, shape), config).shape
        if leaf.shape != expected:
            raise ValueError(
                f"{'/'.join(param_path(name))} must have the shape {expected} by the "
                f"configuration of the checkpoint, got {leaf.shape}"
            )
        leaves[name] = leaf
    if config.head is not None:
        leaves[HEAD_IDS] = config.head.ids
    return leaves


def _first_dtype(leaves: dict[str, Any]) -> np.dtype:
    return next(iter(leaves.values())).dtype


def _write_configs(checkpoint: Checkpoint, folder: Path, dtype: str) -> None:
    metadata = dict(checkpoint.metadata or {})
    tokenizer, eos = checkpoint.tokenizer, list(checkpoint.eos_token_ids)
    ids: dict[str, Any] = {}
    if eos:
        ids["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    for name in ("bos_token_id", "pad_token_id"):
        if getattr(tokenizer, name, None) is not None:
            ids[name] = getattr(tokenizer, name)
    config = {
        **config_to_hf(checkpoint.config, metadata.get("architecture")),
        "dtype": dtype,
        "torch_dtype": dtype,  # what transformers 4 reads
        **{"bos_token_id": None, "eos_token_id": None, **ids},
        _MARK: f"specjax {importlib.metadata.version('specjax')}",
    }
    _write_json(folder / "config.json", config)
    settings = {**metadata.get("generation_config", {}), **ids}
    _write_json(folder / "generation_config.json", settings)


def _write_tokenizer(tokenizer: Any, folder: Path) -> None:
    tokenizer.save_pretrained(str(folder))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8"))
    # The base class has another name in transformers 4, which 5 reads too.
    if settings.get("tokenizer_class") == "TokenizersBackend":
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for name in ("local_files_only", "is_local"):  # how it was loaded, not what it is
        settings.pop(name, None)
    _write_json(path, settings)


def _write_weights(
    leaves: dict[str, Any], config: ModelConfig, folder: Path, limit: int
) -> None:
    """Writes shard by shard; one shard is on the host at a time."""
    groups = list(_groups(leaves, limit))
    weight_map = {}
    for number, names in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        file = _WEIGHTS if len(groups) == 1 else file
        tensors = {
            name: tensor_to_hf(name, np.asarray(jax.device_get(leaves[name])), config)
            for name in names
        }
        # transformers refuses a file that does not name its format.
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o666 & ~umask())  # safetensors makes it private
        weight_map |= dict.fromkeys(names, file)
    if len(groups) > 1:
        total = sum(leaf.nbytes for leaf in leaves.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / _INDEX, index)


def _groups(leaves: dict[str, Any], limit: int) -> Iterator[list[str]]:
    group, size = [], 0
    for name, leaf in leaves.items():
        if group and size + leaf.nbytes > limit:
            yield group
            group, size = [], 0
        group.append(name)
        size += leaf.nbytes
    yield group


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(
        json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
