"""Feature-based terms: what the student's layers hold, against the teacher's.

Axes: B rows, T positions, D width, J mapped pairs of layers.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import jax.numpy as jnp
from jax import Array

from specjax.core import LMOutput, Params
from specjax.distill import _layers
from specjax.distill._layers import LayerTerm, Pairs
from specjax.distill._state import Batch, HeadedModel
from specjax.distill._term import registry

_Read = list[tuple[Array, Array]]


@registry.register("hint")
@dataclass(frozen=True)
class Hint(LayerTerm):
    """FitNets' hint: a learned regressor guesses the teacher's layer from the student.

    `1/2 ||v - u W||^2` for each token, summed over D as in the paper. u is the
    student's feature, v the teacher's; W `[D of u, D of v]` is learned along, in
    `TrainState.aux`.

    The paper trains in two stages, on the hint alone and then on the teacher's law:
    that is two objectives, the second started from what the first trained. As terms of
    one objective they train together.

    Attributes:
        layers: see `LayerTerm`; default the middle of each, as in the paper.

    Reference: Romero et al., FitNets, arXiv 1412.6550, equation 3.
    """

    layers: Pairs = _layers.MIDDLE

    def init(
        self, key: Array, student: HeadedModel, teacher: HeadedModel | None
    ) -> Params:
        """See `Term`: W of each pair."""
        layers = self.bind(student, teacher).layers
        return _layers.projections(key, layers, student, teacher)

    def per_batch(
        self, aux: Params, student: LMOutput, teacher: LMOutput | None, batch: Batch
    ) -> Array:
        """See `Term`."""
        pairs = _layers.read_projected(self.layers, aux, student, teacher)
        loss = sum(0.5 * _layers.squared_distance(u, v) for u, v in pairs)
        return _layers.masked_sum(self.mask(batch), jnp.asarray(loss))


class _Projecting(LayerTerm):
    """A term that may project the student's features to the teacher's widths."""

    project: bool  # a field of each

    def check(self, student: HeadedModel, teacher: HeadedModel | None) -> None:
        """See `Term`: wrong layers, and widths that differ without a projection."""
        layers = self._bound_layers(student, teacher)
        if not self.project:
            _layers.check_widths(layers, student, teacher)

    def init(
        self, key: Array, student: HeadedModel, teacher: HeadedModel | None
    ) -> Params:
        """See `Term`: the matrices of `project`."""
        if not self.project:
            return ()
        layers = self._bound_layers(student, teacher)
        return _layers.projections(key, layers, student, teacher)

    def _read(self, aux: Params, student: LMOutput, teacher: LMOutput | None) -> _Read:
        layers = _layers.as_pairs(self.layers)
        if not self.project:
            return _layers.read(layers, student, teacher)
        return _layers.read_projected(layers, aux, student, teacher)

    def _bound_layers(self, student: HeadedModel, teacher: HeadedModel | None) -> Pairs:
        return _layers.as_pairs(self.bind(student, teacher).layers)


@registry.register("hidden_state")
@dataclass(frozen=True)
class HiddenState(_Projecting):
    """The distance of hidden states, token by token.

    - "mse": the *mean* over D of `(u - v)^2`;
    - "cosine": `1 - cos(u, v)`, taken as half the squared distance of the unit vectors,
      which is the same and exactly 0 where they are equal.

    Attributes:
        layers: see `LayerTerm`.
        distance: "mse" or "cosine".
        project: learn a matrix from the student's width to the teacher's, for each
            pair, in `TrainState.aux`. Without it widths must be equal.

    Raises:
        ValueError: an unknown distance.
    """

    distance: str = "mse"
    project: bool = False

    def __post_init__(self):
        super().__post_init__()
        _layers.choose("distance", self.distance, _DISTANCES)

    def per_batch(
        self, aux: Params, student: LMOutput, teacher: LMOutput | None, batch: Batch
    ) -> Array:
        """See `Term`."""
        pairs = self._read(aux, student, teacher)
        loss = sum(_DISTANCES[self.distance](u, v) for u, v in pairs)
        return _layers.masked_sum(self.mask(batch), jnp.asarray(loss))


@registry.register("attention_transfer")
@dataclass(frozen=True)
class AttentionTransfer(LayerTerm):
    """Where a layer is active: maps over the positions of a row, at length 1.

    The map of a row is `a_t = mean over D of u_t^2`, divided by its norm over the
    row's counted tokens. Over the same tokens, `sum_t (a_t - a'_t)^2`. No projection is
    needed: D is gone.

    As in the authors' code, and unlike equation 2, the distance is squared and its mean
    is over tokens: a row of n tokens has at most 2 / n a token, so weights are large
    (the authors' is 500).

    Attributes:
        layers: see `LayerTerm`.

    Reference: Zagoruyko & Komodakis, arXiv 1612.03928, equation 2; their maps over the
    places of an image are maps over positions here.
    """

    def per_batch(
        self, aux: Params, student: LMOutput, teacher: LMOutput | None, batch: Batch
    ) -> Array:
        """See `Term`."""
        mask = self.mask(batch)

        def attention(x: Array) -> Array:
            activity = jnp.mean(jnp.square(x), axis=-1)
            return _layers.unit(jnp.where(mask, activity, 0.0))

        pairs = _layers.read(self.layers, student, teacher)
        loss = sum(jnp.square(attention(u) - attention(v)) for u, v in pairs)
        return _layers.masked_sum(mask, jnp.asarray(loss))


@registry.register("patient_kd")
@dataclass(frozen=True)
class PatientKD(_Projecting):
    """Patient knowledge distillation: normalised hidden states of several layers.

    `sum_j ||u_j / ||u_j|| - v_j / ||v_j|| ||^2` over J pairs of layers. The final layer
    is left out, as in the paper, unless it is named.

    The paper reads [CLS], which has seen the whole text. In a decoder-only model a
    token has seen what is before it only, so its place is taken by the *last counted
    token* of each row; or every counted token is compared.

    Attributes:
        layers: pairs (see `LayerTerm`), or how the teacher's are chosen for every layer
            of the student but its final one: "skip" takes each (teacher's depth /
            student's depth)-th, "last" those just below its final one. From 12 layers
            to 6, counted from 0: 1, 3, 5, 7, 9 and 6, 7, 8, 9, 10.
        positions: "last", the last counted token of a row, and the mean is over rows;
            "all" counted tokens, and the mean is over them.
        reduction: "sum" over D and J, as the paper writes; "mean" over both, as the
            authors' code has it (`F.mse_loss`), with weights of 10 to 1000. Over rows
            or tokens it is the mean either way, so a batch's size does not count.
        normalize: divide by the norms; the authors tried without, too.
        project: as in `HiddenState`.

    Raises:
        ValueError: an unknown choice.

    Reference: Sun et al., arXiv 1908.09355, section 3.2.
    """

    layers: Pairs | str = "skip"  # pyright: ignore[reportIncompatibleVariableOverride]
    positions: str = "last"
    reduction: str = "sum"
    normalize: bool = True
    project: bool = False

    def __post_init__(self):
        if isinstance(self.layers, str):
            _layers.choose("choice of layers", self.layers, _STRATEGIES)
        else:
            super().__post_init__()
        _layers.choose("choice of positions", self.positions, _POSITIONS)
        _layers.choose("reduction", self.reduction, _REDUCTIONS)

    def bind(self, student: HeadedModel, teacher: HeadedModel | None) -> Self:
        """See `Term`: the teacher's layers chosen, all by their full names."""
        assert teacher is not None
        if not isinstance(self.layers, str):
            return super().bind(student, teacher)
        depths = _layers.num_layers(student), _layers.num_layers(teacher)
        if not 2 <= depths[0] <= depths[1]:
            raise ValueError(
                f"layers={self.layers!r} needs a student of at least 2 layers and a "
                f"teacher of no fewer, got {depths[0]} and {depths[1]}: name pairs, "
                "layers=[['layers.0', 'layers.0']]"
            )
        chosen = _STRATEGIES[self.layers](*depths)
        pairs = tuple((f"layers.{j}", f"layers.{i}") for j, i in enumerate(chosen))
        return dataclasses.replace(self, layers=pairs)

    def mask(self, batch: Batch) -> Array:
        """The tokens of `positions`."""
        return _POSITIONS[self.positions](batch.mask)

    def per_batch(
        self, aux: Params, student: LMOutput, teacher: LMOutput | None, batch: Batch
    ) -> Array:
        """See `Term`."""
        pairs = self._read(aux, student, teacher)
        if self.normalize:
            pairs = [(_layers.unit(u), _layers.unit(v)) for u, v in pairs]
        loss = _REDUCTIONS[self.reduction](pairs)
        return _layers.masked_sum(self.mask(batch), loss)


def _skip(ours: int, theirs: int) -> list[int]:
    return [(j + 1) * theirs // ours - 1 for j in range(ours - 1)]


def _last(ours: int, theirs: int) -> list[int]:
    return [theirs - ours + j for j in range(ours - 1)]


# Of the teacher's layers, from both depths: one for each of the student's but the last.
_STRATEGIES: dict[str, Callable[[int, int], list[int]]] = {"skip": _skip, "last": _last}

_POSITIONS: dict[str, Callable[[Array], Array]] = {
    "last": _layers.last_of_row,
    "all": lambda mask: mask,
}


def _mse(u: Array, v: Array) -> Array:
    return jnp.mean(jnp.square(u - v), axis=-1)


def _cosine(u: Array, v: Array) -> Array:
    return 0.5 * _layers.squared_distance(_layers.unit(u), _layers.unit(v))


_DISTANCES: dict[str, Callable[[Array, Array], Array]] = {
    "mse": _mse,
    "cosine": _cosine,
}


def _sum(pairs: _Read) -> Array:
    return jnp.asarray(sum(_layers.squared_distance(u, v) for u, v in pairs))


def _mean(pairs: _Read) -> Array:
    return jnp.asarray(sum(_mse(u, v) for u, v in pairs)) / len(pairs)


_REDUCTIONS: dict[str, Callable[[_Read], Array]] = {"sum": _sum, "mean": _mean}
