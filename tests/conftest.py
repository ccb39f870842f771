"""Settings of every test: a CPU, quick compilation, no silent broadcasting, shapes.

The import hook checks the shapes and dtypes in the signatures of the pure array code;
it has to be in place before anything imports that code.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from jaxtyping import install_import_hook


def _compile_quickly() -> None:
    """Compiles small programs four times faster; large ones run eight times slower.

    A test that runs a lot of numbers asks `jax.jit` for optimised code again, with
    `compiler_options={"xla_backend_optimization_level": 1}`.
    The flags are read once, when the backend starts, and taken back for subprocesses.
    """
    given = os.environ.get("XLA_FLAGS")
    flags = [given or "", "--xla_backend_optimization_level=0"]
    if jax.__version_info__ < (0, 11):  # 2026-12: an unknown flag ends the process
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ["XLA_FLAGS"] = " ".join(flags)
    jax.devices()
    if given is None:
        del os.environ["XLA_FLAGS"]
    else:
        os.environ["XLA_FLAGS"] = given


_compile_quickly()
jax.config.update("jax_numpy_rank_promotion", "raise")
# The numeric tower: a whole number is a float, as everywhere in Python.
install_import_hook(
    ["specjax.ops", "specjax.divergences", "specjax.verifiers"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)


# The imports below must come after the hook: they import the code that it checks.
import pytest  # noqa: E402

from specjax.core import Checkpoint  # noqa: E402
from specjax.data import train_bpe  # noqa: E402
from specjax.io import export  # noqa: E402
from specjax.models import CausalLM, ModelConfig  # noqa: E402

TEXTS = ["One day the sky was blue, the next day the sky was grey.\n"] * 20
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def pytest_collection_modifyitems(items):
    """The longest files first: a worker that got one last would end alone."""
    items.sort(key=lambda item: "/e2e/" not in item.path.as_posix())


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A checkpoint that runs in a second, with tokeniser and chat template."""
    tokenizer = train_bpe(TEXTS, vocab_size=300)
    tokenizer.chat_template = TEMPLATE
    config = ModelConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=256,
    )
    params = CausalLM(config).init(jax.random.key(0))
    # Larger weights than a fresh model's: its text is then not one token for ever.
    params = jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, params)
    checkpoint = Checkpoint(CausalLM(config), params, tokenizer, config)
    return export(checkpoint, tmp_path_factory.mktemp("tiny") / "model")
