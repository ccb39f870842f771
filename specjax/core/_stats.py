"""What speculative decoding counts, and the ratios that are taken at the very end."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.core._record import record


@record
class SpecStats:
    """Counts a row. Sum them over batches first; ratios are taken once, at the end.

    A draft is *evaluated* if verification reached it: those behind the first rejection,
    an end of text or a length limit are not. `accepted / drafted` is not the
    acceptance rate of the literature, `accepted / evaluated` estimates it. In a tree
    the siblings that are tried at one place count as one evaluated draft.
    """

    rounds: Array  # [B] target calls
    drafted: Array  # [B] drafts proposed: of a tree all its nodes
    evaluated: Array  # [B] drafts that verification reached
    accepted: Array  # [B] drafts emitted
    emitted: Array  # [B] tokens emitted, corrections and bonus tokens included
    evaluated_at: Array  # [B, G] by position in the block, in a tree by depth
    accepted_at: Array  # [B, G]

    @classmethod
    def zeros(cls, batch: int, gamma: int) -> "SpecStats":
        """No rounds yet."""
        # A buffer each: the state is donated, and one buffer cannot be donated twice.
        rows = [jnp.zeros((batch,), jnp.int32) for _ in range(5)]
        grid = [jnp.zeros((batch, gamma), jnp.int32) for _ in range(2)]
        return cls(*rows, *grid)

    def count(
        self,
        *,
        active: Array,
        drafted: Array,
        reached: Array,
        accepted: Array,
        emitted: Array,
    ) -> "SpecStats":
        """Adds one round of the rows that are `active`.

        Args:
            active: `[B]` booleans.
            drafted: `[B]`, drafts proposed.
            reached: `[B]`, drafts that verification reached: those accepted, and the
                next one if there was any.
            accepted: `[B]`, drafts that the verifier accepted.
            emitted: `[B]`, tokens kept of those and the one behind them: fewer where
                an end of text or a limit cut the block.
        """
        gamma = self.accepted_at.shape[1]
        evaluated = jnp.minimum(reached, emitted)
        accepted = jnp.minimum(accepted, emitted)
        position = jnp.arange(gamma)[None, :]

        def where_active(x: Array) -> Array:
            shape = active.reshape(active.shape + (1,) * (x.ndim - 1))
            return jnp.where(shape, x, 0).astype(jnp.int32)

        return SpecStats(
            rounds=self.rounds + where_active(jnp.ones_like(accepted)),
            drafted=self.drafted + where_active(drafted),
            evaluated=self.evaluated + where_active(evaluated),
            accepted=self.accepted + where_active(accepted),
            emitted=self.emitted + where_active(emitted),
            evaluated_at=self.evaluated_at
            + where_active(position < evaluated[:, None]),
            accepted_at=self.accepted_at + where_active(position < accepted[:, None]),
        )

    def __add__(self, other: "SpecStats") -> "SpecStats":
        """The counts of both, as one: rows are joined."""
        return jax.tree.map(
            lambda a, b: np.concatenate([np.asarray(a), np.asarray(b)]), self, other
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted over evaluated drafts, all rows together; NaN without drafts."""
        return _ratio(self.accepted, self.evaluated)

    @property
    def block_efficiency(self) -> float:
        """tau: emitted tokens a target call, at most gamma + 1 (1 without a draft)."""
        return _ratio(self.emitted, self.rounds)

    @property
    def acceptance_by_position(self) -> list[float]:
        """Alpha at each place in the block, given that verification reached it."""
        accepted = np.asarray(self.accepted_at).sum(0)
        evaluated = np.asarray(self.evaluated_at).sum(0)
        return [_ratio(a, e) for a, e in zip(accepted, evaluated, strict=True)]

    def as_dict(self) -> dict[str, float | int | list[float | None] | None]:
        """Sums over rows, and the ratios, for JSON (None where there is no number)."""
        counts = ("rounds", "drafted", "evaluated", "accepted", "emitted")
        sums = {name: int(np.asarray(getattr(self, name)).sum()) for name in counts}
        return {
            **sums,
            "acceptance_rate": _or_none(self.acceptance_rate),
            "block_efficiency": _or_none(self.block_efficiency),
            "acceptance_by_position": [
                _or_none(x) for x in self.acceptance_by_position
            ],
        }


def _ratio(numerator, denominator) -> float:
    total = float(np.asarray(denominator).sum())
    return float(np.asarray(numerator).sum()) / total if total else float("nan")


def _or_none(x: float) -> float | None:
    return None if np.isnan(x) else x
