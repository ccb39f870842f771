"""Mesh, partition rules and sharded placement, on one host or several (level 2)."""

from specjax.parallel._hosts import agree, gather, initialize, is_first, wait
from specjax.parallel._mesh import (
    AXES,
    BATCH,
    batch_sharding,
    constrain,
    make_mesh,
    shard_batch,
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
    "agree",
    "batch_sharding",
    "constrain",
    "constrain_params",
    "gather",
    "initialize",
    "is_first",
    "make_mesh",
    "param_shardings",
    "partition_rules",
    "partition_specs",
    "shard_batch",
    "shard_params",
    "wait",
]
