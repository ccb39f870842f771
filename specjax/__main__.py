"""`python -m specjax generate | fetch | export`."""

import os
import sys

# torch is not missed here: a hint that it is would read like a failed installation.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from specjax._cli import main

if __name__ == "__main__":
    sys.exit(main())
