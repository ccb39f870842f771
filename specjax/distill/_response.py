"""Response-based terms: the labels, and the target's law of the next token.

Axes: B rows, C positions of a chunk, V vocabulary.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.distill._state import Batch
from specjax.distill._term import Term, TokenView, registry
from specjax.divergences import FLOOR, Divergence
from specjax.models import HeadVocabulary
from specjax.ops import locate


@registry.register("distill")
@dataclass(frozen=True)
class Distill(Term):
    """A divergence between the target's law and the draft's, token by token.

    Attributes:
        divergence: `(log_p, log_q) -> [*B]`, from `divergences.resolve`.
        temperature: divides the logits of both, > 0.
        squared: multiply the loss by temperature squared, so that its gradient keeps
            its size as the temperature rises (Hinton et al., arXiv 1503.02531,
            section 2).
        shared_vocab: V of the comparison, where vocabularies are padded to different
            sizes; default the smaller. Both laws are renormalised over those ids.

    Of a student with a reduced head, both laws are those over the head's ids, the
    target's renormalised (as EAGLE-3 trains, arXiv 2503.01840): what the draft cannot
    write gives it nothing to learn. The metrics report the mass outside.

    Reference: Zhou et al., DistillSpec, arXiv 2310.08461, equation 2, with one
    difference: the mean is over all loss tokens, not of each sequence's mean.
    """

    divergence: Divergence = Divergence("forward_kl")  # noqa: RUF009 (frozen)
    temperature: float = 1.0
    squared: bool = False
    shared_vocab: int | None = None

    needs_teacher: ClassVar[bool] = True

    def __post_init__(self):
        check_temperature(self.temperature)

    def per_token(self, view: TokenView) -> Array:
        """See `Term`."""
        log_p, log_q = laws(view, self.temperature, self.shared_vocab)
        loss = self.divergence(log_p, log_q)
        return loss * self.temperature**2 if self.squared else loss


@registry.register("cross_entropy")
@dataclass(frozen=True)
class CrossEntropy(Term):
    """Next-token prediction: pre-training a target, and the baseline draft.

    Rows that the student wrote are no labels and count nothing; nor do tokens that its
    head, if it is reduced, has no row for.
    """

    def mask(self, batch: Batch) -> Array:
        """The loss tokens that are labels which the student can write."""
        counted = batch.mask & ~batch.on_policy[:, None]
        return counted if batch.writable is None else counted & batch.writable

    def per_token(self, view: TokenView) -> Array:
        """Minus the log-probability of each label."""
        logits = view.q_logits.astype(jnp.float32)
        return jax.nn.logsumexp(logits, axis=-1) - at_labels(logits, view)


def laws(
    view: TokenView, temperature: float = 1.0, shared_vocab: int | None = None
) -> tuple[Array, Array]:
    """Log-probabilities of target and student over the ids that both have."""
    assert view.p_logits is not None
    size = shared_vocab or view.p_logits.shape[-1]
    if view.head is None:
        size = shared_vocab or min(size, view.q_logits.shape[-1])
    theirs = on_head(view.p_logits[..., :size], view.head)
    ours = view.q_logits if view.head is not None else view.q_logits[..., :size]
    return log_law(theirs, temperature), log_law(ours, temperature)


def on_head(logits: Array, head: HeadVocabulary | None) -> Array:
    """Logits `[*B, V]` at the ids of a student's head, `[*B, W]`; None: as they are."""
    if head is None:
        return logits
    if head.ids[-1] >= logits.shape[-1]:
        raise ValueError(
            f"the student's head writes ids up to {head.ids[-1]}, but only those below "
            f"{logits.shape[-1]} are shared with the teacher: reduce it to shared ones"
        )
    return jnp.take(
        logits, head.ids, axis=-1, unique_indices=True, indices_are_sorted=True
    )


def at_labels(log_q: Array, view: TokenView) -> Array:
    """The student's `[B, C, V or W]` at the labels; `FLOOR` where it has no row."""
    if view.head is None:
        return at(log_q, view.labels)
    index, inside = locate(view.labels, view.head.ids)
    return jnp.where(inside, at(log_q, index), FLOOR)


def log_law(logits: Array, temperature: float = 1.0) -> Array:
    """`ops.warp` at a temperature known to be positive: without its arg max."""
    return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature, axis=-1)


def at(log_law: Array, labels: Array) -> Array:
    """`[B, C, V]` at `labels [B, C]`."""
    return jnp.take_along_axis(log_law, labels[..., None], axis=-1)[..., 0]


def check_temperature(temperature: float) -> None:
    """Raises a ValueError unless it is a positive number."""
    if not temperature > 0:
        raise ValueError(f"temperature must be > 0, got {temperature}")
