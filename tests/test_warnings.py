"""How tfloop's warnings are printed: in a line, without its own code."""

import subprocess
import sys
import warnings

import loop
from tests.conftest import ROOT

PROGRAM = """
import warnings
from pathlib import Path
import loop
own = str(Path(loop.__file__).parent / "step" / "unsaved.py")
warnings.warn_explicit("ours", UserWarning, own, 7)
warnings.warn_explicit("theirs", UserWarning, "task.py", 7)
"""


def test_a_warning_of_tfloop_is_a_line_and_others_are_as_ever():
    ended = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert ended.stderr == "warning: ours\ntask.py:7: UserWarning: theirs\n"
    strict = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert strict.returncode == 1
    assert "UserWarning: ours" in strict.stderr


def test_a_warning_is_still_caught():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.warn_explicit("ours", UserWarning, loop.__file__, 7)
    assert [str(warning.message) for warning in caught] == ["ours"]
