"""Measurement: acceptance, cost model, latency, losslessness, reports (level 6)."""

from specjax.evals._cost_model import (
    TreeChoice,
    best_gamma,
    best_tree,
    block_efficiency,
    block_efficiency_by_position,
    break_even_alpha,
    pass_cost,
    speedup,
)
from specjax.evals._intervals import interval
from specjax.evals._latency import Timing, measure, ratio
from specjax.evals._lossless import AcceptAll, chi_square_of_loop, greedy_equality
from specjax.evals._quality import rouge_l
from specjax.evals._report import (
    LABELS,
    markdown_table,
    number,
    plot_by_position,
    plot_heat_map,
    plot_learning_curve,
    plot_speedup,
    plot_trade_off,
    settings_table,
    to_json,
)
from specjax.evals._round import round_costs
from specjax.evals._speed import (
    PLAIN,
    Arm,
    Output,
    compare,
    pass_costs,
    run_once,
    time_passes,
)

__all__ = [
    "LABELS",
    "PLAIN",
    "AcceptAll",
    "Arm",
    "Output",
    "Timing",
    "TreeChoice",
    "best_gamma",
    "best_tree",
    "block_efficiency",
    "block_efficiency_by_position",
    "break_even_alpha",
    "chi_square_of_loop",
    "compare",
    "greedy_equality",
    "interval",
    "markdown_table",
    "measure",
    "number",
    "pass_cost",
    "pass_costs",
    "plot_by_position",
    "plot_heat_map",
    "plot_learning_curve",
    "plot_speedup",
    "plot_trade_off",
    "ratio",
    "rouge_l",
    "round_costs",
    "run_once",
    "settings_table",
    "speedup",
    "time_passes",
    "to_json",
]
