r"""Every drafter on equal data: acceptance, cost, predicted and measured speed.

    python -m experiments.drafters --predict           # is a draft worth it at all?
    python -m experiments.drafters                     # quick: 25 minutes on 2 cores
    python -m experiments.drafters --config smollm2 \
        --set contest.questions=spec_bench_dev.jsonl,gsm8k_dev.jsonl

All that can be trained reads the same text, which the target wrote, for equally many
steps. Then all decode the same prompts, in turn in one run, greedily and at T=1, at
each batch size. The workdir gets config.json, checkpoints/, the trained drafters/,
measured/ (a file a decoding and batch: interrupt it and go on with --resume),
drafters.md, drafters.json and pictures.

`--predict` trains nothing. From passes of the target and of an untrained draft it says
from which acceptance on a draft pays, and which draft length is best, in predict.md and
predict.json.

Reference: Leviathan et al., arXiv 2211.17192, section 3.3 (what a draft has to cost);
Xia et al., Spec-Bench, arXiv 2401.07851 (categories).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import Progress

from experiments import _predict
from experiments._config import (
    open_workdir,
    parse,
    run,
    write_atomically,
    write_resolved,
)
from experiments._contestants import CONTESTANTS, Made, Scene
from experiments._drafters_config import PRESETS, Config
from experiments._drafters_report import write_report
from experiments._evaluation import DECODINGS
from experiments._progress import progress_bars
from experiments._questions import (
    Questions,
    encode_questions,
    held_out,
    load_questions,
)
from experiments._stages import Run
from specjax import evals, parallel
from specjax.core import Checkpoint, Drafter, Sampling
from specjax.decoding import prepare

SHORTCUTS = {
    "--predict": "predict",
    "--target": "base.target.source",
    "--draft": "base.draft.source",
    "--prompts": "base.data.prompts",
}


def main() -> None:
    """Predicts, or trains whom the workdir does not hold yet and measures all."""
    args = parse(
        None, Config, PRESETS, SHORTCUTS, __doc__, workdir="runs/drafters-{}".format
    )
    console = Console(width=100)
    if args.config.predict:
        text = predict(args.config, args.workdir)
        console.print(text, highlight=False)
        console.print(f"predict.md and predict.json are in {args.workdir}.")
        return
    workdir = open_workdir(args.workdir, args.resume, args.config)
    if not (workdir / "drafters.json").exists():
        write_resolved(workdir, args.config, args.preset)
        with progress_bars() as progress:
            target, made, questions = train(args.config, workdir, progress)
            report = measure(args.config, workdir, target, made, questions, progress)
        write_report(workdir, report)
    console.print((workdir / "drafters.md").read_text(), highlight=False)
    console.print(f"Everything is in {workdir}.")


def predict(config: Config, workdir: Path) -> str:
    """What a draft of the pair's size could buy; writes it, and returns it as text."""
    workdir = Path(workdir).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    ask = config.contest
    with progress_bars() as progress:
        stages = Run(config.base, workdir, _mesh(config), progress)
        target, draft = stages.untrained_pair()
        capacity = config.base.data.prompt_length + ask.max_new_tokens
        found = _predict.predict(
            target,
            draft,
            gammas=ask.predict_gammas,
            batches=ask.batches,
            capacity=capacity,
            progress=progress,
        )
    text = _predict.markdown(found)
    write_atomically(workdir / "predict.md", text)
    write_atomically(workdir / "predict.json", evals.to_json(found))
    return text


def _mesh(config: Config):
    return parallel.make_mesh(**vars(config.base.mesh))


def train(
    config: Config, workdir: Path, progress: Progress
) -> tuple[Checkpoint, dict[str, Made], Questions]:
    """The target, every drafter, and what they are measured on."""
    ask = config.contest
    asked = load_questions(ask.questions)  # what is missing is missed at once
    stages = Run(config.base, workdir, _mesh(config), progress)
    target, corpus = stages.target_and_corpus()
    questions = (
        encode_questions(asked, target, ask.each, ask.longest)
        if asked
        else held_out(corpus, ask.each)
    )
    if corpus.train is None:
        corpus, _ = stages.samples(target, corpus)
    scene = Scene(ask, stages, target, stages.target_text(target, corpus))
    made = {name: CONTESTANTS[name](scene) for name in ask.drafters}
    return target, made, questions


