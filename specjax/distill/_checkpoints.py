"""Training state on disk. The only module that touches Orbax (its API still moves)."""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax import Array

from specjax import parallel
from specjax.distill._state import TrainState

_FORMAT = "specjax-train-state-2"
_SUMS = "checksums.json"


class Checkpoints:
    """The numbered checkpoints of a run: everything that an exact resume needs.

    A checkpoint is written beside its place and renamed into it, so one that was killed
    half-way is never taken for whole: the one before stays the newest. The structure
    (named tuples of the optimiser, types, shapes) comes from the state given to
    `restore`; a checkpoint that does not fit it is refused by name.

    Args:
        folder: made if missing.
        keep: how many of the newest stay; None: all.
    """

    def __init__(self, folder: str | Path, keep: int | None = 2):
        self.folder = Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, enable_async_checkpointing=False
        )
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder} cannot hold checkpoints: it is a file")
        self._manager = ocp.CheckpointManager(self.folder, options=options)

    @property
    def steps(self) -> list[int]:
        """The steps with a whole checkpoint, ascending."""
        return sorted(self._manager.all_steps())

    @property
    def latest(self) -> int | None:
        """The newest of them, None without any."""
        return max(self.steps, default=None)

    def save(self, state: TrainState, metadata: Mapping[str, Any]) -> None:
        """Writes the state under its own step number and returns when it is on disk.

        Args:
            state: any train state; one saved at that step already is left as it is.
            metadata: what else the run has to remember, for JSON.
        """
        step = int(state.step)
        if step in self.steps:
            return
        notes = {
            "format": _FORMAT,
            "structure": _structure(state),
            "key": str(jax.random.key_impl(state.key)),
            "metadata": dict(metadata),
        }
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(_to_tree(state)), notes=ocp.args.JsonSave(notes)
        )
        self._manager.save(step, args=args, force=True)
        self._manager.wait_until_finished()
        if parallel.is_first():
            sums = json.dumps(_checksums(self.folder / str(step)))
            (self.folder / str(step) / _SUMS).write_text(sums)
        parallel.wait(f"checkpoint {step}")

    def restore(
        self, like: TrainState, step: int | None = None
    ) -> tuple[TrainState, dict[str, Any]]:
        """Reads a checkpoint.

        Args:
            like: a state of the same run, for structure, types and places on the mesh.
            step: which one; default: the newest.

        Returns:
            The state and the metadata.

        Raises:
            ValueError: there is none, it is damaged, or it is of another run.
        """
        step = self.latest if step is None else step
        if step is None or step not in self.steps:
            raise ValueError(
                f"{self.folder} holds no checkpoint of step {step}; it has {self.steps}"
            )
        self._verify(step)
        notes = self._notes(step)
        self._check(step, notes, like)
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
            _to_tree(like),
        )
        args = ocp.args.Composite(state=ocp.args.StandardRestore(target))
        try:
            tree = self._manager.restore(step, args=args)["state"]
        except Exception as error:  # Orbax raises what its storage raises
            raise self._damaged(step, error) from error
        return _from_tree(tree, notes["key"], like), notes["metadata"]

    def close(self) -> None:
        """Releases Orbax's threads."""
        self._manager.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error) -> None:
        self.close()

    def _verify(self, step: int) -> None:
        """Compares the files with their checksums, before Orbax reads in threads."""
        folder = self.folder / str(step)
        if not (folder / _SUMS).exists():  # killed just before they were written
            return
        try:
            wanted = json.loads((folder / _SUMS).read_text())
        except json.JSONDecodeError as error:
            raise self._damaged(step, error) from error
        found = _checksums(folder)
        for name in wanted:
            if found.get(name) != wanted[name]:
                what = "differs from what was written" if name in found else "is gone"
                raise self._damaged(step, OSError(f"{name} {what}"))

    def _notes(self, step: int) -> dict[str, Any]:
        try:
            args = ocp.args.Composite(notes=ocp.args.JsonRestore())
            notes = self._manager.restore(step, args=args)["notes"]
        except Exception as error:  # Orbax raises what its storage raises
            raise self._damaged(step, error) from error
        if not isinstance(notes, dict) or notes.get("format") != _FORMAT:
            raise ValueError(
                f"the checkpoint of step {step} in {self.folder} was not written by "
                f"this trainer: expected format {_FORMAT!r}"
            )
        return notes

    def _check(self, step: int, notes: dict[str, Any], like: TrainState) -> None:
        stored, wanted = notes["structure"], json.loads(json.dumps(_structure(like)))
        # Parameters first: what differs there explains what differs behind them.
        names = sorted(
            stored.keys() | wanted.keys(), key=lambda n: ("opt_state" in n, n)
        )
        for name in names:
            if stored.get(name) != wanted.get(name):
                raise ValueError(
                    f"the checkpoint of step {step} in {self.folder} is of another "
                    f"model or optimiser: {name} is {stored.get(name)} there and "
                    f"{wanted.get(name)} here"
                )

    def _damaged(self, step: int, error: Exception) -> ValueError:
        others = [s for s in self.steps if s != step]
        before = (
            f"remove it to go on from {others[-1]}" if others else "there is no other"
        )
        reason = str(error).strip().split("\n")[0][:200]
        return ValueError(
            f"the checkpoint of step {step} in {self.folder} is damaged or not a "
            f"checkpoint ({type(error).__name__}: {reason}); {before}"
        )


def _checksums(folder: Path) -> dict[str, int]:
    """Path -> CRC of every file under a folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {
        str(path.relative_to(folder)): zlib.crc32(path.read_bytes())
        for path in files
        if path.name != _SUMS
    }


def _structure(state: TrainState) -> dict[str, Any]:
    """Path -> [shape, type] of every leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(_to_tree(state))
    return {
        jax.tree_util.keystr(path): [list(leaf.shape), str(leaf.dtype)]
        for path, leaf in leaves
    }


def _to_tree(state: TrainState) -> dict[str, Any]:
    """Plain arrays: a typed key is stored as its data. What is empty is left out."""
    tree = {
        "params": state.params,
        "opt_state": state.opt_state,
        "step": state.step,
        "key": jax.random.key_data(state.key),
        "aux": state.aux,
        "memory": state.memory,
    }
    return {name: part for name, part in tree.items() if jax.tree.leaves(part)}


def _from_tree(tree: dict[str, Any], key_impl: str, like: TrainState) -> TrainState:
    key: Array = jax.random.wrap_key_data(tree["key"], impl=key_impl)
    return dataclasses.replace(like, **{**tree, "key": key})
