"""Folders of arrays, written shard by shard, that a killed writer goes on with.

A shard is one safetensors file that appears by a rename, and says in its own header
whose it is and what its arrays' checksum is. The manifest, with a checksum a file, is
written last: without it the folder is not finished. Nothing depends on the clock or on
the process, so that a run that was interrupted leaves the same bytes as one that was
not.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

MANIFEST = "manifest.json"
_FORMAT = "specjax-shards-1"
_PART = ".part"
_HEADER = "specjax"  # one entry: a map of several has no order to rely on

Identity = Mapping[str, str | int | float | None]


class ShardWriter:
    """Writes what is missing of a folder.

    Args:
        folder: made if missing.
        what: what is in it, for messages: "teacher cache".
        identity: what its content depends on, plain values.
        num_shards: how many there will be.

    Raises:
        ValueError: it holds shards of another identity, or damaged ones.
        OSError: it cannot be made.
    """

    def __init__(
        self, folder: str | Path, what: str, identity: Identity, num_shards: int
    ):
        self.folder = Path(folder).expanduser()
        self.what = what
        self.identity = dict(identity)
        self.num_shards = num_shards
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(
                f"cannot write a {what} to {self.folder} ({error.strerror or error}); "
                "choose a folder that can be written"
            ) from None
        for left in self.folder.glob(f".*{_PART}"):  # of a writer that was killed
            left.unlink()
        self.is_finished = (self.folder / MANIFEST).exists()
        if self.is_finished:
            check_identity(
                self.folder, what, read_manifest(self.folder, what), identity
            )
            self._there = set(range(num_shards))
        else:
            self._there = {n for n in range(num_shards) if self._holds(n)}

    @property
    def missing(self) -> list[int]:
        """The shards that are still to be written."""
        return [n for n in range(self.num_shards) if n not in self._there]

    def write(self, number: int, arrays: Mapping[str, np.ndarray]) -> None:
        """Writes a shard, whole or not at all.

        Raises:
            OSError: it cannot be written; those before it stay.
        """
        header = {
            "format": _FORMAT,
            "what": self.what,
            "identity": self.identity,
            "shard": number,
            "sha256": _checksum(arrays),
        }
        whole = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
        data = save(whole, {_HEADER: json.dumps(header, sort_keys=True)})
        self._put(shard_name(number), data)
        self._there.add(number)

    def read(self, number: int, name: str) -> np.ndarray:
        """An array of a shard that is there."""
        with safe_open(self.folder / shard_name(number), "numpy") as file:
            return file.get_tensor(name)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Writes the manifest, unless it is there.

        Args:
            summary: what else is worth knowing, for JSON.
        """
        assert not self.missing
        if self.is_finished:
            return
        files = [self.folder / shard_name(n) for n in range(self.num_shards)]
        manifest = {
            "format": _FORMAT,
            "what": self.what,
            "identity": self.identity,
            "summary": dict(summary),
            "shards": [
                {"file": f.name, "bytes": f.stat().st_size, "sha256": file_checksum(f)}
                for f in files
            ],
        }
        text = json.dumps(manifest, indent=1, sort_keys=True) + "\n"
        self._put(MANIFEST, text.encode())
        self.is_finished = True

    def _holds(self, number: int) -> bool:
        """Whether the shard is there already, ours and whole."""
        path = self.folder / shard_name(number)
        if not path.exists():
            return False
        try:
            with safe_open(path, "numpy") as file:
                header = json.loads((file.metadata() or {}).get(_HEADER, "{}"))
                found = _checksum({name: file.get_tensor(name) for name in file.keys()})
        except (SafetensorError, json.JSONDecodeError, OSError) as error:
            raise ValueError(
                f"{path} is damaged ({error}): remove it to have it written again"
            ) from None
        check_identity(self.folder, self.what, header, self.identity)
        if (header["shard"], header["sha256"]) != (number, found):
            raise ValueError(
                f"{path} is damaged (its arrays are not those that were written): "
                "remove it to have it written again"
            )
        return True

    def _put(self, name: str, data: bytes) -> None:
        path = self.folder / name
        temporary = self.folder / f".{name}{_PART}"
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError as error:
            raise OSError(
                f"could not write {name} of the {self.what} in {self.folder}: "
                f"{error.strerror or error}; make room and run it again: the "
                f"{len(self._there)} of {self.num_shards} shards that are there stay"
            ) from None
        finally:
            temporary.unlink(missing_ok=True)


