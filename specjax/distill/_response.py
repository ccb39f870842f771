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
from specjax.divergences import Divergence


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

    Rows that the student wrote are no labels and count nothing.
    """

    def mask(self, batch: Batch) -> Array:
        """The loss tokens of the rows that the student did not write."""
        return batch.mask & ~batch.on_policy[:, None]

    def per_token(self, view: TokenView) -> Array:
        """Minus the log-probability of each label."""
        logits = view.q_logits.astype(jnp.float32)
        return jax.nn.logsumexp(logits, axis=-1) - at(logits, view.labels)


def laws(
    view: TokenView, temperature: float = 1.0, shared_vocab: int | None = None
) -> tuple[Array, Array]:
    """Log-probabilities of target and student over the ids that both have."""
    assert view.p_logits is not None
    size = min(view.q_logits.shape[-1], view.p_logits.shape[-1])
    size = shared_vocab or size
    return (
        log_law(view.p_logits[..., :size], temperature),
        log_law(view.q_logits[..., :size], temperature),
    )


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
