"""Who drafts in `experiments.drafters`, and how each comes to be: one function each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from experiments._corpus import Corpus
from experiments._stages import Run
from specjax import drafters
from specjax.core import Checkpoint, Drafter, Params

if TYPE_CHECKING:
    from experiments._drafters_config import Contest


@dataclasses.dataclass(frozen=True)
class Scene:
    """What all of them get alike."""

    contest: Contest
    stages: Run
    target: Checkpoint
    corpus: Corpus  # text that the target wrote


@dataclasses.dataclass(frozen=True)
class Made:
    """A drafter, and what it took."""

    drafter: Drafter
    parameters: int = 0  # of its own
    steps: int = 0
    seconds: float = 0.0


def prompt_lookup(scene: Scene) -> Made:
    """The longest n-gram that came before; nothing to train."""
    return Made(drafters.PromptLookup(gamma=scene.contest.gamma))


def two_model(scene: Scene) -> Made:
    """The pair's draft, distilled as `base.distill` says, on the text of all."""
    stages, ask = scene.stages, scene.contest
    start = stages.standard_draft(scene.target)
    start = stages.reduced(start, scene.target, scene.corpus)
    trained = stages.fit(
        "two_model",
        start,
        scene.corpus,
        ask.train,
        stages.config.distill.resolve(),
        teacher=scene.target,
    )
    return Made(
        drafters.TwoModel(trained.checkpoint, gamma=ask.gamma),
        _count(trained.checkpoint.params),
        trained.steps,
        trained.seconds,
    )


def _count(params: Params) -> int:
    return sum(x.size for x in jax.tree.leaves(params))


CONTESTANTS: dict[str, Callable[[Scene], Made]] = {
    make.__name__: make for make in (two_model, prompt_lookup)
}
