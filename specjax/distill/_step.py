"""One optimiser step: draw sequences, add up gradients, update. One jitted program."""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from specjax import parallel
from specjax.core import Params
from specjax.distill._micro import (
    master,
    norm,
    row_streams,
    scan_pieces,
    split_rows,
    update,
)
from specjax.distill._objective import Objective, Scales
from specjax.distill._sources import FixedCorpus, Source
from specjax.distill._state import (
    Batch,
    HeadedModel,
    Models,
    Policy,
    Sums,
    TrainState,
)
from specjax.distill._term import Term


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """A training step as a value: static, hashable, holding no arrays.

    The gradient is that of (sum over loss tokens) / (number of loss tokens), over all
    micro-batches and devices, so it does not depend on how a batch is split. A step
    without any loss token leaves the parameters as they are and is counted.

    Under `jax.set_mesh` rows are spread over `data` and `fsdp`, and the state keeps the
    places that `parallel.shard_params` gave it.

    Attributes:
        student: the model in training.
        objective: a term such as `Distill(...)` or `CrossEntropy()`, or an `Objective`
            of several.
        optimizer: from `make_optimizer`, or any optax transformation (the same object
            each time: another one compiles again).
        teacher: the target; its parameters are an argument of every call.
        source: which sequences to train on.
        reference: a draft to compare with, for terms that need one; its parameters are
            an argument of every call.
        accumulate: micro-batches a step; B must be a multiple. They are interleaved
            rows, so that each device keeps its own.
        inner_steps: updates taken on the sequences of one draw (PPO epochs).
        compute_dtype: type of the student's forward and backward pass, bfloat16 say;
            masters stay float32. None: float32.
        kernel_layout: of the student, for its places on a mesh.

    Example:
        >>> from specjax import distill, divergences
        >>> step = distill.TrainStep(  # doctest: +SKIP
        ...     draft, distill.Distill(divergences.resolve("jsd", beta=0.5)),
        ...     distill.make_optimizer("adamw", learning_rate=1e-3), teacher=target)
        >>> state = step.init(jax.random.key(0))  # doctest: +SKIP
        >>> state, sums = step(state, batch, target_params)  # doctest: +SKIP
    """

    student: HeadedModel
    objective: Objective | Term
    optimizer: optax.GradientTransformation
    teacher: HeadedModel | None = None
    source: Source = FixedCorpus()  # noqa: RUF009 (frozen)
    reference: HeadedModel | None = None
    accumulate: int = 1
    inner_steps: int = 1
    compute_dtype: Any = None
    kernel_layout: str = "io"

    def __post_init__(self):
        for name in ("accumulate", "inner_steps"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"{name} must be at least 1, got {getattr(self, name)}"
                )
        if self.loss.needs_reference and self.reference is None:
            raise ValueError("the objective needs reference=, a draft, got None")
        self.loss.check(self.student, self.teacher)

    @property
    def loss(self) -> Objective:
        """The objective as a weighted sum of terms."""
        return Objective.of(self.objective)

    def init(self, key: Array, params: Params = None) -> TrainState:
        """The state before the first step.

        Args:
            key: the run's own key.
            params: where the student starts; default: drawn from `key`. Copied, as
                every step donates its state.
        """
        params_key, run_key = jax.random.split(key)
        if params is None:
            params = _fresh(self.student, params_key)
        return _start(self, jax.tree.map(master, params), run_key)

    def __call__(
        self,
        state: TrainState,
        batch: Batch,
        teacher_params: Params = None,
        reference_params: Params = None,
    ) -> tuple[TrainState, Sums]:
        """Takes one step.

        Args:
            state: before; donated, so it cannot be used again.
            batch: B rows of the corpus.
            teacher_params: the target's; never changed.
            reference_params: the reference draft's; never changed.

        Returns:
            The state after, and what was counted.
        """
        return _update(self, state, batch, teacher_params, reference_params)

    def gradients(
        self,
        state: TrainState,
        batch: Batch,
        teacher_params: Params = None,
        reference_params: Params = None,
    ) -> tuple[Params, Sums]:
        """The gradient that a step's first update would take, and what it counts."""
        return _gradients_only(self, state, batch, teacher_params, reference_params)

    def evaluate(
        self,
        params: Params,
        batches: Iterable[Batch],
        teacher_params: Params = None,
        reference_params: Params = None,
        aux: Params = None,
    ) -> Sums:
        """The objective on given sequences, without gradients and without rollouts.

        Normalised as in training: the loss of a training batch is the same here. `aux`
        is `TrainState.aux`, needed where the objective learns something of its own.
        """
        others = teacher_params, reference_params
        sums = [_evaluate(self, params, aux, batch, *others) for batch in batches]
        total = Sums.zeros(self.loss.names)
        return functools.reduce(lambda a, b: a + b, sums, total)


@functools.partial(jax.jit, static_argnums=0)
def _fresh(model: HeadedModel, key: Array) -> Params:
    return model.init(key)


