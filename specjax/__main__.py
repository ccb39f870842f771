"""`python -m specjax generate | fetch | export`."""

import sys

from specjax._cli import main

if __name__ == "__main__":
    sys.exit(main())
