"""How tokens are drawn from logits: the settings, and nothing of the maths."""

import math
import numbers

from jax import Array

from specjax.core._record import record


@record
class Sampling:
    """Temperature and the filters after it, in the order that they apply.

    A pytree: values may be traced arrays, scalar or one a row (`[B]`), so that changing
    them does not compile again. Which filters are there at all (None or not) is
    structure.

    Attributes:
        temperature: at least 0; 0 is greedy, an arg max.
        top_k: keep the k most likely tokens (and those equal to the k-th), k >= 1.
        top_p: then keep the fewest tokens whose mass reaches p, 0 < p <= 1.
        min_p: then keep tokens at least this likely relative to the best, 0 <= m <= 1.

    Raises:
        ValueError: a value outside its range.

    Example:
        >>> Sampling(temperature=0.8, top_p=0.95).top_k is None
        True
    """

    temperature: float | Array = 1.0
    top_k: int | Array | None = None
    top_p: float | Array | None = None
    min_p: float | Array | None = None

    def __post_init__(self):
        # Only numbers are checked: under a trace the fields hold tracers.
        t, k, p, m = self.temperature, self.top_k, self.top_p, self.min_p
        if _is_number(t) and not (math.isfinite(t) and t >= 0):
            raise ValueError(f"temperature must be a number >= 0 (0: greedy), got {t}")
        if k is not None and _is_number(k) and (k < 1 or k != int(k)):
            raise ValueError(f"top_k must be a whole number >= 1 or None, got {k}")
        if p is not None and _is_number(p) and not 0 < p <= 1:
            raise ValueError(f"top_p must be in (0, 1] or None, got {p}")
        if m is not None and _is_number(m) and not 0 <= m <= 1:
            raise ValueError(f"min_p must be in [0, 1] or None, got {m}")
        if isinstance(t, str | bool) or t is None:
            raise ValueError(f"temperature must be a number >= 0, got {t!r}")


def _is_number(x) -> bool:
    return isinstance(x, numbers.Real) and not isinstance(x, bool)
