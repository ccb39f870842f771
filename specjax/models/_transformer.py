"""A decoder-only transformer in Flax Linen behind the LanguageModel protocol.

Axes: B rows, T query positions, S cache slots, L layers, N query heads, K key/value
heads, H head size, D width, F MLP width, V vocabulary.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specjax.core import KVCache, LMOutput, Params, near
from specjax.models._config import ModelConfig
from specjax.models._head import HeadVocabulary
from specjax.ops import apply_rope, attention, rope_frequencies, spread


@dataclasses.dataclass(frozen=True)
class CausalLM:
    """The LanguageModel of a `ModelConfig`: pure functions over a nested dict.

    Parameter names are those of Hugging Face with `layers.0` written `layers_0`
    (`specjax.models.convert` maps them).

    Attributes:
        config: sizes and options.
        remat: make each block's activations again in the backward pass, for memory. XLA
            minds memory on GPU and TPU; on a CPU only when it is asked to, by
            `XLA_FLAGS=--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED`.

    Example:
        >>> config = ModelConfig(vocab_size=11, hidden_size=8, intermediate_size=16,
        ...     num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4)
        >>> model = CausalLM(config)
        >>> params = model.init(jax.random.key(0))
        >>> out, cache = model.apply(
        ...     params, jnp.zeros((1, 3), int), model.init_cache(1, 8))
        >>> out.logits.shape, int(cache.length[0])
        ((1, 3, 11), 3)
    """

    config: ModelConfig
    remat: bool = False

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def head(self) -> HeadVocabulary | None:
        """The ids that a reduced head has rows for; None: all."""
        return self.config.head

    @property
    def head_ids(self) -> np.ndarray | None:
        """Of a reduced head its ids `[W]`, ascending int32; None: all V."""
        return None if self.head is None else self.head.ids

    @property
    def max_length(self) -> int:
        return self.config.max_position_embeddings

    def init(self, key: Array, dtype: Any = jnp.float32) -> Params:
        """Draws parameters: normal with deviation 0.02, as the Llama family does."""
        tokens = jnp.zeros((1, 1), jnp.int32)
        params = _Decoder(self.config).init(key, tokens, None, None, None, ())["params"]
        return jax.tree.map(lambda x: x.astype(dtype), params)

    def init_cache(self, batch: int, capacity: int, dtype: Any = None) -> KVCache:
        """Allocates an empty cache; `dtype` is float32 unless given."""
        return KVCache.create(
            num_layers=self.config.num_layers,
            batch=batch,
            num_kv_heads=self.config.num_kv_heads,
            capacity=capacity,
            head_dim=self.config.head_dim,
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
        features: tuple[str, ...] = (),
    ) -> tuple[LMOutput, Any]:
        """See `LanguageModel.apply`. What is not used of the output costs nothing.

        `features` may name "embedding" and "layers.N" (the residual stream before the
        first block and behind block N, `[B, T, D]`), and "layers.N.query", ".key" and
        ".value" (`[B, T, heads, H]`, after the rotation).
        """
        self._check_features(features)
        return _Decoder(self.config, self.remat).apply(
            {"params": params}, tokens, cache, positions, mask, features
        )  # pyright: ignore[reportReturnType]

    def unembed(self, params: Params, hidden: Array, *, reduced: bool = False) -> Array:
        """The head alone: logits `[*B, V]` of `LMOutput.hidden [*B, D]`.

        Training uses it to make logits of a few positions at a time; and with `reduced`
        those `[*B, W]` of `head_ids` alone, without the ids that a reduced head lacks.
        Of a full head they are all V.
        """
        return _Decoder(self.config).apply(
            {"params": params}, hidden, reduced, method=_Decoder.unembed
        )  # pyright: ignore[reportReturnType]

    def feature_names(self) -> tuple[str, ...]:
        """What `apply` can be asked for."""
        layers = [f"layers.{n}" for n in range(self.config.num_layers)]
        parts = [f"{name}.{part}" for name in layers for part in _HEADS]
        return ("embedding", *layers, *parts)

    def _check_features(self, features: tuple[str, ...]) -> None:
        known = self.feature_names() if features else ()
        for name in features:
            if name not in known:
                raise ValueError(
                    f"a model of {self.config.num_layers} layers has no feature "
                    f"{name!r}; {near(name, known)}"
                )


_HEADS = ("query", "key", "value")


class Linear(nn.Module):
    """`x @ W + b`, the weight kept in the layout of the configuration."""

    features: int
    layout: str
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        normal = nn.initializers.normal(0.02)
        if self.layout == "io":
            kernel = self.param("kernel", normal, (x.shape[-1], self.features))
            y = x @ kernel
        else:
            kernel = self.param("kernel", normal, (self.features, x.shape[-1]))
            rows = x.reshape(-1, x.shape[-1])
            y = (kernel @ rows.T).T.reshape(*x.shape[:-1], self.features)
        if self.use_bias:
            bias = self.param("bias", nn.initializers.zeros, (self.features,))
            y = y + bias.reshape((1,) * (y.ndim - 1) + (-1,))
        return y


class RMSNorm(nn.Module):
    eps: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + self.eps)
        return y.astype(x.dtype) * scale.reshape((1,) * (x.ndim - 1) + (-1,))


class _Attention(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x, positions, visible, cache: KVCache | None, layer: int):
        c = self.config
        batch, length, _ = x.shape
        linear = functools.partial(Linear, layout=c.kernel_layout)

        def heads(name: str, number: int) -> Array:
            y = linear(number * c.head_dim, use_bias=c.qkv_bias, name=name)(x)
            return y.reshape(batch, length, number, c.head_dim)

        query = heads("q_proj", c.num_heads)
        key = heads("k_proj", c.num_kv_heads)
        value = heads("v_proj", c.num_kv_heads)
        if c.qk_norm:
            query = RMSNorm(c.rms_norm_eps, name="q_norm")(query)
            key = RMSNorm(c.rms_norm_eps, name="k_norm")(key)
        rotate = _rotation(c)
        query, key = rotate(query, positions), rotate(key, positions)
        if cache is None:
            keys, values = jnp.swapaxes(key, 1, 2), jnp.swapaxes(value, 1, 2)
        else:
            cache, keys, values = cache.update(layer, key, value)
        y = attention(query, keys, values, visible)
        y = y.reshape(batch, length, c.num_heads * c.head_dim)
        y = linear(c.hidden_size, use_bias=c.out_bias, name="o_proj")(y)
        return y, cache, dict(zip(_HEADS, (query, key, value), strict=True))


class _MLP(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        c = self.config
        linear = functools.partial(Linear, layout=c.kernel_layout, use_bias=c.mlp_bias)
        gate = linear(c.intermediate_size, name="gate_proj")(x)
        up = linear(c.intermediate_size, name="up_proj")(x)
        return linear(c.hidden_size, name="down_proj")(nn.silu(gate) * up)


class Block(nn.Module):
    config: ModelConfig

    @nn.compact
    def __call__(self, x, positions, visible, cache, layer: int):
        norm = functools.partial(RMSNorm, self.config.rms_norm_eps)
        y, cache, heads = _Attention(self.config, name="self_attn")(
            norm(name="input_layernorm")(x), positions, visible, cache, layer
        )
        x = x + y
        y = norm(name="post_attention_layernorm")(x)
        return x + _MLP(self.config, name="mlp")(y), cache, heads


class _Decoder(nn.Module):
    config: ModelConfig
    remat: bool = False

    def setup(self):
        c = self.config
        self.embed_tokens = self.param(
            "embed_tokens", nn.initializers.normal(0.02), (c.vocab_size, c.hidden_size)
        )
        # Unrolled: scanning over stacked layers copies each slice when decoding.
        block = nn.remat(Block, static_argnums=(5,)) if self.remat else Block
        self.layers = [block(c) for _ in range(c.num_layers)]
        self.norm = RMSNorm(c.rms_norm_eps)
        if not c.tie_word_embeddings:
            self.lm_head = self.param(
                "lm_head", nn.initializers.normal(0.02), (c.head_size, c.hidden_size)
            )

    def __call__(
        self, tokens, cache, positions, mask, features
    ) -> tuple[LMOutput, Any]:
        c = self.config
        length = tokens.shape[1]
        if positions is None:
            start = 0 if cache is None else cache.length[:, None]
            positions = start + jnp.arange(length)[None, :]
        if cache is not None:
            visible = cache.visible(length, mask, c.sliding_window, positions)
        else:
            visible = _block_mask(positions, mask, c.sliding_window)
        x = self.embed_tokens[tokens]
        seen = {"embedding": x}
        for index, layer in enumerate(self.layers):
            x, cache, heads = layer(x, positions, visible, cache, index)
            seen[f"layers.{index}"] = x
            seen |= {f"layers.{index}.{part}": y for part, y in heads.items()}
        hidden = self.norm(x)
        if cache is not None:
            cache = cache.advance(length)
        found = {name: seen[name] for name in features}
        return LMOutput(self.unembed(hidden), hidden, found), cache

    def unembed(self, hidden: Array, reduced: bool = False) -> Array:
        c = self.config
        weight = self.embed_tokens if c.tie_word_embeddings else self.lm_head
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = (weight @ rows.T).T if rows.shape[0] == 1 else rows @ weight.T
        logits = logits.reshape(*hidden.shape[:-1], weight.shape[0])
        if c.head is None or reduced:
            return logits
        return spread(logits, c.head.ids, c.vocab_size)


def _block_mask(positions: Array, mask: Array | None, window: int | None) -> Array:
    """Which of T tokens each sees when there is no cache, `[1 or B, T, T]`."""
    length = positions.shape[1]
    seen = jnp.tri(length, dtype=bool)[None] if mask is None else mask
    if window is None:
        return seen
    return seen & (positions[:, :, None] - positions[:, None, :] < window)


@functools.lru_cache(maxsize=64)
def _rotation(config: ModelConfig):
    scaling = dict(config.rope_scaling)
    frequencies, scale = rope_frequencies(
        head_dim=config.head_dim,
        base=config.rope_theta,
        max_positions=config.max_position_embeddings,
        scaling=scaling,
    )
    dynamic = None
    if scaling.get("rope_type", scaling.get("type")) == "dynamic":
        original = scaling.get("original_max_position_embeddings")
        original = original or config.max_position_embeddings
        dynamic = (config.rope_theta, float(scaling["factor"]), original)
    return functools.partial(
        apply_rope, frequencies=frequencies, scale=scale, dynamic=dynamic
    )
