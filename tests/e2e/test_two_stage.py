"""The two-stage recipe at a tiny size."""

import json

import pytest

import specjax
from experiments import two_stage

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def finished(tmp_path_factory, arguments, job):
    workdir = tmp_path_factory.mktemp("runs") / "two"
    given = arguments(
        workdir,
        "base.",
        student__start__size__num_layers=1,
        student__start__size__hidden_size=24,
        student__start__size__intermediate_size=32,
        student__start__size__num_heads=1,
        student__start__size__num_kv_heads=1,
        student__start__size__head_dim=16,
        student__start__train__steps=24,
        student__distill__train__steps=24,
    )
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert job(two_stage, monkeypatch, given) == 0
    return workdir


def test_quality_and_latency_of_every_model(finished):
    report = json.loads((finished / "report.json").read_text())
    assert set(report["quality"]) == {
        two_stage.LARGE,
        two_stage.SMALL,
        two_stage.BEFORE,
    }
    for row in report["quality"].values():
        assert row["nats"] > 0 and 0 <= row["accuracy"] <= 1 and row["parameters"] > 0
    rows = report["latency"]
    assert len(rows) == 2 * 2 * 2  # decodings x models x arms
    large = [r for r in rows if r["model"] == two_stage.LARGE]
    plain = [r for r in large if r["arm"] == "plain decoding"]
    assert all(r["over_large_plain"] == 1 and r["tau"] == 1 for r in plain)
    drafted = [r for r in rows if r["arm"] == "with its draft"]
    assert all(1 <= r["tau"] <= 3 for r in drafted)
    assert "ms a token" in (finished / "report.md").read_text()


def test_the_small_target_and_its_draft_are_exported(finished):
    out = specjax.generate(
        specjax.load(finished / "target"),
        ["def f("],
        drafter=specjax.drafters.TwoModel(specjax.load(finished / "draft"), gamma=2),
        max_new_tokens=6,
        sampling=specjax.Sampling(temperature=0.0),
    )
    assert len(out.tokens[0]) <= 6
