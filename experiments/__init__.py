"""One short script an experiment: `python -m experiments.NAME --help`."""

import os

# torch is not missed here: a hint that it is would read like a failed installation.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
