"""The folder that a run writes to, and how a run ends."""

import importlib.metadata
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax

from experiments._settings import differences, to_dict

_PACKAGES = (
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "transformers",
    "specjax",
)
# Any of these is the trace of a run.
_TRACES = (
    "config.json",
    "metrics.jsonl",
    "checkpoints",
    "draft",
    "report.json",
    "cells",
    "grid.json",
)
_TRACEBACK = "SPECJAX_TRACEBACK"
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def open_workdir(path: str | os.PathLike, resume: bool, config: Any) -> Path:
    """Makes the folder of a run, or checks that it may be continued.

    Args:
        path: the folder; parents are made too.
        resume: continue the run that it holds. An empty folder is a run at its start.
        config: what the run is to do.

    Returns:
        The folder.

    Raises:
        ValueError: it holds a run and `resume` is off, or that run had another config.
        OSError: it cannot be made or written.
    """
    workdir = Path(path).expanduser()
    _check_writable(workdir)
    traces = [name for name in _TRACES if (workdir / name).exists()]
    if traces == ["config.json"] and not resume and _is_ours(workdir):
        (workdir / "config.json").unlink()  # it failed before it had anything to keep
        traces = []
    if resume and not traces:
        print(f"nothing to resume in {workdir}: a new run begins", file=sys.stderr)
    if traces and not resume:
        raise ValueError(
            f"the workdir {workdir} holds a run already ({', '.join(traces)}): "
            "continue it with --resume, or choose another --workdir"
        )
    if traces:
        _check_same(workdir, config)
    return workdir


def _is_ours(workdir: Path) -> bool:
    """Whether `config.json` was written here, and is not that of a model, say."""
    try:
        record = json.loads((workdir / "config.json").read_text("utf-8"))
    except ValueError:
        return False
    return isinstance(record, dict) and {"config", "versions"} <= record.keys()


def _check_writable(workdir: Path) -> None:
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        # Only writing tells: permission bits say little about a read-only or full disk.
        with tempfile.NamedTemporaryFile(dir=workdir, prefix=".write-test-") as file:
            file.write(b"0")
            file.flush()
    except OSError as error:
        raise OSError(
            f"the workdir {workdir} cannot be written ({error.strerror or error}): "
            "choose another --workdir"
        ) from error


def _check_same(workdir: Path, config: Any) -> None:
    try:
        saved = json.loads((workdir / "config.json").read_text("utf-8"))["config"]
        changed = differences(config, saved)
    except FileNotFoundError:
        raise ValueError(
            f"the workdir {workdir} has no config.json to compare with: it cannot be "
            "resumed; choose another --workdir"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(
            f"{workdir / 'config.json'} was not written by an experiment: the run "
            "cannot be resumed; choose another --workdir"
        ) from None
    if changed:
        listed = ", ".join(
            f"{key} (there {json.dumps(there)}, now {json.dumps(now)})"
            for key, (now, there) in changed.items()
        )
        raise ValueError(
            f"cannot resume the run in {workdir}, its config differs: {listed}"
        )


def write_resolved(workdir: Path, config: Any, preset: str | None = None) -> None:
    """Writes `config.json`: every setting, the seed, versions and the device.

    A run that resumes keeps the file and adds the versions and device it goes on with.
    """
    path = Path(workdir, "config.json")
    here = {"versions": versions(), "device": device()}
    if path.exists():
        record = json.loads(path.read_text("utf-8"))
        record.setdefault("resumed", []).append(here)
    else:
        settings = to_dict(config)
        seed = settings.get("seed")
        record = {"preset": preset, "seed": seed, "config": settings, **here}
    write_atomically(path, json.dumps(record, indent=2) + "\n")


def write_atomically(path: Path, text: str) -> None:
    """Writes a file so that a crash leaves either the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def versions() -> dict[str, str | None]:
    """The versions that results depend on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def device() -> dict[str, Any]:
    """What JAX computes on."""
    devices = jax.devices()
    return {
        "platform": devices[0].platform,
        "kind": devices[0].device_kind,
        "count": len(devices),
        "processes": jax.process_count(),
        "cpu_count": os.cpu_count(),
        "machine": f"{platform.system()} {platform.machine()}",
    }


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs an experiment's `main` and exits with what a user can act on.

    A ValueError or OSError becomes one line on stderr and exit code 2 (set
    SPECJAX_TRACEBACK=1 to see where it comes from), an interrupt a line that says how
    to resume and exit code 130. Other errors are ours: they keep their traceback.

    Example:
        >>> if __name__ == "__main__":  # doctest: +SKIP
        ...     run(main)
    """
    try:
        code = main()
    except KeyboardInterrupt:
        print(f"interrupted; to resume: {_resume_command()}", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
    except (ValueError, OSError) as error:
        if os.environ.get(_TRACEBACK):
            raise
        print(f"error: {_one_line(error)}", file=sys.stderr)
        sys.exit(EXIT_USER_ERROR)
    sys.exit(code or 0)


def _one_line(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.strerror}: {error.filename}"
    return " ".join(text.split()) or type(error).__name__


def _resume_command() -> str:
    """The command line of this process, with `--resume`."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    start = ["python", "-m", spec.name] if spec else ["python", sys.argv[0]]
    resume = [] if "--resume" in sys.argv[1:] else ["--resume"]
    return shlex.join([*start, *sys.argv[1:], *resume])
