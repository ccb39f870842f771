"""Experiment settings: nested frozen dataclasses, and the command line that sets them.

A config class holds its defaults; a preset is an instance of it. `--set a.b=c` replaces
one field, read by the type that the field declares.
"""

import argparse
import dataclasses
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

from specjax.core import near

C = TypeVar("C")


@dataclasses.dataclass(frozen=True)
class Arguments(Generic[C]):
    """What the command line asked for."""

    config: C
    workdir: Path
    resume: bool
    preset: str


def parse(
    argv: Sequence[str] | None,
    config_class: type[C],
    presets: Mapping[str, C],
    shortcuts: Mapping[str, str] | None = None,
    description: str | None = None,
    workdir: Callable[[str], str] = "runs/{}".format,
) -> Arguments[C]:
    """Reads an experiment's command line.

    Settings apply in the order given, later ones win, and the config's own checks run
    once on the result.

    Args:
        argv: the arguments; None: those of this process.
        config_class: a frozen dataclass, whose fields may be such dataclasses.
        presets: configs by name; the first one is the default.
        shortcuts: extra flags and the key each sets: `{"--target": "target.source"}`;
            the flag of a yes-or-no key takes no value and sets it.
            `--seed` sets `seed`, if there is such a field.
        description: what `--help` says first; usually `__doc__`.
        workdir: preset -> the default folder to write to.

    Returns:
        The config, the folder to write to, and whether to resume.

    Raises:
        ValueError: an unknown preset or key, or a value that its field cannot hold.
    """
    fields = keys(config_class)
    shortcuts = dict(shortcuts or {})
    if "seed" in fields:
        shortcuts.setdefault("--seed", "seed")
    default = next(iter(presets))
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", default=default)
    shown = first.parse_known_args(argv)[0].config
    shown = shown if shown in presets else default
    parser = argparse.ArgumentParser(
        description=description,
        epilog="keys of --set, with their values in the preset "
        f"{shown!r}:\n{_listing(presets[shown])}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--workdir", type=Path, help=f"default: {workdir('PRESET')}")
    parser.add_argument(
        "--config", default=default, metavar="PRESET", help=", ".join(presets)
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="replace one setting; may be repeated",
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in the workdir"
    )
    for flag, key in shortcuts.items():
        if key not in fields:
            raise KeyError(f"the shortcut {flag} names the key {key!r}: there is none")
        if fields[key] is bool:
            parser.add_argument(
                flag,
                dest="settings",
                action="append_const",
                const=f"{key}=true",
                help=f"same as --set {key}=true",
            )
            continue
        parser.add_argument(
            flag,
            dest="settings",
            action="append",
            type=lambda value, key=key: f"{key}={value}",
            metavar=key.rpartition(".")[2].upper(),
            help=f"same as --set {key}=...",
        )
    arguments = parser.parse_args(argv)
    if arguments.config not in presets:
        raise ValueError(
            f"unknown preset --config {arguments.config}; "
            + near(arguments.config, presets)
        )
    return Arguments(
        config=replace(presets[arguments.config], arguments.settings),
        workdir=arguments.workdir or Path(workdir(arguments.config)),
        resume=arguments.resume,
        preset=arguments.config,
    )


def keys(config_class: type) -> dict[str, Any]:
    """Every key that can be set, such as `a.b`, and the type of its value."""
    found = {}
    for name, kind in _hints(config_class).items():
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            found |= {f"{name}.{key}": k for key, k in keys(kind).items()}
        else:
            found[name] = kind
    return found


def replace(config: C, settings: Sequence[str]) -> C:
    """Returns the config with settings of the form `a.b=c` replaced.

    Raises:
        ValueError: an unknown key, or a value that its field cannot hold.
    """
    fields = keys(type(config))
    changes: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        key = key.strip()
        if not equals:
            raise ValueError(f"--set takes KEY=VALUE, got {setting!r}")
        if key not in fields:
            inside = [k for k in fields if k.startswith(key + ".")]
            hint = "it holds " + ", ".join(inside) if inside else near(key, fields)
            raise ValueError(f"unknown key {key!r} in --set {setting}; {hint}")
        changes[key] = _read(key, value.strip(), fields[key])
    return _rebuild(config, changes)


