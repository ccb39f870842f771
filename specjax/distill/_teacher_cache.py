"""The teacher's likeliest tokens on disk, so that training runs without the teacher.

Axes: B rows, T positions, K ids of a position, V vocabulary.

Logits at position t predict token t + 1: the law at position t of a row is kept where
token t + 1 counts in the loss, and only there. Log-probabilities are float32: with the
ids beside them, float16 would save a quarter of a file and leave three digits.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from specjax.core import Checkpoint
from specjax.distill._batches import Batches
from specjax.distill._buckets import CachedLaw
from specjax.distill._response import check_temperature, log_law
from specjax.distill._shards import ShardReader, ShardWriter
from specjax.distill._state import Batch, HeadedModel
from specjax.io import model_digest, tokenizer_digest
from specjax.ops import chunk_size, map_chunks

_WHAT = "teacher cache"

Progress = Callable[[int, int], None]  # rows done, rows in all


def write_teacher_cache(
    teacher: Checkpoint,
    sequences: Batch,
    folder: str | Path,
    *,
    top_k: int,
    temperature: float = 1.0,
    shared_vocab: int | None = None,
    shard_rows: int = 256,
    batch_size: int = 8,
    chunk: int = 1024,
    progress: Progress | None = None,
) -> "TeacherCache":
    """Reads all sequences once and keeps the teacher's `top_k` likeliest next tokens.

    It writes a shard at a time. Called again, it goes on behind the shards that are
    there, and the folder ends with the same bytes as that of a run without a break; a
    finished folder is opened as it is.

    Args:
        teacher: a model with a head to call alone, its parameters and tokeniser.
        sequences: all rows to train on, on the host, from `Batch.of`.
        folder: where.
        top_k: K, ids kept a position, at most V.
        temperature: divides the logits, > 0; the student's must be divided too.
        shared_vocab: V of the law, where the student has fewer ids; default the
            teacher's. The law is renormalised over the first so many ids, as in
            `Distill`.
        shard_rows: rows a file.
        batch_size: rows read at once.
        chunk: tokens whose logits are alive at once.
        progress: called with the rows done and the rows in all.

    Returns:
        The cache, open.

    Raises:
        ValueError: a setting is out of range; no token counts; the folder holds another
            cache (another teacher, tokeniser, text or setting, which is named) or
            damaged shards.
        OSError: a shard cannot be written; those before it stay.

    Example:
        >>> cache = write_teacher_cache(  # doctest: +SKIP
        ...     target, corpus, "runs/cache", top_k=64)
        >>> batches = cache.batches(Batches(corpus, batch_size=8))  # doctest: +SKIP
    """
    model = cast(HeadedModel, teacher.model)
    size = model.vocab_size if shared_vocab is None else shared_vocab
    _check(model, sequences, top_k, temperature, size, shard_rows, batch_size, chunk)
    hashes = _row_hashes(sequences)
    identity = {
        "teacher": model_digest(teacher),
        "tokenizer": tokenizer_digest(teacher.tokenizer),
        "sequences": _digest(hashes),
        "rows": len(hashes),
        "width": sequences.tokens.shape[1],
        "top_k": top_k,
        "temperature": float(temperature),
        "vocab_size": size,
        "shard_rows": shard_rows,
    }
    writer = ShardWriter(folder, _WHAT, identity, -(-len(hashes) // shard_rows))
    at_once = chunk_size(chunk, batch_size, sequences.tokens.shape[1])
    read = functools.partial(_read, model, top_k, float(temperature), size, at_once)
    for number in writer.missing:
        rows = np.arange(
            number * shard_rows, min(len(hashes), (number + 1) * shard_rows)
        )
        parts = list(_laws(read, teacher.params, sequences, rows, batch_size))
        writer.write(number, {**_joined(parts), "row_hash": hashes[rows]})
        if progress is not None:
            progress(int(rows[-1]) + 1, len(hashes))
    writer.finish({} if writer.is_finished else _summary(writer))
    return TeacherCache(folder)


class TeacherCache:
    """A folder that `write_teacher_cache` finished.

    Args:
        folder: where it is.

    Raises:
        ValueError: it is missing, unfinished or damaged.
    """

    def __init__(self, folder: str | Path):
        self._reader = ShardReader(folder, _WHAT)
        self._starts: dict[int, np.ndarray] = {}

    @property
    def folder(self) -> Path:
        """Where it is."""
        return self._reader.folder

    @property
    def identity(self) -> Mapping[str, Any]:
        """What it was made from: digests, sizes and settings."""
        return self._reader.identity

    @property
    def summary(self) -> Mapping[str, Any]:
        """`tokens`, and the least and the mean of the mass that the ids captured."""
        return self._reader.summary

    @property
    def top_k(self) -> int:
        """K."""
        return self.identity["top_k"]

    @property
    def temperature(self) -> float:
        """What the teacher's logits were divided by."""
        return self.identity["temperature"]

    @property
    def vocab_size(self) -> int:
        """V of the laws."""
        return self.identity["vocab_size"]

    def check(
        self,
        *,
        teacher: Checkpoint | None = None,
        tokenizer: Any = None,
        sequences: Batch | None = None,
        temperature: float | None = None,
    ) -> None:
        """Makes sure that it belongs to these; what is not given is not compared.

        Args:
            teacher: the model, its parameters and its tokeniser.
            tokenizer: the student's.
            sequences: the rows to train on.
            temperature: of the student's law.

        Raises:
            ValueError: it was made from another one, which is named.
        """
        wanted: dict[str, Any] = {}
        if teacher is not None:
            wanted["teacher"] = model_digest(teacher)
            tokenizer = teacher.tokenizer if tokenizer is None else tokenizer
        if tokenizer is not None and self.identity["tokenizer"]:
            wanted["tokenizer"] = tokenizer_digest(tokenizer)
        if temperature is not None:
            wanted["temperature"] = float(temperature)
        self._reader.check(wanted)
        if sequences is not None:
            self._check_sequences(sequences)

    def verify(self) -> None:
        """Compares every file with its checksum, as reading it would do one by one.

        Raises:
            ValueError: a file is not what was written.
        """
        for number in range(self._reader.num_shards):
            self._reader.verify(number)

    def read(self, rows: np.ndarray) -> CachedLaw:
        """The laws of some rows, on the host.

        A position without one, as its next token does not count, has an empty law: ids
        0 to K - 1 of probability 0, and all the mass in the tail.

        Args:
            rows: `[B]` numbers of rows, in any order.

        Returns:
            `[B, T, K]` arrays, for `Batch.cached`.

        Raises:
            ValueError: a file is not what was written.
        """
        shape = len(rows), self.identity["width"], self.top_k
        ids = np.broadcast_to(np.arange(self.top_k, dtype=np.int32), shape).copy()
        log_p = np.full(shape, -np.inf, np.float32)
        log_tail = np.zeros(shape[:2], np.float32)
        for i, row in enumerate(rows):
            number, place = divmod(int(row), self.identity["shard_rows"])
            shard = self._reader.shard(number)
            if number not in self._starts:
                self._starts[number] = shard.get_tensor("start")
            a, b = (int(x) for x in self._starts[number][place : place + 2])
            if a == b:  # safetensors knows no empty slice
                continue
            there = shard.get_slice("position")[a:b]
            ids[i, there] = shard.get_slice("ids")[a:b]
            log_p[i, there] = shard.get_slice("log_p")[a:b]
            log_tail[i, there] = shard.get_slice("log_tail")[a:b]
        return CachedLaw(ids, log_p, log_tail)  # pyright: ignore

    def batches(self, batches: Batches) -> "CachedBatches":
        """The same batches, each with the teacher's laws of its rows.

        Raises:
            ValueError: the cache was made from other sequences.
        """
        return CachedBatches(batches, self)

    def _check_sequences(self, sequences: Batch) -> None:
        width = sequences.tokens.shape[1]
        hashes = _row_hashes(sequences)
        self._reader.check({"rows": len(hashes), "width": width})
        if _digest(hashes) == self.identity["sequences"]:
            return
        numbers = range(self._reader.num_shards)
        stored = [self._reader.shard(n).get_tensor("row_hash") for n in numbers]
        differ = np.flatnonzero(np.concatenate(stored) != hashes)
        first = f"row {differ[0]} is the first of {len(differ)} that differ"
        raise ValueError(
            f"the teacher cache in {self.folder} was made from other sequences: "
            f"{first if len(differ) else 'the manifest differs'}; write it anew from "
            "these"
        )


