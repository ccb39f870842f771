"""Settings of `experiments.divergence_grid`, and its presets."""

import dataclasses
from dataclasses import dataclass, field

from experiments._distillspec_config import PRESETS as BASES
from experiments._distillspec_config import Config as Base
from experiments._distillspec_config import Stage
from specjax import divergences

SOURCES = ("fixed", "target", "student", "mixture", "teacher_mixed")


@dataclass(frozen=True)
class Grid:
    """What is compared with what.

    Attributes:
        divergences: registered ones, with their options.
        sources: data policies, see `distill.source` of the main job.
        seeds: of the drafts, one whole grid each; the target is the same.
        gamma: G.
        prompts: held-out prompts, decoded together.
        max_new_tokens: tokens added to each.
    """

    divergences: tuple[str, ...] = ("forward_kl", "reverse_kl", "jsd", "tvd", "lk")
    sources: tuple[str, ...] = ("fixed", "target", "student")
    seeds: tuple[int, ...] = (0, 1, 2)
    gamma: int = 4
    prompts: int = 64
    max_new_tokens: int = 64

    def __post_init__(self):
        for name in ("divergences", "sources", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise ValueError(
                    f"grid.{name} must be different values, at least one, got {values}"
                )
        for name in self.divergences:
            divergences.parse(name)
        unknown = set(self.sources) - set(SOURCES)
        if unknown:
            raise ValueError(
                f"grid.sources must be among {', '.join(SOURCES)}, got "
                f"{', '.join(sorted(unknown))}"
            )
        for name in ("gamma", "prompts", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"grid.{name} must be at least 1, got {getattr(self, name)}"
                )


@dataclass(frozen=True)
class Config:
    """The grid, and the pair that it is drawn up for."""

    grid: Grid = field(default_factory=Grid)
    base: Base = field(default_factory=Base)


def _base(preset: str, steps: int) -> Base:
    """A pair of the main job; every stage gets its steps, whatever they cost."""

    def untimed(stage: Stage, **changes) -> Stage:
        return dataclasses.replace(stage, max_seconds=None, **changes)

    base = BASES[preset]
    target, draft, distill = base.target, base.draft, base.distill
    return dataclasses.replace(
        base,
        target=dataclasses.replace(
            target, train=untimed(target.train), grow=untimed(target.grow)
        ),
        draft=dataclasses.replace(draft, train=untimed(draft.train)),
        distill=dataclasses.replace(distill, train=untimed(distill.train, steps=steps)),
    )


PRESETS = {
    "quick": Config(base=_base("quick", 150)),
    "smollm2": Config(
        Grid(seeds=(0,), gamma=3, prompts=16), base=_base("smollm2", 100)
    ),
}
