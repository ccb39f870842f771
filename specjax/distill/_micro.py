"""What every training step does: micro-batches in, one update out.

Axes: B rows.
"""

import jax
import jax.numpy as jnp
import optax
from jax import Array

from specjax import parallel
from specjax.core import Params


def scan_pieces(function, carry, pieces):
    """`lax.scan`; a single piece is not put in a loop, which XLA optimises less."""
    if jax.tree.leaves(pieces)[0].shape[0] > 1:
        return jax.lax.scan(function, carry, pieces)
    carry, out = function(carry, jax.tree.map(lambda x: x[0], pieces))
    return carry, jax.tree.map(lambda x: x[None], out)


def split_rows(tree, parts: int):
    """Leaves `[B, ...]` as `[parts, B / parts, ...]`, part a of rows a, a + parts, ...

    Raises:
        ValueError: B is no multiple of `parts`.
    """
    rows = jax.tree.leaves(tree)[0].shape[0]
    if rows % parts:
        raise ValueError(
            f"the batch must be a multiple of accumulate={parts}, got {rows} rows"
        )

    def split(x: Array) -> Array:
        x = jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1)
        return parallel.constrain(x, None, parallel.BATCH)

    return jax.tree.map(split, tree)


def row_streams(key: Array, step: Array, rows: int) -> tuple[Array, Array]:
    """The key of step `step` of the run with `key`, and one key `[B]` a row of it."""
    step_key, rows_key = jax.random.split(jax.random.fold_in(key, step))
    return step_key, jax.vmap(jax.random.fold_in, (None, 0))(rows_key, jnp.arange(rows))


def update(
    optimizer: optax.GradientTransformation,
    gradients: Params,
    opt_state: Params,
    params: Params,
    some: Array,
    layout: str,
    scale: Params = None,
) -> tuple[Params, Params]:
    """Parameters and optimiser state after one update; both as before unless `some`.

    Args:
        optimizer: what turns gradients into updates.
        gradients: as `params`.
        opt_state: the optimiser's.
        params: what is trained.
        some: `[]`, whether anything counted.
        layout: of the kernels, for their places on a mesh.
        scale: as `params` or a prefix of it, what each update is multiplied by.
    """
    updates, new_state = optimizer.update(gradients, opt_state, params)
    if scale is not None:
        updates = jax.tree.map(
            lambda s, part: jax.tree.map(lambda x: s * x, part), scale, updates
        )
    new = optax.apply_updates(params, updates), new_state
    kept = jax.tree.map(
        lambda new, old: jnp.where(some, new, old), new, (params, opt_state)
    )
    return parallel.constrain_params(kept, layout)


def master(x: Array) -> Array:
    """A copy to train: float32 where the parameter is narrower."""
    low = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return jnp.array(x, dtype=jnp.float32 if low else x.dtype, copy=True)


def norm(tree: Params) -> Array:
    """The Euclidean norm of all leaves together."""
    squares = [
        jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))
