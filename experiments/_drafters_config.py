"""Settings of `experiments.drafters`, and its presets."""

import dataclasses
from dataclasses import dataclass, field

from experiments._contestants import CONTESTANTS
from experiments._distillspec_config import PRESETS as BASES
from experiments._distillspec_config import Config as Base
from experiments._distillspec_config import Stage


@dataclass(frozen=True)
class Contest:
    """Who drafts, and on what all are measured.

    Attributes:
        drafters: names of `CONTESTANTS`.
        train: steps of every drafter that is trained, all on the same target text.
        gamma: G of chains, and the depth of trees.
        nodes: tokens drafted a round by those that draft trees.
        top_k: tokens looked at behind each node of EAGLE's trees.
        exit_layers: of the target, that draft in `self_speculative`.
        window: W of `lookahead`, and its guesses a round.
        questions: files or data sets of questions, which tell their category; none:
            held-out text of the pair's corpus.
        each: questions of a category.
        longest: tokens of a question; longer ones are passed over.
        batches: rows decoded together; prompts come again where there are fewer.
        max_new_tokens: tokens added to each.
        predict_gammas: draft lengths that `--predict` looks at.
    """

    drafters: tuple[str, ...] = tuple(CONTESTANTS)
    train: Stage = field(
        default_factory=lambda: Stage(300, learning_rate=2e-3, optimizer="adamw")
    )
    gamma: int = 4
    nodes: int = 10
    top_k: int = 4
    exit_layers: int = 2
    window: int = 4
    questions: tuple[str, ...] = ()
    each: int = 16
    longest: int = 512
    batches: tuple[int, ...] = (1, 4, 8)
    max_new_tokens: int = 64
    predict_gammas: tuple[int, ...] = (1, 2, 3, 4, 6, 8)

    def __post_init__(self):
        unknown = sorted(set(self.drafters) - set(CONTESTANTS))
        if unknown or not self.drafters:
            raise ValueError(
                f"contest.drafters must be among {', '.join(CONTESTANTS)}, got "
                f"{', '.join(unknown) or 'none'}"
            )
        for name in (
            "gamma",
            "nodes",
            "top_k",
            "window",
            "each",
            "longest",
            "max_new_tokens",
        ):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"contest.{name} must be at least 1, got {getattr(self, name)}"
                )
        for name in ("batches", "predict_gammas"):
            values = getattr(self, name)
            if not values or min(values) < 1:
                raise ValueError(f"contest.{name} must be numbers >= 1, got {values}")
        if self.nodes < self.gamma:
            raise ValueError(
                f"contest.nodes must be at least contest.gamma={self.gamma}, as a tree "
                f"has a node at every depth, got {self.nodes}"
            )


@dataclass(frozen=True)
class Config:
    """The contest, and the pair whose target all draft for."""

    contest: Contest = field(default_factory=Contest)
    base: Base = field(default_factory=Base)
    predict: bool = False  # time passes and say what a draft could buy; train nothing


_SMOLLM2 = BASES["smollm2"]

PRESETS = {
    "quick": Config(),
    "smollm2": Config(
        Contest(
            train=Stage(steps=150, learning_rate=1e-3, optimizer="adamw"),
            gamma=3,
            nodes=8,
            exit_layers=15,
            each=2,
            max_new_tokens=48,
            predict_gammas=(1, 2, 3, 4, 6),
        ),
        base=dataclasses.replace(_SMOLLM2, batch_size=4),
    ),
}