def measure(
    config: Config,
    workdir: Path,
    target: Checkpoint,
    made: Mapping[str, Made],
    questions: Questions,
    progress: Progress,
) -> dict[str, Any]:
    """Every decoding at every batch, all drafters in turn."""
    ask = config.contest
    folder = workdir / "measured"
    folder.mkdir(exist_ok=True)
    settings = [(name, batch) for batch in ask.batches for name in DECODINGS]
    task = progress.add_task("measuring", total=len(settings))
    rows = []
    for decoding, batch in settings:
        path = folder / f"{decoding}-{batch}.json"
        if not path.exists():
            found = _measure(config, target, made, questions, decoding, batch)
            write_atomically(path, evals.to_json(found))
        rows += json.loads(path.read_text())
        progress.advance(task)
    return {
        "target": config.base.target.source or "trained from scratch",
        "target_parameters": target.config.num_params,
        "gamma": ask.gamma,
        "nodes": ask.nodes,
        "prompts": len(questions.prompts),
        "max_new_tokens": ask.max_new_tokens,
        "made": {
            name: {
                "parameters": one.parameters,
                "steps": one.steps,
                "seconds": one.seconds,
            }
            for name, one in made.items()
        },
        "rows": rows,
    }


def _measure(
    config: Config,
    target: Checkpoint,
    made: Mapping[str, Made],
    questions: Questions,
    decoding: str,
    batch: int,
) -> list[dict[str, Any]]:
    ask, sampling = config.contest, DECODINGS[decoding]
    # Whole batches only: prompts come again until the last one is full.
    count = -(-len(questions.prompts) // batch) * batch
    index = [i % len(questions.prompts) for i in range(count)]
    drafters = {name: one.drafter for name, one in made.items()}
    found = evals.compare(
        target,
        drafters,
        [questions.prompts[i] for i in index],
        batch=batch,
        max_new_tokens=ask.max_new_tokens,
        sampling=sampling,
        seed=config.base.seed + 1000,
    )
    categories = [questions.categories[i] for i in index]
    rows = []
    for name, drafter in drafters.items():
        costs = _costs(config, target, drafter, questions, sampling, batch)
        rows.append(
            {
                "drafter": name,
                "decoding": decoding,
                "batch": batch,
                **_figures(found[name], categories, costs, batch),
            }
        )
    return rows


def _costs(
    config: Config,
    target: Checkpoint,
    drafter: Drafter,
    questions: Questions,
    sampling: Sampling,
    batch: int,
) -> dict[str, evals.Timing]:
    """The parts of a round, behind prompts of middling length."""
    middle = sorted(questions.prompts, key=len)[len(questions.prompts) // 2]
    job = prepare(
        target,
        [middle] * batch,
        drafter=drafter,
        sampling=sampling,
        max_new_tokens=config.contest.max_new_tokens,
        eos_token_ids=[],
    )
    return evals.round_costs(job)


def _figures(arm: evals.Arm, categories, costs, batch: int) -> dict[str, Any]:
    stats = arm.stats
    draft = evals.ratio(costs["propose"], costs["target"])
    verify = evals.ratio(costs["verify"], costs["target"])
    tau = stats.block_efficiency
    # A batch goes on until its slowest row has ended: rounds of the loop are its.
    rounds = np.asarray(stats.rounds).reshape(-1, batch).max(axis=1).sum()
    parts = costs["propose"].median_s + costs["verify"].median_s
    rows = [categories[i] for i in arm.outputs]
    by_category = {
        category: jax.tree.map(
            lambda x, c=category: x[[i for i, r in enumerate(rows) if r == c]], stats
        ).block_efficiency
        for category in dict.fromkeys(categories)
    }
    return {
        "alpha": stats.acceptance_rate,
        "alpha_by_position": stats.acceptance_by_position,
        "tau": tau,
        "tau_by_category": by_category,
        "draft_over_target": draft,
        "verify_over_target": verify,
        "round_over_parts": arm.decode_s / rounds / parts,
        "predicted": tau / (draft + verify),
        # Where a pass over all drafts costs as much as a pass of one token.
        "predicted_flat": tau / (draft + 1),
        "speedup": arm.speedup,
        "tokens_per_s": arm.tokens_per_s,
    }


if __name__ == "__main__":
    run(main)
