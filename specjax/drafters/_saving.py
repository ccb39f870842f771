"""Trained drafters on disk: their own parameters, their settings, and whose they are.

A folder holds `model.safetensors`, tensors named by their path with dots, and
`drafter.json`. The target is not in it, only its digest.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from specjax.core import Checkpoint, Params, TrainableDrafter
from specjax.drafters._made_for import MadeFor
from specjax.drafters._registry import registry
from specjax.models import HeadVocabulary

_FORMAT = "specjax-drafter-1"
_SETTINGS, _WEIGHTS = "drafter.json", "model.safetensors"
_IDS = "settings"  # ids of a vocabulary among the settings are tensors too
_RUNTIME = ("params", "made_for", "model")  # fields that are no settings


def save(drafter: Any, folder: str | Path, target: Checkpoint) -> Path:
    """Writes a trained drafter; an earlier one in the folder is replaced.

    Args:
        drafter: a registered drafter that carries parameters (`with_params`).
        folder: where; made if missing.
        target: the checkpoint that it was trained for, known later by its digest.

    Returns:
        The folder.

    Raises:
        ValueError: it has no parameters, is not registered, or does not fit `target`.
        OSError: the folder cannot be written.
    """
    name = _name_of(drafter)
    own = getattr(drafter, "params", None)
    if own is None:
        raise ValueError(
            f"this {name} has no parameters to save: give it trained ones, "
            "drafter.with_params(state.params)"
        )
    dataclasses.replace(drafter, made_for=None).bind(target, target.model.max_length)
    tensors = _flatten(own)
    settings: dict[str, Any] = {}
    for field in _settings_of(type(drafter)):
        value = getattr(drafter, field)
        if isinstance(value, HeadVocabulary):
            tensors[f"{_IDS}.{field}"] = value.ids
            value = {"head_vocabulary": value.digest}
        settings[field] = value
    notes = {
        "format": _FORMAT,
        "drafter": name,
        "settings": settings,
        "made_for": dataclasses.asdict(MadeFor.of(target)),
    }
    folder = Path(folder).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    # The settings come last: a folder without them is not taken for whole.
    (folder / _SETTINGS).unlink(missing_ok=True)
    save_file(tensors, folder / _WEIGHTS)
    (folder / _SETTINGS).write_text(json.dumps(notes, indent=2) + "\n", "utf-8")
    return folder


def load(folder: str | Path, *, any_target: bool = False) -> Any:
    """Reads what `save` wrote.

    Args:
        folder: of the drafter.
        any_target: let it draft for other targets of the same sizes too. (The output
            keeps its law all the same, as long as the verifier is lossless: only fewer
            drafts stay.)

    Returns:
        The drafter with its parameters, for `specjax.generate`.

    Raises:
        ValueError: there is no drafter in the folder, or it is damaged.
    """
    folder = Path(folder).expanduser()
    notes = _read_notes(folder)
    try:
        tensors = load_file(folder / _WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"the weights of the drafter in {str(folder)!r} cannot be read ({error}); "
            "save it again"
        ) from error
    kind: Any = registry.get(notes["drafter"])
    settings = dict(notes["settings"])
    unknown = sorted(settings.keys() ^ set(_settings_of(kind)))
    if unknown:
        raise ValueError(
            f"{str(folder / _SETTINGS)!r} does not fit the drafter "
            f"{notes['drafter']!r} of this version: {', '.join(unknown)}"
        )
    for name, value in settings.items():
        settings[name] = _setting(value, tensors.pop(f"{_IDS}.{name}", None), folder)
    drafter = kind(**settings).with_params(_unflatten(tensors))
    made_for = MadeFor(**notes["made_for"])
    return drafter if any_target else dataclasses.replace(drafter, made_for=made_for)


def _read_notes(folder: Path) -> dict[str, Any]:
    path = folder / _SETTINGS
    if not path.is_file():
        raise ValueError(
            f"there is no drafter in {str(folder)!r}: it has no {_SETTINGS}; give a "
            "folder that drafters.save wrote"
        )
    try:
        notes = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is not JSON ({error})") from error
    keys = {"format", "drafter", "settings", "made_for"}
    if not isinstance(notes, dict) or notes.get("format") != _FORMAT:
        raise ValueError(f"{str(path)!r} is not of the format {_FORMAT!r}")
    if not keys <= notes.keys():
        raise ValueError(f"{str(path)!r} lacks {', '.join(keys - notes.keys())}")
    return notes


def _setting(value: Any, ids: np.ndarray | None, folder: Path) -> Any:
    """A setting as its drafter takes it: JSON has lists where it has tuples."""
    if isinstance(value, dict) and value.keys() == {"head_vocabulary"}:
        head = None if ids is None else HeadVocabulary(ids)
        if head is None or head.digest != value["head_vocabulary"]:
            raise ValueError(
                f"the ids of the draft vocabulary in {str(folder)!r} are not those "
                f"that {_SETTINGS} speaks of: the folder is damaged, save it again"
            )
        return head
    if isinstance(value, list):
        return tuple(_setting(part, None, folder) for part in value)
    return value


def _settings_of(kind: type) -> list[str]:
    return [f.name for f in dataclasses.fields(kind) if f.name not in _RUNTIME]


def _name_of(drafter: TrainableDrafter) -> str:
    for name in registry.names():
        if registry.get(name) is type(drafter):
            return name
    raise ValueError(
        f"{type(drafter).__name__} is not registered: only registered drafters can be "
        "saved, for load() finds them by their name"
    )


def _flatten(own: Params) -> dict[str, np.ndarray]:
    """A nested dict as tensors by path."""
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(own):
        names = [key.key for key in path]
        assert all(isinstance(name, str) and "." not in name for name in names)
        tensors[".".join(names)] = np.ascontiguousarray(jax.device_get(leaf))
    return tensors


def _unflatten(tensors: dict[str, np.ndarray]) -> Params:
    own: dict[str, Any] = {}
    for path, tensor in tensors.items():
        *folders, name = path.split(".")
        inner = own
        for part in folders:
            inner = inner.setdefault(part, {})
        inner[name] = jax.numpy.asarray(tensor)
    return own
