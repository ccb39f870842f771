"""The grid at a tiny size: every cell, the report, and going on."""

import json

import pytest

from experiments import divergence_grid

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def asked(arguments):
    return lambda workdir: arguments(
        workdir,
        "base.",
        grid__divergences="jsd(beta=0.3),tvd",
        grid__sources="fixed,target",
        grid__seeds="0,1",
        grid__gamma=2,
        grid__prompts=4,
        grid__max_new_tokens=8,
        base__data__target_rows=8,
    )


@pytest.fixture(scope="module")
def finished(tmp_path_factory, asked, job):
    workdir = tmp_path_factory.mktemp("runs") / "grid"
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert job(divergence_grid, monkeypatch, asked(workdir)) == 0
    return workdir


def test_every_cell_is_measured_and_compared(finished):
    report = json.loads((finished / "grid.json").read_text())
    rows = report["rows"]
    assert len(rows) == 2 * (1 + 2 * 2)  # decodings x (baseline + grid)
    for row in rows:
        assert 1 <= row["tau"] <= 3 and 0 <= row["alpha"] <= 1
    baselines = [r for r in rows if r["divergence"] == "cross_entropy"]
    assert all(r["gain"] == 0 and r["gain_half_width"] == 0 for r in baselines)
    assert len(list((finished / "cells").iterdir())) == 2 * 5
    assert (finished / "heat_map_greedy.png").stat().st_size > 1000
    table = (finished / "grid.md").read_text()
    assert "jsd(beta=0.3)" in table and "## T=1.0" in table


def test_a_missing_cell_is_filled_in_with_the_same_numbers(
    finished, asked, job, monkeypatch
):
    cell = finished / "cells" / "1-tvd-target.json"
    before = cell.read_text(), (finished / "grid.json").read_text()
    cell.unlink()
    assert job(divergence_grid, monkeypatch, [*asked(finished), "--resume"]) == 0
    assert (cell.read_text(), (finished / "grid.json").read_text()) == before


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("grid.sources=fixd", "among fixed"),
        ("grid.divergences=jds", "jsd"),
        ("grid.seeds=1,1", "different values"),
        ("grid.gamma=0", "at least 1"),
    ],
)
def test_bad_settings_end_with_one_sentence(
    asked, job, monkeypatch, tmp_path, capsys, wrong, message
):
    given = [*asked(tmp_path / "x"), "--set", wrong]
    assert job(divergence_grid, monkeypatch, given) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
