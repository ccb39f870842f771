r"""DistillSpec, end to end: distil a draft against a target, decode, measure, prove.

    python -m experiments.distillspec                    # quick: 6 minutes on 2 cores
    python -m experiments.distillspec --config smollm2   # the real SmolLM2-135M
    python -m experiments.distillspec --config smollm2 \
        --target meta-llama/Llama-2-7b-chat-hf \
        --draft TinyLlama/TinyLlama-1.1B-Chat-v1.0 --prompts prompts.jsonl

`quick` trains a target (1.3 M parameters) and a much smaller draft (0.1 M) from scratch
on the Python standard library. The standard draft is then trained further, by
cross-entropy (the baseline) and by DistillSpec, for equally many steps. Expected at
T=1, gamma 4: block efficiency at least 10 % over the baseline, greedy output identical.

The workdir gets config.json, metrics.jsonl, checkpoints/, draft/ (a Hugging Face
folder; target/ too where it was trained here), prompts.json, report.md, report.json and
pictures. Interrupt it at any time and go on with --resume.

Reference: Zhou et al., DistillSpec, arXiv 2310.08461.
"""

import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from experiments._config import (
    Arguments,
    open_workdir,
    parse,
    run,
    write_atomically,
    write_resolved,
)
from experiments._distillspec_config import PRESETS, Config
from experiments._evaluation import (
    DISTILLED,
    EQUAL_TIME,
    STANDARD,
    Pair,
    evaluate,
    print_report,
    write_report,
)
from experiments._progress import progress_bars
from experiments._stages import Run, Trained, equal_steps, equal_time, held_out_quality
from specjax import export, parallel
from specjax.core import Checkpoint
from specjax.distill import CrossEntropy

SHORTCUTS = {
    "--target": "target.source",
    "--draft": "draft.source",
    "--prompts": "data.prompts",
}


def main() -> None:
    """Runs every stage that the workdir does not hold yet."""
    begin = time.perf_counter()
    args = parse(None, Config, PRESETS, SHORTCUTS, __doc__)
    workdir = open_workdir(args.workdir, args.resume, args.config)
    console = Console(width=80)
    if (workdir / "report.json").exists():
        print_report(console, json.loads((workdir / "report.json").read_text()))
        console.print(f"This run was finished already: it is in {workdir}.")
        return
    write_resolved(workdir, args.config, args.preset)
    with progress_bars() as progress:
        pair = train(args, workdir, progress)
        report = evaluate(args.config, pair, progress)
    report = {**names(args.config), **report}
    report["training"]["seconds since the run was last started"] = (
        time.perf_counter() - begin
    )
    write_report(workdir, report)
    print_report(console, report)
    console.print(f"Everything is in {workdir}; start with report.md.")


def train(args: Arguments[Config], workdir: Path, progress: Progress) -> Pair:
    """A target, its standard draft, the baseline, and DistillSpec's draft."""
    ask = args.config
    run = Run(ask, workdir, parallel.make_mesh(**vars(ask.mesh)), progress)
    target, corpus = run.target_and_corpus()
    start = run.standard_draft(target)
    corpus, held_out = run.samples(target, corpus)
    start = run.reduced(start, target, corpus, held_out)
    teacher = {"teacher": target, "held_out": held_out}

    labels, stage = CrossEntropy(), ask.distill.train
    standard = run.fit("draft", start, corpus, ask.draft.train, labels).checkpoint
    text = run.text(target, corpus)
    distilled = run.distil("distillspec", standard, target, text, held_out)
    # The baseline gets as many steps; the other one as many seconds.
    as_long = equal_steps(stage, distilled)
    baseline = run.fit("cross_entropy", standard, corpus, as_long, labels, **teacher)
    drafts = {STANDARD: baseline.checkpoint, DISTILLED: distilled.checkpoint}
    if ask.distill.equal_time:
        as_long = equal_time(stage, distilled, baseline)
        drafts[EQUAL_TIME] = run.fit(
            EQUAL_TIME, standard, corpus, as_long, labels, **teacher
        ).checkpoint

    if ask.target.source is None:
        export(target, workdir / "target")
    export(distilled.checkpoint, workdir / "draft")
    prompts = corpus.held_out_prompts
    write_atomically(workdir / "prompts.json", json.dumps(prompts) + "\n")
    return Pair(
        target=target,
        drafts=drafts,
        prompts=prompts,
        curves={"cross-entropy": baseline.curve, "DistillSpec": distilled.curve},
        notes={
            **run.notes,
            **sizes(target, distilled.checkpoint),
            **losses(corpus.held_out_text, target, drafts),
            **spent("DistillSpec", distilled),
            **spent("cross-entropy", baseline),
        },
    )


def names(config: Config) -> dict[str, str]:
    """What the report calls the pair."""
    size, draft = config.target.size, config.draft
    scratch = f"target {config.target.grow_to}x{size.hidden_size}"
    small = f"draft {draft.size.num_layers}x{draft.size.hidden_size}"
    if draft.layers:
        small = f"its layers {','.join(map(str, draft.layers))}"
    return {
        "target": config.target.source or scratch,
        "draft": draft.source or small,
    }


def sizes(target: Checkpoint, draft: Checkpoint) -> dict[str, Any]:
    """Parameters of both."""
    return {
        "target: parameters": target.config.num_params,
        "draft: parameters": draft.config.num_params,
    }


def losses(text, target: Checkpoint, drafts) -> dict[str, float | None]:
    """Held-out cross-entropy of every model, where there is a text to measure on."""
    if text is None:
        return {}
    models = {"target": target, **drafts}
    return {
        f"{name}: held-out nats a token": held_out_quality(model, text)["nats"]
        for name, model in models.items()
    }


def spent(name: str, trained: Trained) -> dict[str, Any]:
    """Steps and seconds of a stage."""
    return {f"{name}: steps": trained.steps, f"{name}: seconds": trained.seconds}


if __name__ == "__main__":
    run(main)
