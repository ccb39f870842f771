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
    `compiler_options={"xla_backend_optimization_level": 3}`.
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
