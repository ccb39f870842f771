"""The real model, where it is cached."""

import pytest

from specjax.io import load
from specjax.io._paths import cache_dir


@pytest.fixture(scope="module")
def smollm2():
    name = "smollm2-135m-instruct"
    found = [cache_dir() / name, cache_dir() / f"{name}.gguf"]
    if not any(path.exists() for path in found):
        pytest.skip(f"{name} is not cached: `python -m specjax fetch` gets it")
    return load(name)
