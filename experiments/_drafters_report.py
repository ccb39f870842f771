"""Tables and pictures of `experiments.drafters`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments._config import write_atomically
from specjax import evals


def write_report(workdir: Path, report: Mapping[str, Any]) -> None:
    """Pictures, drafters.md and, last, drafters.json."""
    for decoding in _decodings(report):
        rows = [row for row in report["rows"] if row["decoding"] == decoding]
        first = min(row["batch"] for row in rows)
        alone = [row for row in rows if row["batch"] == first]
        title = f"{report['target']}, {decoding}"
        evals.plot_by_position(
            workdir / f"acceptance_{decoding}.png",
            {row["drafter"]: row["alpha_by_position"] for row in alone},
            f"{title}, batch {first}",
        )
        evals.plot_heat_map(
            workdir / f"speedup_{decoding}.png",
            {(row["drafter"], f"batch {row['batch']}"): row["speedup"] for row in rows},
            title,
            ("drafter", "rows decoded together", "times plain decoding, measured"),
        )
        evals.plot_heat_map(
            workdir / f"categories_{decoding}.png",
            {
                (row["drafter"], category): tau
                for row in alone
                for category, tau in row["tau_by_category"].items()
                if tau is not None
            },
            title,
            ("drafter", "category", "tau, tokens a target call"),
        )
    write_atomically(workdir / "drafters.md", markdown(report))
    write_atomically(workdir / "drafters.json", evals.to_json(report))


def markdown(report: Mapping[str, Any]) -> str:
    """The tables to read."""
    parts = [
        f"# Drafters for {report['target']}",
        f"{report['target_parameters']:,} parameters. {report['prompts']} prompts, "
        f"{report['max_new_tokens']} new tokens each; chains of {report['gamma']}, "
        f"trees of {report['nodes']} nodes as deep. alpha: accepted over evaluated "
        "drafts. tau: tokens a target call. draft, verify: the parts of a round over a "
        "target pass of one token. round: a whole round over those two parts timed "
        "alone. predicted: tau / (draft + verify); flat: tau / (draft + 1), where "
        "longer passes are free: predictions. measured: times plain decoding, in turn "
        "in the same run.",
        "## What each took",
        _made(report),
        "\n".join(answers(report)),
    ]
    for decoding in _decodings(report):
        parts += [f"## {decoding}", _table(report, decoding)]
        parts += ["tau by category", _categories(report, decoding)]
    return "\n\n".join(parts) + "\n"


def answers(report: Mapping[str, Any]) -> list[str]:
    """Which drafters beat plain decoding, measured, a sentence a setting."""
    lines = []
    for decoding in _decodings(report):
        for batch in sorted({row["batch"] for row in report["rows"]}):
            rows = [
                row
                for row in report["rows"]
                if (row["decoding"], row["batch"]) == (decoding, batch)
            ]
            rows.sort(key=lambda row: -row["speedup"])
            won = [
                f"{row['drafter']} ({row['speedup']:.2f}x)"
                for row in rows
                if row["speedup"] > 1
            ]
            best = f"none; the best is {rows[0]['drafter']} ({rows[0]['speedup']:.2f}x)"
            lines.append(
                f"- {decoding}, batch {batch}: faster than plain decoding: "
                f"{', '.join(won) or best}"
            )
    return lines


def _made(report: Mapping[str, Any]) -> str:
    rows = [["drafter", "own parameters", "steps", "seconds"]]
    for name, made in report["made"].items():
        rows.append(
            [
                name,
                f"{made['parameters']:,}",
                str(made["steps"]),
                evals.number(made["seconds"], 0),
            ]
        )
    return evals.markdown_table(rows)


def _table(report: Mapping[str, Any], decoding: str) -> str:
    header = ["batch", "drafter", "alpha", "tau", "draft", "verify", "round"]
    table = [[*header, "predicted", "flat", "measured"]]
    for row in report["rows"]:
        if row["decoding"] == decoding:
            table.append(
                [
                    str(row["batch"]),
                    row["drafter"],
                    evals.number(row["alpha"], 3),
                    evals.number(row["tau"], 2),
                    evals.number(row["draft_over_target"], 2),
                    evals.number(row["verify_over_target"], 2),
                    evals.number(row["round_over_parts"], 2),
                    evals.number(row["predicted"], 2, "x"),
                    evals.number(row["predicted_flat"], 2, "x"),
                    evals.number(row["speedup"], 2, "x"),
                ]
            )
    return evals.markdown_table(table)


def _categories(report: Mapping[str, Any], decoding: str) -> str:
    rows = [row for row in report["rows"] if row["decoding"] == decoding]
    first = min(row["batch"] for row in rows)
    alone = [row for row in rows if row["batch"] == first]
    names = list(alone[0]["tau_by_category"])
    table = [["drafter", *names]]
    for row in alone:
        taus = [evals.number(row["tau_by_category"][name], 2) for name in names]
        table.append([row["drafter"], *taus])
    return evals.markdown_table(table)


def _decodings(report: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["decoding"] for row in report["rows"]))
