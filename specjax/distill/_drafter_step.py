"""One optimiser step of a drafter that is trained beside its target.

Axes: B rows, T positions of a sequence.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from specjax import parallel
from specjax.core import Params, TrainableDrafter
from specjax.distill._micro import (
    master,
    norm,
    row_streams,
    scan_pieces,
    split_rows,
    update,
)
from specjax.distill._state import Batch, HeadedModel, Sums, TrainState
from specjax.ops import chunk_size, locate, sum_chunks

_CHUNK = 1024  # logits of the target that are alive at once


@dataclasses.dataclass(frozen=True)
class DrafterStep:
    """A training step of heads, or of whatever else reads the target's hidden states.

    Static, hashable and without arrays, as `TrainStep`, and in its place in `train`.
    The target reads the batch once; from its output the drafter takes its loss. The
    gradient is that of (sum of the loss) / (tokens that count), over all micro-batches
    and devices. A step without any such token changes nothing and is counted.

    With `train_target` both are trained, on

        (the target's cross-entropy on the text) + drafter_weight * (the drafter's loss)

    (Medusa-2). What is trained, `TrainState.params`, is then `{"own": ..., "target":
    ...}`, and without it the drafter's own parameters alone.

    Attributes:
        drafter: any `core.TrainableDrafter`.
        target: the target's model; its parameters are an argument of every call.
        optimizer: from `make_optimizer`, or any optax transformation.
        accumulate: micro-batches a step; B must be a multiple.
        train_target: train the target too.
        drafter_weight: of the drafter's loss beside the target's, default 0.2; only
            with `train_target`.
        target_rate: the target's learning rate over the drafter's, default 0.25; only
            with `train_target`.
        kernel_layout: of the target, for its places on a mesh.

    Raises:
        ValueError: a setting out of range, or one that would do nothing.

    Reference: Cai et al., Medusa, arXiv 2401.10774, section 2.2: heads on a frozen
    target, and joint training with a rate for each. The defaults of the two numbers are
    ours.

    Example:
        >>> medusa = drafters.Medusa()  # doctest: +SKIP
        >>> step = DrafterStep(medusa, target.model, optimizer)  # doctest: +SKIP
        >>> state = step.init(key, medusa.init_params(key, target))  # doctest: +SKIP
        >>> state, sums = step(state, batch, target.params)  # doctest: +SKIP
        >>> medusa = medusa.with_params(state.params)  # doctest: +SKIP
    """

    drafter: TrainableDrafter
    target: HeadedModel
    optimizer: optax.GradientTransformation
    accumulate: int = 1
    train_target: bool = False
    drafter_weight: float | None = None
    target_rate: float | None = None
    kernel_layout: str = "io"

    def __post_init__(self):
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1, got {self.accumulate}")
        for name in ("drafter_weight", "target_rate"):
            value = getattr(self, name)
            if value is not None and not self.train_target:
                raise ValueError(f"{name} does nothing without train_target=True")
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be > 0, got {value}")
        object.__setattr__(self, "drafter", self.drafter.for_model(self.target))

    # `train` checks the ids of a batch against these two, as those of `TrainStep`.
    @property
    def student(self) -> None:
        """No model of its own."""
        return None

    @property
    def teacher(self) -> HeadedModel:
        """The target."""
        return self.target

    def init(self, key: Array, params: Params) -> TrainState:
        """The state before the first step.

        Args:
            key: the run's own key.
            params: where to start: what `drafter.init_params` gave, with `train_target`
                `{"own": that, "target": the target's}`. Copied, as every step donates
                its state.

        Raises:
            ValueError: the two parts are missing, with `train_target`.
        """
        both = isinstance(params, dict) and params.keys() == {"own", "target"}
        if self.train_target and not both:
            raise ValueError(
                "train_target=True trains two parts: give init the parameters "
                '{"own": the drafter\'s, "target": the target\'s}'
            )
        return _start(self, jax.tree.map(master, params), key)

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
            batch: B rows of the corpus, such as samples of the target.
            teacher_params: the target's; never changed. With `train_target` None: they
                are in the state.
            reference_params: None: there is nothing to compare with.

        Returns:
            The state after, and what was counted.
        """
        self._check(teacher_params, reference_params)
        return _update(self, state, batch, teacher_params)

    def evaluate(
        self,
        params: Params,
        batches: Iterable[Batch],
        teacher_params: Params = None,
        reference_params: Params = None,
        key: Array | None = None,
    ) -> Sums:
        """The loss on given sequences, without gradients.

        `params` is `TrainState.params`; `key` is for drafters whose loss draws noise,
        default `jax.random.key(0)`.
        """
        self._check(teacher_params, reference_params)
        key = jax.random.key(0) if key is None else key
        sums = [_evaluate(self, params, teacher_params, b, key) for b in batches]
        if not sums:
            raise ValueError("evaluate needs at least one batch, got none")
        return functools.reduce(lambda a, b: a + b, sums)

    def _check(self, teacher_params: Params, reference_params: Params) -> None:
        if reference_params is not None:
            raise ValueError("a drafter is compared with nothing: reference_params")
        if self.train_target and teacher_params is not None:
            raise ValueError(
                "with train_target=True the target's parameters are in the state: "
                "teacher_params must be None"
            )
        if not self.train_target and teacher_params is None:
            raise ValueError("teacher_params must be given: the target's parameters")


