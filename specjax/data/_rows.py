"""Rows of files and data sets: mappings of fields, each with a place for errors.

Everything is read as a stream of `(where, row)`, so that a limit reads no more than it
needs, and a bad row is named by file and line.
"""

import csv
import importlib.resources
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from specjax.core import near

PACKAGED = "packaged"
_SEVERAL = "dataset_dict.json"  # in a folder with several splits
# Fields whose values are lists: a CSV file holds them as JSON.
LISTS = ("messages", "conversations", "turns")

Row = tuple[str, Mapping[str, Any]]  # where it stands, for errors, and what it holds


def read_rows(
    source: str, split: str | None, subset: str | None, limit: int | None
) -> Iterator[Row]:
    """The rows of a source, see `load_prompts`.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: it cannot be read, or has no such split.
    """
    if source == PACKAGED:
        file = importlib.resources.files("specjax.data") / "chat_prompts.jsonl"
        text = file.read_text(encoding="utf-8")
        return _of_split(_json_lines("chat_prompts.jsonl", text), split or "train")
    path = Path(source).expanduser()
    if path.is_file():
        return _of_split(_file_rows(path), split)
    if path.is_dir():
        return _saved_rows(path, split)
    is_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source)
    if path.suffix in FILE_TYPES or not is_id:
        raise FileNotFoundError(f"the prompt file {source} does not exist")
    return _hub_rows(source, split or "train", subset, limit)


def _file_rows(path: Path) -> Iterator[Row]:
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix not in _TEXT_FORMATS:
        raise ValueError(
            f"{path}: prompts are read from " + ", ".join(FILE_TYPES) + " files"
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not a text in UTF-8") from None
    return _TEXT_FORMATS[path.suffix](str(path), text)


def _text_lines(name: str, text: str) -> Iterator[Row]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{name}, line {number}", {"text": line.strip()}


def _json_lines(name: str, text: str) -> Iterator[Row]:
    # Not splitlines: a JSON text may hold other line separators than \n.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        row = _parse(where, line)
        if not isinstance(row, dict):
            raise ValueError(f"{where}: expected an object, got {line.strip()[:40]}")
        yield where, row


def _json_array(name: str, text: str) -> Iterator[Row]:
    if not text.strip():
        return
    rows = _parse(name, text)
    if not isinstance(rows, list):
        raise ValueError(
            f"{name}: expected a JSON array of objects, got {text.strip()[:40]!r}; one "
            "object a line is a .jsonl file"
        )
    for number, row in enumerate(rows, 1):
        where = f"{name}, row {number}"
        if isinstance(row, str):
            row = {"text": row}
        if not isinstance(row, dict):
            raise ValueError(
                f"{where}: expected an object or a text, got {json.dumps(row)[:40]}"
            )
        yield where, row


def _csv(name: str, text: str) -> Iterator[Row]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header, number = None, 0
    try:
        for cells in filter(None, reader):  # an empty line has no cells
            if header is None:
                header = cells
                continue
            number += 1
            where = f"{name}, row {number}"
            if len(cells) != len(header):
                raise ValueError(
                    f"{where} has {len(cells)} cells, its header {len(header)}"
                )
            pairs = zip(header, cells, strict=True)
            yield where, {field: _cell(where, field, cell) for field, cell in pairs}
    except csv.Error as error:
        raise ValueError(
            f"{name}, line {reader.line_num} is not CSV: {error}"
        ) from None


def _cell(where: str, field: str, cell: str) -> Any:
    return _parse(f"{where}, field {field!r}", cell) if field in LISTS else cell


def _parse(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is not JSON: {error.msg} at character {error.pos + 1}"
        ) from None


_TEXT_FORMATS: dict[str, Callable[[str, str], Iterator[Row]]] = {
    ".jsonl": _json_lines,
    ".json": _json_array,
    ".csv": _csv,
    ".txt": _text_lines,
}
FILE_TYPES = (*_TEXT_FORMATS, ".parquet")


def _parquet_rows(path: Path) -> Iterator[Row]:
    import datasets  # slow to import, and most runs do not need it

    def load() -> Iterable[Any]:
        # Streaming leaves no copy in the user's cache.
        return datasets.load_dataset(
            "parquet", data_files=str(path), split="train", streaming=True
        )

    return _numbered(str(path), load, "cannot be read as Parquet")


def _saved_rows(path: Path, split: str | None) -> Iterator[Row]:
    """Of a folder that `datasets` wrote with `save_to_disk`."""
    if not is_saved(path):
        raise ValueError(
            f"{path} is a folder, and not one that `Dataset.save_to_disk` wrote; name "
            "a file, one of " + ", ".join(FILE_TYPES)
        )
    import datasets

    several = (path / _SEVERAL).is_file()

    def load() -> Iterable[Any]:
        saved = datasets.load_from_disk(str(path))
        if not isinstance(saved, datasets.DatasetDict):
            return saved
        wanted = split or "train"
        if wanted not in saved:
            raise ValueError(
                f"unknown split {wanted!r}; {near(wanted, map(str, saved))}"
            )
        return saved[wanted]

    rows = _numbered(str(path), load, "cannot be read as a saved data set")
    return rows if several else _of_split(rows, split)


def is_saved(path: Path) -> bool:
    """Whether it is a folder that `Dataset.save_to_disk` wrote."""
    return any((path / name).is_file() for name in (_SEVERAL, "state.json"))


def _hub_rows(
    source: str, split: str, subset: str | None, limit: int | None
) -> Iterator[Row]:
    import datasets

    def load() -> Iterable[Any]:
        return datasets.load_dataset(
            source, subset, split=split, streaming=limit is not None
        )

    return _numbered(
        source, load, "is neither a file here nor a data set that could be loaded"
    )


def _numbered(
    name: str, load: Callable[[], Iterable[Any]], complaint: str
) -> Iterator[Row]:
    """The rows that `load` gives; whatever the library raises says `complaint`."""
    try:
        rows = iter(load())
    except Exception as error:
        raise ValueError(f"{name} {complaint}: {error}") from error
    number = 0
    while True:
        try:  # a stream may break off in the middle
            row = next(rows, None)
        except Exception as error:
            raise ValueError(f"{name} {complaint}: {error}") from error
        if row is None:
            return
        number += 1
        yield f"{name}, row {number}", row


def _of_split(rows: Iterator[Row], split: str | None) -> Iterator[Row]:
    if split is None:
        yield from rows
        return
    found, seen = False, set()
    for where, row in rows:
        if "split" not in row:
            raise ValueError(f"{where} has no field 'split' to choose {split!r} by")
        seen.add(str(row["split"]))
        if row["split"] == split:
            found = True
            yield where, row
    if seen and not found:
        raise ValueError(f"unknown split {split!r}; {near(split, seen)}")
