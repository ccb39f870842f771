"""Distillation: data policies, objectives, the train step and its loop (level 5)."""

from specjax.distill._adaspec import AdaSPEC
from specjax.distill._batches import Batches, BatchFunction, BatchSource
from specjax.distill._buckets import CachedLaw, bucketed
from specjax.distill._checkpoints import Checkpoints
from specjax.distill._configured import make_objective, make_term
from specjax.distill._drafter_step import DrafterStep
from specjax.distill._features import (
    AttentionTransfer,
    HiddenState,
    Hint,
    PatientKD,
)
from specjax.distill._loop import Callback, TrainResult, train
from specjax.distill._metrics import MetricsFile, read_metrics
from specjax.distill._minillm import MiniLLM
from specjax.distill._objective import Objective
from specjax.distill._optimizers import (
    make_optimizer,
    make_schedule,
    optimizer_names,
    schedule_names,
)
from specjax.distill._relations import MiniLMv2, RelationalKD
from specjax.distill._replay import AdaptiveThreshold, ReplayBuffer
from specjax.distill._response import CrossEntropy, Distill
from specjax.distill._sources import (
    FixedCorpus,
    Mixture,
    Source,
    StudentGenerated,
    TargetGenerated,
    TeacherMixed,
    get_source,
    source_names,
)
from specjax.distill._state import (
    Batch,
    Behaviour,
    HeadedModel,
    Models,
    Policy,
    Sums,
    TrainState,
)
from specjax.distill._step import TrainStep
from specjax.distill._target_samples import TargetSamples, sample_target
from specjax.distill._teacher_cache import (
    CachedBatches,
    TeacherCache,
    write_teacher_cache,
)
from specjax.distill._term import Term, TokenView
from specjax.distill._term import registry as terms

__all__ = [
    "AdaSPEC",
    "AdaptiveThreshold",
    "AttentionTransfer",
    "Batch",
    "BatchFunction",
    "BatchSource",
    "Batches",
    "Behaviour",
    "CachedBatches",
    "CachedLaw",
    "Callback",
    "Checkpoints",
    "CrossEntropy",
    "Distill",
    "DrafterStep",
    "FixedCorpus",
    "HeadedModel",
    "HiddenState",
    "Hint",
    "MetricsFile",
    "MiniLLM",
    "MiniLMv2",
    "Mixture",
    "Models",
    "Objective",
    "PatientKD",
    "Policy",
    "RelationalKD",
    "ReplayBuffer",
    "Source",
    "StudentGenerated",
    "Sums",
    "TargetGenerated",
    "TargetSamples",
    "TeacherCache",
    "TeacherMixed",
    "Term",
    "TokenView",
    "TrainResult",
    "TrainState",
    "TrainStep",
    "bucketed",
    "get_source",
    "make_objective",
    "make_optimizer",
    "make_schedule",
    "make_term",
    "optimizer_names",
    "read_metrics",
    "sample_target",
    "schedule_names",
    "source_names",
    "terms",
    "train",
    "write_teacher_cache",
]