@dataclass(frozen=True, eq=False)
class CachedBatches:
    """`Batches` whose batches carry the teacher's laws: a `BatchSource`."""

    batches: Batches
    cache: TeacherCache

    def __post_init__(self):
        self.cache.check(sequences=self.batches.corpus)

    def __call__(self, step: int) -> Batch:
        """The batch of a step, on the host."""
        cached = self.cache.read(self.batches.rows(step))
        return dataclasses.replace(self.batches(step), cached=cached)

    def describe(self) -> Mapping[str, Any]:
        """That of the batches, and what the cache was made from."""
        return {**self.batches.describe(), "cache": dict(self.cache.identity)}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _read(model, top_k, temperature, size, chunk, params, tokens) -> CachedLaw:
    """The laws of all positions but the last, `[B, T-1, K]`."""
    hidden = model.apply(params, tokens)[0].hidden[:, :-1]

    def law(hidden) -> CachedLaw:
        logits = model.unembed(params, hidden)[..., :size]
        return CachedLaw.of(log_law(logits, temperature), top_k)

    return map_chunks(law, hidden, chunk)


def _laws(
    read, params, sequences: Batch, rows: np.ndarray, batch_size: int
) -> Iterator[dict[str, np.ndarray]]:
    """The laws of each row where the next token counts."""
    for start in range(0, len(rows), batch_size):
        some = rows[start : start + batch_size]
        filled = np.resize(some, batch_size)  # one shape for every call
        law = jax.device_get(read(params, np.asarray(sequences.tokens)[filled]))
        for i, row in enumerate(some):
            position = np.flatnonzero(np.asarray(sequences.mask)[row, 1:])
            yield {
                "position": position.astype(np.int32),
                "ids": law.ids[i, position],
                "log_p": law.log_p[i, position],
                "log_tail": law.log_tail[i, position],
            }