class ShardReader:
    """Reads a finished folder; a shard is checked when it is first asked for.

    Args:
        folder: what a writer finished.
        what: what should be in it, for messages.

    Raises:
        ValueError: it is missing, unfinished, of another kind, or lacks a shard.
    """

    def __init__(self, folder: str | Path, what: str):
        self.folder = Path(folder).expanduser()
        self.what = what
        manifest = read_manifest(self.folder, what)
        if manifest.get("what") != what:
            raise ValueError(
                f"{self.folder} holds a {manifest.get('what')}, expected a {what}"
            )
        self.identity: dict[str, Any] = manifest["identity"]
        self.summary: dict[str, Any] = manifest["summary"]
        self._shards: list[dict[str, Any]] = manifest["shards"]
        self._open: dict[int, Any] = {}
        for shard in self._shards:
            path = self.folder / shard["file"]
            if not path.is_file():
                raise self._damaged(shard["file"], "is gone")
            if path.stat().st_size != shard["bytes"]:
                raise self._damaged(shard["file"], "has another size than was written")

    @property
    def num_shards(self) -> int:
        """How many there are."""
        return len(self._shards)

    def shard(self, number: int) -> Any:
        """An open safetensors file: `get_tensor(name)`, `get_slice(name)[a:b]`.

        Raises:
            ValueError: it is not what was written.
        """
        if number not in self._open:
            self.verify(number)
            path = self.folder / self._shards[number]["file"]
            self._open[number] = safe_open(path, "numpy")
        return self._open[number]

    def verify(self, number: int) -> None:
        """Compares a shard with its checksum.

        Raises:
            ValueError: it is not what was written.
        """
        shard = self._shards[number]
        if file_checksum(self.folder / shard["file"]) != shard["sha256"]:
            raise self._damaged(shard["file"], "is not what was written")

    def check(self, identity: Identity) -> None:
        """Compares some of the identity with what it should be.

        Raises:
            ValueError: something differs; names it.
        """
        check_identity(self.folder, self.what, {"identity": self.identity}, identity)

    def _damaged(self, file: str, how: str) -> ValueError:
        return ValueError(
            f"the {self.what} in {self.folder} is damaged or a mix of two: {file} "
            f"{how}; remove {file} and {MANIFEST}, and write it again"
        )


def read_manifest(folder: Path, what: str) -> dict[str, Any]:
    """The manifest of a finished folder.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        assert manifest["format"] == _FORMAT
        assert manifest["identity"] is not None and manifest["shards"] is not None
    except FileNotFoundError:
        started = folder.is_dir() and any(folder.glob("shard-*.safetensors"))
        how = "is not finished: run what wrote it again" if started else "is not there"
        raise ValueError(f"the {what} in {folder} {how}") from None
    except (OSError, ValueError, KeyError, TypeError, AssertionError):
        raise ValueError(
            f"{folder / MANIFEST} is damaged or not of a {what}: remove it, and write "
            "the folder again"
        ) from None
    return manifest


def check_identity(
    folder: Path, what: str, stored: Mapping[str, Any], wanted: Identity
) -> None:
    """Raises a ValueError that names the first thing in which two identities differ."""
    found = stored.get("identity", {})
    for name, value in wanted.items():
        if found.get(name) != value:
            raise ValueError(
                f"the {what} in {folder} is another one: its {name} is "
                f"{_short(found.get(name))}, expected {_short(value)}; take another "
                "folder, or remove this one"
            )


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"shard-{number:05d}.safetensors"


def file_checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rows_digest(rows: Any) -> str:
    """SHA-256 of a list of rows of numbers, whatever their lengths."""
    digest = hashlib.sha256()
    for row in rows:
        row = np.asarray(row, np.int64)
        digest.update(len(row).to_bytes(8, "little") + row.tobytes())
    return digest.hexdigest()


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def _short(value: Any) -> str:
    """Digests are long: the first letters tell two apart."""
    text = json.dumps(value)
    return text if len(text) <= 24 else text[:13] + '..."'
