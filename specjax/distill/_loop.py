"""The training loop: steps, metrics, checkpoints, and the end of the budget."""

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from specjax import parallel
from specjax.core import Params
from specjax.distill._batches import BatchSource
from specjax.distill._checkpoints import Checkpoints
from specjax.distill._drafter_step import DrafterStep
from specjax.distill._metrics import MetricsFile
from specjax.distill._progress import Interrupt, ProgressBar
from specjax.distill._state import Sums, TrainState
from specjax.distill._step import TrainStep


@dataclass(frozen=True)
class Callback:
    """Something to measure every so many steps: a learning curve.

    Attributes:
        name: the kind of its lines in the metrics file.
        function: `state -> {name: number}`. It must not keep the state: the next step
            donates it.
        every: steps between two calls.
        at_start: call it before the first step too.
    """

    name: str
    function: Callable[[TrainState], Mapping[str, Any]]
    every: int
    at_start: bool = True

    def due(self, step: int) -> bool:
        """Whether it is called after `step` steps."""
        return step % self.every == 0 if step else self.at_start


@dataclass(frozen=True)
class TrainResult:
    """How a run ended.

    Attributes:
        state: after the last step.
        stopped: "steps" or "seconds", which cap ended it.
        seconds: in all, those before a resume included.
        metrics: the lines of the metrics file.
    """

    state: TrainState
    stopped: str
    seconds: float
    metrics: list[dict[str, Any]]


def train(
    step: TrainStep | DrafterStep,
    state: TrainState,
    batches: BatchSource,
    *,
    steps: int,
    teacher_params: Params = None,
    reference_params: Params = None,
    seconds: float | None = None,
    min_steps: int = 0,
    workdir: str | Path | None = None,
    resume: bool = True,
    save_every: int | None = None,
    keep: int | None = 2,
    log_every: int = 20,
    callbacks: Sequence[Callback] = (),
    mesh: Mesh | None = None,
    progress: bool = True,
    label: str = "train",
) -> TrainResult:
    """Trains until `steps` steps or `seconds` seconds are spent.

    In `workdir` it writes `metrics.jsonl` and `checkpoints/LABEL/`; runs of different
    labels share a workdir. A run that was stopped, killed or interrupted goes on from
    its newest checkpoint when it is called again, and ends with the same bits as one
    that never stopped. Ctrl-C finishes the step, saves, and raises KeyboardInterrupt.

    After `parallel.initialize` all processes call this alike, on a mesh over all of
    their devices and with one workdir: each sends its own rows to its devices and saves
    its own parts of the state, process 0 writes the metrics and shows the bar, and they
    stop together, whoever was interrupted or out of time. Callbacks run on every
    process.

    Args:
        step: what a step is; a `DrafterStep` trains a drafter beside its target.
        state: where to start; used up. When resuming only its structure counts.
        batches: `Batches(...)`, or any pure function of the step number.
        steps: the cap, resumed steps included.
        teacher_params: the target's.
        reference_params: the reference draft's, for objectives that compare with one.
        seconds: another cap, on wall time: compilation, callbacks, saving and the time
            before a resume included.
        min_steps: steps to take all the same, however long they take.
        workdir: None writes nothing.
        resume: False refuses a `workdir` that holds a run.
        save_every: steps between checkpoints; None: only at the end.
        keep: how many checkpoints stay; None: all.
        log_every: steps between metrics lines, each of which sums up all steps since
            the one before; there is one at each checkpoint too.
        callbacks: what to measure on the way.
        mesh: puts state and batches on it; several processes need one.
        progress: show a bar.
        label: the run's name, on the bar, in the metrics and for its checkpoints.

    Returns:
        The state after the last step, and how the run ended.

    Raises:
        ValueError: wrong settings; a checkpoint of another run or other data; several
            processes without a mesh over all of them.
        FloatingPointError: the loss is not finite. Nothing is saved.

    Example:
        >>> result = train(  # doctest: +SKIP
        ...     step, step.init(jax.random.key(0)), Batches(corpus, batch_size=8),
        ...     steps=350, teacher_params=target.params, workdir="runs/draft",
        ...     save_every=100)
    """
    _check(steps, seconds, save_every, log_every, callbacks)
    _check_mesh(mesh)
    with contextlib.ExitStack() as stack:
        files = _open(workdir, label, keep, resume, stack)
        parallel.wait(f"{label} is open")  # all have read what process 0 will write to
        if mesh is not None:
            stack.enter_context(jax.set_mesh(mesh))
            layout = step.kernel_layout
            state = parallel.shard_params(state, mesh, layout)
            teacher_params = parallel.shard_params(teacher_params, mesh, layout)
            reference_params = parallel.shard_params(reference_params, mesh, layout)
        others = teacher_params, reference_params
        run = _Run(step, state, batches, others, mesh, callbacks, *files)
        run.resume()
        visible = progress and parallel.is_first()
        bar = ProgressBar(label, steps, run.done, visible)
        stack.enter_context(bar)
        interrupt = stack.enter_context(Interrupt())
        try:
            budget = math.inf if seconds is None else seconds
            stopped = _loop(
                run, steps, budget, min_steps, save_every, log_every, bar, interrupt
            )
        except KeyboardInterrupt:
            if run.usable:
                run.save()
            raise
        run.save()
        return TrainResult(run.state, stopped, run.seconds, run.metrics.lines)


