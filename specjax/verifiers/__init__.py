"""Ways to decide which drafts stay (level 1).

`names()` lists them, `get(name)` returns the class. Each says `lossless` true or false.
"""

from specjax.verifiers._block import Block
from specjax.verifiers._greedy import GreedyMatch
from specjax.verifiers._lenience import Lenience
from specjax.verifiers._lossy import (
    Lossy,
    LossyExponential,
    LossyLinear,
    LossySquare,
)
from specjax.verifiers._registry import registry
from specjax.verifiers._rejection import Rejection
from specjax.verifiers._simulated import Simulated
from specjax.verifiers._typical import Typical

names = registry.names
get = registry.get

__all__ = [
    "Block",
    "GreedyMatch",
    "Lenience",
    "Lossy",
    "LossyExponential",
    "LossyLinear",
    "LossySquare",
    "Rejection",
    "Simulated",
    "Typical",
    "get",
    "names",
    "registry",
]
