"""What README.md prints works: its commands parse, its examples run."""

import importlib.util
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from experiments._settings import parse
from experiments.distillspec import PRESETS, SHORTCUTS, Config
from specjax import divergences, drafters
from specjax._cli import _parser
from specjax.core import Checkpoint, Sampling
from specjax.testing import TabularLM
from tests.packaging.readme import ROOT, TEXT, arguments, commands, example

SET_UP = "python3 -m venv .venv && .venv/bin/pip install -qe "


def test_the_two_commands_are_there_once_each_with_their_set_up():
    assert [c for c in commands() if c.startswith(SET_UP)] == [
        f"{SET_UP}. && .venv/bin/python -m experiments.distillspec",
        f"{SET_UP}'.[test]' && .venv/bin/python -m pytest",
    ]


@pytest.mark.parametrize("words", arguments("specjax"), ids=" ".join)
def test_a_command_of_specjax_parses(words):
    args = _parser().parse_args(words)
    assert args.command == words[0]


@pytest.mark.parametrize("words", arguments("experiments.distillspec"), ids=" ".join)
def test_a_command_of_the_main_job_parses(words):
    args = parse(words, Config, PRESETS, SHORTCUTS)
    assert args.resume == ("--resume" in words)


def test_every_module_that_is_run_exists():
    modules = set(re.findall(r"python -m ([\w.]+)", TEXT))
    assert {"experiments.distillspec", "experiments.benchmark", "specjax"} < modules
    for module in modules:
        assert importlib.util.find_spec(module) is not None, module


def test_what_is_linked_or_named_is_there():
    for link in re.findall(r"\]\(([^)#]+)\)", TEXT):
        assert link.startswith("https://") or (ROOT / link).exists(), link
    for folder in re.findall(r"`(tests/\w+)`", TEXT):
        assert list((ROOT / folder).glob("test_*.py")), folder


@pytest.fixture
def registries(monkeypatch):
    """What an example registers is forgotten after the test."""
    for registry in (drafters.registry, divergences.registry):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


def test_the_example_of_generate(tiny_folder, capsys):
    source = example("generate").replace("runs/smollm2/draft", str(tiny_folder))
    source = source.replace("smollm2-135m-instruct", str(tiny_folder))
    source = source.replace("max_new_tokens=128", "max_new_tokens=8")
    scope = {}
    exec(source, scope)
    out = scope["out"]
    assert len(out.tokens[0]) <= 8
    # The target drafts for itself.
    assert out.stats.acceptance_rate == pytest.approx(1.0)
    assert capsys.readouterr().out


def test_the_example_of_a_drafter(registries):
    scope = {}
    exec(example("drafter"), scope)
    model = TabularLM(4, order=1)
    params = jax.tree.map(lambda x: jnp.zeros_like(x), model.init(jax.random.key(0)))
    target = Checkpoint(model, params)  # every token is equally likely
    settings = SimpleNamespace(
        prompts=[[1]] * 64, sampling=Sampling(), max_new_tokens=8, eos_token_ids=[]
    )
    plain, drafted = (
        specjax.generate(target, drafter=drafter, **vars(settings))
        for drafter in (None, drafters.get("repeat")())
    )
    assert all(len(row) == 8 for row in drafted.tokens)
    assert drafted.stats.acceptance_rate == pytest.approx(1 / 4, abs=0.08)
    assert drafted.stats.block_efficiency > plain.stats.block_efficiency == 1.0


def test_the_example_of_a_divergence(registries):
    scope = {}
    exec(example("divergence"), scope)
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.9, 0.0, 0.1])
    bound = divergences.resolve("hellinger")
    with np.errstate(divide="ignore"):
        log_p, log_q = jnp.log(jnp.array(p)), jnp.log(jnp.array(q))
    expected = 0.5 * np.sum((np.sqrt(p) - np.sqrt(q)) ** 2)
    np.testing.assert_allclose(bound(log_p, log_q), expected, rtol=1e-6)
    gradient = jax.grad(lambda x: bound(log_p, x))(log_q)
    assert np.isfinite(gradient).all()
