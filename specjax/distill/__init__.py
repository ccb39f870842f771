"""Distillation: data policies, objectives, the train step and its loop (level 5)."""

from specjax.distill._objectives import CrossEntropy, Distill, Objective
from specjax.distill._optimizers import (
    make_optimizer,
    make_schedule,
    optimizer_names,
    schedule_names,
)
from specjax.distill._sources import (
    FixedCorpus,
    Mixture,
    Source,
    StudentGenerated,
    TargetGenerated,
    get_source,
    source_names,
)
from specjax.distill._state import Batch, Policy, Sums, TrainState
from specjax.distill._step import TrainStep

__all__ = [
    "Batch",
    "CrossEntropy",
    "Distill",
    "FixedCorpus",
    "Mixture",
    "Objective",
    "Policy",
    "Source",
    "StudentGenerated",
    "Sums",
    "TargetGenerated",
    "TrainState",
    "TrainStep",
    "get_source",
    "make_optimizer",
    "make_schedule",
    "optimizer_names",
    "schedule_names",
    "source_names",
]
