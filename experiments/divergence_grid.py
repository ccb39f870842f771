"""Data policy x divergence x decoding: which recipe drafts best for a pair.

    python -m experiments.divergence_grid                    # the quick pair, 3 seeds
    python -m experiments.divergence_grid --set grid.seeds=0 --set grid.sources=student
    python -m experiments.divergence_grid --config smollm2 --resume

For every seed a standard draft is trained by cross-entropy. From there cross-entropy
goes on (the baseline), and every divergence on every source of text, for equally many
steps. Then each draft proposes for the same prompts, greedily and at T=1.

The workdir gets grid.md and grid.json (block efficiency of each cell, its gain over the
baseline seed by seed, 95 % intervals), one heat map a decoding, and cells/, one file a
finished cell: interrupt it at any time and go on with --resume.

Reference: Zhou et al., DistillSpec, arXiv 2310.08461, section 5.3 (the recipe figure).
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
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
from experiments._evaluation import DECODINGS
from experiments._grid_config import PRESETS, Config
from experiments._progress import progress_bars
from experiments._stages import Run
from specjax import drafters, evals, parallel
from specjax.core import Checkpoint
from specjax.decoding import prepare
from specjax.distill import CrossEntropy

BASELINE = ("cross_entropy", "fixed")
Cell = tuple[str, str]  # (divergence, source)


def main() -> None:
    """Fills in every cell that the workdir does not hold yet."""
    args = parse(
        None, Config, PRESETS, {}, __doc__, workdir=lambda name: f"runs/grid-{name}"
    )
    workdir = open_workdir(args.workdir, args.resume, args.config)
    write_resolved(workdir, args.config, args.preset)
    (workdir / "cells").mkdir(exist_ok=True)
    console = Console(width=80)
    with progress_bars() as progress:
        found = fill(args.config, workdir, progress)
    report = summarise(args.config, found)
    write_report(workdir, report)
    console.print((workdir / "grid.md").read_text(), highlight=False)
    console.print(f"Everything is in {workdir}.")


def cells(config: Config) -> list[Cell]:
    """The baseline, then every divergence on every source."""
    grid = config.grid
    return [BASELINE, *((d, s) for s in grid.sources for d in grid.divergences)]


def fill(config: Config, workdir: Path, progress: Progress) -> dict[int, dict]:
    """Seed -> cell -> decoding -> figures."""
    total = len(config.grid.seeds) * len(cells(config))
    task = progress.add_task("cells", total=total)
    first = Run(config.base, workdir, _mesh(config), progress)
    target, corpus = first.target_and_corpus()
    if corpus.train is None:
        corpus, _ = first.samples(target, corpus)
    found: dict[int, dict] = {}
    for seed in config.grid.seeds:
        found[seed] = {}
        standard = None
        for cell in cells(config):
            path = workdir / "cells" / f"{seed}-{cell[0]}-{cell[1]}.json"
            if not path.exists():
                standard = standard or _standard(config, seed, first, target, corpus)
                draft = _train(config, seed, cell, first, standard, target, corpus)
                figures = _measure(config, target, draft, corpus, seed)
                write_atomically(path, evals.to_json(figures))
            found[seed][cell] = json.loads(path.read_text())
            progress.advance(task)
    return found


def _mesh(config: Config):
    return parallel.make_mesh(**vars(config.base.mesh))


def _seeded(config: Config, seed: int, run: Run, **distill: Any) -> Run:
    """The same run with another seed for its drafts, and other settings."""
    ask = dataclasses.replace(config.base.distill, **distill)
    base = dataclasses.replace(config.base, seed=seed, distill=ask)
    return Run(base, run.workdir, run.mesh, run.progress)


def _standard(config: Config, seed: int, run: Run, target, corpus) -> Checkpoint:
    run = _seeded(config, seed, run)
    start, stage = run.standard_draft(target), config.base.draft.train
    start = run.reduced(start, target, corpus)
    return run.fit(f"draft-{seed}", start, corpus, stage, CrossEntropy()).checkpoint


def _train(
    config: Config, seed: int, cell: Cell, run: Run, standard, target, corpus
) -> Checkpoint:
    name = "-".join((str(seed), *cell))
    if cell == BASELINE:
        stage = config.base.distill.train
        run = _seeded(config, seed, run)
        trained = run.fit(name, standard, corpus, stage, CrossEntropy())
    else:
        ask: dict[str, Any] = {"divergence": cell[0], "source": cell[1]}
        # What the target writes depends on the pair's own seed: drawn once for all.
        text = _seeded(config, config.base.seed, run, **ask).text(target, corpus)
        trained = _seeded(config, seed, run, **ask).distil(name, standard, target, text)
    return trained.checkpoint


def _measure(config: Config, target, draft, corpus, seed: int) -> dict[str, Any]:
    """Acceptance and block efficiency by decoding, all prompts in one batch."""
    grid = config.grid
    figures = {}
    for decoding, sampling in DECODINGS.items():
        job = prepare(
            target,
            corpus.held_out_prompts[: grid.prompts],
            drafter=drafters.TwoModel(draft, gamma=grid.gamma),
            sampling=sampling,
            max_new_tokens=grid.max_new_tokens,
            seed=1000 * (1 + seed),
            eos_token_ids=[],
        )
        stats = job.run(job.start()).stats
        figures[decoding] = {
            "alpha": stats.acceptance_rate,
            "tau": stats.block_efficiency,
        }
    return figures


def summarise(config: Config, found: Mapping[int, Mapping]) -> dict[str, Any]:
    """Means over seeds with 95 % intervals; gains are paired, seed by seed."""
    rows = []
    for decoding, cell in _rows(config):

        def over_seeds(figure: str, cell: Cell = cell, decoding=decoding):
            return [found[seed][cell][decoding][figure] for seed in config.grid.seeds]

        base = over_seeds("tau", BASELINE)
        gains = [t / b - 1 for t, b in zip(over_seeds("tau"), base, strict=True)]
        tau, tau_half = evals.interval(over_seeds("tau"))
        gain, gain_half = evals.interval(gains)
        rows.append(
            {
                "decoding": decoding,
                "divergence": cell[0],
                "source": cell[1],
                "alpha": evals.interval(over_seeds("alpha"))[0],
                "tau": tau,
                "tau_half_width": tau_half,
                "gain": gain,
                "gain_half_width": gain_half,
            }
        )
    grid = dataclasses.asdict(config.grid)
    return {"grid": grid, "steps": config.base.distill.train.steps, "rows": rows}


def _rows(config: Config) -> Iterator[tuple[str, Cell]]:
    for decoding in DECODINGS:
        for cell in cells(config):
            yield decoding, cell


def write_report(workdir: Path, report: Mapping[str, Any]) -> None:
    """A table and a heat map a decoding; grid.json last."""
    grid = report["grid"]
    parts = [
        "# Block efficiency by divergence and source of text",
        f"gamma {grid['gamma']}, {report['steps']} further steps for every draft, "
        f"{len(grid['seeds'])} seeds, {grid['prompts']} held-out prompts of the same "
        "target. Gain: tau over that of cross-entropy at equal steps, paired by seed; "
        "± half of the 95 % interval over seeds.",
    ]
    for decoding in DECODINGS:
        rows = [row for row in report["rows"] if row["decoding"] == decoding]
        header = ["divergence", "source", "alpha", "tau", "gain"]
        lines = [[row["divergence"], row["source"], *_figures(row)] for row in rows]
        parts += [f"## {decoding}", evals.markdown_table([header, *lines])]
        evals.plot_heat_map(
            workdir / f"heat_map_{decoding}.png",
            {(r["divergence"], r["source"]): r["tau"] for r in rows},
            f"{decoding}, gamma {grid['gamma']}",
            ("divergence", "text that the draft was trained on", "tau, tokens a call"),
        )
    write_atomically(workdir / "grid.md", "\n\n".join(parts) + "\n")
    write_atomically(workdir / "grid.json", evals.to_json(report))


def _figures(row: Mapping[str, Any]) -> list[str]:
    gain, half = 100 * row["gain"], 100 * row["gain_half_width"]
    return [
        evals.number(row["alpha"], 3),
        evals.number(row["tau"], 2) + " ± " + evals.number(row["tau_half_width"], 2),
        f"{gain:+.1f} % ± " + evals.number(half, 1),
    ]


if __name__ == "__main__":
    run(main)
