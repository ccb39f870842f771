"""Metrics as JSON lines: one object a line, flushed, cut back when a run is resumed."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax import parallel


class MetricsFile:
    """Appends `{"run": ..., "step": n, "kind": ..., ...}` lines to a file.

    Several runs may share a file, one after the other. Lines past the checkpoint that a
    run resumes from tell of steps that will be taken again: `truncate` removes them,
    and a last line that was cut by a crash.

    Of several processes all know the lines, and process 0 writes them.

    Args:
        path: of the file; None keeps lines in memory only.
        run: whose lines these are; those of others are never touched.
    """

    def __init__(self, path: Path | None, run: str):
        self.path = path
        self.run = run
        self.lines = [line for line in self._all() if line.get("run") == run]

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Adds a line. Numbers that JSON cannot hold (NaN, infinities) become null."""
        line = {"run": self.run, "step": step, "kind": kind}
        line |= {name: _plain(value) for name, value in values.items()}
        self.lines.append(line)
        if self.path is not None and parallel.is_first():
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def truncate(self, step: int) -> None:
        """Keeps the lines of steps up to `step`, by an atomic replacement."""
        self.lines = [line for line in self.lines if line["step"] <= step]
        if self.path is None or not self.path.exists() or not parallel.is_first():
            return
        kept = [
            line
            for line in self._all()
            if line.get("run") != self.run or line["step"] <= step
        ]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(partial, self.path)

    def _all(self) -> list[dict[str, Any]]:
        return read_metrics(self.path) if self.path else []

    def has(self, step: int, kind: str) -> bool:
        """Whether there is a line of that step and kind."""
        return any((x["step"], x["kind"]) == (step, kind) for x in self.lines)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line cut by a crash is left out."""
    path = Path(path)
    lines = path.read_text().splitlines() if path.exists() else []
    whole = []
    for number, line in enumerate(lines, 1):
        try:
            whole.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines):
                raise ValueError(
                    f"{path}, line {number}, is not JSON: {line[:80]!r}"
                ) from None
    return whole


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        value = np.asarray(value).item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
