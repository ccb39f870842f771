"""Exact laws: of a model's next tokens, and of what a verifier makes of them.

A *law* here is a function from the tokens so far (a tuple, without the prompt) to the
probabilities of the next. The arithmetic is plain Python, so laws of `Fraction`s give
rational results.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import LanguageModel, Params, Sampling
from specjax.ops import warp

Number = Any  # float or Fraction
Law = Callable[[tuple[int, ...]], Sequence[Number]]
# (drafts, q before each draft, p before each draft and after the last)
#   -> {(num_accepted, the token behind them): probability}
Outcomes = Callable[
    [tuple[int, ...], Sequence[Sequence[Number]], Sequence[Sequence[Number]]],
    dict[tuple[int, int], Number],
]


def rejection_outcomes(drafts, q, p) -> dict[tuple[int, int], Number]:
    """The exact law of `verifiers.Rejection` for given drafts.

    Draft x stays with probability min(1, p(x) / q(x)); the first that does not is
    replaced by a draw from norm(max(0, p - q)); if all stay, one from p is added.

    Args:
        drafts: G token ids.
        q: G laws that they were drawn from.
        p: G + 1 laws of the target.

    Returns:
        `{(num_accepted, last token): probability}`.

    Reference: Leviathan et al., arXiv 2211.17192, algorithm 1.
    """
    outcomes: dict[tuple[int, int], Number] = {}
    reached = 1
    for index, token in enumerate(drafts):
        accept = min(1, p[index][token] / q[index][token])
        residual = [max(a - b, 0) for a, b in zip(p[index], q[index], strict=True)]
        total = sum(residual)
        if reached > 0 and accept < 1 and total > 0:
            for last, mass in enumerate(residual):
                if mass > 0:
                    outcomes[index, last] = reached * (1 - accept) * mass / total
        reached = reached * accept
    return outcomes | _bonus(len(drafts), reached, p)


def match_outcomes(drafts, q, p) -> dict[tuple[int, int], Number]:
    """The exact law of `verifiers.GreedyMatch`: see `rejection_outcomes`.

    A draft stays if a draw from p equals it; the first draw that does not is emitted.
    """
    outcomes: dict[tuple[int, int], Number] = {}
    reached = 1
    for index, token in enumerate(drafts):
        for last, mass in enumerate(p[index]):
            if last != token and reached * mass > 0:
                outcomes[index, last] = reached * mass
        reached = reached * p[index][token]
    return outcomes | _bonus(len(drafts), reached, p)


def enumerate_verifier(
    outcomes: Outcomes, draft: Law, target: Law, *, gamma: int, num_tokens: int
) -> dict[tuple[int, ...], Number]:
    """The exact law of the first tokens that speculative decoding emits.

    Every chain of drafts and every outcome of verifying it, round after round until
    `num_tokens` are there. A lossless verifier gives the target's own law.

    Args:
        outcomes: the verifier's law, such as `rejection_outcomes`.
        draft: the law that drafts are drawn from.
        target: the target's law.
        gamma: G, drafts a round.
        num_tokens: how many tokens to look at.

    Returns:
        `{tokens: probability}`.
    """
    law: dict[tuple[int, ...], Number] = {}
    pending: dict[tuple[int, ...], Number] = {(): 1}
    while pending:
        start = min(pending, key=len)  # nothing shorter can still lead here
        chance = pending.pop(start)
        for drafts, drawn in _chains(draft, start, gamma):
            q = [draft(start + drafts[:i]) for i in range(gamma)]
            p = [target(start + drafts[:i]) for i in range(gamma + 1)]
            for (accepted, last), mass in outcomes(drafts, q, p).items():
                tokens = (*start, *drafts[:accepted], last)[:num_tokens]
                into = law if len(tokens) == num_tokens else pending
                into[tokens] = into.get(tokens, 0) + chance * drawn * mass
    return law


def expected_accepted(
    outcomes: Outcomes, draft: Law, target: Law, *, gamma: int
) -> Number:
    """The expected number of drafts that stay in the first round."""
    total = 0
    for drafts, drawn in _chains(draft, (), gamma):
        q = [draft(drafts[:i]) for i in range(gamma)]
        p = [target(drafts[:i]) for i in range(gamma + 1)]
        for (accepted, _), mass in outcomes(drafts, q, p).items():
            total += drawn * mass * accepted
    return total


def next_token_laws(
    model: LanguageModel,
    params: Params,
    prompt: Sequence[int],
    num_tokens: int,
    sampling: Sampling,
) -> Law:
    """The law of a model's next token after `prompt` and up to `num_tokens - 1` more.

    Every continuation is read in one uncached pass: V ** (num_tokens - 1) rows.
    """
    probabilities = _conditionals(model, params, prompt, num_tokens, sampling)
    size = model.vocab_size

    def law(tokens: tuple[int, ...]) -> list[float]:
        row = 0
        for token in tokens:
            row = row * size + token
        row *= size ** (num_tokens - 1 - len(tokens))
        return probabilities[row, len(tokens)].tolist()

    return law


def sequence_law(
    model: LanguageModel,
    params: Params,
    prompt: Sequence[int],
    num_tokens: int,
    sampling: Sampling,
) -> np.ndarray:
    """The exact law of the next tokens under plain sampling, float64.

    Returns:
        `[V, ..., V]`, one axis a token: the probability of each continuation.
    """
    probabilities = _conditionals(model, params, prompt, num_tokens, sampling)
    size = model.vocab_size
    law = np.ones(())
    for index in range(num_tokens):
        rows = probabilities[:: size ** (num_tokens - 1 - index), index]
        law = law[..., None] * rows.reshape((size,) * (index + 1))
    return law


def _conditionals(model, params, prompt, num_tokens, sampling) -> np.ndarray:
    """Laws `[V ** (n-1), n, V]` along every continuation, in lexical order."""
    tails = list(itertools.product(range(model.vocab_size), repeat=num_tokens - 1))
    tails = np.array(tails, np.int32).reshape(len(tails), num_tokens - 1)
    heads = np.tile(np.asarray(prompt, np.int32), (len(tails), 1))
    tokens = jnp.asarray(np.concatenate([heads, tails], axis=1))
    log_p = _log_law(model, params, tokens, sampling)[:, len(prompt) - 1 :]
    probabilities = np.exp(np.asarray(log_p, np.float64))
    return probabilities / probabilities.sum(-1, keepdims=True)


@functools.partial(jax.jit, static_argnums=0)
def _log_law(model, params, tokens, sampling):
    return warp(model.apply(params, tokens)[0].logits, sampling)


def _chains(draft: Law, start: tuple[int, ...], gamma: int):
    """Every chain of drafts after `start` that can be drawn, and how likely it is."""
    chains: list[tuple[tuple[int, ...], Number]] = [((), 1)]
    for _ in range(gamma):
        chains = [
            ((*drafts, token), chance * mass)
            for drafts, chance in chains
            for token, mass in enumerate(draft(start + drafts))
            if mass > 0
        ]
    return chains


def _bonus(count: int, reached: Number, p) -> dict[tuple[int, int], Number]:
    return {
        (count, last): reached * mass
        for last, mass in enumerate(p[count])
        if reached > 0 and mass > 0
    }
