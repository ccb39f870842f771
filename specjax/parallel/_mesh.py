"""The device mesh: which axes there are and what lies on them.

- `data`: rows of the batch; parameters are copies.
- `fsdp`: rows of the batch too; parameters are cut and gathered where they are used.
- `tensor`: heads and MLP columns of every layer.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
BATCH = ("data", "fsdp")  # the mesh axes over which rows of a batch are spread

# What one array axis is cut along: nothing, a mesh axis, or several.
Cut = str | tuple[str, ...] | None


def make_mesh(
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,  # pyright: ignore[reportInvalidTypeForm]
) -> Mesh:
    """Lays the devices out on the axes `data`, `fsdp` and `tensor`.

    Axes are of type Auto (the compiler places what has no constraint): the default
    Explicit axes do not work with Flax Linen. Use it as `with jax.set_mesh(mesh):`.

    Args:
        data: size of the axis; one of the three may be -1, "all that is left".
        fsdp: size of the axis.
        tensor: size of the axis.
        devices: default all devices.

    Returns:
        The mesh.

    Raises:
        ValueError: the sizes do not multiply to the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = [data, fsdp, tensor]
    asked = ", ".join(f"{a}={s}" for a, s in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
        raise ValueError(
            f"mesh sizes must be >= 1, at most one of them -1, got {asked}"
        )
    fixed = math.prod(s for s in sizes if s != -1)
    sizes = [len(devices) // fixed if s == -1 else s for s in sizes]
    if math.prod(sizes) != len(devices):
        raise ValueError(
            f"mesh sizes must multiply to the number of devices, {len(devices)}, "
            f"got {asked}"
        )
    return jax.make_mesh(
        tuple(sizes), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices
    )


def fit(shape: Sequence[int], cuts: Sequence[Cut], mesh) -> PartitionSpec:
    """A partition of an array of `shape`, without the cuts that do not divide it.

    Args:
        shape: of the array.
        cuts: along what to cut each axis; missing ones are not cut.
        mesh: a Mesh or an AbstractMesh.
    """
    sizes = dict(mesh.shape)

    def keep(size: int, cut: Cut) -> Cut:
        axes = (cut,) if isinstance(cut, str) else cut or ()
        parts = math.prod(sizes[axis] for axis in axes)
        return cut if parts > 1 and size % parts == 0 else None

    cuts = [*cuts, *[None] * (len(shape) - len(cuts))]
    kept = [keep(size, cut) for size, cut in zip(shape, cuts, strict=True)]
    while kept and kept[-1] is None:
        kept.pop()
    return PartitionSpec(*kept)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over `data` and `fsdp`: for every array `[B, ...]` of a batch.

    B must be a multiple of the two axes' sizes.
    """
    return NamedSharding(mesh, PartitionSpec(BATCH))


def shard_batch(tree: Any, mesh: Mesh) -> Any:
    """Puts arrays `[B, ...]` on the mesh, rows over `data` and `fsdp`.

    Every process gives the same arrays and sends to its devices only the rows that are
    theirs.
    """
    sharding = batch_sharding(mesh)

    def place(x: Any) -> Array:
        x = np.asarray(x)
        return jax.make_array_from_process_local_data(sharding, x, x.shape)

    return jax.tree.map(place, tree)


def constrain(x: Array, *cuts: Cut) -> Array:
    """Says where an activation lies, inside a jitted function.

    Does nothing without a mesh (`jax.set_mesh`); cuts that do not divide are left out.

    Args:
        x: the array.
        *cuts: along what each axis is cut; `BATCH` for rows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    return jax.lax.with_sharding_constraint(x, fit(x.shape, cuts, mesh))
