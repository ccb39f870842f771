"""Settings of `experiments.distillspec`, and its presets."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

from specjax import distill, divergences


@dataclass(frozen=True)
class Size:
    """A transformer made from scratch."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Stage:
    """A stretch of training: it ends at `steps` or at `max_seconds`.

    On a slow machine a third of the steps is taken all the same: a model that has
    hardly begun to learn would be compared with another one.
    """

    steps: int
    learning_rate: float
    optimizer: Literal["adamw", "muon"] = "muon"
    schedule: Literal["constant", "cosine", "linear"] = "linear"
    warmup: int = 20
    max_seconds: float | None = None

    @property
    def min_steps(self) -> int:
        """Steps that are taken however long they take."""
        return -(-self.steps // 3)

    def __post_init__(self):
        if self.steps <= self.warmup:
            raise ValueError(
                f"a stage needs steps > warmup, got steps={self.steps}, "
                f"warmup={self.warmup}"
            )
        if not self.learning_rate > 0:
            raise ValueError(f"learning_rate must be > 0, got {self.learning_rate}")


@dataclass(frozen=True)
class Target:
    """The model to make faster: a checkpoint, or trained here on the corpus.

    From scratch, a shallow model is trained first and then grown in depth, which
    reaches a lower loss in the same time than the deep one from the start.
    """

    source: str | None = None
    size: Size = Size(2, 128, 352, 4, 2, 32)
    train: Stage = Stage(steps=700, learning_rate=2e-2, max_seconds=90)
    grow_to: int = 6
    grow: Stage = Stage(steps=120, learning_rate=1e-2, max_seconds=55)


@dataclass(frozen=True)
class Draft:
    """The small model: a checkpoint, some of the target's layers, or from scratch.

    Attributes:
        source: a checkpoint, or none.
        layers: of the target, which the draft is made of; none: from scratch.
        size: of a draft from scratch.
        vocab_size: ids that the draft's head has rows for, the commonest of the
            training text and the end of text; none: all. It reads every id all the
            same, and the target writes those that it cannot.
        train: by cross-entropy, before anything is distilled.
    """

    source: str | None = None
    layers: tuple[int, ...] = ()
    size: Size = Size(1, 64, 176, 2, 1, 32)
    vocab_size: int | None = None
    train: Stage = Stage(steps=450, learning_rate=2e-2, max_seconds=20)

    def __post_init__(self):
        if self.vocab_size is not None and self.vocab_size < 1:
            raise ValueError(
                f"draft.vocab_size must be at least 1 or none, got {self.vocab_size}"
            )


@dataclass(frozen=True)
class Data:
    """What is read: texts, or prompts with the target's answers or their own.

    Attributes:
        prompts: a file, a data set's id, "packaged" (chat prompts that come with
            specjax), or none: texts.
        answers: to prompts: "target" (drawn from it once), or "given" (in the data).
        text: a file, a folder or a data set's id, or none: the standard library.
        field: where a prompt or text stands in a row; none: found by itself.
        answer_field: where a given answer stands; none: found by itself.
        split: of the data set, or the rows of a file whose field `split` says so.
        subset: the data set's configuration, if it has several.
        chat: apply the tokeniser's chat template to prompts.
        max_chars: read about so many characters of the corpus; none: all of it.
        vocab_size: of a tokeniser trained here, for a target from scratch.
        held_out: share of documents kept for measuring, chosen by a hash of the name.
        held_out_prompts: measure on the prompts of this file or data set, and train on
            all of `prompts`; none: a share of those.
        max_prompts: train on at most so many prompts, evenly spread; none: on all.
        length: T, tokens of a training sequence.
        prompt_length: P, tokens given before a sample begins; the longest prompt.
        samples: answers drawn from the target for each training prompt.
        target_rows: training sequences whose beginnings the target goes on from, where
            a corpus is read and distillation wants the target's own text.
    """

    prompts: str | None = None
    answers: Literal["target", "given"] = "target"
    text: str | None = None
    field: str | None = None
    answer_field: str | None = None
    split: str | None = None
    subset: str | None = None
    chat: bool = True
    max_chars: int | None = None
    vocab_size: int = 1024
    held_out: float = 0.05
    held_out_prompts: str | None = None
    max_prompts: int | None = None
    length: int = 128
    prompt_length: int = 32
    samples: int = 1
    target_rows: int = 1024

    def __post_init__(self):
        if not 1 <= self.prompt_length < self.length:
            raise ValueError(
                "data.prompt_length must be at least 1 and less than data.length, got "
                f"{self.prompt_length} and {self.length}"
            )
        if not 0 < self.held_out < 1:
            raise ValueError(f"data.held_out must be in (0, 1), got {self.held_out}")
        if self.prompts is not None and self.text is not None:
            raise ValueError("give data.prompts or data.text, not both")
        if self.prompts is None and self.answers == "given":
            raise ValueError("data.answers=given needs data.prompts, got none")
        if self.prompts is None and (self.held_out_prompts or self.max_prompts):
            raise ValueError(
                "data.held_out_prompts and data.max_prompts need data.prompts, got none"
            )
        for name in ("samples", "target_rows", "max_prompts"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(
                    f"data.{name} must be at least 1, got {getattr(self, name)}"
                )


@dataclass(frozen=True)
class Distillation:
    """DistillSpec, and the cross-entropy baseline that it is compared with.

    Attributes:
        divergence: a registered one, with its options: "jsd(beta=0.5)".
        objective: instead of it, a weighted sum of terms as JSON:
            [{"term": "distill", "weight": 0.5, "temperature": 2, "squared": true},
            {"term": "cross_entropy", "weight": 0.5}].
        source: whose text: "fixed" (the corpus; answers of the target where the data
            are prompts), "target" (its samples, drawn once), "student" (rollouts of
            the draft in each step), "mixture" (of `base` and "student"),
            "teacher_mixed" (rollouts of both laws mixed, `base` beside them).
        base: what "mixture" and "teacher_mixed" read besides: "fixed" or "target".
        fraction: lambda, the share of rows that are rollouts in a mixture.
        temperature: of rollouts.
        inner_steps: updates for each draw of rollouts.
        reference: of the reference draft, where the objective compares with one.
        train: steps of both; the baseline gets as many.
        equal_time: train another baseline for as many seconds as distillation took.
        eval_every: steps between points of the learning curve.
    """

    divergence: str = "jsd(beta=0.5)"
    objective: str | None = None
    source: Literal["fixed", "target", "student", "mixture", "teacher_mixed"] = (
        "mixture"
    )
    base: Literal["fixed", "target"] = "fixed"
    fraction: float = 0.5
    temperature: float = 1.0
    inner_steps: int = 1
    reference: Stage = Stage(steps=220, learning_rate=2e-2, max_seconds=35)
    train: Stage = Stage(steps=220, learning_rate=2e-2, max_seconds=35)
    equal_time: bool = True
    eval_every: int = 50

    def __post_init__(self):
        self.resolve()
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"distill.fraction must be in [0, 1], got {self.fraction}")
        if self.temperature < 0:
            raise ValueError(
                f"distill.temperature must be at least 0, got {self.temperature}"
            )

    def resolve(self) -> distill.Objective:
        """The objective."""
        if self.objective is None:
            return distill.Objective.of(
                distill.Distill(divergences.parse(self.divergence))
            )
        try:
            terms = json.loads(self.objective)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"distill.objective must be a JSON list of terms, got "
                f"{self.objective!r} ({error})"
            ) from None
        return distill.make_objective(terms)


