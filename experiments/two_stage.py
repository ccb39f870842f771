"""Distil the target first, then a draft for it: DistillSpec's two-stage recipe.

    python -m experiments.two_stage                    # quick: 8 minutes on 2 cores
    python -m experiments.two_stage --config smollm2 --resume

1. A smaller target is distilled from the large one.
2. A draft is distilled for the large target, and one for the smaller target.
3. Every model decodes plainly and with its draft.

The report says what quality cost (loss and next-token accuracy on text that neither
model was trained on, of the small target before and after it was distilled) and what it
bought (milliseconds a token, over the large target decoded plainly). The paper reports
6 to 10 times with T5-XXL's family; expect less where the large target is small.

The workdir gets config.json, metrics.jsonl, checkpoints/, target/ (the small one) and
draft/ as Hugging Face folders, report.md and report.json.

Reference: Zhou et al., DistillSpec, arXiv 2310.08461, section 5.2.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from experiments._config import (
    open_workdir,
    parse,
    run,
    write_atomically,
    write_resolved,
)
from experiments._corpus import Corpus
from experiments._evaluation import DECODINGS
from experiments._progress import progress_bars
from experiments._stages import Run, held_out_quality
from experiments._two_stage_config import PRESETS, Config
from specjax import drafters, evals, export, parallel
from specjax.core import Checkpoint
from specjax.distill import CrossEntropy

LARGE, SMALL, BEFORE = "large target", "small target", "small target, not distilled"


@dataclasses.dataclass(frozen=True)
class Trained:
    """What the stages leave."""

    targets: Mapping[str, Checkpoint]  # LARGE, SMALL and BEFORE
    drafts: Mapping[str, Checkpoint]  # for LARGE and for SMALL
    corpus: Corpus
    seconds: Mapping[str, float]


def main() -> None:
    """Runs every stage that the workdir does not hold yet."""
    args = parse(None, Config, PRESETS, {}, __doc__, workdir="runs/two-stage-{}".format)
    workdir = open_workdir(args.workdir, args.resume, args.config)
    console = Console(width=80)
    if not (workdir / "report.json").exists():
        write_resolved(workdir, args.config, args.preset)
        with progress_bars() as progress:
            trained = train(args.config, workdir, progress)
            report = evaluate(args.config, trained, progress)
        write_atomically(workdir / "report.md", markdown(report))
        write_atomically(workdir / "report.json", evals.to_json(report))
    report = json.loads((workdir / "report.json").read_text())
    console.print(markdown(report), highlight=False)
    console.print(f"Everything is in {workdir}.")


def train(config: Config, workdir: Path, progress: Progress) -> Trained:
    """The large target, the small one, and a draft for each."""
    base, ask = config.base, config.student
    mesh = parallel.make_mesh(**vars(base.mesh))
    run = Run(base, workdir, mesh, progress)
    large, corpus = run.target_and_corpus()
    corpus, held_out = run.samples(large, corpus)

    # To the large target, the small one is a draft like any other.
    smaller = dataclasses.replace(base, draft=ask.start, distill=ask.distill)
    first = Run(smaller, workdir, mesh, progress)
    start = first.standard_draft(large)
    before = first.fit("small", start, corpus, ask.start.train, CrossEntropy())
    text = first.text(large, corpus)
    small = first.distil("small_distilled", before.checkpoint, large, text, held_out)
    export(small.checkpoint, workdir / "target")

    drafts, seconds = {}, {"small target: distillation": small.seconds}
    for name, target in ((LARGE, large), (SMALL, small.checkpoint)):
        label = "_".join(name.split())
        begin = run.reduced(run.standard_draft(target), target, corpus)
        standard = run.fit(
            f"draft_{label}", begin, corpus, base.draft.train, CrossEntropy()
        ).checkpoint
        drafts[name] = run.distil(f"distillspec_{label}", standard, target, corpus)
        seconds[f"draft of the {name}: distillation"] = drafts[name].seconds
    export(drafts[SMALL].checkpoint, workdir / "draft")
    return Trained(
        {LARGE: large, BEFORE: before.checkpoint, SMALL: small.checkpoint},
        {name: draft.checkpoint for name, draft in drafts.items()},
        corpus,
        seconds,
    )


def evaluate(config: Config, trained: Trained, progress: Progress) -> dict[str, Any]:
    """Quality of every target; latency of each with and without its draft."""
    ask = config.base.eval
    quality = {}
    for name, target in trained.targets.items():
        text = trained.corpus.held_out_text or trained.corpus.sequences
        quality[name] = {
            "parameters": target.config.num_params,
            **held_out_quality(target, text),
        }
    latency = []
    task = progress.add_task("measuring decoding", total=2 * len(DECODINGS))
    for decoding, sampling in DECODINGS.items():
        for name, draft in trained.drafts.items():
            arms = evals.compare(
                trained.targets[name],
                {"with its draft": drafters.TwoModel(draft, gamma=ask.gamma)},
                trained.corpus.held_out_prompts[: ask.prompts],
                batch=config.batch,
                max_new_tokens=ask.max_new_tokens,
                sampling=sampling,
                seed=config.base.seed + 1000,
            )
            latency += [_row(decoding, name, arm, found) for arm, found in arms.items()]
            progress.advance(task)
    for row in latency:
        plain = next(
            r["ms_a_token"]
            for r in latency
            if (r["decoding"], r["model"]) == (row["decoding"], LARGE)
            and r["arm"] == evals.LABELS[evals.PLAIN]
        )
        row["over_large_plain"] = plain / row["ms_a_token"]
    return {
        "quality": quality,
        "latency": latency,
        "batch": config.batch,
        "gamma": ask.gamma,
        "held_out": trained.corpus.held_out_text is not None,
        "seconds": dict(trained.seconds),
    }


def _row(decoding: str, model: str, arm: str, found: evals.Arm) -> dict[str, Any]:
    return {
        "decoding": decoding,
        "model": model,
        "arm": evals.LABELS.get(arm, arm),
        "tau": found.stats.block_efficiency,
        "ms_a_token": 1e3 / found.tokens_per_s,
    }


def markdown(report: Mapping[str, Any]) -> str:
    """The report to read."""
    quality = [["model", "parameters", "nats a token", "next-token accuracy"]]
    for name, row in report["quality"].items():
        figures = evals.number(row["nats"], 3), evals.number(row["accuracy"], 3)
        quality.append([name, f"{row['parameters']:,}", *figures])
    latency = [["decoding", "model", "arm", "tau", "ms a token", "over large, plain"]]
    for row in report["latency"]:
        latency.append(
            [
                *(row[key] for key in ("decoding", "model", "arm")),
                evals.number(row["tau"], 2),
                evals.number(row["ms_a_token"], 2),
                evals.number(row["over_large_plain"], 2, "x"),
            ]
        )
    seconds = [["stage", "seconds"]]
    seconds += [[k, evals.number(v, 0)] for k, v in report["seconds"].items()]
    where = "held-out text" if report["held_out"] else "the large target's answers"
    return "\n\n".join(
        [
            "# A target distilled, then its draft",
            f"## Quality on {where}",
            evals.markdown_table(quality),
            f"## Latency, batch {report['batch']}, gamma {report['gamma']}",
            evals.markdown_table(latency),
            "## Training",
            evals.markdown_table(seconds) + "\n",
        ]
    )


if __name__ == "__main__":
    run(main)
