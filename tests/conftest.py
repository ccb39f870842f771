"""Settings of every test: a CPU, no silent broadcasting, checked shapes.

The import hook checks the shapes and dtypes in the signatures of the pure array code;
it has to be in place before anything imports that code.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
from jaxtyping import install_import_hook  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
# The numeric tower: a whole number is a float, as everywhere in Python.
install_import_hook(
    ["specjax.ops", "specjax.divergences", "specjax.verifiers"],
    "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))",
)
