"""A few positions at a time: what is made of each needs no memory of its own for all.

Axes: B rows, T positions, C positions of a chunk.
"""

import jax
import jax.numpy as jnp
from jax import Array


def chunk_size(tokens: int | None, rows: int, width: int) -> int:
    """C, so that `rows` rows of C positions are about `tokens`; None: all of `width`.

    Example:
        >>> chunk_size(1024, rows=8, width=200), chunk_size(None, rows=8, width=200)
        (128, 200)
    """
    return width if tokens is None else min(width, max(1, tokens // rows))


def map_chunks(function, pieces, size: int):
    """`function` of each chunk, its `[B, C, ...]` results put back in a row."""
    width = jax.tree.leaves(pieces)[0].shape[1]
    if size >= width:
        return function(pieces)
    out = jax.lax.map(function, cut_chunks(pieces, size))

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :width]

    return jax.tree.map(join, out)


def sum_chunks(function, pieces, size: int):
    """The sum of what `function` gives of each chunk, made again for the gradient.

    What is padded to fill the last chunk is zero: `function` must count nothing there.
    """
    width = jax.tree.leaves(pieces)[0].shape[1]
    if size >= width:
        return function(pieces)
    again, chunks = jax.checkpoint(function), cut_chunks(pieces, size)

    def add(total, piece):
        return jax.tree.map(jnp.add, total, again(piece)), None

    first = jax.tree.map(lambda x: x[0], chunks)
    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, first)
    )
    return jax.lax.scan(add, zeros, chunks)[0]


def cut_chunks(pieces, size: int):
    """`[B, T, ...]` as `[chunks, B, size, ...]`, padded with zeros (masked)."""

    def cut(x) -> Array:  # what is not in a jitted program yet may be NumPy's
        more = [(0, 0)] * x.ndim
        more[1] = (0, -x.shape[1] % size)
        x = jnp.pad(jnp.asarray(x), more)
        return jnp.moveaxis(x.reshape(x.shape[0], -1, size, *x.shape[2:]), 1, 0)

    return jax.tree.map(cut, pieces)
