"""Timing jitted programs so that the ratios can be trusted."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call over several repeats, compilation not among them."""

    seconds: tuple[float, ...]
    compile_s: float  # the first call: tracing, compilation and one run

    @property
    def best_s(self) -> float:
        """The fastest repeat: what the program costs on an idle machine."""
        return min(self.seconds)

    @property
    def median_s(self) -> float:
        """The middle repeat."""
        return float(np.median(self.seconds))


def measure(
    calls: Mapping[str, Callable[[], Any]], *, repeats: int = 5, budget_s: float = 60.0
) -> dict[str, Timing]:
    """Times several programs in turn: A B C A B C ...

    A shared machine drifts; taking turns lets the drift fall on all of them alike. Each
    call is finished (`block_until_ready`) before the clock is read, and the first call
    of each, which compiles, is kept apart.

    Args:
        calls: name to a function of no arguments that returns arrays.
        repeats: timed calls of each, at least 1.
        budget_s: stop early, after one full turn at least, past these seconds.

    Returns:
        A `Timing` for each name.
    """
    first = {name: _time(call) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    begin = time.perf_counter()
    for _ in range(repeats):
        for name, call in calls.items():
            seconds[name].append(_time(call))
        if time.perf_counter() - begin > budget_s:
            break
    return {name: Timing(tuple(seconds[name]), first[name]) for name in calls}


def ratio(a: Timing, b: Timing) -> float:
    """The median of `a / b` taken turn by turn."""
    return float(np.median(np.array(a.seconds) / np.array(b.seconds)))


def _time(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - begin
