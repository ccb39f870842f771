"""What the terms on features share: layers by name, projections, tokens of a row.

Axes: B rows, T positions, D width (E the teacher's), J mapped pairs of layers.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import LMOutput, Params, near
from specjax.distill._state import HeadedModel
from specjax.distill._term import Term

Pairs = tuple[tuple[str, str], ...]  # (the student's, the teacher's)

LAST: Pairs = (("layers.-1", "layers.-1"),)
MIDDLE: Pairs = (("layers.middle", "layers.middle"),)

T = TypeVar("T")


@dataclass(frozen=True)
class LayerTerm(Term):
    """A term that reads pairs of layers of student and teacher.

    Layers are named `(("layers.1", "layers.3"), ...)`, the student's first. "layers.N"
    is the residual stream behind block N, before any final norm; "layers.-1" is a
    model's last block, and "layers.middle" the one behind which half of its depth lies.
    Any other feature of the models will do ("embedding", "layers.2.value", heads laid
    side by side). The losses of several pairs are added up.

    A feature at position t counts where `batch.mask[b, t]` does: it is the state *of* a
    counted token, which has seen that token, not of the position that predicts it.
    """

    layers: Pairs = LAST

    needs_teacher: ClassVar[bool] = True

    def __post_init__(self):
        object.__setattr__(self, "layers", as_pairs(self.layers))

    def bind(self, student: HeadedModel, teacher: HeadedModel | None) -> Self:
        """See `Term`: layers by their full names."""
        return dataclasses.replace(self, layers=named(self.layers, student, teacher))

    def check(self, student: HeadedModel, teacher: HeadedModel | None) -> None:
        """See `Term`: unknown layers."""
        self.bind(student, teacher)

    def features(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See `Term`."""
        return tuple(p[0] for p in self.layers), tuple(p[1] for p in self.layers)


def as_pairs(layers: Any) -> Pairs:
    """Pairs of names as hashable tuples.

    Raises:
        ValueError: anything but pairs of names, or none.
    """
    listed = isinstance(layers, list | tuple) and len(layers) > 0
    if not listed or not all(_is_pair(pair) for pair in layers):
        raise ValueError(
            "layers must be pairs of names, the student's and the teacher's, such as "
            f"[['layers.1', 'layers.3']], got {layers!r}"
        )
    return tuple((ours, theirs) for ours, theirs in layers)


def _is_pair(pair: Any) -> bool:
    two = isinstance(pair, list | tuple) and len(pair) == 2
    return two and all(isinstance(name, str) for name in pair)


def named(
    layers: Pairs, student: HeadedModel, teacher: HeadedModel | None, part: str = ""
) -> Pairs:
    """The pairs by full names, see `LayerTerm`.

    Args:
        layers: the pairs.
        student: whose names come first.
        teacher: whose names come second.
        part: what will be read of each layer, ".query" say.

    Raises:
        ValueError: a name that a model does not know.
    """
    assert teacher is not None  # `Objective.check` has seen to it
    return tuple(
        (_full(ours, student, "student", part), _full(theirs, teacher, "teacher", part))
        for ours, theirs in layers
    )


def _full(name: str, model: HeadedModel, who: str, part: str) -> str:
    known, depth = model.feature_names(), num_layers(model)
    index = _index(name, depth)
    full = name if index is None else f"layers.{index}"
    if full + part not in known:
        choice = [x.removesuffix(part) for x in known if x.endswith(part)]
        raise ValueError(
            f"the {who}, of {depth} layers, has no layer {name!r}; {near(name, choice)}"
        )
    return full


def _index(name: str, depth: int) -> int | None:
    """Which block a name like "layers.-1" means; None: it is a full name, or wrong."""
    form = re.fullmatch(r"layers\.(-\d+|middle)", name)
    if form is None:
        return None
    index = (depth - 1) // 2 if form[1] == "middle" else depth + int(form[1])
    return index if 0 <= index < depth else None


def num_layers(model: HeadedModel) -> int:
    """How many blocks a model has."""
    blocks = (re.fullmatch(r"layers\.\d+", name) for name in model.feature_names())
    return sum(form is not None for form in blocks)


