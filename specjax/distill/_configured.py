"""Objectives from plain data, as a configuration file holds it."""

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from specjax import divergences
from specjax.core import near
from specjax.distill._objective import Objective
from specjax.distill._term import Term, registry


def make_objective(
    terms: Sequence[Mapping[str, Any]],
    *,
    chunk: int | None = 1024,
    monitor: bool = True,
) -> Objective:
    """A weighted sum of registered terms.

    Args:
        terms: one mapping each: "term", a name of `distill.terms`; "weight", default 1;
            and the term's own options. Lists do for tuples. A term's "divergence" is
            written as in `divergences.parse`, or its options stand beside it: both
            "jsd(beta=0.1)" and "jsd" with "beta" will do.
        chunk: see `Objective`.
        monitor: see `Objective`.

    Raises:
        ValueError: an unknown term or option (near names are listed), a value of the
            wrong type, or one that the term refuses.

    Example:
        >>> make_objective([
        ...     {"term": "cross_entropy", "weight": 0.5},
        ...     {"term": "distill", "weight": 0.5, "divergence": "jsd", "beta": 0.1},
        ... ]).names
        ('cross_entropy', 'distill')
    """
    if isinstance(terms, str | Mapping) or not isinstance(terms, Sequence):
        raise ValueError(f"an objective is a list of terms, got {terms!r}")
    made = [_weighted(entry) for entry in terms]
    return Objective(*made, chunk=chunk, monitor=monitor)


def _weighted(entry: Any) -> tuple[float, Term]:
    name = entry.get("term") if isinstance(entry, Mapping) else None
    if not isinstance(name, str):
        raise ValueError(
            'a term is written {"term": NAME, "weight": W, ...}, got '
            f"{entry!r}; known: {', '.join(registry.names())}"
        )
    options = {key: value for key, value in entry.items() if key != "term"}
    weight = options.pop("weight", 1.0)
    if not _is_number(weight):
        raise ValueError(f"weight must be a number, got {weight!r} in {entry!r}")
    return weight, make_term(name, **options)


def make_term(name: str, /, **options: Any) -> Term:
    """A registered term with its options, as `make_objective` reads them.

    Raises:
        ValueError: as there.

    Example:
        >>> make_term("hint", layers=[["layers.0", "layers.3"]]).layers
        (('layers.0', 'layers.3'),)
    """
    kind = registry.get(name)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    options, known = _bind_divergence(fields, options)
    for option in options:
        if option not in fields:
            hint = near(option, known) if known else "it has none."
            raise ValueError(f"the term {name!r} has no option {option!r}; {hint}")
    missing = [
        f.name for f in fields.values() if _required(f) and f.name not in options
    ]
    if missing:
        raise ValueError(f"the term {name!r} needs the option {', '.join(missing)}")
    hints = typing.get_type_hints(kind)
    for option, value in options.items():
        if not _fits(value, hints[option]):
            raise ValueError(
                f"the option {option!r} of the term {name!r} must be of type "
                f"{_written(hints[option])}, got {value!r}"
            )
    try:
        return kind(**{option: _frozen(value) for option, value in options.items()})
    except ValueError as error:
        raise ValueError(f"the term {name!r}: {error}") from None


def _bind_divergence(
    fields: Mapping[str, dataclasses.Field], options: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Options with the divergence's own bound to it, and all names that may be given.

    A term that is not made of a divergence keeps its options as they are.
    """
    given = options.get(
        "divergence", getattr(fields.get("divergence"), "default", None)
    )
    if isinstance(given, str):
        given = divergences.parse(given)
    if not isinstance(given, divergences.Divergence):
        return options, list(fields)
    known = list(inspect.signature(divergences.get(given.name)).parameters)[2:]
    known = [option for option in known if option not in fields]
    mine = {key: value for key, value in options.items() if key in known}
    bound = dict(given.options)
    twice = sorted(set(mine) & set(bound)) if "divergence" in options else []
    if twice:
        raise ValueError(
            f"the option {twice[0]!r} is given twice, in "
            f"{options['divergence']!r} and beside it"
        )
    divergence = divergences.resolve(given.name, **(bound | mine))
    rest = {key: value for key, value in options.items() if key not in mine}
    return rest | {"divergence": divergence}, [*fields, *known]


def _required(field: dataclasses.Field) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _frozen(value: Any) -> Any:
    """Lists as tuples, inside too: a term is hashable."""
    if isinstance(value, list | tuple):
        return tuple(_frozen(each) for each in value)
    return value


_PLAIN = (bool, int, float, str, type(None))


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a plain type; of others the term itself is the judge."""
    kinds = typing.get_args(hint) if _is_union(hint) else (hint,)
    if not all(kind in _PLAIN for kind in kinds):
        return True
    if _is_number(value) and isinstance(value, int):
        return int in kinds or float in kinds
    return type(value) in kinds


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


def _written(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
