"""`load`: a checkpoint from a folder, a hub id, a GGUF file or a short name."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from specjax.core import Checkpoint, near
from specjax.io._fetch import SHORT_NAMES, download_snapshot, fetch
from specjax.io._gguf import (
    gguf_config,
    gguf_dtype,
    gguf_tensors,
    open_gguf,
)
from specjax.io._gguf_tokenizer import gguf_tokenizer
from specjax.io._tokenizer import folder_tokenizer
from specjax.io._weights import read_head, read_json, read_shards, shards, to_params
from specjax.models import HEAD_MARK, CausalLM, config_from_hf

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def load(
    name_or_path: str | Path,
    *,
    dtype: Any = None,
    kernel_layout: str | None = None,
) -> Checkpoint:
    """Loads a language model with its tokeniser.

    Args:
        name_or_path: a Hugging Face folder, a `.gguf` file, a hub id such as
            `HuggingFaceTB/SmolLM2-135M-Instruct`, or the short name
            `smollm2-135m-instruct` (fetched where it is not cached). What exists on
            disk goes before a hub id of the same name.
        dtype: of every parameter. None: float32 on a CPU, where smaller floats are
            emulated, else the checkpoint's own (float32 for quantised GGUF files).
        kernel_layout: `"io"` or `"oi"`, see `ModelConfig`. None: `best_kernel_layout`.

    Returns:
        The checkpoint: `config` is its `ModelConfig`, `metadata` holds what `export`
        writes back (`architecture`, `generation_config`).

    Raises:
        FileNotFoundError: there is no such model, or one of its files is absent.
        ValueError: a damaged file, or a model that is not implemented.
        OSError: the hub did not answer.

    Example:
        >>> import specjax
        >>> target = specjax.load("smollm2-135m-instruct")  # doctest: +SKIP
    """
    dtype = _check_dtype(dtype)
    if kernel_layout not in (None, "io", "oi"):
        raise ValueError(
            f"kernel_layout must be 'io', 'oi' or None, got {kernel_layout!r}"
        )
    path = _locate(name_or_path)
    read = _load_gguf if path.is_file() else _load_folder
    return read(path, dtype, kernel_layout, str(name_or_path))


def best_kernel_layout(hidden_size: int, backend: str | None = None) -> str:
    """The layout of weight matrices that decodes fastest.

    On a CPU one row at a time reads `[out, in]` at memory speed (27 GB/s against 22 for
    `[in, out]`); below width 512 the weights fit the caches and `[in, out]`, which
    multiplies several rows twice as fast, is better. Accelerators do not mind.
    """
    backend = backend or jax.default_backend()
    return "oi" if hidden_size >= 512 and backend == "cpu" else "io"


def _check_dtype(dtype: Any) -> Any:
    if dtype is None:
        return jnp.dtype(jnp.float32) if jax.default_backend() == "cpu" else None
    try:
        known = jnp.dtype(dtype)
    except TypeError:
        known = None
    if known is None or not jnp.issubdtype(known, jnp.floating):
        raise ValueError(
            f"dtype must be float32, bfloat16, float16 or None, got {dtype!r}"
        )
    return known


def _locate(name: str | Path) -> Path:
    """Finds, or downloads, what a name stands for: a file or a folder."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return path
        raise ValueError(
            f"{str(path)!r} is a file but not a .gguf one; give the folder of a "
            "Hugging Face model or a .gguf file"
        )
    text = str(name)
    if text in SHORT_NAMES:
        return fetch(text)
    is_path = isinstance(name, Path) or path.suffix.lower() == ".gguf"
    if is_path or not _HUB_ID.fullmatch(text):
        raise FileNotFoundError(
            f"there is no model {text!r}: neither a folder, nor a .gguf file, nor a "
            f"hub id (owner/name), nor a short name; {near(text, SHORT_NAMES)}"
        )
    return download_snapshot(text)


def _load_folder(
    folder: Path, dtype: Any, kernel_layout: str | None, source: str
) -> Checkpoint:
    hf = read_json(folder / "config.json")
    layout = kernel_layout or best_kernel_layout(int(hf.get("hidden_size") or 1))
    head = read_head(shards(folder), repr(str(folder))) if HEAD_MARK in hf else None
    config = config_from_hf(
        hf, kernel_layout=layout, source=str(folder / "config.json"), head=head
    )
    files = shards(folder)
    tokenizer = folder_tokenizer(folder)
    generation = folder / "generation_config.json"
    settings = read_json(generation) if generation.is_file() else {}
    params = to_params(read_shards(files), config, dtype, repr(str(folder)))
    return Checkpoint(
        model=CausalLM(config),
        params=params,
        tokenizer=tokenizer,
        config=config,
        eos_token_ids=_eos_ids(settings, hf, tokenizer),
        source=source,
        metadata={
            "architecture": hf["architectures"][0],
            "generation_config": settings,
        },
    )


def _load_gguf(
    path: Path, dtype: Any, kernel_layout: str | None, source: str
) -> Checkpoint:
    file = open_gguf(path)
    width = int(file.get("embedding_length"))
    layout = kernel_layout or best_kernel_layout(width)
    config, architecture = gguf_config(file, layout)
    tokenizer = gguf_tokenizer(file)
    params = to_params(
        gguf_tensors(file, config), config, dtype or gguf_dtype(file), repr(str(path))
    )
    ends = {
        file.fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")
    }
    return Checkpoint(
        model=CausalLM(config),
        params=params,
        tokenizer=tokenizer,
        config=config,
        eos_token_ids=tuple(sorted(int(i) for i in ends if i is not None)),
        source=source,
        metadata={"architecture": architecture, "generation_config": {}},
    )


def _eos_ids(generation: dict, hf: dict, tokenizer: Any) -> tuple[int, ...]:
    """End-of-text ids: what generation is told, else the model, else the tokeniser."""
    for ids in (
        generation.get("eos_token_id"),
        hf.get("eos_token_id"),
        None if tokenizer is None else tokenizer.eos_token_id,
    ):
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()
