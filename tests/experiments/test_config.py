import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from experiments._config import (
    open_workdir,
    parse,
    replace,
    run,
    to_dict,
    to_json,
    write_atomically,
    write_resolved,
)


@dataclass(frozen=True)
class Target:
    source: str = "scratch"
    layers: int | None = None
    widths: tuple[int, ...] = (64, 128)
    span: tuple[float, str] = (0.5, "x")

    def __post_init__(self):
        if self.layers is not None and self.layers < 1:
            raise ValueError(f"layers must be at least 1, got {self.layers}")


@dataclass(frozen=True)
class Train:
    steps: int = 10
    learning_rate: float = 1e-3
    on_policy: bool = True
    divergence: Literal["forward_kl", "jsd"] = "jsd"
    low: int = 1
    high: int = 2
    budget: int | float | str | None = None

    def __post_init__(self):
        if self.low >= self.high:
            raise ValueError(f"low must be below high, got {self.low}, {self.high}")


@dataclass(frozen=True)
class Config:
    seed: int = 0
    target: Target = field(default_factory=Target)
    train: Train = field(default_factory=Train)


PRESETS = {"quick": Config(), "full": Config(train=Train(steps=1000))}


def parsed(*argv):
    return parse(argv, Config, PRESETS, {"--target": "target.source"})


def test_defaults_are_the_first_preset():
    args = parsed()
    assert args.config == PRESETS["quick"]
    assert args.workdir == Path("runs/quick")
    assert not args.resume


def test_flags_and_settings_apply_in_order():
    args = parsed(
        *["--config", "full", "--workdir", "w", "--resume", "--seed", "3"],
        *["--target", "a", "--set", "target.source=b", "--set", "train.steps = 7"],
    )
    assert args.config == Config(3, Target("b"), Train(steps=7))
    assert (args.workdir, args.resume, args.preset) == (Path("w"), True, "full")
    assert parsed("--set", "target.source=b", "--target", "a").config.target == Target(
        "a"
    )


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("train.steps=12", 12),
        ("train.learning_rate=2e-4", 2e-4),
        ("train.learning_rate=3", 3.0),
        ("train.on_policy=false", False),
        ("train.on_policy=On", True),
        ("train.divergence=forward_kl", "forward_kl"),
        ("train.budget=none", None),
        ("train.budget=5", 5),
        ("train.budget=5.5", 5.5),
        ("train.budget=long", "long"),
        ("target.layers=none", None),
        ("target.layers=4", 4),
        ("target.source=a=b,c", "a=b,c"),
        ("target.source=", ""),
        ("target.widths=1,2, 3", (1, 2, 3)),
        ("target.widths=(8,)", (8,)),
        ("target.widths=[]", ()),
        ("target.span=1,z", (1.0, "z")),
    ],
)
def test_values_are_read_by_the_type_of_their_field(setting, value):
    config = replace(Config(), [setting])
    outer, inner = setting.partition("=")[0].split(".")
    got = getattr(getattr(config, outer), inner)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.stepz=1", "unknown key 'train.stepz'.*did you mean 'train.steps'"),
        ("train=1", "unknown key 'train'.*it holds train.steps, "),
        ("train.steps", "takes KEY=VALUE, got 'train.steps'"),
        ("train.steps=1.5", "train.steps=1.5: expected a whole number$"),
        ("train.steps=true", "expected a whole number"),
        ("train.learning_rate=fast", "expected a number"),
        ("train.learning_rate=nan", "expected a number"),
        ("train.on_policy=maybe", "expected true or false"),
        ("train.divergence=kl", "expected one of forward_kl, jsd"),
        ("target.layers=few", "expected a whole number or none"),
        ("target.widths=1,b", "expected a list like a,b,c of values each a whole"),
        ("target.span=1", "expected 2 values like a,b: a number, a text"),
        ("target.layers=0", "layers must be at least 1, got 0"),
    ],
)
def test_a_bad_setting_says_in_a_sentence_what_is_wrong(setting, message):
    with pytest.raises(ValueError, match=message) as error:
        replace(Config(), [setting])
    assert "\n" not in str(error.value)


def test_settings_that_depend_on_each_other_are_checked_together():
    config = replace(Config(), ["train.low=5", "train.high=9"])
    assert (config.train.low, config.train.high) == (5, 9)


def test_an_unknown_preset_names_the_near_ones():
    with pytest.raises(ValueError, match=r"--config ful; did you mean 'full'"):
        parsed("--config", "ful")


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit) as end:
        parsed("--help")
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert 'target.source="scratch"' in text
    assert "train.learning_rate=0.001" in text
    assert "--target" in text


def test_json_round_trip():
    config = replace(Config(), ["target.widths=1,2"])
    assert json.loads(to_json(config)) == to_dict(config)
    assert to_dict(config)["target"]["widths"] == [1, 2]


