"""Text of the target on disk: SeqKD's data, drawn once and used as a fixed corpus.

Axes: N rows in all, B rows of a batch, T positions.

Reference: Kim & Rush, Sequence-Level Knowledge Distillation, arXiv 1606.07947.
"""

import dataclasses
import json
import numbers
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax.core import Checkpoint, Sampling
from specjax.decoding import generate
from specjax.distill._shards import ShardReader, ShardWriter, rows_digest
from specjax.distill._state import Batch
from specjax.io import model_digest, tokenizer_digest

_WHAT = "set of target samples"


@dataclass(frozen=True, eq=False)
class TargetSamples:
    """Prompts and what the target answered, padded on the right with zeros.

    Attributes:
        tokens: `[N, T]` int32, in the order of the prompts.
        length: `[N]` int32, prompt and answer.
        prompt_length: `[N]` int32.
        ended: `[N]` bool, answers that came to an end of text.
    """

    tokens: np.ndarray
    length: np.ndarray
    prompt_length: np.ndarray
    ended: np.ndarray

    def batch(self) -> Batch:
        """All rows as a corpus: the loss is on the answers, their ends too."""
        return Batch.of(
            self.tokens, length=self.length, prompt_length=self.prompt_length
        )


def sample_target(
    target: Checkpoint,
    prompts: Sequence[Sequence[int]],
    folder: str | Path,
    *,
    length: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    eos_token_ids: Sequence[int] | None = None,
    batch_size: int = 8,
    shard_rows: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> TargetSamples:
    """Draws one answer to each prompt, or reads the folder where they are already.

    It writes a shard at a time; called again, it goes on behind the shards that are
    there. Every row has a seed of its own, so that the samples, and the bytes on disk,
    are those of a run without a break.

    Args:
        target: who answers.
        prompts: token ids, at least one each; for several answers to a prompt, give it
            several times.
        folder: where the samples are kept.
        length: T, prompt and answer together, within the target's context.
        sampling: plain numbers; default `Sampling()`: temperature 1, no filters.
        seed: row n has the seed `seed + n`.
        eos_token_ids: ids that end an answer; default the target's.
        batch_size: rows decoded together; prompts of like lengths are.
        shard_rows: rows a file: what is lost at most when a run is killed.
        progress: called with the rows there are, and the rows in all.

    Returns:
        The samples.

    Raises:
        ValueError: no prompt, a prompt that leaves no room for an answer, a setting out
            of range; the folder holds other samples (of another target, prompts or
            settings, which is named) or damaged shards.
        OSError: a shard cannot be written; those before it stay.

    Example:
        >>> samples = sample_target(  # doctest: +SKIP
        ...     target, prompts, "runs/samples", length=256)
        >>> batches = Batches(samples.batch(), batch_size=8)  # doctest: +SKIP
    """
    sampling = sampling or Sampling()
    eos = target.eos_token_ids if eos_token_ids is None else tuple(eos_token_ids)
    _check(prompts, length, target.model.max_length, seed, batch_size, shard_rows)
    identity = {
        "target": model_digest(target),
        "tokenizer": tokenizer_digest(target.tokenizer),
        "prompts": rows_digest(prompts),
        "rows": len(prompts),
        "length": length,
        "sampling": _settings(sampling),
        "seed": seed,
        "eos_token_ids": repr(tuple(int(i) for i in eos)),
        "shard_rows": shard_rows,
    }
    # Prompts of like lengths together: they share a compiled shape, and end together.
    order = np.argsort([len(p) for p in prompts], kind="stable")
    shards = [order[i : i + shard_rows] for i in range(0, len(order), shard_rows)]
    writer = ShardWriter(folder, _WHAT, identity, len(shards))
    done = len(prompts) - sum(len(shards[n]) for n in writer.missing)
    for number in writer.missing:
        parts = []
        for start in range(0, len(shards[number]), batch_size):
            rows = shards[number][start : start + batch_size]
            parts.append(
                _draw(target, prompts, rows, batch_size, length, sampling, seed, eos)
            )
            done += len(rows)
            if progress is not None:
                progress(done, len(prompts))
        writer.write(
            number, {n: np.concatenate([p[n] for p in parts]) for n in parts[0]}
        )
    writer.finish({})
    return _read(folder, prompts, length)


def _draw(
    target: Checkpoint,
    prompts: Sequence[Sequence[int]],
    rows: np.ndarray,
    batch_size: int,
    length: int,
    sampling: Sampling,
    seed: int,
    eos: Sequence[int],
) -> dict[str, np.ndarray]:
    filled = np.resize(rows, batch_size)  # one shape for every call
    asked = [list(prompts[row]) for row in filled]
    out = generate(
        target,
        asked,
        sampling=sampling,
        max_new_tokens=[length - len(p) for p in asked],
        seed=[(seed + int(row)) % 2**32 for row in filled],
        eos_token_ids=eos,
    )
    tokens = np.zeros((len(rows), length), np.int32)
    lengths = np.zeros((len(rows),), np.int32)
    for i in range(len(rows)):
        whole = asked[i] + out.tokens[i]
        tokens[i, : len(whole)], lengths[i] = whole, len(whole)
    ended = [reason == "eos" for reason in out.finish_reasons[: len(rows)]]
    return {
        "row": rows.astype(np.int64),
        "tokens": tokens,
        "length": lengths,
        "ended": np.asarray(ended, bool),
    }


def _read(
    folder: str | Path, prompts: Sequence[Sequence[int]], length: int
) -> TargetSamples:
    reader, total = ShardReader(folder, _WHAT), len(prompts)
    tokens = np.zeros((total, length), np.int32)
    lengths, ended = np.zeros((total,), np.int32), np.zeros((total,), bool)
    for number in range(reader.num_shards):
        shard = reader.shard(number)
        rows = shard.get_tensor("row")
        tokens[rows] = shard.get_tensor("tokens")
        lengths[rows] = shard.get_tensor("length")
        ended[rows] = shard.get_tensor("ended")
    prompt_length = np.asarray([len(p) for p in prompts], np.int32)
    return TargetSamples(tokens, lengths, prompt_length, ended)


def _settings(sampling: Sampling) -> str:
    """As text that is the same for 1 and 1.0."""
    fields = dataclasses.asdict(sampling)
    for name, value in fields.items():
        if value is not None and not isinstance(value, numbers.Real):
            raise ValueError(
                f"sampling.{name} must be a number for all rows, got {value!r}"
            )
    return json.dumps({n: None if v is None else float(v) for n, v in fields.items()})


def _check(
    prompts: Sequence[Any],
    length: int,
    context: int,
    seed: int,
    batch_size: int,
    shard_rows: int,
) -> None:
    if not len(prompts):
        raise ValueError("the target needs at least one prompt to answer, got none")
    sizes = [len(prompt) for prompt in prompts]
    if min(sizes) < 1:
        raise ValueError(f"prompt {sizes.index(0)} is empty: give at least one token")
    if length > context:
        raise ValueError(f"length must be at most the context {context}, got {length}")
    long = [n for n, size in enumerate(sizes) if size >= length]
    if long:
        raise ValueError(
            f"{len(long)} of {len(sizes)} prompts leave no room for an answer in "
            f"length={length} tokens (prompt {long[0]} has {sizes[long[0]]}); allow "
            "more, or drop them"
        )
    for name, value in (("batch_size", batch_size), ("shard_rows", shard_rows)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be in [0, 2**32), got {seed}")
