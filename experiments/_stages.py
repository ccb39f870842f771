"""The stages of a DistillSpec run; each goes on from what the workdir holds of it."""

import dataclasses
from pathlib import Path
from typing import Any, TypeVar, cast

import jax
import numpy as np
from jax.sharding import Mesh
from rich.progress import Progress

from experiments import _corpus
from experiments._corpus import Corpus, Sequences
from experiments._distillspec_config import Config, Size, Stage
from specjax import data, distill, load
from specjax.core import Checkpoint, Sampling, TrainableDrafter
from specjax.io import check_same_tokenizer
from specjax.models import CausalLM, ModelConfig, grow, reduce_head, take_layers

D = TypeVar("D", bound=TrainableDrafter)

_EVAL_ROWS = 16  # rows scored at once for a point of the learning curve


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model after a stage of training."""

    checkpoint: Checkpoint
    curve: list[tuple[int, float]]  # (step, alpha on held-out target text)
    steps: int
    seconds: float


class Run:
    """One run: its settings, its folder, and notes for the report."""

    def __init__(self, config: Config, workdir: Path, mesh: Mesh, progress: Progress):
        self.config = config
        self.workdir = workdir
        self.mesh = mesh
        self.progress = progress
        self.notes: dict[str, Any] = {}

    def target_and_corpus(self) -> tuple[Checkpoint, Corpus]:
        """The target, loaded or trained from scratch, and what there is to read."""
        ask = self.config
        if ask.target.source is not None:
            target = load(ask.target.source, dtype=ask.dtype)
            if target.tokenizer is None:
                raise ValueError(
                    f"{ask.target.source} has no tokenizer, which reading text needs"
                )
            text = ask.data.prompts is None
            read = _corpus.read_text if text else _corpus.read_prompts
            return target, read(ask, target.tokenizer)
        if ask.data.prompts is not None:
            raise ValueError(
                "data.prompts need a target that can answer them: give --target, or "
                "leave --prompts away"
            )
        documents = _corpus.read_documents(ask)
        train, _ = data.split(documents, ask.data.held_out)
        tokenizer = data.train_bpe([d.text for d in train], ask.data.vocab_size)
        corpus = _corpus.read_text(ask, tokenizer, documents)
        return self._train_target(tokenizer, corpus), corpus

    def standard_draft(self, target: Checkpoint) -> Checkpoint:
        """Where every draft starts: a checkpoint, layers of the target, or scratch.

        Its head is still whole: `reduced` needs the training text.
        """
        ask = self.config.draft
        if ask.source is not None:
            draft = load(ask.source, dtype=self.config.dtype)
            check_same_tokenizer(target, draft)
        elif ask.layers:
            config, params = take_layers(target.config, target.params, ask.layers)
            draft = _like(target, CausalLM(config), params)
        else:
            sizes = target.model.vocab_size, target.model.max_length
            model = CausalLM(_model_config(ask.size, *sizes))
            params = model.init(jax.random.key(self.config.seed + 10))
            draft = _like(target, model, params)
        _check_head(draft, ask.vocab_size)
        return draft

    def untrained_pair(self) -> tuple[Checkpoint, Checkpoint]:
        """A target and a draft of the run's sizes, to time passes of.

        What is trained from scratch keeps its first weights: they cost what others do.
        """
        ask = self.config
        if ask.target.source is not None:
            target = load(ask.target.source, dtype=ask.dtype)
        else:
            size = dataclasses.replace(ask.target.size, num_layers=ask.target.grow_to)
            model = CausalLM(
                _model_config(size, ask.data.vocab_size, 2 * _context(ask))
            )
            params = model.init(jax.random.key(ask.seed))
            target = Checkpoint(model, params, config=model.config)
        draft = self.standard_draft(target)
        if ask.draft.vocab_size is None:
            return target, draft
        ids = range(ask.draft.vocab_size)
        config, params = reduce_head(draft.config, draft.params, ids)
        return target, _like(target, CausalLM(config), params)

    def reduced(
        self,
        draft: Checkpoint,
        target: Checkpoint,
        corpus: Corpus,
        held_out: Sequences | None = None,
    ) -> Checkpoint:
        """The draft with a head over the commonest ids of the training text.

        The end of text is among them. Prompts are counted too, for answers come back to
        what was asked. Held-out text only tells how much of it the head can write.
        """
        size = self.config.draft.vocab_size
        if size is None:
            return draft
        ends = {*target.eos_token_ids, target.tokenizer.eos_token_id} - {None}
        counts = corpus.sequences.counts(draft.config.vocab_size)
        found = data.frequent_tokens(counts, size, always=ends)
        self.notes["draft: ids of its head"] = size
        self.notes["draft: share of the training text in its head"] = found.mass
        if held_out is not None:
            others = held_out.counts(draft.config.vocab_size)
            share = float(others[found.ids].sum() / others.sum())
            self.notes["draft: share of held-out samples in its head"] = share
        config, params = reduce_head(draft.config, draft.params, found.ids)
        return dataclasses.replace(
            draft, model=CausalLM(config), params=params, config=config
        )

    def samples(self, target: Checkpoint, corpus: Corpus) -> tuple[Corpus, Sequences]:
        """Text of the target: held-out samples, and training text if it has none."""
        ask = self.config
        prompts = corpus.held_out_prompts[: ask.eval.prompts]
        length = max(map(len, prompts)) + ask.eval.max_new_tokens
        held_out = self._draw(target, prompts, length, "held-out samples", 1)
        if corpus.train is None:
            corpus = self._answered(target, corpus, corpus.train_prompts)
        self.notes["training sequences"] = len(corpus.sequences.tokens)
        return corpus, held_out

    def fit(
        self,
        name: str,
        start: Checkpoint,
        corpus: Corpus,
        stage: Stage,
        objective: distill.Objective | distill.Term,
        source: distill.Source | None = None,
        teacher: Checkpoint | None = None,
        reference: Checkpoint | None = None,
        held_out: Sequences | None = None,
        inner_steps: int = 1,
    ) -> Trained:
        """Trains `start` for a stage; with held-out text, a learning curve too."""
        ask, scored = self.config, objective.needs_teacher
        student = dataclasses.replace(cast(CausalLM, start.model), remat=ask.remat)
        step = distill.TrainStep(
            student,
            objective,
            _optimizer(stage, start),
            teacher=_headed(teacher) if scored and teacher else None,
            source=source or distill.FixedCorpus(),
            reference=_headed(reference) if reference else None,
            accumulate=ask.accumulate,
            inner_steps=inner_steps,
            compute_dtype=ask.compute_dtype,
            kernel_layout=start.config.kernel_layout,
        )
        callbacks = []
        if held_out is not None and teacher is not None:
            callbacks.append(self._curve(start, teacher, held_out))
        result = self._train(
            name,
            step,
            start.params,
            corpus,
            stage,
            teacher_params=teacher.params if scored and teacher else None,
            reference_params=reference.params if reference else None,
            callbacks=callbacks,
        )
        curve = [
            (line["step"], line["alpha"])
            for line in result.metrics
            if line["kind"] == "alpha"
        ]
        params = jax.tree.map(
            lambda x, like: x.astype(like.dtype), result.state.params, start.params
        )
        checkpoint = dataclasses.replace(start, params=params)
        return Trained(checkpoint, curve, int(result.state.step), result.seconds)

    def fit_drafter(
        self,
        name: str,
        drafter: D,
        target: Checkpoint,
        corpus: Corpus,
        stage: Stage,
    ) -> tuple[D, distill.TrainResult]:
        """Trains heads, or what else reads the target's hidden states, beside it."""
        step = distill.DrafterStep(
            drafter,
            _headed(target),
            _optimizer(stage, target),
            accumulate=self.config.accumulate,
            kernel_layout=target.config.kernel_layout,
        )
        own = drafter.init_params(jax.random.key(self._seed(name)), target)
        result = self._train(
            name, step, own, corpus, stage, teacher_params=target.params
        )
        return cast(D, drafter.with_params(result.state.params)), result

    def _train(
        self, name: str, step, params, corpus: Corpus, stage: Stage, **others: Any
    ) -> distill.TrainResult:
        """Takes the steps of a stage."""
        ask, seed = self.config, self._seed(name)
        result = distill.train(
            step,
            step.init(jax.random.key(seed), params),
            corpus.sequences.batches(ask.batch_size, seed),
            steps=stage.steps,
            seconds=stage.max_seconds,
            min_steps=stage.min_steps,
            workdir=self.workdir,
            label=name,
            save_every=ask.checkpoint_every,
            keep=1,
            mesh=self.mesh,
            **others,
        )
        if result.stopped == "seconds":
            done = f"{int(result.state.step)} of {stage.steps} steps"
            self.notes[f"{name}: stopped by time"] = done
            self.progress.console.print(
                f"{name}: stopped by time at {done}; this machine is slow or busy"
            )
        return result

    def _seed(self, name: str) -> int:
        """A seed of its own for each stage, the same in every run of it."""
        return self.config.seed + sum(name.encode())

    def text(self, target: Checkpoint, corpus: Corpus) -> Corpus:
        """What distillation reads: the corpus, or text that the target wrote."""
        ask = self.config.distill
        return (
            self.target_text(target, corpus)
            if "target" in (ask.source, ask.base)
            else corpus
        )

    def distil(
        self,
        name: str,
        start: Checkpoint,
        target: Checkpoint,
        corpus: Corpus,
        held_out: Sequences | None = None,
    ) -> Trained:
        """Distils `start` as the settings say, on `text(...)`."""
        ask = self.config.distill
        objective, reference = ask.resolve(), None
        if objective.needs_reference:
            # AdaSPEC's reference is a draft distilled in the plain way.
            reference = self.fit(
                f"{name}_reference",
                start,
                corpus,
                ask.reference,
                distill.Distill(),
                teacher=target,
            ).checkpoint
        return self.fit(
            name,
            start,
            corpus,
            ask.train,
            objective,
            self._source(target),
            teacher=target,
            reference=reference,
            held_out=held_out,
            inner_steps=ask.inner_steps,
        )

    def _source(self, target: Checkpoint) -> distill.Source:
        """The data policy of the settings."""
        ask, text = self.config.distill, self.config.data
        rollout: dict[str, Any] = {
            "prompt_size": text.prompt_length,
            "max_new_tokens": text.length - text.prompt_length,
            "sampling": Sampling(temperature=ask.temperature),
            "eos_ids": target.eos_token_ids,
        }
        fixed, student = distill.FixedCorpus(), distill.StudentGenerated(**rollout)
        if ask.source == "student":
            return student
        if ask.source == "mixture":
            return distill.Mixture(fixed, student, ask.fraction, per="split")
        if ask.source == "teacher_mixed":
            mixed = distill.TeacherMixed(**rollout)
            return distill.Mixture(fixed, mixed, ask.fraction, per="split")
        return fixed

    def target_text(self, target: Checkpoint, corpus: Corpus) -> Corpus:
        """A corpus that the target wrote; of prompts that it answered it is that."""
        ask = self.config.data
        if not corpus.train_prompts:
            rows = np.linspace(
                0, len(corpus.sequences.tokens) - 1, ask.target_rows
            ).astype(int)
            prompts = corpus.sequences.tokens[rows, : ask.prompt_length].tolist()
        elif ask.answers == "given":
            prompts = corpus.train_prompts
        else:
            return corpus
        return self._answered(target, corpus, prompts)

    def _answered(self, target: Checkpoint, corpus: Corpus, prompts) -> Corpus:
        """The corpus with the target's text behind the prompts."""
        ask = self.config.data
        repeats = ask.samples if corpus.train_prompts else 1
        repeated = [p for p in prompts for _ in range(repeats)]
        train = self._draw(target, repeated, ask.length, "target samples", 2)
        return dataclasses.replace(corpus, train=train)

    def _train_target(self, tokenizer, corpus: Corpus) -> Checkpoint:
        """A target from scratch: shallow first, then deeper."""
        ask = self.config.target
        model = CausalLM(
            _model_config(ask.size, len(tokenizer), 2 * _context(self.config))
        )
        params = model.init(jax.random.key(self.config.seed))
        start = Checkpoint(model, params, tokenizer, model.config)
        shallow = self.fit(
            "target_shallow", start, corpus, ask.train, distill.CrossEntropy()
        )
        config, params = grow(model.config, shallow.checkpoint.params, ask.grow_to)
        deep = dataclasses.replace(
            start, model=CausalLM(config), params=params, config=config
        )
        grown = self.fit("target", deep, corpus, ask.grow, distill.CrossEntropy())
        self.notes["target: training seconds"] = shallow.seconds + grown.seconds
        return grown.checkpoint

    def _draw(self, target, prompts, length: int, label: str, salt: int) -> Sequences:
        return _corpus.target_samples(
            target,
            prompts,
            length=length,
            batch_size=self.config.batch_size,
            seed=self.config.seed + 10_000 * salt,
            folder=self.workdir / "checkpoints" / label.replace(" ", "_"),
            progress=self.progress,
            label=label,
        )

    def _curve(self, draft: Checkpoint, target: Checkpoint, held_out: Sequences):
        """Alpha by training step: the mean of sum min(p, q) over target samples."""
        probe = distill.TrainStep(
            _headed(draft),
            distill.Distill(),
            distill.make_optimizer(learning_rate=1.0),
            teacher=_headed(target),
        )
        rows = np.arange(len(held_out.tokens))
        batches = [
            held_out.batch(rows[i : i + _EVAL_ROWS])
            for i in range(0, len(rows), _EVAL_ROWS)
        ]

        def measure(state) -> dict[str, float]:
            sums = probe.evaluate(state.params, batches, target.params).as_dict()
            return {"alpha": sums["overlap"], "agreement": sums["agreement"]}

        return distill.Callback("alpha", measure, every=self.config.distill.eval_every)


