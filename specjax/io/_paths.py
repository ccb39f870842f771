"""Where files lie, which are whole, and how they are replaced in one step."""

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def cache_dir() -> Path:
    """The folder for fetched models: `SPECJAX_CACHE`, else `~/.cache/specjax`."""
    return Path(os.environ.get("SPECJAX_CACHE") or "~/.cache/specjax").expanduser()


def sha256(path: Path) -> str:
    """The checksum of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def sibling_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, so that a rename into place is atomic.

    It is removed at the end unless it was renamed.

    Raises:
        OSError: the parent folder cannot be made or written; the message says which.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise OSError(
            f"cannot write to {str(target.parent)!r} ({error.strerror or error}); "
            "choose a folder that can be written"
        ) from None
    try:
        folder.chmod(0o777 & ~umask())  # mkdtemp makes it private
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_folder(new: Path, target: Path) -> None:
    """Renames `new` to `target`; an old `target` is moved aside first, then removed."""
    if not target.exists():
        new.rename(target)
        return
    with sibling_folder(target) as aside:
        old = aside / "old"
        target.rename(old)
        try:
            new.rename(target)
        except OSError:
            old.rename(target)
            raise


def umask() -> int:
    """The permissions that new files of this process are made without."""
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
