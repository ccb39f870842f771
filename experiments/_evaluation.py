"""The last part of a run: measure every arm in one go, write the report."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from experiments._config import write_atomically
from experiments._distillspec_config import Config
from specjax import drafters, evals
from specjax.core import Checkpoint, Sampling

DECODINGS = {"greedy": Sampling(temperature=0.0), "T=1.0": Sampling(temperature=1.0)}
STANDARD, DISTILLED = "standard_sd", "distillspec"
EQUAL_TIME = "cross_entropy_equal_time"


@dataclasses.dataclass(frozen=True)
class Pair:
    """What training left: the target, its drafts, and how they learned."""

    target: Checkpoint
    drafts: Mapping[str, Checkpoint]  # STANDARD, DISTILLED, maybe EQUAL_TIME
    prompts: Sequence[Sequence[int]]
    curves: Mapping[str, Sequence[tuple[int, float]]]  # label -> (step, alpha)
    notes: Mapping[str, Any]  # losses, seconds, steps; go into the report as they are


def evaluate(config: Config, pair: Pair, progress: Progress) -> dict[str, Any]:
    """Measures everything that the report says."""
    ask = config.eval
    gammas = {batch: [ask.gamma] for batch in ask.batches}
    gammas[1] = sorted({ask.gamma, *ask.gammas})  # of the curve
    costs = {batch: _costs(config, pair, batch, each) for batch, each in gammas.items()}
    settings, extra = _settings(config, pair, costs, progress)
    curve = _speedup_curve(config, pair, costs[1], progress)
    lossless = _lossless(config, pair, progress)
    return {
        "settings": settings,
        "lossless": lossless,
        "speedup_by_gamma": curve,
        "learning_curve": {k: list(v) for k, v in pair.curves.items()},
        "training": dict(pair.notes),
        **extra,
    }


def _drafter(draft: Checkpoint, gamma: int) -> drafters.TwoModel:
    return drafters.TwoModel(draft, gamma=gamma)


def _settings(
    config: Config, pair: Pair, costs: Mapping[int, "Costs"], progress: Progress
):
    """The main table: decoding x batch x arm."""
    ask = config.eval
    arms = {name: _drafter(d, ask.gamma) for name, d in pair.drafts.items()}
    main = {name: arms[name] for name in (STANDARD, DISTILLED)}
    runs = [(name, batch) for batch in ask.batches for name in DECODINGS]
    task = progress.add_task("measuring decoding", total=len(runs))
    settings, by_position, equal_time = [], {}, {}
    for decoding, batch in runs:
        # The other baseline needs no clock of its own: once a decoding is enough.
        extra = batch == max(ask.batches)
        found = evals.compare(
            pair.target,
            arms if extra else main,
            pair.prompts[: ask.prompts],
            batch=batch,
            max_new_tokens=ask.max_new_tokens,
            sampling=DECODINGS[decoding],
            seed=config.seed + 1000,
        )
        if extra and EQUAL_TIME in found:
            equal_time[decoding] = _arm(found[EQUAL_TIME])
        by_position[f"{decoding}, batch {batch}"] = {
            name: found[name].stats.acceptance_by_position for name in main
        }
        settings.append(_setting(decoding, batch, ask.gamma, found, costs[batch]))
        progress.advance(task)
    return settings, {
        "acceptance_by_position": by_position,
        "cross_entropy_at_equal_time": equal_time,
    }


@dataclasses.dataclass(frozen=True)
class Costs:
    """Single passes, timed in turn in the middle of a text."""

    target_ms: float  # a target pass of one token
    draft: float  # a draft pass over it
    verify: Mapping[int, float]  # by gamma, a target pass of gamma + 1 tokens over it


def _costs(config: Config, pair: Pair, batch: int, gammas: Collection[int]) -> Costs:
    """Measured once a batch, so that all predictions rest on the same figures."""
    timings = evals.time_passes(
        {"target": (pair.target, 1), "draft": (pair.drafts[DISTILLED], 1)}
        | {str(gamma): (pair.target, gamma + 1) for gamma in gammas},
        batch=batch,
        capacity=config.eval.prompt_length + config.eval.max_new_tokens,
    )
    one = timings["target"]
    return Costs(
        1e3 * one.median_s,
        evals.ratio(timings["draft"], one),
        {gamma: evals.ratio(timings[str(gamma)], one) for gamma in gammas},
    )


def _arm(arm: evals.Arm) -> dict[str, float]:
    return {
        "alpha": arm.stats.acceptance_rate,
        "tau": arm.stats.block_efficiency,
        "tokens_per_s": arm.tokens_per_s,
        "speedup": arm.speedup,
    }


def _setting(decoding, batch, gamma, found, costs: Costs) -> dict[str, Any]:
    standard, distilled = _arm(found[STANDARD]), _arm(found[DISTILLED])
    c, verify = costs.draft, costs.verify[gamma]
    return {
        "decoding": decoding,
        "batch": batch,
        "gamma": gamma,
        "ar": {"tokens_per_s": found[evals.PLAIN].tokens_per_s},
        STANDARD: standard,
        DISTILLED: distilled,
        "gain": {
            key: distilled[key] / standard[key] - 1 for key in ("tau", "tokens_per_s")
        },
        "costs": {
            "draft_over_target": c,
            "verify_over_target": verify,
            "target_pass_ms": costs.target_ms,
            "draft_pass_ms": c * costs.target_ms,
            "verify_pass_ms": verify * costs.target_ms,
        },
        "predicted_speedup": {
            "here": evals.speedup(distilled["tau"], gamma, c, verify),
            # Where a pass of gamma + 1 tokens costs as much as a pass of one.
            "flat_device": evals.speedup(distilled["tau"], gamma, c, 1.0),
        },
    }


def _speedup_curve(config: Config, pair: Pair, costs: Costs, progress: Progress):
    """Speed-up of DistillSpec by draft length, T=1, batch 1, beside predictions."""
    ask = config.eval
    gammas = sorted({*ask.gammas, ask.gamma})
    task = progress.add_task("speed-up by gamma", total=len(gammas))
    rows = []
    for gamma in gammas:
        draft = pair.drafts[DISTILLED]
        found = evals.compare(
            pair.target,
            {DISTILLED: _drafter(draft, gamma)},
            pair.prompts[: ask.curve_prompts],
            batch=1,
            max_new_tokens=ask.max_new_tokens,
            sampling=DECODINGS["T=1.0"],
            seed=config.seed + 1000,
        )[DISTILLED]
        c, verify = costs.draft, costs.verify[gamma]
        tau = evals.block_efficiency(found.stats.acceptance_rate, gamma)
        rows.append(
            {
                "gamma": gamma,
                "tau": found.stats.block_efficiency,
                "measured": found.speedup,
                "predicted_here": evals.speedup(tau, gamma, c, verify),
                "predicted_flat_device": evals.speedup(tau, gamma, c),
            }
        )
        progress.advance(task)
    return rows


def _lossless(config: Config, pair: Pair, progress: Progress) -> dict[str, Any]:
    """Greedy equality n/N, and the chi-square of the real loop with its control."""
    ask = config.eval
    prompts = pair.prompts[: ask.lossless_prompts]
    drafter = _drafter(pair.drafts[DISTILLED], ask.gamma)
    task = progress.add_task("testing losslessness", total=2)
    equal, total = evals.greedy_equality(
        pair.target, drafter, prompts, max_new_tokens=ask.max_new_tokens
    )
    progress.advance(task)
    p_value, control = evals.chi_square_of_loop(
        pair.target,
        drafter,
        prompts,
        max_new_tokens=ask.max_new_tokens,
        sampling=DECODINGS["T=1.0"],
        seed=config.seed + 2000,
    )
    progress.advance(task)
    return {
        "greedy_equal": f"{equal}/{total}",
        "chi_square_p": p_value,
        "negative_control_p": control,
    }


def write_report(workdir: Path, report: Mapping[str, Any]) -> None:
    """Writes pictures, `report.md` and, last, `report.json`: the run is finished."""
    title = f"{report['target']} / {report['draft']}"
    if any(report["learning_curve"].values()):
        evals.plot_learning_curve(
            workdir / "learning_curve.png", report["learning_curve"], title
        )
    name, arms = list(report["acceptance_by_position"].items())[-1]
    evals.plot_by_position(
        workdir / "acceptance_by_position.png",
        {evals.LABELS[arm]: values for arm, values in arms.items()},
        f"{title}, {name}",
    )
    rows = report["speedup_by_gamma"]
    evals.plot_speedup(
        workdir / "speedup_by_gamma.png",
        {
            "measured here": [(r["gamma"], r["measured"]) for r in rows],
            "predicted here (pass costs, alpha)": [
                (r["gamma"], r["predicted_here"]) for r in rows
            ],
            "predicted, passes of any length cost one": [
                (r["gamma"], r["predicted_flat_device"]) for r in rows
            ],
        },
        f"{title}, T=1, batch 1",
    )
    write_atomically(workdir / "report.md", markdown(report))
    write_atomically(workdir / "report.json", evals.to_json(report))


def verdict(report: Mapping[str, Any]) -> list[str]:
    """What the run found, in sentences."""
    lines = []
    for setting in report["settings"]:
        gain, here = setting["gain"], setting["distillspec"]["speedup"]
        word = "faster" if here > 1 else "SLOWER"
        lines.append(
            f"{setting['decoding']}, batch {setting['batch']}: tau "
            f"{100 * gain['tau']:+.0f} % over standard SD; {here:.2f}x plain decoding "
            f"measured ({word}), {setting['predicted_speedup']['flat_device']:.2f}x "
            "predicted where longer passes are free"
        )
    proof = report["lossless"]
    lines.append(
        f"lossless: greedy equal {proof['greedy_equal']}, chi-square p = "
        f"{evals.number(proof['chi_square_p'], 3)}, negative control p = "
        f"{proof['negative_control_p']:.1e}"
    )
    return lines


def markdown(report: Mapping[str, Any]) -> str:
    """The report to read."""
    parts = [
        f"# {report['draft']} drafting for {report['target']}",
        "\n".join(f"- {line}" for line in verdict(report)),
        evals.markdown_table(evals.settings_table(report["settings"])),
        "alpha: accepted over evaluated drafts. tau: tokens a target call. Speed is of "
        "the decoding loop, neither compilation nor prefill, all arms in turn in one "
        "run. Predictions use the costs of single passes measured in the same run; the "
        "one for a flat device takes a pass of gamma + 1 tokens to cost as much as one "
        "of one token (a GPU or TPU at batch 1): a prediction, not a measurement.",
        "## Speed-up by gamma (T=1, batch 1)",
        evals.markdown_table(
            [
                ["gamma", "tau", "measured", "predicted here", "predicted, flat"],
                *(
                    [
                        str(row["gamma"]),
                        evals.number(row["tau"], 2),
                        evals.number(row["measured"], 2, "x"),
                        evals.number(row["predicted_here"], 2, "x"),
                        evals.number(row["predicted_flat_device"], 2, "x"),
                    ]
                    for row in report["speedup_by_gamma"]
                ),
            ]
        ),
    ]
    if report["cross_entropy_at_equal_time"]:
        parts += [
            "## Cross-entropy for as long as distillation took",
            evals.markdown_table(
                [
                    ["decoding", "alpha", "tau"],
                    *(
                        [k, evals.number(v["alpha"], 3), evals.number(v["tau"], 2)]
                        for k, v in report["cross_entropy_at_equal_time"].items()
                    ),
                ]
            ),
        ]
    parts += [
        "## Training",
        evals.markdown_table(
            [["what", "value"], *([k, _cell(v)] for k, v in report["training"].items())]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def print_report(console: Console, report: Mapping[str, Any]) -> None:
    """The table that a run ends with; it fits 80 columns."""
    header, *rows = evals.settings_table(report["settings"])
    table = Table(title=f"{report['draft']} drafting for {report['target']}")
    for index, name in enumerate(header):
        table.add_column(name, justify="left" if index in (0, 2) else "right")
    for index, row in enumerate(rows):
        table.add_row(*row, end_section=index % 3 == 2)
    console.print(table)
    for line in verdict(report):
        console.print(line, highlight=False)


def _cell(value: Any) -> str:
    return evals.number(value, 3) if isinstance(value, float) else str(value)