def test_a_fresh_workdir_gets_a_resolved_config(tmp_path):
    workdir = open_workdir(tmp_path / "a" / "b", False, Config(seed=4))
    write_resolved(workdir, Config(seed=4), preset="quick")
    record = json.loads((workdir / "config.json").read_text())
    assert record["seed"] == 4
    assert record["preset"] == "quick"
    assert record["config"] == to_dict(Config(seed=4))
    packages = {"python", "jax", "flax", "optax", "orbax-checkpoint", "transformers"}
    assert packages | {"specjax"} <= set(record["versions"])
    assert record["device"]["count"] >= 1
    assert {"platform", "kind"} <= set(record["device"])
    assert os.listdir(workdir) == ["config.json"]


def test_resuming_needs_the_flag_and_the_same_config(tmp_path):
    write_resolved(open_workdir(tmp_path, False, Config()), Config())
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(ValueError, match=r"holds a run already \(config.json, .*--res"):
        open_workdir(tmp_path, False, Config())
    other = Config(seed=1, train=Train(steps=11))
    with pytest.raises(ValueError) as error:
        open_workdir(tmp_path, True, other)
    assert "seed (there 0, now 1)" in str(error.value)
    assert "train.steps (there 10, now 11)" in str(error.value)
    assert "learning_rate" not in str(error.value)

    write_resolved(open_workdir(tmp_path, True, Config()), Config())
    record = json.loads((tmp_path / "config.json").read_text())
    assert len(record["resumed"]) == 1


def test_resuming_an_empty_folder_is_a_fresh_run_and_says_so(tmp_path, capsys):
    assert open_workdir(tmp_path, True, Config()) == tmp_path
    assert "nothing to resume" in capsys.readouterr().err


def test_a_run_that_kept_nothing_does_not_block_the_next_one(tmp_path):
    """Such as one whose target could not be loaded."""
    write_resolved(open_workdir(tmp_path, False, Config()), Config())
    other = Config(seed=1)
    write_resolved(open_workdir(tmp_path, False, other), other)
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["seed"] == 1 and "resumed" not in record


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "llama"}'])
def test_a_foreign_config_is_not_resumed(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match="was not written by an experiment"):
        open_workdir(tmp_path, True, Config())
    with pytest.raises(ValueError, match="holds a run already"):
        open_workdir(tmp_path, False, Config())
    assert (tmp_path / "config.json").read_text() == text


def test_results_without_a_config_are_not_resumed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"has no config\.json to compare with"):
        open_workdir(tmp_path, True, Config())


def test_a_workdir_that_cannot_be_made_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(OSError, match=r"cannot be written \(.*choose another"):
            open_workdir(bad, False, Config())


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_read_only_workdir_says_so(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="cannot be written"):
        open_workdir(tmp_path, False, Config())


def test_an_atomic_write_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    write_atomically(path, "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("gamma must be\n at least 1"), "error: gamma must be at least 1\n"),
        (OSError("no room"), "error: no room\n"),
        (FileNotFoundError(2, "No such file", "x"), "error: No such file: x\n"),
    ],
)
def test_a_user_error_is_one_line_and_exit_code_2(capsys, monkeypatch, error, line):
    monkeypatch.delenv("SPECJAX_TRACEBACK", raising=False)

    def main():
        raise error

    with pytest.raises(SystemExit) as end:
        run(main)
    assert end.value.code == 2
    assert capsys.readouterr().err == line
    monkeypatch.setenv("SPECJAX_TRACEBACK", "1")
    with pytest.raises(type(error)):
        run(main)


def test_other_errors_keep_their_traceback():
    def main():
        raise TypeError("a fault of ours")

    with pytest.raises(TypeError):
        run(main)


def test_an_interrupt_says_how_to_resume(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["x.py", "--set", "a=b c"])

    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        run(main)
    assert end.value.code == 130
    assert "--set 'a=b c' --resume" in capsys.readouterr().err


def test_a_script_exits_with_the_code(tmp_path):
    script = (
        "from dataclasses import dataclass\n"
        "from experiments._config import *\n"
        "@dataclass(frozen=True)\n"
        "class C:\n"
        "    steps: int = 1\n"
        "def main():\n"
        "    a = parse(None, C, {'quick': C()})\n"
        "    open_workdir(a.workdir, a.resume, a.config)\n"
        "run(main)\n"
    )

    def execute(*argv):
        command = [sys.executable, "-c", script, *argv]
        root = Path(__file__).parents[2]
        return subprocess.run(command, cwd=root, capture_output=True, text=True)

    good = execute("--workdir", str(tmp_path / "run"))
    assert (good.returncode, good.stderr) == (0, "")
    bad = execute("--workdir", str(tmp_path), "--set", "step=2")
    assert bad.returncode == 2
    assert bad.stderr == (
        "error: unknown key 'step' in --set step=2; did you mean 'steps'?\n"
    )
