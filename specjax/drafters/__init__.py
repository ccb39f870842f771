"""Ways to draft, one a file (level 3).

`names()` lists them, `get(name)` returns the class.
"""

from specjax.drafters._prompt_lookup import PromptLookup
from specjax.drafters._registry import registry
from specjax.drafters._two_model import TwoModel

names = registry.names
get = registry.get

__all__ = ["PromptLookup", "TwoModel", "get", "names", "registry"]
