"""Proof, on the real loop and the real models, that the output did not change."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.core import Checkpoint, Drafter, Proposal, Sampling, Verdict
from specjax.decoding import generate
from specjax.drafters import TwoModel
from specjax.ops import fit_vocabulary, warp
from specjax.testing import chi_square

_BINS = 32
_LOGITS_AT_ONCE = 2**24  # entries of [rows, T, V]


def greedy_equality(
    target: Checkpoint,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
) -> tuple[int, int]:
    """How many prompts decode greedily to the same tokens with and without a draft.

    In float32 all must. In bfloat16 a near-tie may fall the other way, because a pass
    of several tokens rounds differently from a pass of one.

    Returns:
        Equal rows, and rows.
    """
    sampling = Sampling(temperature=0.0)
    plain, drafted = (
        generate(
            target,
            prompts,
            drafter=drafter,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
        ).tokens
        for drafter in (None, drafter)
    )
    return sum(a == b for a, b in zip(plain, drafted, strict=True)), len(plain)


def chi_square_of_loop(
    target: Checkpoint,
    drafter: TwoModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int = 0,
) -> tuple[float, float]:
    """Tests every token of the real loop against the target's law at its place.

    Each emitted token becomes a number that is uniform in [0, 1] if, and only if, it
    was drawn from the target's law given the tokens before it: the mass of the ids
    before it plus a random part of its own (the randomised probability integral
    transform, Smith 1985). Ids are ordered by q / p, so that whatever leaks from the
    draft's law piles up at one end. Pearson's test over 32 bins then covers all
    positions and any vocabulary, where counting sequences could not.

    Returns:
        The p-value of the loop, and of a negative control that must be tiny: the same
        loop with a verifier that accepts every draft.
    """
    p_values = []
    for verifier in (None, AcceptAll()):
        out = generate(
            target,
            prompts,
            drafter=drafter,
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            seed=seed,
            verifier=verifier,
        )
        rows = [[*p, *new] for p, new in zip(prompts, out.tokens, strict=True)]
        starts = [len(p) for p in prompts]
        uniforms = _transform(target, drafter, rows, starts, sampling, seed)
        counts, _ = np.histogram(uniforms, bins=_BINS, range=(0.0, 1.0))
        p_values.append(chi_square(counts, np.full(_BINS, 1 / _BINS)))
    return p_values[0], p_values[1]


@dataclasses.dataclass(frozen=True)
class AcceptAll:
    """Keeps every draft: wrong, for use as a negative control only."""

    lossless: ClassVar[bool] = False

    def __call__(self, keys: Array, proposal: Proposal, log_p: Array) -> Verdict:
        """See `specjax.core.Verifier`."""
        gamma = proposal.tokens.shape[1]
        last = jax.vmap(jax.random.categorical)(keys, log_p[:, gamma])
        tokens = jnp.concatenate([proposal.tokens, last[:, None]], axis=1)
        return Verdict(jnp.full(last.shape, gamma, jnp.int32), tokens.astype(jnp.int32))


def _transform(target, drafter, rows, starts, sampling, seed) -> np.ndarray:
    """The uniform number of each new token, all rows together."""
    bound, draft_params = drafter.bind(target, max(len(row) for row in rows))
    width = max(len(row) for row in rows)
    tokens = np.zeros((len(rows), width), np.int32)
    new = np.zeros(tokens.shape, bool)
    for index, (row, start) in enumerate(zip(rows, starts, strict=True)):
        tokens[index, : len(row)] = row
        new[index, start : len(row)] = True
    at_once = max(1, _LOGITS_AT_ONCE // (width * target.model.vocab_size))
    at_once = min(at_once, len(rows))
    key, found = jax.random.key(seed + 1), []
    for begin in range(0, len(rows), at_once):
        # The last piece overlaps the one before: one shape, one compilation.
        begin = min(begin, len(rows) - at_once)
        piece = slice(begin, begin + at_once)
        values = _uniforms(
            target.model,
            bound.model,
            target.params,
            draft_params,
            jnp.asarray(tokens[piece]),
            sampling,
            jax.random.fold_in(key, begin),
        )
        found.append((begin, np.asarray(values)))
    uniforms = np.zeros(tokens.shape)
    for begin, values in found:
        uniforms[begin : begin + at_once, 1:] = values
    return uniforms[new]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _uniforms(model, draft, params, draft_params, tokens, sampling, key) -> Array:
    """`[B, T-1]`, one number for each token but the first."""

    def law(model, params):
        logits = model.apply(params, tokens)[0].logits[:, :-1]
        return warp(fit_vocabulary(logits, target_size), sampling)

    target_size = model.vocab_size
    log_p, log_q = law(model, params), law(draft, draft_params)
    p = jnp.exp(log_p)
    # The rank is any function of the past alone; -inf - -inf (both masked) has no mass.
    rank = jnp.where(p > 0, log_q - log_p, 0.0)
    own = jnp.take_along_axis(rank, tokens[:, 1:, None], axis=-1)
    below = jnp.sum(jnp.where(rank < own, p, 0.0), axis=-1)
    equal = jnp.sum(jnp.where(rank == own, p, 0.0), axis=-1)
    return jnp.clip(below + jax.random.uniform(key, below.shape) * equal, 0.0, 1.0)
