"""Speed for quality: lossy ways to accept, on a distilled pair.

    python -m experiments.lossy                        # quick: 9 minutes on 2 cores
    python -m experiments.lossy --workdir runs/lossy --set lossy.epsilons=0.5,0.1

A pair is trained as in `experiments.distillspec` (a workdir that holds one goes on from
it). Then the same prompts are decoded plainly, with lossless speculative decoding, and
with DistillSpec's f_lin, f_sq and f_exp and Medusa's typical acceptance, all in turn in
one run. A curve a function, a point an epsilon: milliseconds a token, and

- nats a token: minus the mean log-probability that the target gives to what was
  written. Lossless sampling has the target's entropy; lenience moves away from it, up
  (the draft's text, which the target likes less) or down (bland text). So both ways are
  a change; the report says how far;
- ROUGE-L with how the text really goes on (the given answers, or else the target's own
  greedy answers), the task metric.

The workdir gets config.json, checkpoints/, lossy.md, lossy.json, nats.png, rouge.png.

Reference: Zhou et al., DistillSpec, arXiv 2310.08461, section 5.3 (lossy decoding).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

import specjax
from experiments._config import (
    open_workdir,
    parse,
    run,
    write_atomically,
    write_resolved,
)
from experiments._lossy_config import PRESETS, Config
from experiments._progress import progress_bars
from experiments._stages import Run
from specjax import drafters, evals, parallel
from specjax.core import Checkpoint, Sampling
from specjax.distill import CrossEntropy

LOSSLESS = "rejection (lossless)"
PLAIN = "plain decoding"


def main() -> None:
    """Trains the pair if the workdir has none yet, and measures."""
    args = parse(None, Config, PRESETS, {}, __doc__, workdir="runs/lossy-{}".format)
    workdir = open_workdir(args.workdir, args.resume, args.config)
    console = Console(width=80)
    if not (workdir / "lossy.json").exists():
        write_resolved(workdir, args.config, args.preset)
        with progress_bars() as progress:
            target, draft, texts = train(args.config, workdir, progress)
            report = measure(args.config, target, draft, texts, progress)
        write_report(workdir, report)
    report = json.loads((workdir / "lossy.json").read_text())
    console.print(markdown(report), highlight=False)
    console.print(f"Everything is in {workdir}.")


Texts = tuple[list[list[int]], list[list[int]]]  # prompts, and how they go on


def train(
    config: Config, workdir: Path, progress: Progress
) -> tuple[Checkpoint, Checkpoint, Texts]:
    """The target, the distilled draft, and held-out texts cut in two."""
    ask, mesh = config.base, parallel.make_mesh(**vars(config.base.mesh))
    stages = Run(ask, workdir, mesh, progress)
    target, corpus = stages.target_and_corpus()
    if corpus.train is None:
        corpus, _ = stages.samples(target, corpus)
    start = stages.reduced(stages.standard_draft(target), target, corpus)
    standard = stages.fit("draft", start, corpus, ask.draft.train, CrossEntropy())
    text = stages.text(target, corpus)
    draft = stages.distil("distillspec", standard.checkpoint, target, text)
    prompts, references = corpus.held_out_prompts, corpus.held_out_references
    if not references:
        references = specjax.generate(
            target,
            prompts,
            sampling=Sampling(temperature=0.0),
            max_new_tokens=config.lossy.max_new_tokens,
            eos_token_ids=[],
        ).tokens
    return target, draft.checkpoint, (prompts, references)


def measure(
    config: Config,
    target: Checkpoint,
    draft: Checkpoint,
    texts: Texts,
    progress: Progress,
) -> dict[str, Any]:
    """Every arm on the same prompts, in turn."""
    ask = config.lossy
    prompts, references = (part[: ask.prompts] for part in texts)
    drafter = drafters.TwoModel(draft, gamma=ask.gamma)
    curves = ask.verifiers()
    verifiers = {
        f"{name} {epsilon:g}": verifier
        for name, curve in curves.items()
        for epsilon, verifier in curve
    }
    task = progress.add_task("decoding", total=len(prompts) // ask.batch)
    found = evals.compare(
        target,
        {LOSSLESS: drafter, **dict.fromkeys(verifiers, drafter)},
        prompts,
        batch=ask.batch,
        max_new_tokens=ask.max_new_tokens,
        sampling=Sampling(temperature=ask.temperature),
        seed=config.base.seed + 1000,
        repeats=ask.repeats,
        verifiers=verifiers,
        on_batch=lambda: progress.advance(task),
    )
    found[PLAIN] = found.pop(evals.PLAIN)
    figures = {name: _figures(arm, references) for name, arm in found.items()}
    return {
        "settings": {
            name: getattr(ask, name)
            for name in ("gamma", "batch", "temperature", "prompts", "max_new_tokens")
        },
        "points": {name: figures[name] for name in (PLAIN, LOSSLESS)},
        "curves": {
            name: [
                {"epsilon": epsilon, **figures[f"{name} {epsilon:g}"]}
                for epsilon, _ in curve
            ]
            for name, curve in curves.items()
        },
    }


def _figures(arm: evals.Arm, references: list[list[int]]) -> dict[str, float]:
    """Speed and quality of an arm; half widths are of 95 % intervals over prompts."""
    rows = arm.outputs.items()
    nats, nats_half = evals.interval([-float(np.mean(o.log_probs)) for _, o in rows])
    rouge, rouge_half = evals.interval(
        [evals.rouge_l(out.tokens, references[i][: len(out.tokens)]) for i, out in rows]
    )
    return {
        "tau": arm.stats.block_efficiency,
        "ms_a_token": 1e3 / arm.tokens_per_s,
        "speedup": arm.speedup,
        "nats": nats,
        "nats_half_width": nats_half,
        "rouge_l": rouge,
        "rouge_l_half_width": rouge_half,
    }


def write_report(workdir: Path, report: Mapping[str, Any]) -> None:
    """Pictures, lossy.md and, last, lossy.json."""
    settings = report["settings"]
    title = f"T={settings['temperature']:g}, gamma {settings['gamma']}, " + (
        f"batch {settings['batch']}"
    )
    for name, key, label in (
        ("nats", "nats", "nats a token, under the target"),
        ("rouge", "rouge_l", "ROUGE-L with the true continuation"),
    ):
        evals.plot_trade_off(
            workdir / f"{name}.png",
            {
                function: [(point["ms_a_token"], point[key]) for point in curve]
                for function, curve in report["curves"].items()
            },
            {
                name: (point["ms_a_token"], point[key])
                for name, point in report["points"].items()
            },
            title,
            ("ms a token, measured", label),
        )
    write_atomically(workdir / "lossy.md", markdown(report))
    write_atomically(workdir / "lossy.json", evals.to_json(report))


def markdown(report: Mapping[str, Any]) -> str:
    """The report to read."""
    header = ["accept", "epsilon", "tau", "ms/token", "speed-up", "nats", "ROUGE-L"]
    rows = [[name, "", *_cells(point)] for name, point in report["points"].items()]
    for name, curve in report["curves"].items():
        rows += [[name, f"{point['epsilon']:g}", *_cells(point)] for point in curve]
    settings = report["settings"]
    return "\n\n".join(
        [
            "# Speed for quality",
            f"{settings['prompts']} held-out prompts, {settings['max_new_tokens']} new "
            f"tokens each, T={settings['temperature']:g}, gamma {settings['gamma']}, "
            f"batch {settings['batch']}. nats: minus the mean log-probability that the "
            "target gives to what was written (lossless: its entropy). ± half of the "
            "95 % interval over prompts.",
            evals.markdown_table([header, *rows]) + "\n",
        ]
    )


def _cells(point: Mapping[str, float]) -> list[str]:
    def with_half(key: str, digits: int) -> str:
        half = evals.number(point[f"{key}_half_width"], digits)
        return f"{evals.number(point[key], digits)} ± {half}"

    return [
        evals.number(point["tau"], 2),
        evals.number(point["ms_a_token"], 2),
        evals.number(point["speedup"], 2, "x"),
        with_half("nats", 2),
        with_half("rouge_l", 3),
    ]


if __name__ == "__main__":
    run(main)
