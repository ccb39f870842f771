"""A language model that is a table, so that its exact law can be written down.

Axes: B rows, T query positions, S cache slots, V vocabulary, k the order.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

from specjax.core import KVCache, LMOutput, Params


@dataclasses.dataclass(frozen=True)
class TabularLM:
    """The law of the next token is a table over the last `order` tokens.

    It obeys the whole LanguageModel protocol and keeps the tokens themselves in a
    KVCache: one layer, one head of size one. So the decoding loop treats it like any
    transformer, at a cost that lets tens of thousands of rows run at once, while
    `sequence_law` gives the exact law that they should follow. It reads what it
    attends to out of the cache alone: a slot that was lost, overwritten or poisoned
    shows, for what is no token there gives NaN logits.

    Attributes:
        vocab_size: V; exact enumeration wants a small one, 5 at most.
        order: k, how many tokens back the law looks.
        max_length: the longest sequence, in tokens.
        scale: the standard deviation of the logits that `init` draws.

    Example:
        >>> model = TabularLM(vocab_size=3, order=2)
        >>> params = model.init(jax.random.key(0))
        >>> params["table"].shape  # index 3: no token there yet
        (4, 4, 3)
        >>> out, _ = model.apply(params, jnp.array([[0, 1, 2]]))
        >>> bool((out.logits[0, 2] == params["table"][1, 2]).all())
        True
    """

    vocab_size: int
    order: int = 1
    max_length: int = 4096
    scale: float = 1.0

    def __post_init__(self):
        if self.vocab_size < 1 or self.order < 1:
            raise ValueError(
                "TabularLM needs vocab_size >= 1 and order >= 1, got "
                f"vocab_size={self.vocab_size} and order={self.order}"
            )

    def init(self, key: Array, dtype: Any = jnp.float32) -> Params:
        """Draws a table `[V+1, ..., V+1, V]` of logits, oldest token first."""
        shape = (self.vocab_size + 1,) * self.order + (self.vocab_size,)
        return {"table": self.scale * jax.random.normal(key, shape, dtype)}

    def init_cache(self, batch: int, capacity: int, dtype: Any = None) -> KVCache:
        """Allocates an empty cache; tokens are kept in `dtype`, default float32."""
        return KVCache.create(
            num_layers=1,
            batch=batch,
            num_kv_heads=1,
            capacity=capacity,
            head_dim=1,
            dtype=dtype or jnp.float32,
        )

    def apply(
        self,
        params: Params,
        tokens: Array,
        cache: KVCache | None = None,
        *,
        positions: Array | None = None,
        mask: Array | None = None,
    ) -> tuple[LMOutput, Any]:
        """See `LanguageModel.apply`; `hidden` is the logits again.

        The last `order` tokens are those that a query may look at, by slot: under the
        mask of a tree they are its ancestors. The law does not depend on `positions`.

        Raises:
            ValueError: `mask` lets a token look at a later one, which is no causal
                model's law. Under a trace, where the mask has no values, such a
                token gets NaN logits instead.
        """
        length = tokens.shape[1]
        later = jnp.triu(jnp.ones((length, length), bool), 1)[None]
        ahead = jnp.zeros((), bool)
        if mask is not None:
            ahead = jnp.any(mask & later, axis=-1)
            if not isinstance(ahead, Tracer) and np.any(ahead):
                raise ValueError(
                    "TabularLM is causal: its mask must not let a token look at a "
                    "later one, got a mask with entries above the diagonal"
                )
        written = tokens[..., None, None].astype(jnp.float32)
        if cache is None:
            seen = ~later if mask is None else mask & ~later
            slots = tokens.astype(jnp.float32)
        else:
            seen = cache.visible(length, mask, None)
            cache, keys, _ = cache.update(0, written, written)
            cache, slots = cache.advance(length), keys[:, 0, :, 0]
        logits = self._look_up(params["table"], slots, seen)
        logits = jnp.where(ahead[..., None], jnp.nan, logits)
        return LMOutput(logits=logits, hidden=logits), cache

    def unembed(self, params: Params, hidden: Array, *, reduced: bool = False) -> Array:
        """The head alone: `hidden` are the logits already (D = V)."""
        return hidden

    def _look_up(self, table: Array, slots: Array, seen: Array) -> Array:
        """Logits `[B, T, V]` from what is in `slots [B, S]` and `seen [B, T, S]`."""
        batch, size = slots.shape
        seen = jnp.broadcast_to(seen, (batch, *seen.shape[1:]))
        number = jnp.arange(size)[None, None, :]
        context, stale = [], jnp.zeros(seen.shape[:2], bool)
        for _ in range(self.order):
            slot = jnp.max(jnp.where(seen, number, -1), axis=-1)  # [B, T]
            seen = seen & (number < slot[..., None])
            value = jnp.take_along_axis(slots, jnp.maximum(slot, 0), axis=1)
            token = (value >= 0) & (value < self.vocab_size)  # NaN is none either
            stale |= (slot >= 0) & ~token
            value = jnp.where((slot >= 0) & token, value, self.vocab_size)
            context.append(value.astype(jnp.int32))
        logits = table[tuple(reversed(context))]
        return jnp.where(stale[..., None], jnp.nan, logits)
