"""MiniLLM: the reverse KL of whole sequences, by policy gradient.

Axes: B rows, T positions, C positions of a chunk, V vocabulary.
"""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import Array

from specjax.distill._response import at, at_labels, laws, log_law
from specjax.distill._state import Batch
from specjax.distill._term import Term, TokenView, registry
from specjax.divergences import FLOOR, reverse_kl


@registry.register("minillm")
@dataclass(frozen=True)
class MiniLLM(Term):
    """Minimises E_{y ~ q} log q(y) / p(y): token by token, and through what follows.

    With r_t = log p(y_t) - log q(y_t) and R_{t+1} the sum of the later ones, the
    gradient of the sequence's KL is that of

        sum_t w_t (sum_v q_t(v) log q_t(v) / p_t(v)
                   - min(rho_t R_{t+1}, clip(rho_t) R_{t+1}))

    (section 2.2): the first part is exact, what token t costs by itself; in
    the second, R is a constant that says what it did to the tokens behind it, and
    rho_t = q / q_old is 1 in value on the first update of a draw, and clipped on later
    ones (`TrainStep.inner_steps`). w_t = q_old / p~ pays for tokens drawn from the
    mixture p~ of `TeacherMixed`.

    **w_t is that of one token alone**, as in the paper. The unbiased weight is the
    product of all of a sequence's, which varies too much to be of use; with alpha > 0
    the gradient is therefore biased, with alpha = 0 it is not. Length normalisation
    changes the aim as well: short answers do not win by being short.

    It counts rows that the student wrote. Beside them the paper reads a corpus, with
    plain cross-entropy: `Mixture(FixedCorpus(), TeacherMixed(...), per="split")` and
    `Objective((1.0, MiniLLM()), (1.0, CrossEntropy()))`. The loss is a surrogate: its
    gradient means something, its value little.

    Attributes:
        length_norm: R is the mean over the later tokens, not their sum.
        single_step: take token t's own cost exactly, over the whole vocabulary. Without
            it, that cost is part of the return: the same expectation, more noise.
        clip: how far from 1 the ratio rho is followed, > 0; PPO's epsilon.
        reward_clip: the largest |r_t|, in nats, > 0; None: no bound but that of
            `divergences.FLOOR`.

    Reference: Gu et al., MiniLLM, arXiv 2306.08543. The published scripts take clip
    0.2, rewards clipped at 100, 4 epochs a draw, alpha 0.2.
    """

    length_norm: bool = True
    single_step: bool = True
    clip: float = 0.2
    reward_clip: float | None = 100.0

    needs_teacher: ClassVar[bool] = True

    def __post_init__(self):
        if not self.clip > 0:
            raise ValueError(f"clip must be > 0, got {self.clip}")
        if self.reward_clip is not None and not self.reward_clip > 0:
            raise ValueError(
                f"reward_clip must be > 0 nats or None, got {self.reward_clip}"
            )

    def mask(self, batch: Batch) -> Array:
        """The loss tokens of the rows that the student wrote, with or without help."""
        return batch.mask & batch.on_policy[:, None]

    def score(self, view: TokenView) -> Array:
        """The target's log-probability of each label, `[B, C]`."""
        if view.head is None:
            return at(laws(view)[0], view.labels)
        # What the head lacks is part of the sequence, and so of its probability.
        assert view.p_logits is not None
        return at(log_law(view.p_logits), view.labels)

    def weigh(self, scores: Array, batch: Batch) -> tuple[Array, Array, Array]:
        """Importance weight, return, and log q at the time of the draw, `[B, T-1]`.

        Rewards are those of the draft that drew, as in PPO: updates on the same draw do
        not move them.
        """
        if batch.behaviour is None:
            raise ValueError(
                "MiniLLM needs to know how likely its rollouts were (Batch.behaviour): "
                "draw them with TeacherMixed; alpha=0 is the student alone"
            )
        counted = self.mask(batch)[:, 1:]
        log_mix, log_q = batch.behaviour.log_prob[:, 1:], batch.behaviour.log_q[:, 1:]
        # What the draft cannot write (a reduced vocabulary) is the target's alone.
        ours = counted & (log_q > FLOOR)
        importance = jnp.where(ours, jnp.exp(log_q - log_mix), 0.0)
        log_q = jnp.maximum(log_q, FLOOR)
        reward = jnp.maximum(scores, FLOOR) - log_q
        if self.reward_clip is not None:
            reward = jnp.clip(reward, -self.reward_clip, self.reward_clip)
        returns = self._returns(jnp.where(ours, reward, 0.0), counted)
        return importance, returns, log_q

    def _returns(self, reward: Array, counted: Array) -> Array:
        """What follows each token, `[B, T-1]`; and itself, where it is not exact."""
        total = jax.lax.cumsum(reward, axis=1, reverse=True)
        number = jax.lax.cumsum(counted.astype(jnp.int32), axis=1, reverse=True)
        if self.single_step:
            ahead = ((0, 0), (0, 1))
            total = jnp.pad(total[:, 1:], ahead)
            number = jnp.pad(number[:, 1:], ahead)
        return total / jnp.maximum(number, 1) if self.length_norm else total

    def per_token(self, view: TokenView) -> Array:
        """See the class."""
        log_p, log_q = laws(view)
        importance, returns, before = view.weights
        now = jnp.maximum(at_labels(log_q, view), FLOOR)
        # Bounded, so that no product of infinity and zero is in the gradient.
        ratio = jnp.exp(jnp.clip(now - before, -_STEEP, _STEEP))
        clipped = jnp.clip(ratio, 1 - self.clip, 1 + self.clip)
        gain = jnp.minimum(ratio * returns, clipped * returns)
        own = reverse_kl(log_p, log_q) if self.single_step else 0.0
        return importance * (own - gain)


_STEEP = 20.0  # nats: far outside any clip, and its exponential squared is finite