def _loop(run, steps, budget, min_steps, save_every, log_every, bar, interrupt) -> str:
    """Takes steps until a cap is reached, and says which."""
    timed = budget < math.inf  # asking all processes for the time is a round trip
    run.call_back()
    while run.done < steps:
        if timed and run.done >= min_steps and parallel.agree(run.seconds >= budget):
            return "seconds"
        run.take()
        if run.done % log_every == 0:
            run.log()
        run.call_back()
        if save_every and run.done % save_every == 0:
            run.save()
        bar.show(run.done, run.newest, run.seconds_left(steps, budget))
        if parallel.agree(interrupt.wanted):
            raise KeyboardInterrupt
    return "steps"


class _Run:
    """The one mutable thing: a state on its way, its clock and its files."""

    def __init__(
        self,
        step,
        state,
        batches,
        others,
        mesh,
        callbacks,
        metrics,
        checkpoints,
    ):
        self.step: TrainStep | DrafterStep = step
        self.state: TrainState = state
        self.batches: BatchSource = batches
        self.others: tuple[Params, Params] = others  # of the teacher, of the reference
        self.mesh: Mesh | None = mesh
        self.callbacks: Sequence[Callback] = callbacks
        self.metrics: MetricsFile = metrics
        self.checkpoints: Checkpoints | None = checkpoints
        self.done = int(state.step)
        self.newest: dict[str, Any] = {}
        self._unlogged: list[Sums] = []
        self._began = time.monotonic()
        self._before = 0.0  # seconds of the runs that this one goes on from
        # Since when, how many steps and tokens: compilation and callbacks left out.
        self._pace: tuple[float, int] | None = None
        self._busy, self._timed_steps = 0.0, 0

    @property
    def seconds(self) -> float:
        return self._before + time.monotonic() - self._began

    @property
    def usable(self) -> bool:
        """Whether the state is there: a second Ctrl-C may come inside a step."""
        return not any(x.is_deleted() for x in jax.tree.leaves(self.state))

    def resume(self) -> None:
        """Goes on from the newest checkpoint, or begins."""
        if self.checkpoints is None or self.checkpoints.latest is None:
            self.metrics.truncate(-1)
            return
        self.state, notes = self.checkpoints.restore(self.state)
        data = self._describe_data()
        if notes["data"] != data:
            raise ValueError(
                "the run to resume read other data: its checkpoint says "
                f"{notes['data']}, these batches are {data}"
            )
        self._before = notes["seconds"]
        self.done = int(self.state.step)
        self.metrics.truncate(self.done)

    def take(self) -> None:
        """One step. The one before it is waited for, so that only one is queued."""
        batch = self.batches(self.done)
        _check_ids(batch.tokens, self.step)
        if self.mesh is not None:
            batch = parallel.shard_batch(batch, self.mesh)
        self.state, sums = self.step(self.state, batch, *self.others)
        self.done += 1
        if self._pace is None:
            jax.block_until_ready(sums)
            self._pace = time.monotonic(), len(self._unlogged) + 1
        elif self._unlogged:
            jax.block_until_ready(self._unlogged[-1])
        self._unlogged.append(sums)

    def log(self) -> None:
        """Writes one line about all steps since the last one."""
        if not self._unlogged:
            return
        host = jax.device_get(self._unlogged)
        total = jax.tree.map(lambda *xs: np.sum(np.stack(xs)), *host)
        values = total.as_dict()
        if not math.isfinite(values["loss"]) or not math.isfinite(values["grad_norm"]):
            raise FloatingPointError(
                f"the loss is {values['loss']} and the gradient's norm "
                f"{values['grad_norm']} in the {len(host)} steps up to {self.done}"
            )
        values["tokens_per_s"] = self._tokens_per_s(host)
        self.newest = values
        self.metrics.write(self.done, "train", {**values, "seconds": self.seconds})
        self._unlogged = []

    def call_back(self) -> None:
        """Runs the callbacks that are due and have no line yet."""
        for callback in self.callbacks:
            due = callback.due(self.done)
            if due and not self.metrics.has(self.done, callback.name):
                values = callback.function(self.state)
                self.metrics.write(self.done, callback.name, values)
                self._pause()

    def save(self) -> None:
        """Logs, and writes a checkpoint where there is a place for one."""
        self.done = int(self.state.step)
        self.log()
        if self.checkpoints is not None:
            notes = {"seconds": self.seconds, "data": self._describe_data()}
            self.checkpoints.save(self.state, notes)
            self._pause()

    def seconds_left(self, steps: int, budget: float) -> float:
        """The nearer of the two caps, as far as the pace tells."""
        left = math.inf
        if self._timed_steps:
            left = (steps - self.done) * self._busy / self._timed_steps
        return min(left, budget - self.seconds)

    def _tokens_per_s(self, host: list[Sums]) -> float | None:
        """Loss tokens a second of the steps behind the pace mark."""
        assert self._pace is not None
        since, skip = self._pace
        elapsed, timed = time.monotonic() - since, host[skip:]
        self._pace = time.monotonic(), 0
        if not timed:
            return None
        self._busy += elapsed
        self._timed_steps += len(timed)
        return sum(int(s.tokens) for s in timed) / elapsed

    def _pause(self) -> None:
        """Leaves what was no training out of the pace: it starts again from here."""
        if self._pace is not None:
            jax.block_until_ready(self.state)
            self._pace = time.monotonic(), len(self._unlogged)

    def _describe_data(self) -> dict[str, Any]:
        return json.loads(json.dumps(dict(self.batches.describe())))


