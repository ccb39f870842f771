"""Where the parameters of the transformer lie on the mesh, by their path.

The scheme is Megatron's (Shoeybi et al., arXiv 1909.08053, section 3) for `tensor`,
and the other axis of each matrix is cut along `fsdp`. Paths match at their end, so
the moments of an optimiser, which mirror the parameters, follow the same rules.
"""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.parallel._mesh import Cut, fit

Rule = tuple[str, tuple[Cut, ...]]

_COLUMN = r"(q_proj|k_proj|v_proj|gate_proj|up_proj)"  # cut by heads or columns
_ROW = r"(o_proj|down_proj)"  # their sum is taken over `tensor`


def partition_rules(kernel_layout: str = "io") -> tuple[Rule, ...]:
    """The rules `(pattern of the path, cut of each axis)`; the first match counts.

    What no rule matches (norms, scalars, a new module) is not cut.

    Args:
        kernel_layout: "io" for kernels `[in, out]`, "oi" for `[out, in]`.

    Raises:
        ValueError: another layout.
    """
    orders: dict[str, Callable] = {"io": lambda cuts: cuts, "oi": lambda c: c[::-1]}
    if kernel_layout not in orders:
        raise ValueError(f"kernel_layout must be 'io' or 'oi', got {kernel_layout!r}")
    order = orders[kernel_layout]
    return (
        (rf"(^|/){_COLUMN}/kernel$", order(("fsdp", "tensor"))),
        (rf"(^|/){_ROW}/kernel$", order(("tensor", "fsdp"))),
        (rf"(^|/){_COLUMN}/bias$", ("tensor",)),
        (r"(^|/)(embed_tokens|lm_head)$", ("tensor", "fsdp")),  # [V, D]
    )


def partition_specs(tree: Any, mesh: Any, kernel_layout: str = "io") -> Any:
    """The PartitionSpec of every leaf of `tree`: parameters, or a whole train state.

    Axes that a cut does not divide stay whole.
    """
    rules = partition_rules(kernel_layout)

    def spec(path, leaf) -> PartitionSpec:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for pattern, cuts in rules:
            if re.search(pattern, name) and len(cuts) == len(leaf.shape):
                return fit(leaf.shape, cuts, mesh)
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, tree)


def param_shardings(tree: Any, mesh: Mesh, kernel_layout: str = "io") -> Any:
    """The NamedSharding of every leaf of `tree` (arrays, or only their shapes)."""
    specs = partition_specs(tree, mesh, kernel_layout)
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def shard_params(tree: Any, mesh: Mesh, kernel_layout: str = "io") -> Any:
    """Puts parameters, or a whole train state, where the rules say.

    Of several processes each gives the same arrays, and keeps its own parts of them.

    Example:
        >>> mesh = make_mesh(data=-1)  # doctest: +SKIP
        >>> params = shard_params(params, mesh)  # doctest: +SKIP
    """
    shardings = param_shardings(tree, mesh, kernel_layout)
    if jax.process_count() == 1:
        return jax.device_put(tree, shardings)
    return jax.tree.map(_place, tree, shardings)


def _place(x: Any, sharding: NamedSharding) -> Array:
    """An array over several processes, of which each has a whole copy.

    (`jax.device_put` would first send every copy to every process, to compare them.)
    """
    if isinstance(x, Array) and not x.is_fully_addressable:
        return jax.device_put(x, sharding)
    if isinstance(x, Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _place(jax.random.key_data(x), sharding)
        return jax.random.wrap_key_data(data, impl=str(jax.random.key_impl(x)))
    whole = np.asarray(x)
    return jax.make_array_from_callback(whole.shape, sharding, lambda at: whole[at])


def constrain_params(tree: Any, kernel_layout: str = "io") -> Any:
    """`shard_params` inside a jitted function; does nothing without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree
    specs = partition_specs(tree, mesh, kernel_layout)
    return jax.tree.map(jax.lax.with_sharding_constraint, tree, specs)
