"""`python -m specjax`: what it prints, and one sentence for what cannot be done."""

import json

import jax
import pytest

from specjax import drafters
from specjax._cli import main
from specjax.io import load
from tests.marks import sampled

RATES = ["--set", "verifier.rates=[2]"]  # no acceptance rates


def command(folder, *extra):
    return [
        "generate",
        "--target",
        str(folder),
        "--prompt",
        "One day the sky was blue, the next day",
        "--max-new-tokens",
        "12",
        "--temperature",
        "0",
        *extra,
    ]


def run_json(capsys, argv):
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_holds_what_the_contract_names(tiny_folder, capsys):
    out = run_json(capsys, command(tiny_folder))
    assert {"texts", "tokens", "finish_reasons", "stats"} <= out.keys()
    assert len(out["tokens"][0]) == 12 and out["finish_reasons"] == ["length"]
    assert out["stats"]["acceptance_rate"] is None
    assert out["stats"]["block_efficiency"] == 1.0


@pytest.mark.parametrize(
    "drafter",
    sampled(
        [["prompt_lookup"], ["two_model", "--draft"], ["prompt_lookup", "-v"]],
        ["two_model", "--draft"],
    ),
)
def test_a_drafter_changes_the_counts_and_not_the_text(tiny_folder, capsys, drafter):
    plain = run_json(capsys, command(tiny_folder))
    extra = [tiny_folder] if drafter[-1] == "--draft" else []
    if drafter[-1] == "-v":
        drafter = [drafter[0], "--verifier", "greedy"]
    options = ["--drafter", *drafter, *map(str, extra), "--gamma", "3"]
    drafted = run_json(capsys, command(tiny_folder, *options))
    assert drafted["tokens"] == plain["tokens"] and drafted["texts"] == plain["texts"]
    if extra:  # the target drafts for itself
        assert drafted["stats"]["acceptance_rate"] == 1.0
        assert drafted["stats"]["block_efficiency"] == 4.0


@pytest.mark.full
def test_trained_heads_are_a_folder(tiny_folder, tmp_path, capsys):
    target = load(str(tiny_folder))
    medusa = drafters.Medusa(2, (2, 1))
    own = medusa.init_params(jax.random.key(0), target)
    drafters.save(medusa.with_params(own), tmp_path, target)
    plain = run_json(capsys, command(tiny_folder))
    options = ["--drafter", "medusa", "--draft", str(tmp_path)]
    drafted = run_json(capsys, command(tiny_folder, *options))
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["stats"]["drafted"] > 0


OPTIONS = [
    "self_speculative --set drafter.early_exit=1 --gamma 3",
    "self_speculative --set drafter.layers=[0,1]",
    "lookahead --set drafter.level=4 --set drafter.window=3",
    "fallback --draft TINY --gamma 2 --min-confidence 0.1",
    "two_model --draft TINY --set drafter.vocabulary=intersection",
    "placeholder --verifier block",
]


@pytest.mark.parametrize("options", sampled(OPTIONS, OPTIONS[-1]))
def test_drafters_without_training_and_their_settings(tiny_folder, capsys, options):
    plain = run_json(capsys, command(tiny_folder))
    options = options.replace("TINY", str(tiny_folder)).split()
    drafted = run_json(capsys, command(tiny_folder, "--drafter", *options))
    assert drafted["tokens"] == plain["tokens"]


@pytest.mark.full
def test_simulated_acceptance_has_its_rates(tiny_folder, capsys):
    options = ["--drafter", "placeholder", "--verifier", "simulated", "--gamma", "3"]
    options += ["--set", "verifier.rates=[1, 1, 0]", "--max-new-tokens", "30"]
    out = run_json(capsys, command(tiny_folder, *options))
    assert out["stats"]["acceptance_by_position"] == [1.0, 1.0, 0.0]
    assert out["stats"]["block_efficiency"] == 3.0


@pytest.mark.full
def test_several_prompts_and_stop_strings(tiny_folder, capsys):
    plain = run_json(capsys, command(tiny_folder, "--prompt", "the sky"))
    assert len(plain["texts"]) == 2
    text = plain["texts"][0]
    stop = next(c for c in text if c.isascii())
    out = run_json(capsys, command(tiny_folder, "--stop", stop))
    assert out["texts"] == [text[: text.index(stop)]]
    assert out["finish_reasons"] == ["stop"]


def test_chat_applies_the_template(tiny_folder, capsys):
    assert main(command(tiny_folder, "--chat")) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() and "12 tokens" in printed.err


def test_export_writes_a_folder_that_loads(tiny_folder, tmp_path, capsys):
    copy = tmp_path / "copy"
    assert main(["export", str(tiny_folder), str(copy)]) == 0
    capsys.readouterr()
    assert run_json(capsys, command(copy)) == run_json(capsys, command(tiny_folder))


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--top-k", "0"], "top_k"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--drafter", "prompt_lokup"], "prompt_lookup"),
        (["--drafter", "two_model"], "--draft"),
        (["--draft", "x"], "--drafter two_model"),
        (["--drafter", "medusa"], "the folder of a trained one"),
        (["--drafter", "medusa", "--draft", "x"], "no drafter.json"),
        (
            ["--drafter", "medusa", "--draft", "x", "--gamma", "2"],
            "gamma is no setting",
        ),
        (["--drafter", "lookahead", "--gamma", "2"], "gamma is no setting"),
        (["--drafter", "lookahead", "--set", "drafter.windw=2"], "'window'"),
        (["--drafter", "lookahead", "--set", "drafter.window=x"], "window, a whole"),
        (["--drafter", "lookahead", "--set", "window=2"], "drafter.KEY=VALUE"),
        (["--drafter", "fallback"], "--draft"),
        (["--drafter", "self_speculative"], "early_exit"),
        (["--drafter", "prompt_lookup", "--min-confidence", "0.5"], "no setting"),
        (
            ["--drafter", "prompt_lookup", "--set", "drafter.max_ngram=x"],
            "PromptLookup",
        ),
        (
            ["--drafter", "prompt_lookup", "--gamma", "2", "--set", "drafter.gamma=3"],
            "not both",
        ),
        (["--drafter", "lookahead", "--verifier", "block"], "chains of drafts only"),
        (["--set", "drafter.gamma=3"], "--drafter"),
        (["--drafter", "lookahead", "--set", "verifier.rates=1"], "--verifier"),
        (
            ["--drafter", "placeholder", "--verifier", "simulated", *RATES],
            "acceptance rates in [0, 1]",
        ),
        (["--gamma", "4"], "--drafter"),
        (["--verifier", "greedy"], "--drafter"),
        (["--drafter", "prompt_lookup", "--gamma", "0"], "gamma"),
        (["--drafter", "prompt_lookup", "--verifier", "gredy"], "greedy"),
        (["--prompt", ""], "empty"),
        (["--prompt", "the sky was blue " * 200], "context"),
        (["--stop", ""], "stop"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(tiny_folder, capsys, extra, words):
    assert main(command(tiny_folder, *extra)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and words in lines[0]


def test_a_model_that_is_not_there(tmp_path, capsys):
    assert main(command(tmp_path / "nothing")) == 2
    assert "nothing" in capsys.readouterr().err
