"""Relation-based terms: how rows, or tokens, stand to each other.

Axes: B rows (I, J, K among each other), T positions (C of a chunk, S those looked at),
D width, A relation heads, H their size.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
import optax
from jax import Array

from specjax import divergences
from specjax.core import LMOutput, Params
from specjax.distill import _layers
from specjax.distill._layers import LayerTerm
from specjax.distill._state import Batch, HeadedModel
from specjax.distill._term import registry
from specjax.ops import cut_chunks


@registry.register("relational_kd")
@dataclass(frozen=True)
class RelationalKD(LayerTerm):
    """RKD: distances and angles among the rows of a micro-batch.

    Each row is one vector, pooled from a layer. Distances are divided by the mean of
    those that are positive; an angle is the cosine at row j between the rows i and k.
    Student and teacher are compared by the smooth-L1 loss (Huber's, of delta 1), whose
    mean is over ordered pairs of two rows, and over ordered triples of three. (The
    authors' code counts a row's pairs with itself too, which are 0: it is smaller by (B
    - 1) / B and (B - 1)(B - 2) / B^2.)

    Rows without a counted token are left out. Distances need 2 others and angles 3:
    with fewer there is no loss. Rows that are equal (to 1e-5 of their length) have
    distance 0, cosines of 0, and no gradient between them. Widths may differ.

    **Rows are compared inside a micro-batch only**, so the loss is a mean over
    micro-batches, weighted by their counted tokens: of each it is multiplied by their
    number, because a term is divided by the number in all of them. With
    `TrainStep.accumulate > 1` it is not the loss of the whole batch.

    Memory: `[B, B, D]` and `[B, B, B]`.

    Attributes:
        layers: see `LayerTerm`; default the last of each.
        distance_weight: of the distances.
        angle_weight: of the angles.
        pooling: "mean" over a row's counted tokens, or its "last" one.

    Raises:
        ValueError: an unknown pooling, a weight below 0, or none above.

    Reference: Park et al., arXiv 1904.05068, sections 3.2.1 and 3.2.2.
    """

    distance_weight: float = 1.0
    angle_weight: float = 2.0
    pooling: str = "mean"

    def __post_init__(self):
        super().__post_init__()
        _layers.choose("pooling", self.pooling, _POOLED)
        weights = self.distance_weight, self.angle_weight
        if not (min(weights) >= 0 and 0 < max(weights) < float("inf")):
            raise ValueError(
                "distance_weight and angle_weight must be >= 0, one of them above 0, "
                f"got {weights[0]} and {weights[1]}"
            )

    def per_batch(
        self, aux: Params, student: LMOutput, teacher: LMOutput | None, batch: Batch
    ) -> Array:
        """See `Term`."""
        mask = self.mask(batch)
        pooled = _POOLED[self.pooling](mask)
        rows = jnp.any(mask, axis=1)
        loss = jnp.zeros(())
        for u, v in _layers.read(self.layers, student, teacher):
            ours, theirs = (_Rows.of(_pool(x, pooled), rows) for x in (u, v))
            loss += self.distance_weight * _distance_loss(ours, theirs, rows)
            loss += self.angle_weight * _angle_loss(ours, theirs, rows)
        return loss * self.count(batch)


_POOLED: dict[str, Callable[[Array], Array]] = {
    "mean": lambda mask: mask,
    "last": _layers.last_of_row,
}


def _pool(x: Array, mask: Array) -> Array:
    """The mean `[B, D]` over the tokens of a mask; 0 where there is none."""
    total = jnp.einsum("BTD,BT->BD", x, mask.astype(x.dtype))
    return total / jnp.maximum(jnp.sum(mask, axis=1, keepdims=True), 1)


# Rows whose distance is a smaller part of their length are equal: what is left of it is
# rounding, and its direction noise.
_EQUAL = 1e-5


@dataclass(frozen=True)
class _Rows:
    """What lies between the rows of one model."""

    distance: Array  # [B, B], over their mean
    direction: Array  # [B, B, D] from the second to the first, unit vectors or 0

    @classmethod
    def of(cls, x: Array, rows: Array) -> "_Rows":
        difference = x[:, None, :] - x[None, :, :]
        squares = jnp.sum(jnp.square(difference), axis=-1)
        size = jnp.sum(jnp.square(x), axis=-1)
        apart = squares > _EQUAL**2 * (size[:, None] + size[None, :])
        # The square root has an infinite slope at 0.
        distance = jnp.sqrt(jnp.where(apart, squares, 1.0))
        direction = jnp.where(apart[..., None], difference / distance[..., None], 0.0)
        distance = jnp.where(apart, distance, 0.0)
        positive = _pairs(rows) & apart
        total = jnp.sum(jnp.where(positive, distance, 0.0))
        mean = total / jnp.maximum(jnp.sum(positive), 1)
        return cls(distance / jnp.where(mean > 0, mean, 1.0), direction)


def _pairs(rows: Array) -> Array:
    """Ordered pairs `[B, B]` of two different rows that count."""
    return rows[:, None] & rows[None, :] & ~jnp.eye(rows.shape[0], dtype=bool)


def _distance_loss(ours: _Rows, theirs: _Rows, rows: Array) -> Array:
    return _smooth_l1(ours.distance, theirs.distance, _pairs(rows))


def _angle_loss(ours: _Rows, theirs: _Rows, rows: Array) -> Array:
    def cosines(x: _Rows) -> Array:
        return jnp.einsum("IJD,KJD->JIK", x.direction, x.direction)

    pairs = _pairs(rows)
    triples = pairs[:, :, None] & pairs[:, None, :] & pairs[None, :, :]
    return _smooth_l1(cosines(ours), cosines(theirs), triples)


def _smooth_l1(u: Array, v: Array, mask: Array) -> Array:
    """The mean over what a mask counts; 0 where that is nothing."""
    loss = jnp.where(mask, optax.losses.huber_loss(u, v), 0.0)
    return jnp.sum(loss) / jnp.maximum(jnp.sum(mask), 1)


@registry.register("minilm_v2")
@dataclass(frozen=True)
class MiniLMv2(LayerTerm):
    """Self-attention relations among queries, among keys and among values.

    All heads of a layer are laid side by side and split again into A relation heads of
    size d, so that models with other numbers and sizes of heads, and grouped ones, can
    be compared. A relation is `softmax(X X^T / sqrt(d))` over the tokens up to each:
    causal, as the models are (padding, on the right, is never looked at). The loss of a
    token is `KL(teacher's || student's)`, the mean over A and the sum over relations.
    Queries and keys are taken after the rotation of their positions.

    Memory: of `[B, A, T, T]` only `chunk` of the T tokens are alive at once, and made
    again for the gradient.

    Attributes:
        layers: see `LayerTerm`; default the last of each. Of large teachers the paper
            takes one above the middle instead: of 24 layers "layers.18", say.
        relation_heads: A; it must divide the width of every relation, in both models.
            More than there are heads helps (the paper: 48 for 12 heads, 64 for 16).
            Default: the teacher's query heads.
        relations: of "query", "key" and "value".
        chunk: tokens whose relations are alive at once; None: all.

    Raises:
        ValueError: relation_heads or chunk below 1, or unknown or repeated relations.

    Reference: Wang et al., arXiv 2012.15828, section 3.
    """

    relation_heads: int | None = None
    relations: tuple[str, ...] = ("query", "key", "value")
    chunk: int | None = 64

    def __post_init__(self):
        super().__post_init__()
        for name in ("relation_heads", "chunk"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {value}")
        known = ("query", "key", "value")
        given = tuple(self.relations)
        if not given or len(set(given)) < len(given) or not set(given) <= set(known):
            raise ValueError(f"relations must be some of {known}, got {given!r}")
        object.__setattr__(self, "relations", given)

    def bind(self, student: HeadedModel, teacher: HeadedModel | None) -> Self:
        """See `Term`: layers by their full names, and the number of heads."""
        assert teacher is not None
        for part in self.relations:
            layers = _layers.named(self.layers, student, teacher, f".{part}")
        heads = self.relation_heads
        if heads is None:
            heads = _layers.shapes(teacher)[f"{layers[0][1]}.query"][0]
        return dataclasses.replace(self, layers=layers, relation_heads=heads)

    def check(self, student: HeadedModel, teacher: HeadedModel | None) -> None:
        """See `Term`: unknown layers, and widths that cannot be split."""
        assert teacher is not None
        bound = self.bind(student, teacher)
        heads, names = bound.relation_heads, bound.features()
        assert heads is not None
        models = {"student": student, "teacher": teacher}
        widths = {
            f"the {who}'s {name}": _layers.width(model, name)
            for (who, model), of_one in zip(models.items(), names, strict=True)
            for name in of_one
        }
        if any(width % heads for width in widths.values()):
            common = math.gcd(*widths.values())
            divisors = [str(n) for n in range(1, common + 1) if common % n == 0]
            raise ValueError(
                f"relation_heads={heads} must divide the width of every relation, got "
                + ", ".join(f"{name}: {width}" for name, width in widths.items())
                + f"; choose one of {', '.join(divisors)}"
            )

    def features(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """See `Term`."""
        ours, theirs = zip(*self._pairs, strict=True)
        return ours, theirs

    def per_batch(
        self, aux: Params, student: LMOutput, teacher: LMOutput | None, batch: Batch
    ) -> Array:
        """See `Term`."""
        assert self.relation_heads is not None  # bound
        loss = jnp.zeros(())
        for pair in _layers.read(self._pairs, student, teacher):
            ours, theirs = (_split(x, self.relation_heads) for x in pair)
            loss += _relation_loss(ours, theirs, self.mask(batch), self.chunk)
        return loss

    @property
    def _pairs(self) -> _layers.Pairs:
        """The features of both, relation by relation."""
        return tuple(
            (f"{ours}.{part}", f"{theirs}.{part}")
            for ours, theirs in self.layers
            for part in self.relations
        )


def _split(x: Array, heads: int) -> Array:
    """`[B, T, D]` as `[B, T, A, D / A]`."""
    return x.reshape(*x.shape[:2], heads, -1)


def _relation_loss(ours: Array, theirs: Array, mask: Array, chunk: int | None) -> Array:
    """The sum over counted tokens of the mean over A of KL(theirs || ours).

    Args:
        ours: `[B, T, A, H]` of the student.
        theirs: the same of the teacher, with an H of its own.
        mask: `[B, T]`, the counted tokens.
        chunk: see `MiniLMv2`.
    """
    tokens = mask.shape[1]
    index = jnp.broadcast_to(jnp.arange(tokens), (1, tokens))

    @jax.checkpoint
    def add(total: Array, piece) -> tuple[Array, None]:
        (u, v, mask), index = piece
        log_q, log_p = _relation(u, ours, index[0]), _relation(v, theirs, index[0])
        loss = jnp.mean(divergences.forward_kl(log_p, log_q), axis=1)
        return total + _layers.masked_sum(mask, loss), None

    size = min(chunk or tokens, tokens)
    pieces = cut_chunks(((ours, theirs, mask), index), size)
    return jax.lax.scan(add, jnp.zeros(()), pieces)[0]


def _relation(x: Array, others: Array, index: Array) -> Array:
    """Log-softmax of what tokens have in common with those up to each.

    Args:
        x: `[B, C, A, H]` of C tokens.
        others: `[B, S, A, H]` of all.
        index: `[C]`, which of all those C are.

    Returns:
        `[B, A, C, S]`; what a token may not look at is at `-inf`.
    """
    scores = jnp.einsum("BCAH,BSAH->BACS", x, others) / math.sqrt(x.shape[-1])
    seen = jnp.arange(others.shape[1])[None, :] <= index[:, None]
    scores = jnp.where(seen[None, None], scores, -jnp.inf)
    return jax.nn.log_softmax(scores, axis=-1)
