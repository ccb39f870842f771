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
from specjax.distill._objectives import Objective
from specjax.distill._sources import FixedCorpus, Source
from specjax.distill._state import Batch, HeadedModel, Policy, Sums, TrainState


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
        objective: `Distill(...)` or `CrossEntropy(...)`.
        optimizer: from `make_optimizer`, or any optax transformation (the same object
            each time: another one compiles again).
        teacher: the target; its parameters are an argument of every call.
        source: which sequences to train on.
        accumulate: micro-batches a step; B must be a multiple. They are interleaved
            rows, so that each device keeps its own.
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
    objective: Objective
    optimizer: optax.GradientTransformation
    teacher: HeadedModel | None = None
    source: Source = FixedCorpus()  # noqa: RUF009 (frozen)
    accumulate: int = 1
    compute_dtype: Any = None
    kernel_layout: str = "io"

    def __post_init__(self):
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {self.accumulate}")
        if self.objective.needs_teacher and self.teacher is None:
            name = type(self.objective).__name__
            raise ValueError(f"the objective {name} needs teacher=, got None")

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
        return _start(self, jax.tree.map(_master, params), run_key)

    def __call__(
        self, state: TrainState, batch: Batch, teacher_params: Params = None
    ) -> tuple[TrainState, Sums]:
        """Takes one step.

        Args:
            state: before; donated, so it cannot be used again.
            batch: B rows of the corpus.
            teacher_params: the target's; never changed.

        Returns:
            The state after, and what was counted.
        """
        return _update(self, state, batch, teacher_params)

    def gradients(
        self, state: TrainState, batch: Batch, teacher_params: Params = None
    ) -> tuple[Params, Sums]:
        """The gradient that a step would take, and what it counts."""
        return _gradients_only(self, state, batch, teacher_params)

    def evaluate(
        self, params: Params, batches: Iterable[Batch], teacher_params: Params = None
    ) -> Sums:
        """The objective on given sequences, without gradients and without rollouts.

        Normalised as in training: the loss of a training batch is the same here.
        """
        total = Sums.zeros()
        for batch in batches:
            total = total + _evaluate(self, params, batch, teacher_params)
        return total


@functools.partial(jax.jit, static_argnums=0)
def _fresh(model: HeadedModel, key: Array) -> Params:
    return model.init(key)


@functools.partial(jax.jit, static_argnums=0)
def _start(step: TrainStep, params: Params, key: Array) -> TrainState:
    opt_state = step.optimizer.init(params)
    return TrainState(params, opt_state, jnp.zeros((), jnp.int32), key)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _update(step: TrainStep, state: TrainState, batch: Batch, teacher_params):
    gradients, sums = _gradients(step, state, batch, teacher_params)
    updates, opt_state = step.optimizer.update(gradients, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    some = sums.tokens > 0
    new = jax.tree.map(
        lambda new, old: jnp.where(some, new, old),
        (params, opt_state),
        (state.params, state.opt_state),
    )
    params, opt_state = parallel.constrain_params(new, step.kernel_layout)
    sums = dataclasses.replace(
        sums,
        updates=some.astype(jnp.int32),
        skipped=(~some).astype(jnp.int32),
        grad_norm=_norm(gradients),
    )
    return TrainState(params, opt_state, state.step + 1, state.key), sums


@functools.partial(jax.jit, static_argnums=0)
def _gradients_only(step: TrainStep, state: TrainState, batch: Batch, teacher_params):
    return _gradients(step, state, batch, teacher_params)


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(step: TrainStep, params: Params, batch: Batch, teacher_params) -> Sums:
    student, teacher = _policies(step, params, teacher_params)
    return step.objective(student, teacher, batch)


def _gradients(
    step: TrainStep, state: TrainState, batch: Batch, teacher_params: Params
) -> tuple[Params, Sums]:
    """The gradient of the mean over all loss tokens of all micro-batches."""
    rows = batch.tokens.shape[0]
    if rows % step.accumulate:
        raise ValueError(
            f"the batch must be a multiple of accumulate={step.accumulate}, got {rows} "
            "rows"
        )
    step_key, rows_key = jax.random.split(jax.random.fold_in(state.key, state.step))
    row_keys = jax.vmap(jax.random.fold_in, (None, 0))(rows_key, jnp.arange(rows))
    part = functools.partial(_part, step, state.params, teacher_params, step_key)
    if step.accumulate == 1:
        gradients, sums = part(batch, row_keys)
    else:
        micro = jax.tree.map(lambda x: _split(x, step.accumulate), (batch, row_keys))

        def add(total, piece):
            return jax.tree.map(jnp.add, total, part(*piece)), None

        zeros = jax.tree.map(jnp.zeros_like, state.params), Sums.zeros()
        (gradients, sums), _ = jax.lax.scan(add, zeros, micro)
    count = jnp.maximum(sums.tokens, 1).astype(jnp.float32)
    return jax.tree.map(lambda g: g / count, gradients), sums


def _part(step, params, teacher_params, step_key, batch, row_keys):
    """Gradient of the *sum* over the loss tokens of one micro-batch."""
    student, teacher = _policies(step, params, teacher_params)
    batch = step.source.draw(step_key, row_keys, batch, student, teacher)
    batch = jax.tree.map(lambda x: parallel.constrain(x, parallel.BATCH), batch)

    def loss(params: Params) -> tuple[Array, Sums]:
        student, teacher = _policies(step, params, teacher_params)
        sums = step.objective(student, teacher, batch)
        return sums.loss, sums

    (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return gradients, sums


def _policies(step: TrainStep, params: Params, teacher_params: Params):
    if step.compute_dtype is not None:
        params = jax.tree.map(lambda x: x.astype(step.compute_dtype), params)
    if step.teacher is None:
        return Policy(params, step.student), None
    if teacher_params is None:
        raise ValueError("teacher_params must be given: the step has a teacher")
    return Policy(params, step.student), Policy(teacher_params, step.teacher)


def _split(x: Array, parts: int) -> Array:
    """`[B, ...]` as `[parts, B / parts, ...]`, part a of rows a, a + parts, ..."""
    x = jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1)
    return parallel.constrain(x, None, parallel.BATCH)


def _master(x: Array) -> Array:
    low = jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 32
    return jnp.array(x, dtype=jnp.float32 if low else x.dtype, copy=True)


def _norm(tree: Params) -> Array:
    squares = [
        jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(jnp.sum(jnp.stack(squares)))
