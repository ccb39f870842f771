"""Text for training without a download: folders, and Python's own standard library."""

import hashlib
import io
import os
import sysconfig
import tokenize
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from specjax.core import near
from specjax.data._prompts import find_field
from specjax.data._rows import is_saved, read_rows

_SUFFIXES = (".py", ".rst", ".txt")
# Tests and code tables are repetitive; the rest is not part of the library.
_STANDARD_LIBRARY_EXCLUDED = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "encodings",
        "idle_test",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
    }
)
# Written for one machine, not part of the release.
_SITE_FILES = ("sitecustomize.py", "usercustomize.py", "_sysconfigdata_")


@dataclass(frozen=True)
class Document:
    """One text and the name it goes by: its path below the corpus folder, with `/`."""

    name: str
    text: str


def standard_library(
    max_chars: int | None = None, root: str | os.PathLike | None = None
) -> list[Document]:
    """Reads the Python installation's own standard library: about 10 MB of real text.

    Sources and plain-text documents, without tests, `encodings`, `pydoc_data` and
    installed packages. Every machine that can run this has them, so that a first run
    needs no network. Versions of Python differ in a few files.

    Args:
        max_chars: stop before the documents come to more characters than this; which
            ones stay depends on their names only. None: all of them.
        root: the folder to read; None: where this interpreter keeps its library.

    Returns:
        The documents, sorted by name.

    Raises:
        ValueError: the installation has no sources.

    Example:
        >>> documents = standard_library(max_chars=100_000)
        >>> training, held_out = split(documents)
    """
    folder = Path(root or sysconfig.get_paths()["stdlib"])
    if not folder.is_dir() or not any(folder.glob("*.py")):
        raise ValueError(
            f"this Python installation has no standard library sources in {folder}: "
            "use one that has them, or train on your own text with read_folder(...)"
        )
    documents = [
        d
        for d in _walk(folder, _SUFFIXES, _STANDARD_LIBRARY_EXCLUDED)
        if not d.name.startswith((*_SITE_FILES, "config-"))
    ]
    return _limit(documents, max_chars)


def read_folder(
    folder: str | os.PathLike,
    suffixes: Sequence[str] = (".md", ".py", ".rst", ".txt"),
    exclude: Collection[str] = ("__pycache__", ".git"),
    max_chars: int | None = None,
) -> list[Document]:
    """Reads every text file below a folder.

    Args:
        folder: where to look.
        suffixes: which files count, by the end of their name.
        exclude: names of folders to leave out.
        max_chars: as in `standard_library`.

    Returns:
        The documents, sorted by name. Files that are not text (in UTF-8, or in the
        encoding that a Python source declares) are left out, and empty ones.

    Raises:
        ValueError: the folder is missing, or holds no such text.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"the corpus folder {folder} does not exist")
    documents = list(_walk(folder, tuple(suffixes), frozenset(exclude)))
    if not documents:
        raise ValueError(
            f"the corpus folder {folder} holds no text in files named "
            + ", ".join("*" + s for s in suffixes)
        )
    return _limit(documents, max_chars)


def load_documents(
    source: str | os.PathLike,
    *,
    field: str | None = None,
    split: str | None = None,
    subset: str | None = None,
    max_chars: int | None = None,
) -> list[Document]:
    """Reads texts to pack, from what `load_prompts` reads: a row is a document.

    Args:
        source: as in `load_prompts`; a `.txt` file is one document, and a folder of
            text files is read as by `read_folder`.
        field: the field with the text; None: `text`, or `content`.
        split: as in `load_prompts`.
        subset: as in `load_prompts`.
        max_chars: as in `standard_library`.

    Returns:
        The documents; each is named for the source and its place there.

    Raises:
        FileNotFoundError: the file is missing.
        ValueError: no text, an unknown field, or a row that cannot be read.
    """
    source = os.fspath(source)
    path, documents = Path(source).expanduser(), []
    if path.is_dir() and not is_saved(path):
        return read_folder(path, max_chars=max_chars)
    if path.suffix == ".txt" and path.is_file():
        rows = iter([(source, {"text": _read(path)})])
    else:
        rows = read_rows(source, split, subset, None)
    for number, (where, row) in enumerate(rows, 1):
        field = field or find_field(where, row, ("text", "content"), "field")
        if field not in row:
            raise ValueError(f"{where}: unknown field {field!r}; {near(field, row)}")
        text = row[field]
        if not isinstance(text, str):
            raise ValueError(
                f"{where}, field {field!r}: expected a text, got {str(text)[:40]!r}"
            )
        if text.strip():
            documents.append(Document(f"{path.name}:{number}", text))
    if not documents:
        raise ValueError(f"{source} holds no text in UTF-8")
    return _limit(documents, max_chars)


def split(
    documents: Sequence[Document], held_out: float = 0.05
) -> tuple[list[Document], list[Document]]:
    """Splits documents in two by a hash of their names.

    A document is on the same side on every machine, whatever else is in the corpus.

    Args:
        documents: what to split.
        held_out: the share of documents, 0 to 1, that training must not see.

    Returns:
        The documents to train on, and those held out.

    Raises:
        ValueError: `held_out` is not a share.
    """
    if not 0 <= held_out <= 1:
        raise ValueError(f"held_out must be a share between 0 and 1, got {held_out}")
    training = [d for d in documents if _position(d.name) >= held_out]
    return training, [d for d in documents if _position(d.name) < held_out]


def _position(name: str) -> float:
    """Where a name falls in [0, 1)."""
    digest = hashlib.sha256(name.encode()).digest()
    # 53 bits are what a float holds exactly: the result stays below 1.
    return (int.from_bytes(digest[:8], "big") >> 11) / 2**53


def _limit(documents: Sequence[Document], max_chars: int | None) -> list[Document]:
    if max_chars is None:
        return list(documents)
    kept, total = [], 0
    # By another hash than `split`, whose shares would otherwise be out of proportion.
    for document in sorted(documents, key=lambda d: _shuffled(d.name)):
        if total + len(document.text) <= max_chars:
            kept.append(document)
            total += len(document.text)
    return sorted(kept, key=lambda d: d.name)


def _shuffled(name: str) -> bytes:
    return hashlib.sha256(b"order " + name.encode()).digest()


def _walk(
    folder: Path, suffixes: tuple[str, ...], exclude: frozenset[str]
) -> Iterator[Document]:
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [f for f in folders if f not in exclude]
        found += [Path(parent, f) for f in files if f.endswith(suffixes)]
    named = sorted((path.relative_to(folder).as_posix(), path) for path in found)
    for name, path in named:
        text = _read(path)
        if text:
            yield Document(name, text)


def _read(path: Path) -> str:
    """The text of a file with Unix line ends; empty if it is not text."""
    try:
        data = path.read_bytes()
        encoding = "utf-8-sig"
        if path.suffix == ".py":
            encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""
    return text.replace("\r\n", "\n")
