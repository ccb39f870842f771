"""Optimisers and learning-rate schedules by name."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers

from specjax.core import Registry

_schedules: Registry[Callable[..., optax.Schedule]] = Registry("schedule")
_optimizers: Registry[Callable[..., optax.GradientTransformation]] = Registry(
    "optimiser"
)


def optimizer_names() -> tuple[str, ...]:
    """The registered optimisers."""
    return _optimizers.names()


def schedule_names() -> tuple[str, ...]:
    """The registered schedules."""
    return _schedules.names()


@functools.lru_cache(maxsize=64)
def make_schedule(
    schedule: str = "constant",
    *,
    learning_rate: float,
    warmup: int = 0,
    steps: int | None = None,
    final: float = 0.1,
) -> optax.Schedule:
    """A learning rate by step: linear warm-up, then a decay to `final` of the peak.

    Args:
        schedule: "constant", "cosine" or "linear".
        learning_rate: the peak.
        warmup: steps from 0 to the peak.
        steps: the whole run, warm-up included; every decay needs it.
        final: what is left of the peak at the end.

    Raises:
        ValueError: an unknown schedule, or a decay without `steps`.
    """
    make = _schedules.get(schedule)
    if schedule != "constant" and (steps is None or steps <= warmup):
        raise ValueError(
            f"schedule {schedule!r} needs steps > warmup, got steps={steps}, "
            f"warmup={warmup}"
        )
    after = make(learning_rate, (steps or 0) - warmup, final)
    if not warmup:
        return after
    # The first step already moves: a rate of 0 would waste it.
    rise = optax.linear_schedule(learning_rate / (warmup + 1), learning_rate, warmup)
    return optax.join_schedules([rise, after], [warmup])


@functools.lru_cache(maxsize=64)
def make_optimizer(
    name: str = "adamw",
    *,
    learning_rate: float,
    warmup: int = 0,
    schedule: str = "constant",
    steps: int | None = None,
    final: float = 0.1,
    clip: float | None = 1.0,
    weight_decay: float = 0.0,
    kernel_layout: str = "io",
) -> optax.GradientTransformation:
    """An optimiser with its schedule and clipping.

    Equal settings give the same object, so a `TrainStep` made twice compiles once.

    Args:
        name: "adamw", or "muon" (Jordan, 2024): matrices of the layers by
            orthogonalised momentum, embeddings, head, norms and biases by AdamW at a
            tenth of the rate. A good rate for muon is near 2e-2, for adamw near 1e-3.
        learning_rate: the peak.
        warmup: see `make_schedule`.
        schedule: see `make_schedule`.
        steps: see `make_schedule`.
        final: see `make_schedule`.
        clip: the largest global norm of the gradient; None: any.
        weight_decay: of matrices, multiplied by the learning rate; norms and biases
            have none.
        kernel_layout: of the model, "io" or "oi": which axis muon takes as output.

    Raises:
        ValueError: an unknown name, or settings out of range.
    """
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be > 0, got {learning_rate}")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be > 0 or None, got {clip}")
    make = _optimizers.get(name)
    rate = make_schedule(
        schedule, learning_rate=learning_rate, warmup=warmup, steps=steps, final=final
    )
    update = make(rate, weight_decay, kernel_layout)
    return update if clip is None else optax.chain(_clip(clip), update)


def _clip(norm: float) -> optax.GradientTransformation:
    return optax.clip_by_global_norm(norm)


@_schedules.register("constant")
def _constant(peak: float, steps: int, final: float) -> optax.Schedule:
    return optax.constant_schedule(peak)


@_schedules.register("cosine")
def _cosine(peak: float, steps: int, final: float) -> optax.Schedule:
    return optax.cosine_decay_schedule(peak, steps, alpha=final)


@_schedules.register("linear")
def _linear(peak: float, steps: int, final: float) -> optax.Schedule:
    return optax.linear_schedule(peak, peak * final, steps)


def _is_matrix(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim >= 2, params)


@_optimizers.register("adamw")
def _adamw(rate: optax.Schedule, weight_decay: float, kernel_layout: str):
    return optax.adamw(
        rate, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=_is_matrix
    )


@_optimizers.register("muon")
def _muon(rate: optax.Schedule, weight_decay: float, kernel_layout: str):
    axes = {"io": (0, 1), "oi": (1, 0)}
    if kernel_layout not in axes:
        raise ValueError(f"kernel_layout must be 'io' or 'oi', got {kernel_layout!r}")
    reduction, output = axes[kernel_layout]
    numbers = MuonDimensionNumbers(reduction_axis=reduction, output_axis=output)

    def dimension_numbers(params: Any) -> Any:
        # Left to itself optax.contrib.muon takes every matrix, the embedding too.
        def of(path, leaf):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return numbers if name.endswith("kernel") and leaf.ndim == 2 else None

        return jax.tree_util.tree_map_with_path(of, params)

    return optax.contrib.muon(
        rate,
        weight_decay=weight_decay,
        adam_b2=0.95,
        adam_learning_rate=lambda step: 0.1 * rate(step),
        muon_weight_dimension_numbers=dimension_numbers,
    )
