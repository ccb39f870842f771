"""Experiments at a tiny size, run in this process."""

import sys

import pytest

from experiments._config import run

TINY = {
    "target.size.hidden_size": 32,
    "target.size.intermediate_size": 48,
    "target.size.num_heads": 2,
    "target.size.num_kv_heads": 1,
    "target.size.head_dim": 16,
    "target.size.num_layers": 1,
    "target.grow_to": 2,
    "target.train.steps": 24,
    "target.grow.steps": 24,
    "draft.size.hidden_size": 16,
    "draft.size.intermediate_size": 16,
    "draft.size.num_heads": 1,
    "draft.size.head_dim": 16,
    "draft.train.steps": 24,
    "distill.train.steps": 24,
    "distill.eval_every": 12,
    "distill.equal_time": False,
    "checkpoint_every": 8,
    "batch_size": 4,
    "data.vocab_size": 300,
    "data.length": 48,
    "data.max_chars": 300_000,
    "data.held_out": 0.2,
    "data.prompt_length": 16,
    "eval.gamma": 2,
    "eval.gammas": "1",
    "eval.batches": "1",
    "eval.prompts": 4,
    "eval.curve_prompts": 1,
    "eval.prompt_length": 16,
    "eval.max_new_tokens": 12,
    "eval.lossless_prompts": 4,
}


@pytest.fixture(scope="session")
def arguments():
    """The command line of a tiny run; `prefix` says where the pair's settings are."""

    def make(workdir, prefix="", **changes) -> list[str]:
        settings = {prefix + key: value for key, value in TINY.items()}
        settings |= {key.replace("__", "."): value for key, value in changes.items()}
        sets = [part for k, v in settings.items() for part in ("--set", f"{k}={v}")]
        return ["--workdir", str(workdir), *sets]

    return make


@pytest.fixture(scope="session")
def job():
    """Runs an experiment in this process; returns its exit code."""

    def start(script, monkeypatch, given: list[str]) -> int:
        monkeypatch.setattr(sys, "argv", [script.__name__, *given])
        with pytest.raises(SystemExit) as ended:
            run(script.main)
        return ended.value.code

    return start
