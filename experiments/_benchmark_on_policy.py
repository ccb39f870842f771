"""An on-policy distillation step, ours and that of TRL's GKD trainer (torch)."""

import argparse
import importlib.util
import tempfile
import time
from typing import Any

import jax
import numpy as np

import specjax
from experiments._benchmark_models import first_layers, in_transformers
from specjax import distill, divergences
from specjax.core import Checkpoint
from specjax.data import chat_prompts, packaged_prompts
from specjax.models import CausalLM

_ROWS, _NEW, _STUDENT_LAYERS = 4, 32, 4


def on_policy(args: argparse.Namespace) -> dict[str, Any]:
    """Rollout, teacher, loss, gradient and update: generated tokens a second of each.

    The same teacher and student (its first layers), the same prompts, row by row the
    same number of new tokens, JSD(0.5), AdamW, float32. The two take turns: our step
    runs whenever one of theirs has ended.
    """
    teacher = specjax.load(args.target, dtype="float32")
    student = first_layers(teacher, _STUDENT_LAYERS)
    texts = [p.text for p in packaged_prompts("train")][:64]
    prompts = chat_prompts(teacher.tokenizer, texts).tokens
    # Prompts of one length: neither side pads.
    width = int(np.median([len(p) for p in prompts]))
    texts = [t for t, p in zip(texts, prompts, strict=True) if len(p) == width][:_ROWS]
    prompts = [p for p in prompts if len(p) == width][:_ROWS]
    take_step = _ours(teacher, student, prompts)
    ours: list[float] = []

    def one() -> None:
        begin = time.perf_counter()
        take_step()
        ours.append(time.perf_counter() - begin)

    one()
    ours.clear()  # compilation
    if importlib.util.find_spec("trl") is None:
        for _ in range(args.repeats):
            one()
        theirs = []
    else:
        theirs = _theirs(teacher, student, texts, 1 + args.repeats, one)[1:]
        ours = ours[1:]
    tokens = len(prompts) * _NEW
    found: dict[str, Any] = {
        "rows": len(prompts),
        "prompt_tokens": width,
        "tokens_per_s": tokens / float(np.median(ours)),
        "over_trl": None,  # install the extra `parity`
    }
    if theirs:
        found["trl_tokens_per_s"] = tokens / float(np.median(theirs))
        found["over_trl"] = float(np.median(theirs) / np.median(ours))
    return found


def _ours(teacher: Checkpoint, student: Checkpoint, prompts: list[list[int]]):
    """A function that takes one step and waits for it."""
    width = len(prompts[0])
    step = distill.TrainStep(
        CausalLM(student.config),
        distill.Distill(divergences.resolve("jsd", beta=0.5)),
        distill.make_optimizer("adamw", learning_rate=1e-5),
        teacher=CausalLM(teacher.config),
        source=distill.StudentGenerated(width, _NEW),
        kernel_layout=student.config.kernel_layout,
    )
    tokens = np.pad(np.asarray(prompts), ((0, 0), (0, _NEW)))
    batch = distill.Batch.of(tokens, prompt_length=width)
    state = step.init(jax.random.key(0), student.params)

    def take() -> None:
        nonlocal state
        state, sums = step(state, batch, teacher.params)
        jax.block_until_ready((state, sums))

    return take


def _theirs(teacher, student, texts: list[str], steps: int, between) -> list[float]:
    """Seconds of each step of TRL's trainer; `between` runs after every one."""
    import datasets
    import transformers
    import trl.experimental.gkd as gkd  # pyright: ignore[reportMissingImports]

    class Clock(transformers.TrainerCallback):
        """Times the steps."""

        def __init__(self):
            self.seconds: list[float] = []
            self.begin = 0.0

        def on_step_begin(self, *_, **__):
            self.begin = time.perf_counter()

        def on_step_end(self, *_, **__):
            self.seconds.append(time.perf_counter() - self.begin)
            between()

    clock = Clock()
    rows = [
        {
            "messages": [
                {"role": "user", "content": text},
                {"role": "assistant", "content": "Yes."},
            ]
        }
        for text in texts * steps
    ]
    model, tokenizer = in_transformers(student)
    teacher_model, _ = in_transformers(teacher)
    with tempfile.TemporaryDirectory() as folder:
        trainer = gkd.GKDTrainer(
            model=model,
            teacher_model=teacher_model,
            args=gkd.GKDConfig(
                output_dir=folder,
                max_steps=steps,
                per_device_train_batch_size=len(texts),
                lmbda=1.0,
                beta=0.5,
                temperature=1.0,
                max_new_tokens=_NEW,
                learning_rate=1e-5,
                lr_scheduler_type="constant",
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
            ),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[clock],
        )
        trainer.generation_config.min_new_tokens = _NEW
        trainer.train()
    return clock.seconds
