"""Ways to decide which drafts stay (level 1).

`names()` lists them, `get(name)` returns the class. Each says `lossless` true or false.
"""

from specjax.verifiers._greedy import GreedyMatch
from specjax.verifiers._registry import registry
from specjax.verifiers._rejection import Rejection

names = registry.names
get = registry.get

__all__ = ["GreedyMatch", "Rejection", "get", "names", "registry"]
