"""Two language models that write together, as one model for the decoding loop.

Axes: B rows, T positions, V vocabulary. The target's law is *p*, the draft's *q*.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import LMOutput, Params, record
from specjax.distill._response import log_law
from specjax.distill._state import HeadedModel, Policy


def mixed_policy(student: Policy, teacher: Policy, alpha: float) -> Policy:
    """Who writes from alpha p + (1 - alpha) q, token by token."""
    pair = student, teacher
    types = tuple(jax.tree.leaves(x.params)[0].dtype for x in pair)
    model = MixedModel(student.model, teacher.model, alpha, types)
    return Policy((student.params, teacher.params), model)  # pyright: ignore


@record
class _Caches:
    """Of both models, side by side."""

    student: Any
    teacher: Any  # None where the teacher has no share

    def with_length(self, length: Array) -> "_Caches":
        teacher = None if self.teacher is None else self.teacher.with_length(length)
        return _Caches(self.student.with_length(length), teacher)


@dataclass(frozen=True)
class MixedModel:
    """alpha p + (1 - alpha) q over the ids that both models have, as a LanguageModel.

    Its parameters are `(the student's, the teacher's)`, its logits the logarithm of the
    mixture. Without a share (alpha = 0) the teacher is not run.

    Attributes:
        student: q.
        teacher: p.
        alpha: the teacher's share, in [0, 1).
        types: of the two caches.
    """

    student: HeadedModel
    teacher: HeadedModel
    alpha: float
    types: tuple[Any, ...]

    @property
    def vocab_size(self) -> int:
        """The smaller of the two: what is past it is padding of the larger."""
        return min(self.student.vocab_size, self.teacher.vocab_size)

    @property
    def max_length(self) -> int:
        """The shorter of the two."""
        return min(self.student.max_length, self.teacher.max_length)

    def init_cache(self, batch: int, capacity: int, dtype: Any = None) -> _Caches:
        """Caches of both models, each in its own type."""
        ours, theirs = self.types
        teacher = None
        if self.alpha > 0:
            teacher = self.teacher.init_cache(batch, capacity, theirs)
        return _Caches(self.student.init_cache(batch, capacity, ours), teacher)

    def apply(
        self,
        params: tuple[Params, Params],
        tokens: Array,
        cache: _Caches | None = None,
        *,
        positions: Array | None = None,
        mask: Array | None = None,
    ) -> tuple[LMOutput, Any]:
        """See `LanguageModel.apply`; `hidden` is the student's."""
        caches = (None, None) if cache is None else (cache.student, cache.teacher)
        how: dict[str, Any] = {"positions": positions, "mask": mask}
        out, mine = self.student.apply(params[0], tokens, caches[0], **how)
        logits, theirs = out.logits[..., : self.vocab_size], None
        if self.alpha > 0:
            other, theirs = self.teacher.apply(params[1], tokens, caches[1], **how)
            log_p = log_law(other.logits[..., : self.vocab_size])
            logits = jnp.logaddexp(
                jnp.log1p(-self.alpha) + log_law(logits), jnp.log(self.alpha) + log_p
            )
        cache = None if cache is None else _Caches(mine, theirs)
        return LMOutput(logits=logits, hidden=out.hidden), cache
