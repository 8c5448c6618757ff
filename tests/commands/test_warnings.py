"""How commands print tfloop's warnings: in a line, without its own code."""

import subprocess
import sys

from tests.conftest import ROOT

PROGRAM = """
import contextlib
import sys
import warnings
import cli
sys.argv = ["tfloop", "--version"]
with contextlib.suppress(SystemExit):
    cli.main()
warnings.warn_explicit("ours", UserWarning, cli.command_line.__file__, 7)
warnings.warn_explicit("theirs", UserWarning, "task.py", 7)
"""


def run(*options, program=PROGRAM):
    return subprocess.run([sys.executable, *options, "-c", program], cwd=ROOT, capture_output=True, text=True)


def test_a_warning_of_tfloop_is_a_line_and_others_are_as_ever():
    assert run().stderr == "warning: ours\ntask.py:7: UserWarning: theirs\n"


def test_it_is_an_error_where_warnings_are():
    ended = run("-W", "error::UserWarning")
    assert ended.returncode == 1
    assert "UserWarning: ours" in ended.stderr


def test_a_program_that_imports_tfloop_keeps_its_own_way():
    program = "import warnings\nbefore = warnings.formatwarning\nimport loop\nassert warnings.formatwarning is before"
    assert run(program=program).returncode == 0