@dataclass(frozen=True)
class Evaluation:
    """What is measured at the end.

    Attributes:
        gamma: G of the main table.
        gammas: draft lengths of the speed-up curve.
        batches: rows decoded together.
        prompts: held-out prompts for acceptance and speed.
        curve_prompts: how many of them for the speed-up curve.
        prompt_length: tokens of a held-out prompt cut from the corpus.
        max_new_tokens: tokens added to each.
        lossless_prompts: for greedy equality and the chi-square test.
    """

    gamma: int = 4
    gammas: tuple[int, ...] = (1, 2, 6)
    batches: tuple[int, ...] = (1, 8)
    prompts: int = 32
    curve_prompts: int = 8
    prompt_length: int = 32
    max_new_tokens: int = 96
    lossless_prompts: int = 64

    def __post_init__(self):
        for name in ("gamma", "prompts", "curve_prompts", "prompt_length"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"eval.{name} must be at least 1, got {getattr(self, name)}"
                )
        for name in ("batches", "gammas"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(
                    f"eval.{name} must be numbers >= 1, got {getattr(self, name)}"
                )
        if max(self.batches) > self.prompts:
            raise ValueError(
                f"eval.batches of {max(self.batches)} rows need as many eval.prompts, "
                f"got {self.prompts}"
            )


@dataclass(frozen=True)
class Mesh:
    """Devices by axis; -1: all that are left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1


@dataclass(frozen=True)
class Config:
    """Everything that a run depends on."""

    seed: int = 0
    batch_size: int = 8
    accumulate: int = 1
    dtype: Literal["float32", "bfloat16"] | None = None
    compute_dtype: Literal["float32", "bfloat16"] | None = None  # of training passes
    remat: bool = False  # make activations again in the backward pass
    checkpoint_every: int = 100
    target: Target = field(default_factory=Target)
    draft: Draft = field(default_factory=Draft)
    data: Data = field(default_factory=Data)
    distill: Distillation = field(default_factory=Distillation)
    eval: Evaluation = field(default_factory=Evaluation)
    mesh: Mesh = field(default_factory=Mesh)


_ADAM: dict[str, Any] = {"optimizer": "adamw", "schedule": "cosine"}

PRESETS = {
    "quick": Config(),
    "smollm2": Config(
        batch_size=4,
        checkpoint_every=20,
        target=Target(source="smollm2-135m-instruct"),
        # The whole head of 49,152 rows would be twice as large as these layers.
        draft=Draft(
            layers=(0, 1, 2, 3),
            vocab_size=8192,
            train=Stage(100, learning_rate=1e-3, **_ADAM),
        ),
        data=Data(prompts="packaged", length=128, prompt_length=88),
        distill=Distillation(
            train=Stage(100, learning_rate=5e-4, **_ADAM),
            equal_time=False,
            eval_every=20,
        ),
        eval=Evaluation(
            gamma=2,
            gammas=(1, 4),
            prompts=16,
            curve_prompts=4,
            max_new_tokens=48,
            lossless_prompts=8,
        ),
    ),
}