def _rebuild(config: C, changes: Mapping[str, Any]) -> C:
    """Replaces from the inside out, so that each level is checked once, complete."""
    here = {key: value for key, value in changes.items() if "." not in key}
    for name in {key.partition(".")[0] for key in changes} - set(here):
        inside = {
            key.partition(".")[2]: value
            for key, value in changes.items()
            if key.startswith(name + ".")
        }
        here[name] = _rebuild(getattr(config, name), inside)
    return dataclasses.replace(config, **here) if here else config  # pyright: ignore


def to_dict(config: Any) -> dict[str, Any]:
    """The config as JSON would hold it: dictionaries, lists and plain values."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def to_json(config: Any) -> str:
    """The config as indented JSON."""
    return json.dumps(to_dict(config), indent=2)


def differences(config: Any, other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys that differ between a config and another one's `to_dict`.

    Returns:
        For each such key both values; a key that one side lacks counts as `None`.
    """
    left, right = _flat(to_dict(config)), _flat(other)
    return {
        key: (left.get(key), right.get(key))
        for key in sorted(left.keys() | right.keys())
        if left.get(key) != right.get(key)
    }


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _listing(config: Any) -> str:
    values = _flat(to_dict(config))
    return "\n".join(f"  {key}={json.dumps(value)}" for key, value in values.items())


def _hints(config_class: type) -> dict[str, Any]:
    hints = typing.get_type_hints(config_class)
    return {f.name: hints[f.name] for f in dataclasses.fields(config_class) if f.init}


def _read(key: str, text: str, kind: Any) -> Any:
    """Reads `text` as a value of type `kind`, or raises a ValueError."""
    try:
        return _value(text, kind)
    except ValueError:
        pass
    raise ValueError(f"--set {key}={text}: expected {_name(kind)}")


def _value(text: str, kind: Any) -> Any:
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _first(text, sorted(choices, key=_reading_order))
    if origin is typing.Literal:
        return _literal(text, choices)
    if kind is tuple or origin is tuple:
        return _tuple(text, choices or (str, ...))
    if kind not in _READERS:
        raise TypeError(f"no way to read a value of type {kind} from text")
    return _READERS[kind](text)


def _first(text: str, kinds: Sequence[Any]) -> Any:
    """Reads `text` by the first of `kinds` that it fits."""
    for kind in kinds:
        try:
            return _value(text, kind)
        except ValueError:
            continue
    _reject()


def _reading_order(kind: Any) -> int:
    """None before all else, text last: `none` and `3` are texts too."""
    order = [types.NoneType, bool, int, float]
    return order.index(kind) if kind in order else len(order) + (kind is str)


def _literal(text: str, choices: Sequence[Any]) -> Any:
    by_text = {str(choice): choice for choice in choices}
    return by_text[text] if text in by_text else _reject()


def _tuple(text: str, kinds: Sequence[Any]) -> tuple:
    inside = re.fullmatch(r"\((.*)\)|\[(.*)\]", text)
    if inside:
        text = inside.group(1) or inside.group(2) or ""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        kinds = [kinds[0]] * len(parts)
    if len(parts) != len(kinds):
        _reject()
    return tuple(_value(part, kind) for part, kind in zip(parts, kinds, strict=True))


def _bool(text: str) -> bool:
    words = {"true": True, "false": False, "yes": True, "no": False}
    words |= {"on": True, "off": False, "1": True, "0": False}
    return words[text.lower()] if text.lower() in words else _reject()


def _float(text: str) -> float:
    number = float(text)
    return _reject() if math.isnan(number) else number


def _none(text: str) -> None:
    return None if text.lower() in ("none", "null") else _reject()


def _reject() -> NoReturn:
    raise ValueError


_READERS = {
    int: int,
    float: _float,
    str: str,
    bool: _bool,
    Path: Path,
    types.NoneType: _none,
}


def _name(kind: Any) -> str:
    """The type in words, for an error."""
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_name(choice) for choice in choices)
    if origin is typing.Literal:
        return "one of " + ", ".join(map(str, choices))
    if origin is tuple and choices[-1] is Ellipsis:
        return f"a list like a,b,c of values each {_name(choices[0])}"
    if origin is tuple:
        return f"{len(choices)} values like a,b: " + ", ".join(map(_name, choices))
    words = {int: "a whole number", float: "a number", bool: "true or false"}
    words |= {types.NoneType: "none", str: "a text", Path: "a path"}
    return words.get(kind, str(kind))
