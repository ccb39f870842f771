"""What verifiers share: reading laws at drafts, and putting a verdict together.

Axes: B rows, G draft length (the depth of a tree), M drafts (the nodes of a tree), V
vocabulary. Laws of the target have M + 1 entries, the first before any draft.
"""

import numbers

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import Proposal, Verdict
from specjax.ops import fold, sample


def require_chain(verifier, proposal: Proposal) -> None:
    """Raises a ValueError for a tree."""
    if not proposal.is_chain:
        raise ValueError(
            f"the verifier {type(verifier).__name__} takes chains of drafts only, got "
            "a tree; use a verifier of trees, such as Rejection"
        )


def require_fraction(verifier, name: str) -> None:
    """Raises a ValueError unless the setting `name` is a number in (0, 1]."""
    value = getattr(verifier, name)
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not 0 < float(value) <= 1:
        raise ValueError(
            f"{type(verifier).__name__} needs {name} in (0, 1], got {value!r}"
        )


def at(log_probs: Array, tokens: Array) -> Array:
    """`log_probs [B, G, V]` at `tokens [B, G]`."""
    return jnp.take_along_axis(log_probs, tokens[..., None], axis=-1)[..., 0]


def row_at(x: Array, index: Array) -> Array:
    """`x [B, M+1, V]` at entry `index [B]`: `[B, V]`."""
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


def drafted(proposal: Proposal) -> Array:
    """Which of the M tokens are drafts `[B, M]`: the others are padding."""
    number = jnp.arange(proposal.tokens.shape[1])[None, :]
    return number < proposal.num_drafted[:, None]


def draft_at(proposal: Proposal) -> Array:
    """The log q of each draft `[B, M]`: 0 for point masses."""
    if proposal.log_q is None:
        return jnp.zeros(proposal.tokens.shape)
    return at(proposal.log_q, proposal.tokens)


def draft_law(proposal: Proposal, index: Array, size: int) -> Array:
    """The law q `[B, V]` of draft `index [B]`; zero where nothing was drafted."""
    last = proposal.tokens.shape[1] - 1
    if last < 0:
        return jnp.zeros((index.shape[0], size))
    there = index < proposal.num_drafted
    index = jnp.minimum(index, last)
    if proposal.log_q is None:
        q = jax.nn.one_hot(pick(proposal.tokens, index), size)
    else:
        q = jnp.exp(row_at(proposal.log_q, index))
    return jnp.where(there[:, None], q, 0.0)


def pick(x: Array, index: Array) -> Array:
    """`x [B, M]` at `index [B]`: `[B]`."""
    return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]


def leading(accept: Array) -> Array:
    """How many of `accept [B, G]` are true before the first that is not."""
    return jnp.sum(jnp.cumprod(accept.astype(jnp.int32), axis=1), axis=1)


def accept_ratio(keys: Array, proposal: Proposal, log_f: Array) -> Array:
    """Accepts each draft x of a chain with probability min(1, f(x) / q(x)): `[B, G]`.

    `log_f [B, G+1, V]` is the target's law, or a looser bound that takes its place.
    """
    gamma = proposal.tokens.shape[1]
    ratio = at(log_f[:, :gamma], proposal.tokens) - draft_at(proposal)
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (gamma,)))(fold(keys, 0))
    # Strict: a draft that the target cannot emit (ratio -inf) is never accepted.
    return drafted(proposal) & (jnp.log(uniform) < ratio)


def corrected(
    keys: Array, proposal: Proposal, accept: Array, log_f: Array, log_p: Array
) -> Verdict:
    """Keeps the drafts of a chain before the first that is not in `accept [B, G]`.

    That one is replaced by a draw from norm(max(0, f - q)); if all stay, a bonus token
    is drawn from p.
    """
    num_accepted = leading(accept)
    p, f = jnp.exp(row_at(log_p, num_accepted)), jnp.exp(row_at(log_f, num_accepted))
    q = draft_law(proposal, num_accepted, log_p.shape[-1])
    rejected = num_accepted < proposal.num_drafted
    residual = jnp.where(rejected[:, None], jnp.maximum(f - q, 0.0), p)
    # f == q leaves nothing but rounding to draw from: then p itself is the law.
    # (Not `<= 0`: a draft that overflowed to NaN is refused, and p is the law too.)
    empty = ~(jnp.sum(residual, axis=-1, keepdims=True) > 0.0)
    last = sample(fold(keys, 1), jnp.log(jnp.where(empty, p, residual)))
    return chain_verdict(num_accepted, proposal.tokens, last)


def chain_verdict(num_accepted: Array, tokens: Array, last: Array) -> Verdict:
    """The drafts `tokens [B, G]` with `last [B]` behind those that were accepted."""
    slot = jnp.arange(tokens.shape[1] + 1)[None, :]
    padded = jnp.pad(tokens, ((0, 0), (0, 1)))
    emitted = jnp.where(slot == num_accepted[:, None], last[:, None], padded)
    return Verdict(num_accepted, emitted)


def path_verdict(
    proposal: Proposal, num_accepted: Array, path: Array, last: Array
) -> Verdict:
    """The same along the nodes `path [B, G]` of a tree, chains among them."""
    tokens = proposal.tokens
    if path.shape[1]:
        tokens = jnp.take_along_axis(tokens, path, axis=1)
    verdict = chain_verdict(num_accepted, tokens, last)
    if proposal.is_chain:
        return verdict
    return Verdict(verdict.num_accepted, verdict.tokens, path)
