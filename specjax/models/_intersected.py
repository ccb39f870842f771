"""A model of one vocabulary that reads and writes the ids of another.

Axes: B rows, T positions, V the other vocabulary, W the model's own.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.core import LanguageModel, LMOutput, Params


@dataclasses.dataclass(frozen=True, init=False)
class VocabularyMap:
    """What each of V ids is in a vocabulary of another model.

    A static value: equality and hash go by a digest, made once.

    Args:
        shared: V ids of the model, -1 for a token that it does not have.
        readable: V ids of the model, what it reads for each: the same where shared.

    Raises:
        ValueError: nothing is shared, or the two do not fit each other.
    """

    shared: np.ndarray = dataclasses.field(compare=False, repr=False)  # [V] int32
    readable: np.ndarray = dataclasses.field(compare=False, repr=False)  # [V] int32
    digest: str = dataclasses.field(init=False)

    def __init__(
        self, shared: Sequence[int] | np.ndarray, readable: Sequence[int] | np.ndarray
    ):
        ours, read = np.array(shared, np.int32), np.array(readable, np.int32)
        if ours.ndim != 1 or ours.shape != read.shape or (read < 0).any():
            raise ValueError(
                "a vocabulary map needs two lists of one id a token, readable without "
                f"-1, got the shapes {ours.shape} and {read.shape}"
            )
        if not (ours >= 0).any():
            raise ValueError(
                f"the two vocabularies share none of {ours.size} tokens: the draft "
                "could never draft anything; take another draft"
            )
        for name, ids in (("shared", ours), ("readable", read)):
            ids.flags.writeable = False
            object.__setattr__(self, name, ids)
        digest = hashlib.sha256(ours.astype("<i4").tobytes())
        digest.update(read.astype("<i4").tobytes())
        object.__setattr__(self, "digest", digest.hexdigest())

    @property
    def num_shared(self) -> int:
        """How many of the V ids the model can write."""
        return int((self.shared >= 0).sum())


@dataclasses.dataclass(frozen=True)
class IntersectedModel:
    """The LanguageModel of another vocabulary: logits are `-inf` for what it lacks.

    Its law is that of the model, restricted to the tokens that both have. Parameters
    and cache are the model's own; one token of the other vocabulary is one token read.

    Attributes:
        model: the model.
        ids: what the other vocabulary's ids are in the model's.

    Reference: Timor et al., Accelerating LLM Inference with Lossless Speculative
    Decoding Algorithms for Heterogeneous Vocabularies, arXiv 2502.05202, algorithm 4
    (token-level intersection).

    Example:
        >>> VocabularyMap([2, -1, 0], [2, 1, 0]).num_shared
        2
    """

    model: LanguageModel
    ids: VocabularyMap

    @property
    def vocab_size(self) -> int:
        """V of the other vocabulary."""
        return self.ids.shared.size

    @property
    def max_length(self) -> int:
        """The model's."""
        return self.model.max_length

    def init(self, key: Array) -> Params:
        """The model's parameters."""
        return self.model.init(key)

    def init_cache(self, batch: int, capacity: int, dtype: Any = None) -> Any:
        """The model's cache."""
        return self.model.init_cache(batch, capacity, dtype)

    def apply(
        self,
        params: Params,
        tokens: Array,
        cache: Any = None,
        *,
        positions: Array | None = None,
        mask: Array | None = None,
    ) -> tuple[LMOutput, Any]:
        """See `LanguageModel.apply`; `hidden` is the model's."""
        read = jnp.asarray(self.ids.readable)[tokens]
        out, cache = self.model.apply(
            params, read, cache, positions=positions, mask=mask
        )
        shared = jnp.asarray(self.ids.shared)
        logits = jnp.take(out.logits, jnp.maximum(shared, 0), axis=-1)
        there = (shared >= 0).reshape((1,) * (logits.ndim - 1) + (-1,))
        return LMOutput(jnp.where(there, logits, -jnp.inf), out.hidden), cache
