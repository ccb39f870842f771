"""Exact laws: of a model's next tokens, and of what a verifier makes of them.

A *law* here is a function from the tokens so far (a tuple, without the prompt) to the
probabilities of the next. The arithmetic is plain Python, so laws of `Fraction`s give
rational results.
"""

import functools
import itertools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specjax.core import LanguageModel, Params, Sampling
from specjax.ops import warp
from specjax.testing._outcomes import Number, Outcomes

Law = Callable[[tuple[int, ...]], Sequence[Number]]


def enumerate_verifier(
    outcomes: Outcomes,
    draft: Law,
    target: Law,
    *,
    gamma: int,
    num_tokens: int,
    stop: Callable[[tuple[int, ...]], bool] = lambda tokens: False,
) -> dict[tuple[int, ...], Number]:
    """The exact law of the first tokens that speculative decoding emits.

    Every chain of drafts and every outcome of verifying it, round after round until
    `num_tokens` are there. A lossless verifier gives the target's own law.

    Args:
        outcomes: the verifier's law, such as `rejection_outcomes`.
        draft: the law that drafts are drawn from.
        target: the target's law.
        gamma: G, the most drafts a round.
        num_tokens: how many tokens to look at.
        stop: whether a round drafts no further behind these tokens.

    Returns:
        `{tokens: probability}`.
    """
    law: dict[tuple[int, ...], Number] = {}
    pending: dict[tuple[int, ...], Number] = {(): 1}
    while pending:
        start = min(pending, key=len)  # nothing shorter can still lead here
        chance = pending.pop(start)
        for drafts, drawn in _chains(draft, start, gamma, stop):
            q = [draft(start + drafts[:i]) for i in range(len(drafts))]
            p = [target(start + drafts[:i]) for i in range(len(drafts) + 1)]
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


def _chains(
    draft: Law,
    start: tuple[int, ...],
    gamma: int,
    stop: Callable[[tuple[int, ...]], bool] = lambda tokens: False,
) -> list[tuple[tuple[int, ...], Number]]:
    """Every chain of drafts after `start` that can be drawn, and how likely it is."""
    chains: list[tuple[tuple[int, ...], Number]] = []
    growing: list[tuple[tuple[int, ...], Number]] = [((), 1)]
    for _ in range(gamma):
        chains += [chain for chain in growing if stop(start + chain[0])]
        growing = [
            ((*drafts, token), chance * mass)
            for drafts, chance in growing
            if not stop(start + drafts)
            for token, mass in enumerate(draft(start + drafts))
            if mass > 0
        ]
    return chains + growing
