"""The tests with all combinations of their parameters, of which the suite takes few: see `tests/products.py`.

`python -m tests.campaigns.products [ARGUMENTS]` hands its arguments to pytest, such as `tests/step -n 2`; without
arguments it runs each file that uses `tests.products`.
"""

import os
import subprocess
import sys

from tests.conftest import ROOT
from tests.products import ALL


def files():
    """The files of tests that take few of their combinations."""
    return [path for path in sorted(ROOT.glob("tests/**/test_*.py")) if "from tests.products" in path.read_text()]


if __name__ == "__main__":
    command = [sys.executable, "-m", "pytest", *(sys.argv[1:] or files())]
    sys.exit(subprocess.run(command, cwd=ROOT, env=os.environ | {ALL: "1"}, check=False).returncode)
