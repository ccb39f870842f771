"""specjax: distil a draft, decode speculatively, prove that nothing changed.

Example:
    >>> import specjax  # doctest: +SKIP
    >>> target = specjax.load("smollm2-135m-instruct")  # doctest: +SKIP
    >>> out = specjax.generate(  # doctest: +SKIP
    ...     target, ["Why is the sky blue?"],
    ...     drafter=specjax.drafters.PromptLookup(gamma=10),
    ...     sampling=specjax.Sampling(temperature=0.0), max_new_tokens=64)
"""

from specjax import divergences, drafters, verifiers
from specjax.core import Checkpoint, Sampling
from specjax.decoding import Generation, generate
from specjax.io import export, fetch, load

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "Generation",
    "Sampling",
    "divergences",
    "drafters",
    "export",
    "fetch",
    "generate",
    "load",
    "verifiers",
]
