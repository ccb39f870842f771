"""AdaSPEC: train the draft on the tokens that it can still learn.

Axes: B rows, T positions, C positions of a chunk, V vocabulary.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.distill._response import check_temperature, laws, log_law, on_head
from specjax.distill._state import Batch
from specjax.distill._term import Term, TokenView, registry
from specjax.divergences import Divergence


@registry.register("adaspec")
@dataclass(frozen=True)
class AdaSPEC(Term):
    """A divergence on the share of tokens where the draft trails a reference draft.

    The reference is a draft that was distilled already and is kept as it is
    (`TrainStep.reference`). Of each row the counted tokens with the largest

        dL = D(p, q) - D(p, q_reference)

    are taken: what the reference shows to be within reach. The loss is the mean over
    the tokens that were taken; their choice gets no gradient.

    The paper takes the best of a whole batch. Here it is `ceil(keep * n)` of each row's
    n counted tokens, so that a row's loss does not depend on who shares its micro-batch
    or device, and how many are taken is known before any model is run. The metrics tell
    it: `tokens/adaspec`, beside `tokens`, of which it is a share.

    Attributes:
        divergence: `(log_p, log_q) -> [*B]`, from `divergences.resolve`.
        keep: the share of each row's tokens, in (0, 1]; 1 is `Distill`.
        temperature: divides the logits of all three models, > 0.
        shared_vocab: as in `Distill`.

    Reference: Hu et al., AdaSPEC, arXiv 2510.19779, with keep 0.4 and forward KL on a
    fixed corpus.
    """

    divergence: Divergence = Divergence("forward_kl")  # noqa: RUF009 (frozen)
    keep: float = 0.4
    temperature: float = 1.0
    shared_vocab: int | None = None

    needs_teacher: ClassVar[bool] = True
    needs_reference: ClassVar[bool] = True

    def __post_init__(self):
        check_temperature(self.temperature)
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep must be in (0, 1], got {self.keep}")

    def count(self, batch: Batch) -> Array:
        """The tokens that it takes."""
        return jnp.sum(self._share(batch))

    def score(self, view: TokenView) -> Array:
        """How far the draft trails the reference, dL `[B, C]`."""
        assert view.reference_logits is not None
        assert view.p_logits is not None
        everyone = [view.p_logits, view.reference_logits]
        everyone += [view.q_logits] if view.head is None else []
        size = self.shared_vocab or min(x.shape[-1] for x in everyone)
        log_p, log_q = laws(view, self.temperature, size)
        theirs = on_head(view.reference_logits[..., :size], view.head)
        log_reference = log_law(theirs, self.temperature)
        return self.divergence(log_p, log_q) - self.divergence(log_p, log_reference)

    def weigh(self, scores: Array, batch: Batch) -> Array:
        """Which tokens are taken, `[B, T-1]`: exactly `_share` of each row."""
        counted = self.mask(batch)[:, 1:]
        order = jnp.argsort(jnp.where(counted, -scores, jnp.inf), axis=1)
        rank = jnp.argsort(order, axis=1)
        return rank < self._share(batch)[:, None]

    def per_token(self, view: TokenView) -> Array:
        """The divergence where a token is taken."""
        log_p, log_q = laws(view, self.temperature, self.shared_vocab)
        return jnp.where(view.weights, self.divergence(log_p, log_q), 0.0)

    def _share(self, batch: Batch) -> Array:
        """How many tokens of each row are taken, `[B]` int32."""
        # A table made in double precision: 0.4 of 5 is 2, not a little more.
        sizes = np.arange(batch.mask.shape[1] + 1)
        table = np.ceil(self.keep * sizes - 1e-9).astype(np.int32)
        return jnp.asarray(table)[jnp.sum(self.mask(batch), axis=1)]
