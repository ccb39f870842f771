"""Ways to draft, one a file (level 3).

`names()` lists them, `get(name)` returns the class. Trained ones are written by `save`
and read by `load`.
"""

from specjax.drafters._eagle import Eagle, Eagle3
from specjax.drafters._fallback import Fallback
from specjax.drafters._lookahead import Lookahead
from specjax.drafters._made_for import MadeFor
from specjax.drafters._medusa import Medusa
from specjax.drafters._placeholder import Placeholder
from specjax.drafters._prompt_lookup import PromptLookup
from specjax.drafters._registry import registry
from specjax.drafters._saving import load, save
from specjax.drafters._self_speculative import SelfSpeculative
from specjax.drafters._trees import cartesian_tree, sparse_tree
from specjax.drafters._two_model import TwoModel

names = registry.names
get = registry.get

__all__ = [
    "Eagle",
    "Eagle3",
    "Fallback",
    "Lookahead",
    "MadeFor",
    "Medusa",
    "Placeholder",
    "PromptLookup",
    "SelfSpeculative",
    "TwoModel",
    "cartesian_tree",
    "get",
    "load",
    "names",
    "registry",
    "save",
    "sparse_tree",
]
