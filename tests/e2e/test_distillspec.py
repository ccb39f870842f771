"""The main job at a tiny size: all stages, what it writes, resuming, and bad input."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

import specjax
from experiments import distillspec

HEAD = {"draft__vocab_size": 90}  # the draft writes the commonest ids only


@pytest.fixture(scope="module")
def finished(tmp_path_factory, arguments, job):
    """A finished run, of drafts with a reduced head."""
    workdir = tmp_path_factory.mktemp("runs") / "tiny"
    with pytest.MonkeyPatch.context() as monkeypatch:
        given = arguments(workdir, **HEAD)
        assert job(distillspec, monkeypatch, given) == 0
    return workdir


def test_the_report_holds_what_the_contract_names(finished):
    report = json.loads((finished / "report.json").read_text())
    assert {"target", "draft", "settings", "lossless"} <= report.keys()
    assert [(s["decoding"], s["batch"]) for s in report["settings"]] == [
        ("greedy", 1),
        ("T=1.0", 1),
    ]
    for setting in report["settings"]:
        assert setting["ar"]["tokens_per_s"] > 0
        for arm in ("standard_sd", "distillspec"):
            values = setting[arm]
            assert 0 <= values["alpha"] <= 1
            assert 1 <= values["tau"] <= setting["gamma"] + 1
            assert values["speedup"] == pytest.approx(
                values["tokens_per_s"] / setting["ar"]["tokens_per_s"]
            )
        gain = setting["distillspec"]["tau"] / setting["standard_sd"]["tau"] - 1
        assert setting["gain"]["tau"] == pytest.approx(gain)
    assert report["lossless"]["greedy_equal"] == "4/4"
    assert report["lossless"]["chi_square_p"] > 1e-3


def test_every_file_of_the_contract_is_there(finished):
    for name in (
        "config.json",
        "metrics.jsonl",
        "checkpoints",
        "draft/model.safetensors",
        "target/model.safetensors",
        "report.md",
        "learning_curve.png",
        "acceptance_by_position.png",
        "speedup_by_gamma.png",
    ):
        assert (finished / name).exists(), name
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    runs = {json.loads(line)["run"] for line in lines}
    assert {"target", "draft", "distillspec", "cross_entropy"} <= runs


def test_the_drafts_head_is_over_the_commonest_ids(finished):
    notes = json.loads((finished / "report.json").read_text())["training"]
    assert notes["draft: ids of its head"] == 90
    assert 0.5 < notes["draft: share of the training text in its head"] < 1
    assert 0 < notes["draft: share of held-out samples in its head"] < 1
    draft, target = (specjax.load(finished / name) for name in ("draft", "target"))
    assert draft.model.head_ids.size == 90
    assert set(target.eos_token_ids) <= set(draft.model.head_ids.tolist())
    lines = (finished / "metrics.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines if '"distillspec"' in line]
    assert all(0 < x["outside"] < 1 for x in told if "outside" in x)
    assert any("outside" in x for x in told)


def test_the_exported_pair_decodes(finished):
    target = specjax.load(finished / "target")
    draft = specjax.load(finished / "draft")
    out = specjax.generate(
        target,
        ["import os\n"],
        drafter=specjax.drafters.TwoModel(draft, gamma=2),
        sampling=specjax.Sampling(temperature=0.0),
        max_new_tokens=8,
    )
    plain = specjax.generate(
        target,
        ["import os\n"],
        sampling=specjax.Sampling(temperature=0.0),
        max_new_tokens=8,
    )
    assert out.tokens == plain.tokens


def test_a_second_run_needs_resume_and_then_repeats_nothing(
    finished, monkeypatch, capsys, arguments, job
):
    assert job(distillspec, monkeypatch, arguments(finished, **HEAD)) == 2
    assert "--resume" in capsys.readouterr().err
    before = (finished / "metrics.jsonl").read_text()
    assert (
        job(distillspec, monkeypatch, [*arguments(finished, **HEAD), "--resume"]) == 0
    )
    assert (finished / "metrics.jsonl").read_text() == before


@pytest.mark.full
def test_an_interrupted_run_goes_on_to_the_same_draft(
    finished, tmp_path, monkeypatch, arguments, job
):
    workdir = tmp_path / "interrupted"
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.distillspec", *arguments(workdir, **HEAD)],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        env={
            **os.environ,
            "XLA_FLAGS": "--xla_backend_optimization_level=0"
            " --xla_cpu_use_fusion_emitters=false",
        },
    )
    metrics = workdir / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and '"target"' in metrics.read_text()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "--resume" in err
    assert not (workdir / "draft").exists()
    assert job(distillspec, monkeypatch, [*arguments(workdir, **HEAD), "--resume"]) == 0
    assert (workdir / "draft" / "model.safetensors").read_bytes() == (
        finished / "draft" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--set", "distil.base=target"], "distill.base"),
        (["--set", "distill.divergence=jds"], "jsd"),
        (["--set", "distill.divergence=jsd(beta=2)"], "beta"),
        (["--set", "eval.gamma=0"], "gamma"),
        (["--target", "no/such/folder"], "no/such/folder"),
        (["--prompts", "packaged"], "--target"),
        (["--config", "quik"], "quick"),
    ],
)
def test_bad_settings_end_at_once_with_one_sentence(
    tmp_path, monkeypatch, capsys, extra, message, arguments, job
):
    assert job(distillspec, monkeypatch, [*arguments(tmp_path / "x"), *extra]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("error: ") and message in lines[-1]
    assert not (tmp_path / "x" / "checkpoints").exists()


def test_a_workdir_that_cannot_be_made_is_refused(
    tmp_path, monkeypatch, capsys, arguments, job
):
    (tmp_path / "file").write_text("")
    assert job(distillspec, monkeypatch, arguments(tmp_path / "file" / "run")) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.full
def test_prompts_are_answered_by_a_given_target_and_layers_of_it_draft(
    tiny_folder, tmp_path, monkeypatch, arguments, job
):
    """The way of `--config smollm2`: a checkpoint, chat prompts, a draft of layers."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"sky {a}{b}"} for a in "abcdef" for b in "uvwxyz"]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    workdir = tmp_path / "run"
    extra = ["--target", str(tiny_folder), "--prompts", str(prompts)]
    changes = {"draft__layers": "0", "data__length": 64, "data__prompt_length": 40}
    assert job(distillspec, monkeypatch, [*arguments(workdir, **changes), *extra]) == 0
    report = json.loads((workdir / "report.json").read_text())
    assert report["target"] == str(tiny_folder)
    equal, held_out = report["lossless"]["greedy_equal"].split("/")
    assert equal == held_out and int(held_out) >= 2  # as many as the hash holds out
    assert not (workdir / "target").exists()
    draft = specjax.load(workdir / "draft")
    assert draft.config.num_layers == 1 and draft.config.hidden_size == 16