@functools.partial(jax.jit, static_argnums=0)
def _start(step: DrafterStep, params: Params, key: Array) -> TrainState:
    opt_state = step.optimizer.init(params)
    return TrainState(params, opt_state, jnp.zeros((), jnp.int32), key)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _update(step: DrafterStep, state: TrainState, batch: Batch, theirs: Params):
    _, keys = row_streams(state.key, state.step, batch.tokens.shape[0])
    gradients, sums = _gradients(step, state.params, theirs, batch, keys)
    some = sum(sums.counts.values(), jnp.zeros((), jnp.int32)) > 0
    rate = 0.25 if step.target_rate is None else step.target_rate
    params, opt_state = update(
        step.optimizer,
        gradients,
        state.opt_state,
        state.params,
        some,
        step.kernel_layout,
        {"own": 1.0, "target": rate} if step.train_target else None,
    )
    sums = dataclasses.replace(
        sums,
        updates=some.astype(jnp.int32),
        skipped=(~some).astype(jnp.int32),
        grad_norm=norm(gradients),
    )
    state = dataclasses.replace(
        state, params=params, opt_state=opt_state, step=state.step + 1
    )
    return state, sums


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(step: DrafterStep, params, theirs, batch: Batch, key: Array) -> Sums:
    _, keys = row_streams(key, jnp.zeros((), jnp.int32), batch.tokens.shape[0])
    return _part(step, params, theirs, (batch, keys), jnp.zeros(()))[1]


def _gradients(step: DrafterStep, trained, theirs, batch: Batch, keys: Array):
    """The gradient of the mean over all tokens of all micro-batches, and the sums."""
    pieces = split_rows((batch, keys), step.accumulate)

    def take(piece, ratio: Array):
        def loss(trained):
            return _part(step, trained, theirs, piece, ratio)

        (_, sums), gradients = jax.value_and_grad(loss, has_aux=True)(trained)
        return gradients, sums

    ratio = jnp.zeros(())
    if step.train_target:
        # Two means with a count each in one gradient: it is divided by the drafter's
        # tokens at the end, so the other sum is scaled for that before it is taken.
        # (What only counts is cheap: XLA drops what it does not need.)
        counts = _add_up(
            lambda piece: _part(step, trained, theirs, piece, ratio)[1].counts, pieces
        )
        ratio = _at_least_one(counts["drafter"]) / _at_least_one(counts["target"])
    gradients, sums = _add_up(lambda piece: take(piece, ratio), pieces)
    scale = 1.0 / _at_least_one(sums.counts["drafter"])
    return jax.tree.map(lambda x: x * scale, gradients), sums


def _add_up(function, pieces):
    """The sum of what `function` gives of each micro-batch."""
    first = jax.tree.map(lambda x: x[0], pieces)
    like = jax.eval_shape(function, first)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

    def add(total, piece):
        return jax.tree.map(jnp.add, total, function(piece)), None

    return scan_pieces(add, zeros, pieces)[0]


def _part(
    step: DrafterStep, trained: Params, theirs: Params, piece: Any, ratio: Array
) -> tuple[Array, Sums]:
    """The loss of a micro-batch, not yet divided, and what it counts.

    `ratio` is what the target's own cross-entropy is multiplied by.
    """
    batch, keys = piece
    batch = jax.tree.map(lambda x: parallel.constrain(x, parallel.BATCH), batch)
    own = trained
    if step.train_target:
        own, theirs = trained["own"], trained["target"]
    features = tuple(step.drafter.features)
    out, _ = step.target.apply(theirs, batch.tokens, features=features)
    if not step.train_target:
        theirs, out = jax.lax.stop_gradient((theirs, out))
    params = {"own": own, "target": theirs}
    loss, named = step.drafter.loss(params, keys, batch.tokens, batch.mask, out)
    tokens = named["tokens"].astype(jnp.int32)
    parts, counts = {"drafter": loss}, {"drafter": tokens}
    if step.train_target:
        weight = 0.2 if step.drafter_weight is None else step.drafter_weight
        own_loss, count = _cross_entropy(step.target, theirs, batch, out.hidden)
        parts = {"drafter": weight * loss, "target": own_loss}
        counts["target"] = count
        loss = weight * loss + ratio * own_loss
    sums = dataclasses.replace(
        Sums.zeros(),
        parts=parts,
        counts=counts,
        tokens=tokens,
        named=named,
        rows=jnp.asarray(batch.mask.shape[0], jnp.int32),
        empty_rows=jnp.sum(~jnp.any(batch.mask, axis=1), dtype=jnp.int32),
    )
    return loss, sums


def _cross_entropy(
    model: HeadedModel, params: Params, batch: Batch, hidden: Array
) -> tuple[Array, Array]:
    """The target's own loss on the text, summed, and the tokens that count."""
    mask, labels = batch.mask[:, 1:], batch.tokens[:, 1:]
    if model.head is not None:
        mask &= locate(labels, model.head.ids)[1]

    def one(piece) -> Array:
        hidden, labels, mask = piece
        logits = model.unembed(params, hidden).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
        loss = jax.nn.logsumexp(logits, axis=-1) - chosen
        return jnp.sum(jnp.where(mask, loss, 0.0))

    size = chunk_size(_CHUNK, *mask.shape)
    loss = sum_chunks(one, (hidden[:, :-1], labels, mask), size)
    return loss, jnp.sum(mask, dtype=jnp.int32)


def _at_least_one(count: Array) -> Array:
    return jnp.maximum(count, 1).astype(jnp.float32)
