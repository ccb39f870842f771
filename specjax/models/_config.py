"""What a decoder-only transformer of the Llama family is made of."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specjax.models._head import HeadVocabulary
from specjax.ops import rope_frequencies


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Sizes and options; frozen and hashable, so it can be a static argument.

    Attributes:
        vocab_size: V.
        hidden_size: D.
        intermediate_size: F, the width of the gated MLP.
        num_layers: L.
        num_heads: N, query heads.
        num_kv_heads: K; N: multi-head, 1: multi-query, between: grouped-query.
        head_dim: H, which need not be D / N.
        max_position_embeddings: the longest sequence, in tokens.
        rms_norm_eps: epsilon of the RMS norms.
        rope_theta: base of the rotary frequencies.
        rope_scaling: settings as sorted pairs (hashable); see `ops.rope_frequencies`.
        tie_word_embeddings: the head is the embedding.
        head: the ids that the head has rows for; None: all V. A reduced head is never
            tied. Any id can be read, and logits are `-inf` where there is no row.
        qkv_bias: biases on query, key and value projections (Qwen2).
        out_bias: a bias on the output projection.
        mlp_bias: biases in the MLP.
        qk_norm: an RMS norm on each head's queries and keys (Qwen3).
        sliding_window: how many positions back a token sees; None: all.
        kernel_layout: "io" keeps weights `[in, out]`, "oi" `[out, in]`. The same
            numbers either way; on a CPU "io" is faster for narrow models that read
            several tokens at once, "oi" for one token of a wide one.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, Any], ...] = ()
    tie_word_embeddings: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    kernel_layout: str = "io"
    head: HeadVocabulary | None = None

    def __post_init__(self):
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number >= 1, got {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {self.num_heads} "
                f"and {self.num_kv_heads}"
            )
        if self.kernel_layout not in ("io", "oi"):
            raise ValueError(
                f"kernel_layout must be 'io' or 'oi', got {self.kernel_layout!r}"
            )
        if self.head is not None:
            self._check_head(self.head)
        if isinstance(self.rope_scaling, Mapping):
            raise ValueError("rope_scaling must be sorted pairs: use freeze(settings)")
        # An unknown kind or a missing setting fails here, not in the first trace.
        rope_frequencies(
            head_dim=self.head_dim,
            base=self.rope_theta,
            max_positions=self.max_position_embeddings,
            scaling=dict(self.rope_scaling),
        )

    def _check_head(self, head: HeadVocabulary) -> None:
        if self.tie_word_embeddings:
            raise ValueError(
                "a reduced head has rows of its own: it needs "
                "tie_word_embeddings=False, got True"
            )
        if head.ids[-1] >= self.vocab_size:
            raise ValueError(
                f"the ids of the head must be below vocab_size={self.vocab_size}, got "
                f"{head.ids[-1]}"
            )

    @property
    def head_size(self) -> int:
        """Rows of the head: V, or W of a reduced one."""
        return self.vocab_size if self.head is None else self.head.size

    @property
    def num_params(self) -> int:
        """How many parameters there are, a tied head counted once."""
        d, h = self.hidden_size, self.head_dim
        q, kv = self.num_heads * h, self.num_kv_heads * h
        layer = 2 * d + d * (q + 2 * kv) + q * d + 3 * d * self.intermediate_size
        layer += (q + 2 * kv) * self.qkv_bias + d * self.out_bias
        layer += (2 * self.intermediate_size + d) * self.mlp_bias + 2 * h * self.qk_norm
        rows = self.vocab_size
        rows += 0 if self.tie_word_embeddings else self.head_size
        return self.num_layers * layer + rows * d + d


def freeze(settings: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...]:
    """Settings as sorted pairs, lists as tuples: hashable, and the same."""
    return tuple(
        (key, tuple(value) if isinstance(value, list) else value)
        for key, value in sorted((settings or {}).items())
        if value is not None
    )
