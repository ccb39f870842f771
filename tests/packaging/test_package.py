"""The package as a user gets it: what an import costs, names, versions, contracts."""

import doctest
import importlib
import importlib.metadata
import inspect
import os
import pkgutil
import re
import subprocess
import sys
import tomllib

import pytest

import specjax
from tests.packaging.readme import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
MODULES = [
    m.name
    for m in pkgutil.walk_packages(specjax.__path__, "specjax.")
    if not m.name.endswith("__main__")
]
ROOMS = [name for name in MODULES if "._" not in name]


def python(*arguments, cwd):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_an_import_brings_nothing_slow(tmp_path):
    slow = ["torch", "transformers", "datasets", "matplotlib", "pandas", "scipy"]
    code = f"import sys, specjax; print([m for m in {slow} if m in sys.modules])"
    done = python("-W", "error", "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", [(), ("generate",)])
def test_help(tmp_path, command):
    done = python("-m", "specjax", *command, "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" ".join(["usage: python -m specjax", *command]))


def test_one_version():
    assert specjax.__version__ == PROJECT["project"]["version"]
    changes = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert f"## [{specjax.__version__}]" in changes


def test_torch_is_needed_by_the_extra_parity_alone():
    extras = PROJECT["project"]["optional-dependencies"]
    need = {name for name, deps in extras.items() if any("torch" in d for d in deps)}
    assert need == {"parity"}
    assert not any("torch" in d for d in PROJECT["project"]["dependencies"])


def test_every_third_party_import_is_declared():
    declared = {
        re.split(r"[<>=\[; ]", dep)[0].lower().replace("_", "-")
        for dep in PROJECT["project"]["dependencies"]
    }
    distributions = importlib.metadata.packages_distributions()
    imported = set()
    for path in (ROOT / "specjax").rglob("*.py"):
        found = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text("utf-8"), re.M)
        imported |= {name for name in found if name in distributions}
    imported -= {"specjax", *sys.stdlib_module_names}
    names = {"orbax": ["orbax-checkpoint"]}  # a namespace of several packages
    for name in imported:
        given = names.get(name, distributions[name])
        assert declared & {d.lower().replace("_", "-") for d in given}, name


@pytest.mark.parametrize("room", ["specjax", *ROOMS])
def test_public_names_exist_and_say_what_they_are(room):
    module = importlib.import_module(room)
    assert module.__doc__
    assert list(module.__all__) == sorted(set(module.__all__), key=_isort_key)
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isclass(thing) or inspect.isroutine(thing):
            own = thing.__dict__.get("__doc__") if inspect.isclass(thing) else None
            assert own or inspect.getdoc(thing), f"{room}.{name} has no docstring"
            # A dataclass without one is given its signature instead.
            assert not (own or "").startswith(f"{name}("), f"{room}.{name}"


def _isort_key(name):
    """Constants, then classes, then the rest, as ruff sorts them."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    return kind, name


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings_run(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.parametrize("kind", ["drafter", "verifier"])
def test_the_contract_of_independence_names_every_file(kind):
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    [contract] = [c for c in contracts if c["name"].startswith(f"{kind.title()}s do")]
    registry = importlib.import_module(f"specjax.{kind}s").registry
    files = {registry.get(name).__module__ for name in registry.names()}
    assert files <= set(contract["modules"])


def test_no_file_names_a_machine():
    """Paths of one machine, or of the people who wrote this."""
    shipped = [*(ROOT / "specjax").rglob("*"), *(ROOT / "experiments").rglob("*")]
    texts = [p for p in shipped if p.suffix in (".py", ".jsonl", ".typed", ".md")]
    assert len(texts) > 50
    for path in texts:
        text = path.read_text("utf-8")
        found = re.search(r"(?<![\w.~])/(home|root|work|tmp|Users|mnt)/\w+", text)
        assert found is None, f"{path}: {found and found.group()}"
