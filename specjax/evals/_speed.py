"""What speculation buys on this machine: acceptance, tokens per second, pass costs."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from specjax.core import (
    Checkpoint,
    Drafter,
    LanguageModel,
    Sampling,
    SpecStats,
    Verifier,
)
from specjax.decoding import Generation, Job, collect, prepare
from specjax.evals._latency import Timing, measure


class Output(NamedTuple):
    """What came of one prompt."""

    tokens: list[int]  # the new ones
    log_probs: list[float]  # the target's, whatever the verifier


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to decode, measured over all prompts."""

    stats: SpecStats
    decode_s: float  # the loop alone: neither compilation nor prefill
    prefill_s: float
    speedup: float  # tokens per second over those of plain decoding, same run
    outputs: Mapping[int, Output]  # by index of the prompt

    @property
    def tokens_per_s(self) -> float:
        """Emitted tokens a second of decoding, all rows of a batch together."""
        return float(self.stats.emitted.sum()) / self.decode_s


PLAIN = "ar"


def compare(
    target: Checkpoint,
    drafters: Mapping[str, Drafter],
    prompts: Sequence[Sequence[int]],
    *,
    batch: int,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    repeats: int = 1,
    verifiers: Mapping[str, Verifier] | None = None,
    on_batch: Callable[[], None] | None = None,
) -> dict[str, Arm]:
    """Decodes the same prompts plainly and with each drafter, in turn, batch by batch.

    The arms take turns on every batch, so that a shared machine's drift falls on all.
    Each new shape is run once before it is timed. Prefill is timed apart.

    Args:
        target: the target.
        drafters: name to drafter; plain decoding is added as "ar".
        prompts: token ids; a last batch that is not full is left out.
        batch: rows decoded together.
        max_new_tokens: tokens added to each; no end of text is heeded, so that all
            arms emit the same number.
        sampling: how to draw.
        seed: of the first row; the others follow.
        repeats: timed runs of each batch; the fastest counts.
        verifiers: drafter's name to verifier; rejection sampling for the others.
        on_batch: called after each batch, for a progress bar.

    Returns:
        Name to `Arm`.
    """
    if len(prompts) < batch:
        raise ValueError(
            f"batch={batch} rows need at least as many prompts, got {len(prompts)}"
        )
    arms: dict[str, Drafter | None] = {PLAIN: None, **drafters}
    _check_names(drafters, verifiers or {})
    stats: dict[str, SpecStats] = {}
    outputs: dict[str, dict[int, Output]] = {name: {} for name in arms}
    decode_s, prefill_s = dict.fromkeys(arms, 0.0), dict.fromkeys(arms, 0.0)
    seen: set[tuple] = set()
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for begin in range(0, len(prompts) - batch + 1, batch):
        rows = order[begin : begin + batch]  # of like lengths: few shapes to compile
        for name, drafter in arms.items():
            job = prepare(
                target,
                [prompts[i] for i in rows],
                drafter=drafter,
                sampling=sampling,
                max_new_tokens=max_new_tokens,
                seed=seed + begin,
                eos_token_ids=[],
                verifier=(verifiers or {}).get(name),
            )
            shape = (name, job.prompts.shape, job.capacity)
            if shape not in seen:
                seen.add(shape)
                run_once(target, job)
            runs = [run_once(target, job) for _ in range(repeats)]
            out = runs[0][2]
            counts = out.stats
            stats[name] = stats[name] + counts if name in stats else counts
            each = map(Output, out.tokens, out.log_probs)
            outputs[name] |= zip(rows, each, strict=True)
            prefill_s[name] += min(run[0] for run in runs)
            decode_s[name] += min(run[1] for run in runs)
        if on_batch is not None:
            on_batch()
    return {
        name: Arm(
            stats[name],
            decode_s[name],
            prefill_s[name],
            speedup=_rate(stats, decode_s, name) / _rate(stats, decode_s, PLAIN),
            outputs=outputs[name],
        )
        for name in arms
    }


def run_once(target: Checkpoint, job: Job) -> tuple[float, float, Generation]:
    """Seconds of the prefill, seconds of the decoding loop, and what it decoded."""
    begin = time.perf_counter()
    state = jax.block_until_ready(job.start())
    middle = time.perf_counter()
    state = jax.block_until_ready(job.run(state))
    end = time.perf_counter()
    return middle - begin, end - middle, collect(target, job, state)


def _check_names(drafters: Mapping, verifiers: Mapping) -> None:
    unknown = sorted(set(verifiers) - set(drafters))
    if unknown or PLAIN in drafters:
        raise ValueError(
            f"verifiers are for the drafters {sorted(drafters)}, none of which may be "
            f"called {PLAIN!r} (plain decoding is added), got verifiers for {unknown}"
        )


def pass_costs(
    target: Checkpoint,
    draft: Checkpoint,
    *,
    batch: int,
    gamma: int,
    capacity: int,
    repeats: int = 5,
    passes: int = 20,
) -> dict[str, Timing]:
    """Times a target pass of one token, one of gamma + 1, and a draft pass of one.

    Returns:
        "target", "verify" and "draft"; seconds are of one pass.
    """
    return time_passes(
        {"target": (target, 1), "verify": (target, gamma + 1), "draft": (draft, 1)},
        batch=batch,
        capacity=capacity,
        repeats=repeats,
        passes=passes,
    )


def time_passes(
    what: Mapping[str, tuple[Checkpoint, int]],
    *,
    batch: int,
    capacity: int,
    repeats: int = 5,
    passes: int = 20,
) -> dict[str, Timing]:
    """Times single passes in the middle of a text, in turn.

    Args:
        what: name to a model and how many tokens a row its pass reads.
        batch: rows.
        capacity: slots of the cache, half of which are full.
        repeats: timed calls of each.
        passes: passes a call.

    Returns:
        The same names; seconds are of one pass.
    """

    def timed(checkpoint: Checkpoint, tokens: int):
        cache = checkpoint.model.init_cache(
            batch, capacity, jax.tree.leaves(checkpoint.params)[0].dtype
        )
        cache = cache.with_length(jnp.full((batch,), capacity // 2, jnp.int32))
        return lambda: _passes(
            checkpoint.model, passes, checkpoint.params, cache, tokens
        )

    timings = measure({n: timed(*how) for n, how in what.items()}, repeats=repeats)
    return {
        name: Timing(tuple(s / passes for s in t.seconds), t.compile_s)
        for name, t in timings.items()
    }


@functools.partial(jax.jit, static_argnums=(0, 1, 4))
def _passes(model: LanguageModel, passes: int, params, cache, num_tokens: int):
    """Passes one after the other: each reads an arg max of the one before."""
    length = cache.length

    def one(_, carry):
        cache, token = carry
        tokens = jnp.broadcast_to(token[:, None], (token.shape[0], num_tokens))
        out, cache = model.apply(params, tokens, cache)
        token = jnp.argmax(out.logits[:, -1], axis=-1).astype(jnp.int32)
        return cache.with_length(length), token

    token = jnp.zeros(length.shape, jnp.int32)
    return jax.lax.fori_loop(0, passes, one, (cache, token))[1]


def _rate(stats: Mapping[str, SpecStats], seconds: Mapping[str, float], name) -> float:
    return float(stats[name].emitted.sum()) / seconds[name]
