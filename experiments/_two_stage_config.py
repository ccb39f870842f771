"""Settings of `experiments.two_stage`, and its presets."""

import dataclasses
from dataclasses import dataclass, field

from experiments._distillspec_config import PRESETS as BASES
from experiments._distillspec_config import Config as Base
from experiments._distillspec_config import Distillation, Draft, Size, Stage


@dataclass(frozen=True)
class Student:
    """The smaller target: how it starts, and how the large one teaches it."""

    start: Draft = field(
        default_factory=lambda: Draft(
            size=Size(2, 96, 256, 3, 1, 32),
            train=Stage(steps=450, learning_rate=2e-2, max_seconds=40),
        )
    )
    distill: Distillation = field(
        default_factory=lambda: Distillation(
            divergence="forward_kl",
            source="fixed",
            train=Stage(steps=350, learning_rate=2e-2, max_seconds=60),
        )
    )


@dataclass(frozen=True)
class Config:
    """The large target and the draft's settings (`base`), and the target between."""

    student: Student = field(default_factory=Student)
    base: Base = field(default_factory=Base)
    batch: int = 1  # rows decoded together when latency is measured

    def __post_init__(self):
        if self.student.start.vocab_size is not None:
            raise ValueError(
                "student.start.vocab_size must be none, as a target has to be able to "
                f"write every token, got {self.student.start.vocab_size}"
            )
        if not 1 <= self.batch <= self.base.eval.prompts:
            raise ValueError(
                "batch must be at least 1 and at most base.eval.prompts="
                f"{self.base.eval.prompts}, got {self.batch}"
            )


_SMOLLM2 = BASES["smollm2"]

PRESETS = {
    "quick": Config(),
    "smollm2": Config(
        Student(
            start=dataclasses.replace(
                _SMOLLM2.draft, layers=tuple(range(0, 30, 2)), vocab_size=None
            ),
            distill=dataclasses.replace(
                _SMOLLM2.distill, divergence="forward_kl", source="fixed"
            ),
        ),
        base=_SMOLLM2,
    ),
}
