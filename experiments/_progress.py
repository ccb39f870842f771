"""The bars of a run."""

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn


def progress_bars() -> Progress:
    """Bars with steps done and time left, on standard error, gone when all is done."""
    return Progress(
        *Progress.get_default_columns()[:-1],
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