def _open(workdir, label: str, keep, resume: bool, stack):
    if workdir is None:
        return MetricsFile(None, label), None
    folder = Path(workdir)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoints = stack.enter_context(Checkpoints(folder / "checkpoints" / label, keep))
    if not resume and checkpoints.latest is not None:
        raise ValueError(
            f"{folder} holds the run {label!r} at step {checkpoints.latest}: resume "
            "it, or take another workdir"
        )
    return MetricsFile(folder / "metrics.jsonl", label), checkpoints


def _check_mesh(mesh: Mesh | None) -> None:
    """Processes that each train alone would write over each other's files."""
    if jax.process_count() == 1:
        return
    on = set() if mesh is None else {d.process_index for d in mesh.devices.flat}
    if len(on) < jax.process_count():
        raise ValueError(
            f"{jax.process_count()} processes train together on a mesh over all of "
            "their devices: give mesh=parallel.make_mesh(...), got "
            f"{'None' if mesh is None else f'one over {len(on)} of them'}"
        )


def _check_ids(tokens, step: TrainStep | DrafterStep) -> None:
    """An id past a vocabulary would be read as another token, silently."""
    sizes = [m.vocab_size for m in (step.student, step.teacher) if m is not None]
    low, high = int(np.min(tokens)), int(np.max(tokens))
    if low < 0 or high >= min(sizes):
        raise ValueError(
            f"token ids must be 0..{min(sizes) - 1}, the vocabulary that student and "
            f"teacher share, got {low}..{high}"
        )


def _check(steps, seconds, save_every, log_every, callbacks) -> None:
    counts = {"log_every": log_every, "save_every": save_every or 1, "steps": steps + 1}
    counts |= {f"every of callback {c.name!r}": c.every for c in callbacks}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name} must be at least 1 (steps: 0), got {value}")
    if seconds is not None and seconds < 0:
        raise ValueError(f"seconds must be >= 0 or None, got {seconds}")
