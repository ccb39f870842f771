"""Types only: protocols, the cache, state records and the registry (level 0)."""

from specjax.core._cache import KVCache
from specjax.core._protocols import (
    Checkpoint,
    Context,
    Drafter,
    Feedback,
    LanguageModel,
    LMOutput,
    Params,
    Proposal,
    Stateless,
    TrainableDrafter,
    Verdict,
    Verifier,
)
from specjax.core._record import record, static_field
from specjax.core._registry import Registry, near
from specjax.core._sampling import Sampling
from specjax.core._stats import SpecStats

__all__ = [
    "Checkpoint",
    "Context",
    "Drafter",
    "Feedback",
    "KVCache",
    "LMOutput",
    "LanguageModel",
    "Params",
    "Proposal",
    "Registry",
    "Sampling",
    "SpecStats",
    "Stateless",
    "TrainableDrafter",
    "Verdict",
    "Verifier",
    "near",
    "record",
    "static_field",
]
