"""What a person sees of a run, and how they stop it."""

import math
import signal
import threading
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)


class ProgressBar:
    """A bar of steps with the loss, tokens a second and the time left, on stderr.

    Args:
        label: what is running.
        steps: the whole run.
        done: steps taken already.
        visible: False shows nothing.
    """

    def __init__(self, label: str, steps: int, done: int, visible: bool):
        self._progress = Progress(
            TextColumn("{task.description:<13}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TextColumn("after"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=not visible,
        )
        self._task = self._progress.add_task(
            label, total=steps, completed=done, note=""
        )

    def show(self, step: int, values: dict[str, Any], seconds_left: float) -> None:
        """Moves to `step`; `values` are those of the newest metrics line."""
        parts = [f"loss {values['loss']:.4f}"] if "loss" in values else []
        if values.get("tokens_per_s"):
            parts.append(f"{values['tokens_per_s']:,.0f} tokens/s")
        if math.isfinite(seconds_left):
            minutes, seconds = divmod(max(0, round(seconds_left)), 60)
            parts.append(f"{minutes}:{seconds:02d} left")
        self._progress.update(self._task, completed=step, note=", ".join(parts))

    def __enter__(self) -> "ProgressBar":
        self._progress.start()
        return self

    def __exit__(self, *error) -> None:
        self._progress.stop()


class Interrupt:
    """Turns the first Ctrl-C into a wish to stop after the step that is running.

    A step donates its state: an exception in the middle of it would leave nothing to
    save. A second Ctrl-C stops at once.
    """

    def __init__(self):
        self.wanted = False

    def __enter__(self) -> "Interrupt":
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:  # only there may handlers be set
            self._before = signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *error) -> None:
        if self._main:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, number, frame) -> None:
        if self.wanted:
            raise KeyboardInterrupt
        self.wanted = True
