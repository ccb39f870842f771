"""Language models in Flax Linen, their configurations and name conversion (level 2)."""

from specjax.models._config import ModelConfig, freeze
from specjax.models._transformer import CausalLM

__all__ = ["CausalLM", "ModelConfig", "freeze"]
