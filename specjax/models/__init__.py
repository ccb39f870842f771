"""Language models in Flax Linen, their configurations and name conversion (level 2)."""

from specjax.models._config import ModelConfig, freeze
from specjax.models._convert import (
    architectures,
    config_from_hf,
    config_to_hf,
    param_path,
    tensor_from_hf,
    tensor_shapes,
    tensor_to_hf,
)
from specjax.models._eagle import EagleNet
from specjax.models._head import HEAD_IDS, HEAD_MARK, HeadVocabulary
from specjax.models._intersected import IntersectedModel, VocabularyMap
from specjax.models._surgery import grow, pick_layers, reduce_head, take_layers
from specjax.models._transformer import CausalLM

__all__ = [
    "HEAD_IDS",
    "HEAD_MARK",
    "CausalLM",
    "EagleNet",
    "HeadVocabulary",
    "IntersectedModel",
    "ModelConfig",
    "VocabularyMap",
    "architectures",
    "config_from_hf",
    "config_to_hf",
    "freeze",
    "grow",
    "param_path",
    "pick_layers",
    "reduce_head",
    "take_layers",
    "tensor_from_hf",
    "tensor_shapes",
    "tensor_to_hf",
]
