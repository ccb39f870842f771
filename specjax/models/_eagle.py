"""The network of an EAGLE draft: one block over the features of its target.

Axes: B rows, T positions, S slots, D width, W ids of the head, V vocabulary.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax import Array

from specjax.core import KVCache, Params
from specjax.models._config import ModelConfig
from specjax.models._head import HeadVocabulary
from specjax.models._transformer import Block, Linear, RMSNorm
from specjax.ops import spread


@dataclasses.dataclass(frozen=True)
class EagleNet:
    """One transformer block that guesses a feature from the one before and a token.

    In slot i it reads the feature h_i and the embedding e of the token behind it,

        a_i = block(fc([e(t_{i+1}); h_i]))      the guess of what lies at i + 1

    With `num_features` 0 (EAGLE-1) h is the hidden state that the target's head reads,
    a is a guess of the next one, and the same head reads that. Else (EAGLE-3) h fuses
    so many features of the target, h = fuse([f; f; ...]), a is free of any likeness to
    them, e and h are normalised before fc, and the network has a norm and a head of its
    own. In either case h_i is a_{i-1} where the target has not been.

    The block is the target's kind of block: same sizes, RoPE and cache.

    Attributes:
        config: of the block and the head; see `for_target`.
        num_features: how many features of the target are fused; 0: none, see above.
        normalise: EAGLE-3.1: an RMS norm on each of them before they are fused, and a
            is what the own norm gives, so that guesses do not grow with depth.

    Reference: Li et al., arXiv 2401.15077, section 4.1; 2503.01840, section 3.1.
    """

    config: ModelConfig
    num_features: int = 0
    normalise: bool = False

    @classmethod
    def for_target(
        cls,
        target: ModelConfig,
        num_features: int = 0,
        vocabulary: HeadVocabulary | None = None,
        normalise: bool = False,
    ) -> "EagleNet":
        """The network for a target of this configuration.

        Args:
            target: its configuration.
            num_features: see the class.
            vocabulary: the ids of the own head; None: all V.
            normalise: see the class.
        """
        config = dataclasses.replace(
            target,
            num_layers=1,
            head=vocabulary,
            tie_word_embeddings=False,
            sliding_window=None,  # every slot that it is shown
            kernel_layout="io",  # one on disk, whichever device loaded the target
        )
        return cls(config, num_features, normalise)

    def init(self, key: Array) -> Params:
        """Draws parameters: normal with deviation 0.02, norms at one."""
        one = jnp.zeros((1, 1, self.config.hidden_size))
        features = (one,) * self.num_features
        return self._module.init(key, one, features)["params"]

    def init_cache(self, batch: int, capacity: int, dtype: Any) -> KVCache:
        """An empty cache of its one layer."""
        c = self.config
        return KVCache.create(
            num_layers=1,
            batch=batch,
            num_kv_heads=c.num_kv_heads,
            capacity=capacity,
            head_dim=c.head_dim,
            dtype=dtype,
        )

    def fuse(self, params: Params, features: tuple[Array, ...]) -> Array:
        """The h `[B, T, D]` of `num_features` features of the target alike."""
        return self._call(params, "fuse", features)

    def apply(
        self,
        params: Params,
        embedded: Array,
        h: Array,
        cache: KVCache,
        positions: Array,
        visible: Array,
    ) -> tuple[Array, KVCache]:
        """Reads T tokens behind what the cache holds.

        Args:
            params: its own.
            embedded: `[B, T, D]`, the target's embeddings of the tokens.
            h: `[B, T, D]`, the feature before each.
            cache: from `init_cache`.
            positions: `[B or 1, T]`.
            visible: `[B or 1, T, S]`, the slots that each looks at.

        Returns:
            a `[B, T, D]`, and the cache T slots longer.
        """
        a, cache = self._call(params, "read", embedded, h, cache, positions, visible)  # pyright: ignore[reportGeneralTypeIssues]
        return a, cache.advance(embedded.shape[1])

    def unembed(self, params: Params, a: Array, *, reduced: bool = False) -> Array:
        """The own head: logits `[*B, V]` of a `[*B, D]`; `reduced`: its ids' alone."""
        logits = self._call(params, "unembed", a)
        head = self.config.head
        if head is None or reduced:
            return logits
        return spread(logits, head.ids, self.config.vocab_size)

    @property
    def _module(self) -> "_Eagle":
        return _Eagle(self.config, self.num_features, self.normalise)

    def _call(self, params: Params, method: str, *args) -> Any:
        return self._module.apply({"params": params}, *args, method=method)


class _Eagle(nn.Module):
    config: ModelConfig
    num_features: int
    normalise: bool

    def setup(self):
        c = self.config
        linear = functools.partial(Linear, c.hidden_size, c.kernel_layout)
        norm = functools.partial(RMSNorm, c.rms_norm_eps)
        self.fc = linear()
        self.layers = [Block(c)]
        if self.num_features:
            self.fusion = linear()
            self.embedding_norm, self.hidden_norm, self.norm = norm(), norm(), norm()
            normal = nn.initializers.normal(0.02)
            size = (c.head_size, c.hidden_size)
            self.lm_head = self.param("lm_head", normal, size)
        if self.normalise:
            self.feature_norms = [norm() for _ in range(self.num_features)]

    def __call__(self, embedded: Array, features: tuple[Array, ...]) -> Array:
        """Everything once, on one token, so that `init` finds all parameters."""
        h = self.fuse(features) if features else embedded
        first = jnp.zeros((1, 1), jnp.int32)
        a, _ = self.read(embedded, h, None, first, jnp.ones((1, 1, 1), bool))
        return self.unembed(a) if self.num_features else a

    def fuse(self, features: tuple[Array, ...]) -> Array:
        if self.normalise:
            pairs = zip(self.feature_norms, features, strict=True)
            features = tuple(norm(f) for norm, f in pairs)
        return self.fusion(jnp.concatenate(features, axis=-1))

    def read(self, embedded, h, cache, positions, visible):
        if self.num_features:
            embedded, h = self.embedding_norm(embedded), self.hidden_norm(h)
        x = self.fc(jnp.concatenate([embedded, h], axis=-1))
        a, cache, _ = self.layers[0](x, positions, visible, cache, 0)
        return (self.norm(a) if self.normalise else a), cache

    def unembed(self, a: Array) -> Array:
        hidden = a if self.normalise else self.norm(a)
        return hidden @ self.lm_head.T
