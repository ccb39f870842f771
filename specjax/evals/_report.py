"""Tables and pictures of a run. Nothing here measures anything."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Figures without pyplot: no window system, no global state of a notebook touched.
from matplotlib.figure import Figure

LABELS = {
    "ar": "plain decoding",
    "standard_sd": "standard SD",
    "distillspec": "DistillSpec",
}


def to_json(value: Any) -> str:
    """Indented JSON; numbers that it cannot hold (NaN, infinities) become null."""
    return json.dumps(_finite(value), indent=2) + "\n"


def settings_table(settings: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The report's settings as rows of short cells, a header first."""
    header = ["decoding", "batch", "arm", "alpha", "tau", "tokens/s", "speed-up"]
    rows = [header]
    for setting in settings:
        for arm in ("ar", "standard_sd", "distillspec"):
            values = setting[arm]
            rows.append(
                [
                    setting["decoding"] if arm == "ar" else "",
                    str(setting["batch"]) if arm == "ar" else "",
                    LABELS[arm],
                    number(values.get("alpha"), 3),
                    number(values.get("tau"), 2),
                    number(values["tokens_per_s"], 1),
                    number(values.get("speedup", 1.0), 2, "x"),
                ]
            )
    return rows


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, columns padded so that it reads as plain text too."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def number(value: float | None, digits: int, suffix: str = "") -> str:
    """A number for a table; a dash where there is none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.{digits}f}{suffix}"


def plot_learning_curve(
    path: Path, curves: Mapping[str, Sequence[tuple[float, float]]], title: str
) -> None:
    """Acceptance over training: label -> (step, alpha)."""
    figure, axes = _axes()
    for label, points in curves.items():
        steps, alphas = zip(*points, strict=True)
        axes.plot(steps, alphas, marker="o", markersize=3, label=label)
    axes.set_xlabel("further training steps of the draft")
    axes.set_ylabel("alpha on held-out target text")
    _finish(figure, axes, path, title)


def plot_by_position(
    path: Path, curves: Mapping[str, Sequence[float]], title: str
) -> None:
    """Acceptance at each position of the block, given that it was reached."""
    figure, axes = _axes()
    for label, alphas in curves.items():
        axes.plot(range(1, len(alphas) + 1), alphas, marker="o", label=label)
    axes.set_xlabel("position in the drafted block")
    axes.set_ylabel("share accepted, if reached")
    axes.set_xticks(range(1, 1 + max(len(a) for a in curves.values())))
    axes.set_ylim(0, 1)
    _finish(figure, axes, path, title)


def plot_speedup(
    path: Path, curves: Mapping[str, Sequence[tuple[int, float]]], title: str
) -> None:
    """Speed-up by draft length: label -> (gamma, speed-up); predictions dashed."""
    figure, axes = _axes()
    for label, points in curves.items():
        gammas, values = zip(*points, strict=True)
        style = "--" if "predicted" in label else "-"
        axes.plot(gammas, values, style, marker="o", markersize=4, label=label)
    axes.axhline(1.0, color="grey", linewidth=1)
    axes.set_xlabel("gamma, tokens drafted a round")
    axes.set_ylabel("speed-up over plain decoding")
    _finish(figure, axes, path, title)


def plot_trade_off(
    path: Path,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    points: Mapping[str, tuple[float, float]],
    title: str,
    labels: tuple[str, str],
) -> None:
    """A quality over a cost: a curve a method, and single points to compare with.

    Args:
        path: where to.
        curves: label -> (cost, quality).
        points: label -> (cost, quality), drawn as larger marks.
        title: of the picture.
        labels: of cost and quality, with their units.
    """
    figure, axes = _axes()
    for label, line in curves.items():
        costs, qualities = zip(*line, strict=True)
        axes.plot(costs, qualities, marker="o", markersize=4, label=label)
    for (label, point), mark in zip(points.items(), "*sD^v", strict=False):
        axes.plot(*point, mark, markersize=11, color="black", label=label)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    _finish(figure, axes, path, title)


def plot_heat_map(
    path: Path,
    values: Mapping[tuple[str, str], float],
    title: str,
    labels: tuple[str, str, str],
) -> None:
    """A number for each (row, column), as a colour and in writing.

    Args:
        path: where to.
        values: (row, column) -> number; missing cells stay empty.
        title: of the picture.
        labels: of the rows, of the columns, of the colours (with its unit).
    """
    rows = list(dict.fromkeys(row for row, _ in values))
    columns = list(dict.fromkeys(column for _, column in values))
    grid = [[values.get((r, c), math.nan) for c in columns] for r in rows]
    figure = Figure(figsize=(2.2 + 1.3 * len(columns), 1.6 + 0.55 * len(rows)))
    axes = figure.add_subplot()
    image = axes.imshow(grid, cmap="viridis", aspect="auto")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylabel(labels[0])
    axes.set_xlabel(labels[1])
    middle = (max(values.values()) + min(values.values())) / 2
    for (r, c), value in values.items():
        colour = "black" if value > middle else "white"
        where = columns.index(c), rows.index(r)
        axes.text(
            *where, number(value, 2), ha="center", va="center", color=colour, fontsize=8
        )
    figure.colorbar(image, ax=axes, label=labels[2])
    axes.set_title(title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _axes():
    figure = Figure(figsize=(6.4, 4.0))
    return figure, figure.add_subplot()


def _finish(figure, axes, path: Path, title: str) -> None:
    axes.set_title(title)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