def _optimizer(stage: Stage, trained: Checkpoint):
    return distill.make_optimizer(
        stage.optimizer,
        learning_rate=stage.learning_rate,
        warmup=stage.warmup,
        schedule=stage.schedule,
        steps=stage.steps,
        final=0.05,
        kernel_layout=trained.config.kernel_layout,
    )


def equal_steps(stage: Stage, distilled: Trained) -> Stage:
    """The baseline's stage: the steps that distillation came to, no time limit."""
    warmup = min(stage.warmup, distilled.steps - 1)
    return dataclasses.replace(
        stage, steps=distilled.steps, warmup=warmup, max_seconds=None
    )


def equal_time(stage: Stage, distilled: Trained, baseline: Trained) -> Stage:
    """A stage of as many seconds as distillation took, at the baseline's pace.

    It needs its steps beforehand, for the learning rate falls over them.
    """
    steps = round(baseline.steps * distilled.seconds / baseline.seconds)
    steps = max(steps, stage.warmup + 1)
    return dataclasses.replace(stage, steps=steps, max_seconds=distilled.seconds)


def held_out_quality(checkpoint: Checkpoint, text: Sequences) -> dict[str, float]:
    """Cross-entropy of a text, nats a token, and how often the arg max is right."""
    probe = distill.TrainStep(
        _headed(checkpoint),
        distill.CrossEntropy(),
        distill.make_optimizer(learning_rate=1.0),
    )
    rows = np.arange(min(256, len(text.tokens)))
    batches = [text.batch(rows[i : i + 32]) for i in range(0, len(rows), 32)]
    sums = probe.evaluate(checkpoint.params, batches).as_dict()
    return {"nats": sums["loss"], "accuracy": sums["agreement"]}


