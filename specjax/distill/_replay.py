"""Rollouts kept for later steps, and DistiLLM's schedule of when to make new ones.

Axes: N slots of the buffer, B rows, T positions.

Reference: Ko et al., DistiLLM, arXiv 2402.03898, section 3.2 and the authors' code.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specjax.core import record
from specjax.distill._state import Batch, Behaviour


@record
class ReplayBuffer:
    """The last N sequences: a ring, all of it arrays of fixed shape.

    It is a pytree that jitted steps take and give back, and that a checkpoint holds as
    it holds parameters (`TrainState.memory`).
    """

    rows: Batch  # [N, ...]; slots never written count nothing
    added: Array  # [] int32, sequences added so far; slot `added % N` is the next

    @classmethod
    def create(
        cls, width: int, capacity: int = 1000, *, behaviour: bool = False
    ) -> "ReplayBuffer":
        """An empty buffer.

        Args:
            width: T of the sequences.
            capacity: N; 1000 is DistiLLM's.
            behaviour: whether the sequences carry a `Behaviour`.

        Raises:
            ValueError: a size below 1.
        """
        for name, value in (("width", width), ("capacity", capacity)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        shape = capacity, width
        # Arrays of their own: a step that donates its state donates each buffer once.
        told = [jnp.zeros(shape, jnp.float32) for _ in range(2)] if behaviour else None
        rows = Batch(
            tokens=jnp.zeros(shape, jnp.int32),
            mask=jnp.zeros(shape, bool),
            prompt_length=jnp.zeros((capacity,), jnp.int32),
            on_policy=jnp.zeros((capacity,), bool),
            behaviour=Behaviour(*told) if told else None,
        )
        return cls(rows, jnp.zeros((), jnp.int32))  # pyright: ignore

    @property
    def capacity(self) -> int:
        """N."""
        return self.rows.tokens.shape[0]

    @property
    def size(self) -> Array:
        """How many sequences are in it, `[]` int32."""
        return jnp.minimum(self.added, self.capacity)

    def add(self, batch: Batch) -> "ReplayBuffer":
        """With the rows of a batch, which overwrite the oldest.

        Rows without a token that counts are left out. Of more than N rows the last N
        stay.

        Args:
            batch: `[B, T]`, with a behaviour exactly if the buffer was made for it.

        Raises:
            ValueError: another width, or a behaviour too many or too few.
        """
        batch = self._fitting(batch)
        keep = jnp.any(batch.mask, axis=1)
        place = self.added + jnp.cumsum(keep, dtype=jnp.int32) - 1
        added = self.added + jnp.sum(keep, dtype=jnp.int32)
        keep = keep & (place >= added - self.capacity)
        # A slot out of range is dropped: no slot is written twice.
        slot = jnp.where(keep, place % self.capacity, self.capacity)

        def put(old: Array, new: Array) -> Array:
            return old.at[slot].set(jnp.asarray(new, old.dtype), mode="drop")

        return ReplayBuffer(jax.tree.map(put, self.rows, batch), added)  # pyright: ignore

    def sample(self, key: Array, batch_size: int) -> Batch:
        """Rows drawn uniformly: none twice before every other was drawn once.

        Args:
            key: of the draw.
            batch_size: B.

        Returns:
            `[B, T]`. An empty buffer gives rows that count nothing.
        """
        size = self.size
        there = jnp.arange(self.capacity) < size
        chance = jnp.where(there, jax.random.uniform(key, (self.capacity,)), 2.0)
        order = jnp.argsort(chance)
        chosen = order[jnp.arange(batch_size) % jnp.maximum(size, 1)]
        return jax.tree.map(lambda x: x[chosen], self.rows)

    def _fitting(self, batch: Batch) -> Batch:
        if batch.tokens.shape[1] != self.rows.tokens.shape[1]:
            raise ValueError(
                f"the buffer holds sequences of {self.rows.tokens.shape[1]} positions, "
                f"got {batch.tokens.shape[1]}"
            )
        wanted = self.rows.behaviour is not None
        if (batch.behaviour is not None) != wanted:
            raise ValueError(
                f"the buffer was made with behaviour={wanted}, got sequences "
                f"{'without' if wanted else 'with'} one"
            )
        return dataclasses.replace(batch, cached=None, loss_width=self.rows.loss_width)


@dataclasses.dataclass(frozen=True)
class AdaptiveThreshold:
    """How often the student writes: more as soon as its validation loss has risen.

    DistiLLM starts on the data and raises the share of the student's text by `step`
    whenever validation finds the loss `tolerance` above what it was at the last rise
    (before training, at first). Host-side and pure: `update` returns the next state.

    Attributes:
        threshold: the share of steps that read text of the student, in [0, 1].
        reference: the validation loss that a rise is counted from; None: not known yet,
            the next one becomes it.
        step: what is added, > 0.
        tolerance: the rise that counts, in nats, >= 0.

    Example:
        >>> state = AdaptiveThreshold().update(2.0).update(1.5).update(2.1)
        >>> state.threshold, state.reference
        (0.1, 2.1)
    """

    threshold: float = 0.0
    reference: float | None = None
    step: float = 0.1
    tolerance: float = 0.1

    def __post_init__(self):
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1], got {self.threshold}")
        if not 0 < self.step <= 1:
            raise ValueError(f"step must be in (0, 1], got {self.step}")
        if not 0 <= self.tolerance < float("inf"):
            raise ValueError(f"tolerance must be >= 0 nats, got {self.tolerance}")

    def update(self, validation_loss: float) -> "AdaptiveThreshold":
        """The schedule after another validation.

        Args:
            validation_loss: nats a token, finite.

        Raises:
            ValueError: it is not finite.
        """
        if not abs(validation_loss) < float("inf"):
            raise ValueError(f"validation_loss must be finite, got {validation_loss}")
        if self.reference is None:
            return dataclasses.replace(self, reference=float(validation_loss))
        if validation_loss < self.reference + self.tolerance:
            return self
        # Sums of 0.1 would creep away from the tenths.
        raised = round(min(1.0, self.threshold + self.step), 9)
        return dataclasses.replace(
            self, threshold=raised, reference=float(validation_loss)
        )

    def fresh_share(self, done: int, steps: int) -> float:
        """The share of steps whose rollouts are made anew, the buffer being full.

        The other `threshold - fresh_share` take theirs from the buffer: as the student
        settles, its older text will do. While the buffer is not full all are new.

        Args:
            done: steps taken.
            steps: in all.
        """
        return self.threshold * max(0.0, 1 - done / steps)

    def as_dict(self) -> dict[str, Any]:
        """All fields, for JSON; `AdaptiveThreshold(**fields)` is the same again."""
        return dataclasses.asdict(self)
