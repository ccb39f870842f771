"""The trade-off at a tiny size: a curve a function, bad settings are named."""

import json

import pytest

from experiments import lossy

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def asked(arguments):
    return lambda workdir, **changes: arguments(
        workdir,
        "base.",
        lossy__epsilons="0.2",
        lossy__typical="0.1",
        lossy__gamma=2,
        lossy__prompts=4,
        lossy__max_new_tokens=8,
        **changes,
    )


def test_every_function_has_its_curve(tmp_path, asked, job, monkeypatch, capsys):
    workdir = tmp_path / "lossy"
    assert job(lossy, monkeypatch, asked(workdir)) == 0
    report = json.loads((workdir / "lossy.json").read_text())
    assert set(report["curves"]) == {"lossy_lin", "lossy_sq", "lossy_exp", "typical"}
    assert set(report["points"]) == {lossy.PLAIN, lossy.LOSSLESS}
    points = [p for curve in report["curves"].values() for p in curve]
    for point in [*points, *report["points"].values()]:
        assert point["nats"] > 0 and 0 <= point["rouge_l"] <= 1
        assert point["ms_a_token"] > 0
    # The same drafter and seeds: whoever is lenient keeps more of what is drafted.
    exact = report["points"][lossy.LOSSLESS]["tau"]
    assert max(point["tau"] for point in points) > exact
    assert report["points"][lossy.PLAIN]["tau"] == 1.0
    for picture in ("nats.png", "rouge.png"):
        assert (workdir / picture).stat().st_size > 1000
    capsys.readouterr()
    assert job(lossy, monkeypatch, [*asked(workdir), "--resume"]) == 0
    assert "lossy_exp" in capsys.readouterr().out


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("lossy__epsilons", "0", "epsilon"),
        ("lossy__temperature", "0", "lossy.temperature must be > 0"),
        ("lossy__batch", "9", "lossy.batch must be at most lossy.prompts=4"),
        ("lossy__prompts", "99", "lossy.prompts must be at most base.eval.prompts=4"),
    ],
)
def test_bad_settings_are_named(
    tmp_path, asked, job, monkeypatch, capsys, key, value, message
):
    args = [*asked(tmp_path / "bad"), "--set", f"{key.replace('__', '.')}={value}"]
    assert job(lossy, monkeypatch, args) == 2
    assert message in capsys.readouterr().err