def _check_head(draft: Checkpoint, size: int | None) -> None:
    """Refuses a head that `reduced` could not make, before anything is trained."""
    if size is None:
        return
    if draft.config.head is not None:
        raise ValueError(
            f"the draft's head is reduced to {draft.config.head.size} ids already: "
            "leave it so with draft.vocab_size=none"
        )
    if size > draft.config.vocab_size:
        raise ValueError(
            "draft.vocab_size must be at most the draft's vocabulary of "
            f"{draft.config.vocab_size}, got {size}; none: all of it"
        )


def _headed(checkpoint: Checkpoint) -> distill.HeadedModel:
    """Its model; what `load` and this script make has a head of its own to call."""
    return cast(distill.HeadedModel, checkpoint.model)


def _context(config: Config) -> int:
    """The longest sequence that the run will come to."""
    ask = config.eval
    return max(config.data.length, ask.prompt_length + ask.max_new_tokens)


def _model_config(size: Size, vocab_size: int, max_length: int) -> ModelConfig:
    return ModelConfig(
        **dataclasses.asdict(size),
        vocab_size=vocab_size,
        max_position_embeddings=max_length,
    )


def _like(target: Checkpoint, model: CausalLM, params: Any) -> Checkpoint:
    """A draft that shares the target's tokeniser and end of text."""
    return Checkpoint(
        model,
        params,
        target.tokenizer,
        model.config,
        target.eos_token_ids,
        metadata=target.metadata,
    )
