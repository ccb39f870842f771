"""Rotary position embeddings and their scalings.

Frequencies are made once on the host in float64; the rotation angle is a float32
product (bfloat16 would turn position 257 into 256).
"""

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from specjax.core import Registry

# kind -> (head_dim, base, settings, max_positions) -> (frequencies [H/2], scale)
_kinds: Registry = Registry("RoPE kind")


def rope_kinds() -> tuple[str, ...]:
    """The kinds of RoPE scaling that `rope_frequencies` knows."""
    return _kinds.names()


def rope_frequencies(
    *,
    head_dim: int,
    base: float,
    max_positions: int,
    scaling: Mapping[str, Any] | None = None,
) -> tuple[np.ndarray, float]:
    """Angular frequencies of each pair of dimensions, and the factor on cos and sin.

    Args:
        head_dim: H, even.
        base: theta.
        max_positions: the context that the configuration declares.
        scaling: as in a Hugging Face config (`rope_type` and its settings); None:
            default.

    Returns:
        Frequencies `[H/2]` float32 in radians a position, and the attention factor.

    Raises:
        ValueError: an unknown kind, or a setting it needs is missing.
    """
    if head_dim % 2:
        raise ValueError(f"RoPE needs an even head size, got head_dim={head_dim}")
    settings = dict(scaling or {})
    kind = settings.get("rope_type", settings.get("type", "default"))
    make = _kinds.get(kind)
    try:
        frequencies, scale = make(head_dim, base, settings, max_positions)
    except KeyError as missing:
        raise ValueError(
            f"RoPE kind {kind!r} needs the setting {missing} in the model's "
            f"configuration, got {settings}"
        ) from None
    return np.asarray(frequencies, np.float32), float(scale)


def apply_rope(
    x: Float[Array, "B T X H"],
    positions: Int[Array, "#B T"],
    frequencies: np.ndarray,
    scale: float = 1.0,
    dynamic: tuple[float, float, int] | None = None,
) -> Float[Array, "B T X H"]:
    """Rotates the halves `(x[:H/2], x[H/2:])` of each head by position x frequency.

    This is the half-split pairing of Hugging Face checkpoints (GGUF's llama models
    interleave: the loader permutes them).

    Args:
        x: queries or keys.
        positions: absolute positions.
        frequencies: `[H/2]`.
        scale: the attention factor of yarn.
        dynamic: `(base, factor, max_positions)` of dynamic scaling, where a token past
            `max_positions` rotates with a base of its own position. (transformers
            takes the longest position of the *call*, so its cached and its uncached
            keys differ; a cache that equals a fresh prefill needs one rule a token.)
    """
    position = positions.astype(jnp.float32)[..., None]
    inverse = jnp.asarray(frequencies)[None, None, :]
    if dynamic is not None:
        base, factor, max_positions = dynamic
        half = x.shape[-1]
        length = jnp.maximum(position + 1, max_positions)
        grown = base * (factor * length / max_positions - (factor - 1)) ** (
            half / (half - 2)
        )
        exponent = jnp.arange(0, half, 2, dtype=jnp.float32)[None, None, :] / half
        inverse = jnp.where(position + 1 > max_positions, grown**-exponent, inverse)
    angle = position * inverse  # [B, T, H/2]
    cos = (jnp.cos(angle) * scale)[:, :, None, :]
    sin = (jnp.sin(angle) * scale)[:, :, None, :]
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)
    return rotated.astype(x.dtype)


def _default(head_dim, base, settings, max_positions):
    return base ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim), 1.0


def _linear(head_dim, base, settings, max_positions):
    frequencies, _ = _default(head_dim, base, settings, max_positions)
    return frequencies / settings["factor"], 1.0


def _dynamic(head_dim, base, settings, max_positions):
    settings["factor"]  # needed past max_positions, see apply_rope
    return _default(head_dim, base, settings, max_positions)


def _llama3(head_dim, base, settings, max_positions):
    frequencies, _ = _default(head_dim, base, settings, max_positions)
    factor = settings["factor"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    original = settings["original_max_position_embeddings"]
    wavelength = 2 * math.pi / frequencies
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    return (
        np.where(
            wavelength < original / high,
            frequencies,
            np.where(wavelength > original / low, frequencies / factor, blended),
        ),
        1.0,
    )


def _yarn(head_dim, base, settings, max_positions):
    """Peng et al., arXiv 2309.00071, with the settings of transformers."""
    original = settings.get("original_max_position_embeddings") or max_positions
    factor = settings["factor"]
    scale = settings.get("attention_factor")
    if scale is None:
        mscale, mscale_all = settings.get("mscale"), settings.get("mscale_all_dim")

        def get(m):
            return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

        scale = get(mscale) / get(mscale_all) if mscale and mscale_all else get(1)
    beta_fast = settings.get("beta_fast") or 32
    beta_slow = settings.get("beta_slow") or 1

    def dimension(rotations):
        return (head_dim * math.log(original / (rotations * 2 * math.pi))) / (
            2 * math.log(base)
        )

    low, high = dimension(beta_fast), dimension(beta_slow)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
    frequencies, _ = _default(head_dim, base, settings, max_positions)
    return frequencies / factor * ramp + frequencies * (1 - ramp), scale


for _name, _make in {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}.items():
    _kinds.register(_name)(_make)