@functools.partial(jax.jit, static_argnums=0)
def _start(step: TrainStep, params: Params, key: Array) -> TrainState:
    aux_key = jax.random.fold_in(key, 2**32 - 1)  # no step's number
    aux = step.loss.init(aux_key, step.student, step.teacher)
    opt_state = step.optimizer.init((params, aux))
    memory = step.source.memory()
    return TrainState(params, opt_state, jnp.zeros((), jnp.int32), key, aux, memory)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _update(step: TrainStep, state: TrainState, batch: Batch, *others: Params):
    drawn, counts, memory = _draw(step, state, batch, *others)
    state = dataclasses.replace(state, memory=memory)

    def once(state: TrainState) -> tuple[TrainState, Sums]:
        return _descend(step, state, drawn, counts, *others)

    if step.inner_steps == 1:
        state, sums = once(state)
    else:
        state, each = jax.lax.scan(
            lambda state, _: once(state), state, length=step.inner_steps
        )
        sums = jax.tree.map(lambda x: jnp.sum(x, axis=0, dtype=x.dtype), each)
    return dataclasses.replace(state, step=state.step + 1), sums


@functools.partial(jax.jit, static_argnums=0)
def _gradients_only(step: TrainStep, state: TrainState, batch: Batch, *others: Params):
    drawn, counts, _ = _draw(step, state, batch, *others)
    (gradients, _), sums = _gradients(step, state, drawn, counts, *others)
    return gradients, sums


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(step: TrainStep, params, aux, batch: Batch, *others: Params) -> Sums:
    return step.loss.measure(_models(step, params, *others), batch, aux)[1]


def _draw(
    step: TrainStep, state: TrainState, batch: Batch, *others: Params
) -> tuple[Batch, dict[str, Array], Any]:
    """The micro-batches to train on, `[accumulate, B / accumulate, ...]`.

    Returns:
        The micro-batches, the loss tokens of each term in all of them, and the source's
        memory.
    """
    rows = batch.tokens.shape[0]
    step_key, row_keys = row_streams(state.key, state.step, rows)
    models = _models(step, state.params, *others)

    def draw(memory, piece):
        batch, row_keys = piece
        batch, memory = step.source.draw(step_key, row_keys, batch, models, memory)
        batch = batch.for_head(step.student.head)
        batch = jax.tree.map(lambda x: parallel.constrain(x, parallel.BATCH), batch)
        return memory, (batch, step.loss.count(batch))

    micro = split_rows((batch, row_keys), step.accumulate)
    memory, (drawn, counts) = scan_pieces(draw, state.memory, micro)
    return drawn, jax.tree.map(lambda x: jnp.sum(x, dtype=x.dtype), counts), memory


def _descend(
    step: TrainStep, state: TrainState, drawn: Batch, counts, *others: Params
) -> tuple[TrainState, Sums]:
    """One update; none where nothing counts."""
    gradients, sums = _gradients(step, state, drawn, counts, *others)
    old = state.params, state.aux
    some = sums.tokens > 0
    (params, aux), opt_state = update(
        step.optimizer, gradients, state.opt_state, old, some, step.kernel_layout
    )
    sums = dataclasses.replace(
        sums,
        updates=some.astype(jnp.int32),
        skipped=(~some).astype(jnp.int32),
        grad_norm=norm(gradients),
    )
    state = dataclasses.replace(state, params=params, aux=aux, opt_state=opt_state)
    return state, sums


def _gradients(
    step: TrainStep, state: TrainState, drawn: Batch, counts, *others: Params
) -> tuple[tuple[Params, Params], Sums]:
    """The gradient of the mean over all loss tokens of all micro-batches."""
    scales = step.loss.scales(counts)
    trained = state.params, state.aux

    def add(total, batch: Batch):
        part = _part(step, trained, batch, scales, *others)
        return jax.tree.map(jnp.add, total, part), None

    sums = Sums.zeros(step.loss.names)
    zeros = jax.tree.map(jnp.zeros_like, trained), sums
    return scan_pieces(add, zeros, drawn)[0]


def _part(step: TrainStep, trained, batch: Batch, scales: Scales, *others: Params):
    """What one micro-batch adds to the gradient, and what it counts."""

    def loss(trained) -> tuple[Array, Sums]:
        params, aux = trained
        return step.loss(_models(step, params, *others), aux, batch, scales)

    (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
    return gradients, sums


def _models(step: TrainStep, params, teacher_params=None, reference_params=None):
    if step.compute_dtype is not None:
        params = jax.tree.map(lambda x: x.astype(step.compute_dtype), params)

    def other(name: str, model: HeadedModel | None, params: Params) -> Policy | None:
        if model is None:
            return None
        if params is None:
            raise ValueError(f"{name}_params must be given: the step has a {name}")
        return Policy(params, model)

    return Models(
        Policy(params, step.student),
        other("teacher", step.teacher, teacher_params),
        other("reference", step.reference, reference_params),
    )
