"""What an objective is made of: terms, each a loss with a count of its own.

Axes: B rows, T positions, C positions of a chunk, D width, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import Array

from specjax.core import LMOutput, Params, Registry, record, static_field
from specjax.distill._state import Batch, HeadedModel
from specjax.models import HeadVocabulary

registry: Registry = Registry("distillation term")


@record
class TokenView:
    """What a term sees of C positions. Logits at a position predict its label.

    A student whose head is reduced gives logits of the head's W ids alone: `laws`
    brings the teacher's law to them, `locate(labels, head.ids)` the labels.
    """

    labels: Array  # [B, C] int32
    q_logits: Array  # [B, C, V], the student's; [B, C, W] of a reduced head
    p_logits: Array | None  # [B, C, V], the teacher's: no gradient
    reference_logits: Array | None  # [B, C, V], the reference draft's: no gradient
    cached: Any  # the teacher's law from disk at these positions
    weights: Any  # what the term's `weigh` gave for these positions
    head: HeadVocabulary | None = static_field(default=None)  # the student's


@dataclass(frozen=True)
class Term:
    """One part of an objective. Frozen and hashable: settings, no arrays.

    A term overrides `per_token` (a loss at each position, from logits that are made a
    few positions at a time), `per_batch` (a loss from features of whole sequences), or
    both. It is divided by its own `count` of tokens, over *all* micro-batches of a
    step.
    """

    needs_teacher: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False

    def check(self, student: HeadedModel, teacher: HeadedModel | None) -> None:
        """Raises a ValueError where the term cannot work with these two."""

    def bind(self, student: HeadedModel, teacher: HeadedModel | None) -> "Term":
        """The same term, with what depends on the two models filled in.

        Its layers by their full names, say, where it was told "the last". `features`
        and `per_batch` are asked of what comes back.
        """
        return self

    def mask(self, batch: Batch) -> Array:
        """The tokens `[B, T]` that it counts."""
        return batch.mask

    def count(self, batch: Batch) -> Array:
        """Its loss tokens, what it is divided by: known before any model is run.

        All of `mask`, unless the term takes a fixed number of those.
        """
        return jnp.sum(self.mask(batch), dtype=jnp.int32)

    def init(
        self, key: Array, student: HeadedModel, teacher: HeadedModel | None
    ) -> Params:
        """What it learns besides the student: projections."""
        return ()

    def features(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the features that it reads, of the student and of the teacher."""
        return (), ()

    def score(self, view: TokenView) -> Any:
        """A first look without gradients: arrays `[B, C, ...]` for `weigh`, or None."""
        return None

    def weigh(self, scores: Any, batch: Batch) -> Any:
        """From scores `[B, T-1, ...]`: `[B, T-1, ...]` arrays for `TokenView.weights`.

        Entry i belongs to the prediction of token i + 1.
        """
        return None

    def per_token(self, view: TokenView) -> Array | None:
        """The loss `[B, C]` at each position, or None."""
        return None

    def per_batch(
        self, aux: Params, student: LMOutput, teacher: LMOutput | None, batch: Batch
    ) -> Array | None:
        """A loss summed over the tokens of `mask`, or None.

        Args:
            aux: what `init` gave, as trained so far.
            student: the output on `batch.tokens [B, T]`, with `features()`.
            teacher: the same of the teacher, without gradients.
            batch: the sequences.
        """
        return None
