"""The contest of drafters at a tiny size, and the prediction before it."""

import json

import pytest

from experiments import drafters

pytestmark = pytest.mark.full

NAMES = ("two_model", "prompt_lookup", "medusa")  # a draft, nothing, heads to train
ONE_BATCH = ("--set", "contest.batches=2")


@pytest.fixture(scope="module")
def asked(arguments):
    return lambda workdir, **changes: arguments(
        workdir,
        "base.",
        contest__train__steps=24,
        contest__gamma=2,
        contest__nodes=3,
        contest__each=3,
        contest__batches="1,2",
        contest__drafters=",".join(NAMES),
        contest__max_new_tokens=8,
        contest__predict_gammas="1,3",
        base__data__target_rows=8,
        **changes,
    )


def test_all_are_measured_alike(tmp_path, asked, job, monkeypatch, capsys):
    workdir = tmp_path / "contest"
    assert job(drafters, monkeypatch, [*asked(workdir), *ONE_BATCH]) == 0
    report = json.loads((workdir / "drafters.json").read_text())
    assert len(report["rows"]) == 2 * len(NAMES)
    for row in report["rows"]:
        assert 1 <= row["tau"] <= 3
        assert row["tau_by_category"] == {"held-out": pytest.approx(row["tau"])}
        assert row["predicted"] > 0 and row["speedup"] > 0
    table = (workdir / "drafters.md").read_text()
    for name in NAMES:
        assert f"| {name} " in table
    for picture in ("acceptance_greedy", "speedup_T=1.0", "categories_greedy"):
        assert (workdir / f"{picture}.png").stat().st_size > 1000
    capsys.readouterr()
    assert job(drafters, monkeypatch, [*asked(workdir), *ONE_BATCH, "--resume"]) == 0
    assert "faster than plain decoding" in capsys.readouterr().out


def test_the_prediction_trains_nothing(tmp_path, asked, job, monkeypatch, capsys):
    workdir = tmp_path / "predict"
    assert job(drafters, monkeypatch, [*asked(workdir), "--predict"]) == 0
    found = json.loads((workdir / "predict.json").read_text())
    assert [of["batch"] for of in found["batches"]] == [1, 2]
    for of in found["batches"]:
        assert [row["gamma"] for row in of["rows"]] == [1, 3]
        assert all(row["speedup"] == sorted(row["speedup"]) for row in of["rows"])
    assert {p.name for p in workdir.iterdir()} == {"predict.md", "predict.json"}
    assert "batch 2: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("contest.drafters", "two_model,twomodel", "must be among two_model"),
        ("contest.nodes", "1", "at least contest.gamma=2"),
        ("contest.batches", "0", "contest.batches must be numbers >= 1"),
        ("contest.questions", "missing.jsonl", "missing.jsonl"),
    ],
)
def test_bad_settings_are_named(
    tmp_path, asked, job, monkeypatch, capsys, key, value, message
):
    args = [*asked(tmp_path / "bad"), "--set", f"{key}={value}"]
    assert job(drafters, monkeypatch, args) == 2
    assert message in capsys.readouterr().err
