"""Mesh, partition rules and sharded placement (level 2)."""

from specjax.parallel._mesh import (
    AXES,
    BATCH,
    batch_sharding,
    constrain,
    make_mesh,
)
from specjax.parallel._rules import (
    constrain_params,
    param_shardings,
    partition_rules,
    partition_specs,
    shard_params,
)

__all__ = [
    "AXES",
    "BATCH",
    "batch_sharding",
    "constrain",
    "constrain_params",
    "make_mesh",
    "param_shardings",
    "partition_rules",
    "partition_specs",
    "shard_params",
]