@functools.lru_cache(maxsize=64)
def shapes(model: HeadedModel) -> Mapping[str, tuple[int, ...]]:
    """The shape of each feature without B and T: `(D,)`, or `(heads, H)`."""

    def read() -> dict[str, Array]:
        params = model.init(jax.random.key(0))
        tokens = jnp.zeros((1, 1), jnp.int32)
        return model.apply(params, tokens, features=model.feature_names())[0].features

    return {name: x.shape[2:] for name, x in jax.eval_shape(read).items()}


def width(model: HeadedModel, name: str) -> int:
    """D of a feature; heads are laid side by side."""
    return math.prod(shapes(model)[name])


def check_widths(
    layers: Pairs, student: HeadedModel, teacher: HeadedModel | None
) -> None:
    """Raises a ValueError where a pair cannot be compared without a projection."""
    assert teacher is not None
    for ours, theirs in layers:
        pair = width(student, ours), width(teacher, theirs)
        if pair[0] != pair[1]:
            raise ValueError(
                f"the student's {ours!r} is {pair[0]} wide and the teacher's "
                f"{theirs!r} is {pair[1]}: they can be compared with project=True"
            )


def projections(
    key: Array, layers: Pairs, student: HeadedModel, teacher: HeadedModel | None
) -> tuple[Array, ...]:
    """A matrix for each pair, from the student's width to the teacher's.

    Normal with variance 1 / (the student's width), which keeps the scale.
    """
    assert teacher is not None

    def matrix(key: Array, ours: str, theirs: str) -> Array:
        shape = width(student, ours), width(teacher, theirs)
        return jax.random.normal(key, shape) / math.sqrt(shape[0])

    keys = jax.random.split(key, len(layers))
    return tuple(matrix(key, *pair) for key, pair in zip(keys, layers, strict=True))


def read(
    layers: Pairs, student: LMOutput, teacher: LMOutput | None
) -> list[tuple[Array, Array]]:
    """Features `[B, T, D]` and `[B, T, E]` of each pair, in float32."""
    assert teacher is not None
    return [
        (_wide(student.features[ours]), _wide(teacher.features[theirs]))
        for ours, theirs in layers
    ]


def read_projected(
    layers: Pairs, aux: Params, student: LMOutput, teacher: LMOutput | None
) -> list[tuple[Array, Array]]:
    """The same with the student's features projected, both `[B, T, E]`.

    Raises:
        ValueError: `aux` is not what `projections` gave.
    """
    if len(aux) != len(layers):
        raise ValueError(
            f"the term learns {len(layers)} projections, got {len(aux)}: give "
            "TrainState.aux as aux"
        )
    pairs = zip(aux, read(layers, student, teacher), strict=True)
    return [(jnp.einsum("BTD,DE->BTE", u, matrix), v) for matrix, (u, v) in pairs]


def _wide(x: Array) -> Array:
    return x.reshape(*x.shape[:2], -1).astype(jnp.float32)


def masked_sum(mask: Array, per_token: Array) -> Array:
    """The sum over the tokens `[B, T]` that count."""
    return jnp.sum(jnp.where(mask, per_token, 0.0))


def last_of_row(mask: Array) -> Array:
    """Of each row the last token that counts, `[B, T]`; none of an empty row."""
    left = jnp.cumsum(mask[:, ::-1], axis=1)[:, ::-1]  # counted from here on
    return mask & (left == 1)


def unit(x: Array) -> Array:
    """Vectors along the last axis at length 1; a zero vector stays, with gradient 0."""
    squares = jnp.sum(x * x, axis=-1, keepdims=True)
    some = squares > 0
    return jnp.where(some, x * jax.lax.rsqrt(jnp.where(some, squares, 1.0)), 0.0)


def squared_distance(u: Array, v: Array) -> Array:
    """`||u - v||^2` along the last axis."""
    return jnp.sum(jnp.square(u - v), axis=-1)


def choose(what: str, name: Any, known: Mapping[str, T]) -> T:
    """An entry by its name, or a ValueError that lists near ones."""
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown {what} {name!r}; {near(str(name), known)}")
    return known[name]
