"""Which cases of a product the default run takes; `pytest -m full` takes the others."""

from collections.abc import Iterable

import pytest


def sampled(values: Iterable, *default):
    """`values` for `parametrize`, all but the `default` ones marked `full`.

    Values are compared as they are, so a wrong default is an error, not a test less.
    """
    values = list(values)
    missing = [value for value in default if value not in values]
    assert not missing, f"{missing} are none of {values}"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[] if value in default else [pytest.mark.full],
        )
        for value in values
    ]
