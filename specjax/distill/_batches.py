"""Batches by step number, so that a resumed run reads what the straight one read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np

from specjax import data
from specjax.distill._state import Batch


class BatchSource(Protocol):
    """The batch of every step: a pure function of the step number.

    So the position in the data *is* the step: there is no iterator to save, and none to
    wind forward when a run goes on in the middle of an epoch.
    """

    def __call__(self, step: int) -> Batch:
        """The batch that step number `step` (from 0) trains on."""
        ...

    def describe(self) -> Mapping[str, Any]:
        """What the order depends on, for JSON: a resumed run must find it equal."""
        ...


@dataclass(frozen=True, eq=False)
class Batches:
    """Rows of a corpus in an order drawn anew for each epoch from `(seed, epoch)`.

    The order is that of `data.Batches`: epochs follow each other without a gap.

    Attributes:
        corpus: all rows as one batch on the host, from `Batch.of`.
        batch_size: B.
        seed: of the order.
    """

    corpus: Batch
    batch_size: int
    seed: int = 0

    def __post_init__(self):
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if not len(self.corpus.tokens):
            raise ValueError("the corpus must hold at least one row, got none")
        object.__setattr__(self, "corpus", self.corpus.bounded())

    @property
    def num_rows(self) -> int:
        """Rows of the corpus."""
        return len(self.corpus.tokens)

    def rows(self, step: int) -> np.ndarray:
        """Which rows step number `step` trains on, `[B]`."""
        return data.Batches(self.num_rows, self.batch_size, self.seed)[step]

    def __call__(self, step: int) -> Batch:
        """The batch of a step, on the host."""
        rows = self.rows(step)
        return jax.tree.map(lambda x: x[rows], self.corpus)

    def describe(self) -> Mapping[str, Any]:
        """Sizes, seed and a checksum of the ids."""
        shape = self.corpus.tokens.shape
        weights = np.arange(1, shape[0] + 1, dtype=np.int64)
        checksum = int((self.corpus.tokens.astype(np.int64).sum(1) * weights).sum())
        return {
            "rows": shape[0],
            "width": shape[1],
            "batch_size": self.batch_size,
            "seed": self.seed,
            "checksum": checksum,
        }


@dataclass(frozen=True, eq=False)
class BatchFunction:
    """A function of the step number as a `BatchSource`.

    Attributes:
        function: `step -> Batch`; the same step must give the same batch.
        description: what it depends on, for JSON.
    """

    function: Callable[[int], Batch]
    description: Mapping[str, Any]

    def __call__(self, step: int) -> Batch:
        """The batch of a step."""
        return self.function(step)

    def describe(self) -> Mapping[str, Any]:
        """The description."""
        return self.description