def _joined(rows: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Rows end to end, and where each begins."""
    counts = [len(row["position"]) for row in rows]
    joined = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    return {**joined, "start": np.cumsum([0, *counts], dtype=np.int64)}


def _summary(writer: ShardWriter) -> dict[str, Any]:
    """Of all shards, those of an earlier run too."""
    tails = [writer.read(n, "log_tail") for n in range(writer.num_shards)]
    mass = -np.expm1(np.concatenate(tails).astype(np.float64))
    return {
        "tokens": int(mass.size),
        "captured_mass": {"mean": float(mass.mean()), "least": float(mass.min())},
    }


def _row_hashes(sequences: Batch) -> np.ndarray:
    """Of each row 64 bits: its tokens up to the last that counts, and which count."""
    tokens, mask = np.asarray(sequences.tokens, np.int32), np.asarray(sequences.mask)
    hashes = np.zeros((len(tokens),), np.uint64)
    for row in range(len(tokens)):
        counted = np.flatnonzero(mask[row]).astype(np.int32)
        end = int(counted[-1]) + 1 if len(counted) else 0
        data = tokens[row, :end].tobytes() + b"|" + counted.tobytes()
        digest = hashlib.blake2b(data, digest_size=8).digest()
        hashes[row] = int.from_bytes(digest, "little")
    return hashes


def _digest(hashes: np.ndarray) -> str:
    return hashlib.sha256(hashes.tobytes()).hexdigest()


def _check(
    model: HeadedModel,
    sequences: Batch,
    top_k: int,
    temperature: float,
    size: int,
    shard_rows: int,
    batch_size: int,
    chunk: int,
) -> None:
    check_temperature(temperature)
    if not 1 <= size <= model.vocab_size:
        raise ValueError(
            f"shared_vocab must be 1..{model.vocab_size}, the teacher's vocabulary, "
            f"got {size}"
        )
    if not 1 <= top_k <= size:
        raise ValueError(f"top_k must be 1..{size}, the vocabulary, got {top_k}")
    counts = {"shard_rows": shard_rows, "batch_size": batch_size, "chunk": chunk}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not np.asarray(sequences.mask).any():
        raise ValueError(
            "a teacher cache needs tokens that count in the loss, got none in "
            f"{len(sequences.tokens)} rows"
        )
    low, high = np.min(sequences.tokens), np.max(sequences.tokens)
    if low < 0 or high >= model.vocab_size:
        raise ValueError(
            f"token ids must be 0..{model.vocab_size - 1}, the teacher's vocabulary, "
            f"got {low}..{high}"
        )
