"""Checks that a cache holds what a fresh prefill would hold.

Leaves of a cache are `[B]` (its length), `[B, S]` or `[B, ..., S, H]`, S the slots.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.core import LanguageModel, Params


def poison(cache, value: float = 1e9):
    """Fills every slot at or past a row's length with `value`.

    Those slots are garbage that nothing may read: a number this size there makes
    nonsense of whatever reads one. Pure, so it can run inside a jitted program.

    Args:
        cache: what `init_cache` gave, with `length [B]`.
        value: what to write. NaN is stricter than what `ops.attention` promises: it
            gives a masked slot the weight 0, and 0 * NaN is NaN.
    """

    def fill(leaf: Array) -> Array:
        if leaf.ndim < 2:
            return leaf
        value_here = jnp.full((1,) * leaf.ndim, value, leaf.dtype)
        return jnp.where(_valid(leaf, cache.length), leaf, value_here)

    return jax.tree.map(fill, cache)


def check_cache(
    model: LanguageModel,
    params: Params,
    tokens: Array,
    length: Array,
    cache,
    *,
    atol: float = 1e-5,
) -> None:
    """Raises unless `cache` holds what reading `tokens` afresh would write.

    Args:
        model: whose cache it is.
        params: its parameters.
        tokens: `[B, S]`, the rows' texts, S at most the cache's capacity.
        length: `[B]`, how many tokens of each the cache should hold.
        cache: the cache to check.
        atol: the largest absolute difference allowed.

    Raises:
        AssertionError: a length or a valid slot differs; the message names the row.
    """
    wanted = np.maximum(np.asarray(length), 0)
    there = np.maximum(np.asarray(cache.length), 0)
    if not np.array_equal(wanted, there):
        row = int(np.argmax(wanted != there))
        raise AssertionError(
            f"row {row}: the cache should hold {wanted[row]} tokens, it says "
            f"{there[row]}"
        )
    worst = np.asarray(_worst(model, params, tokens, cache))  # [leaves, B]
    bad = ~(worst <= atol)  # NaN is bad
    if bad.any():
        leaf, row = (int(i) for i in np.argwhere(bad)[0])
        raise AssertionError(
            f"row {row}: the first {wanted[row]} slots of leaf {leaf} differ from a "
            f"fresh prefill by {worst[leaf, row]}, more than {atol}"
        )


@functools.partial(jax.jit, static_argnums=0)
def _worst(model, params, tokens, cache) -> Array:
    """The largest difference in a valid slot, for each leaf and row."""
    leaves = [leaf for leaf in jax.tree.leaves(cache) if leaf.ndim >= 2]
    slots = leaves[0].shape[_slot_axis(leaves[0])]
    empty = model.init_cache(tokens.shape[0], slots, leaves[0].dtype)
    _, fresh = model.apply(params, tokens, empty)
    worst = []
    for leaf, other in zip(jax.tree.leaves(cache), jax.tree.leaves(fresh), strict=True):
        if leaf.ndim >= 2:
            gap = jnp.abs(leaf.astype(jnp.float32) - other.astype(jnp.float32))
            gap = jnp.where(_valid(leaf, cache.length), gap, 0.0)
            worst.append(jnp.max(gap, axis=tuple(range(1, gap.ndim))))
    return jnp.stack(worst)


def _slot_axis(leaf: Array) -> int:
    return 1 if leaf.ndim == 2 else leaf.ndim - 2


def _valid(leaf: Array, length: Array) -> Array:
    """Which entries of a leaf lie in a slot before the row's length."""
    axis = _slot_axis(leaf)
    slot = jnp.arange(leaf.shape[axis])
    slot = slot.reshape((1,) * axis + (-1,) + (1,) * (leaf.ndim - axis - 1))
    return slot < length.reshape((-1,) + (1,) * (leaf.ndim - 1))
