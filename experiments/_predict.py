"""Is a draft worth it? What speculation could buy, from pass costs alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.progress import Progress

from specjax import evals
from specjax.core import Checkpoint

ALPHAS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def predict(
    target: Checkpoint,
    draft: Checkpoint,
    *,
    gammas: Sequence[int],
    batches: Sequence[int],
    capacity: int,
    progress: Progress,
) -> dict[str, Any]:
    """Break-even acceptance and the best draft length, by batch, before any training.

    Costs do not depend on what the weights are, so an untrained draft will do. A round
    is taken to cost gamma draft passes and one target pass of gamma + 1 tokens.

    Args:
        target: the target.
        draft: a draft of the size in question.
        gammas: draft lengths to look at, at least 1 each.
        batches: rows decoded together.
        capacity: slots of a row's cache.
        progress: a bar is added to it.

    Returns:
        `batches`: for each the measured `passes`, a row a gamma (`verify_over_target`,
        `break_even_alpha`, `speedup` by alpha), and the best gamma by alpha.
    """
    task = progress.add_task("timing passes", total=len(batches))
    found = []
    for batch in batches:
        sizes = sorted({1, *(gamma + 1 for gamma in gammas)})
        timings = evals.time_passes(
            {"draft": (draft, 1)} | {str(n): (target, n) for n in sizes},
            batch=batch,
            capacity=capacity,
        )
        found.append(_of_batch(batch, gammas, timings))
        progress.advance(task)
    return {"alphas": list(ALPHAS), "batches": found}


def _of_batch(batch: int, gammas, timings: Mapping[str, evals.Timing]):
    one = timings["1"]
    draft_cost = evals.ratio(timings["draft"], one)
    rows = []
    for gamma in gammas:
        verify = evals.ratio(timings[str(gamma + 1)], one)
        rows.append(
            {
                "gamma": gamma,
                "verify_over_target": verify,
                "break_even_alpha": evals.break_even_alpha(gamma, draft_cost, verify),
                "speedup": [
                    evals.speedup(
                        evals.block_efficiency(alpha, gamma), gamma, draft_cost, verify
                    )
                    for alpha in ALPHAS
                ],
            }
        )
    best = [
        max(rows, key=lambda row, i=i: row["speedup"][i]) for i in range(len(ALPHAS))
    ]
    return {
        "batch": batch,
        "target_pass_ms": 1e3 * one.median_s,
        "draft_over_target": draft_cost,
        "rows": rows,
        # 0: at this acceptance no draft length beats plain decoding.
        "best_gamma": [
            row["gamma"] if row["speedup"][i] > 1 else 0 for i, row in enumerate(best)
        ],
    }


def answer(found: Mapping[str, Any]) -> list[str]:
    """What it comes to, a sentence a batch."""
    lines = []
    for of in found["batches"]:
        least = min(of["rows"], key=lambda row: row["break_even_alpha"])
        head = f"batch {of['batch']}: "
        if least["break_even_alpha"] > 1:
            lines.append(
                head + "no draft of this size can win on this machine, not even if all "
                "of its drafts were accepted"
            )
            continue
        best = ", ".join(
            f"{alpha:g}: gamma {gamma} ({_speedup(of, gamma, i):.2f}x)"
            if gamma
            else f"{alpha:g}: none"
            for i, (alpha, gamma) in enumerate(
                zip(found["alphas"], of["best_gamma"], strict=True)
            )
        )
        lines.append(
            head
            + f"a draft pays from an acceptance of {least['break_even_alpha']:.2f} "
            f"(gamma {least['gamma']}); best at acceptance {best}"
        )
    return lines


def markdown(found: Mapping[str, Any]) -> str:
    """The prediction to read."""
    parts = [
        "# Is a draft worth it?",
        "\n".join(f"- {line}" for line in answer(found)),
        "The columns 0.4 to 0.9: speed-up at that acceptance. Predicted from passes "
        "timed alone, for independent acceptances (Leviathan et "
        "al., theorem 3.8, with the measured cost of verifying): no measurement of "
        "decoding.",
    ]
    for of in found["batches"]:
        header = ["gamma", "verify/target", "break-even"]
        header += [f"{alpha:g}" for alpha in found["alphas"]]
        rows = [
            [
                str(row["gamma"]),
                evals.number(row["verify_over_target"], 2),
                evals.number(row["break_even_alpha"], 2),
                *(evals.number(value, 2, "x") for value in row["speedup"]),
            ]
            for row in of["rows"]
        ]
        parts += [
            f"## Batch {of['batch']}: target pass {of['target_pass_ms']:.2f} ms, draft "
            f"pass {of['draft_over_target']:.2f} of it",
            evals.markdown_table([header, *rows]),
        ]
    return "\n\n".join(parts) + "\n"


def _speedup(of: Mapping[str, Any], gamma: int, index: int) -> float:
    return next(row["speedup"][index] for row in of["rows"] if row["gamma"] == gamma)
