"""The shape of the house: who may import whom, and where collectives may stand."""

import ast
import re
import subprocess
import sys
import zipfile

import pytest

from loop.target import task_loader
from tests.campaigns import house
from tests.conftest import ROOT

FLOORS = ("callbacks", "loop", "cli")

REACHED = {
    "folders and files side by side in loop/",
    "imports between them",
    "imports that run upward",
    "lines of code of the biggest class",
    "attributes of Run written from outside",
    "lines of the longest file",
    "functions above a complexity of 15",
    "assignments of tuples per 1,000",
    "most attributes of a class",
    "most methods of a class",
    "greatest cyclomatic complexity",
    "lines with Any in annotations",
    "comments per 100 lines of code",
    "comprehensions per 1,000",
}
"""Measures of `python -m tests.campaigns.house` whose goals are reached."""


def sources():
    return [*ROOT.glob("loop/**/*.py"), *ROOT.glob("callbacks/**/*.py"), ROOT / "cli.py"]


def code_of(path):
    """The code of a file without comments and docstrings."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [
                each for each in body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
            ]
            node.body = node.body or [ast.Pass()]
    return ast.unparse(tree)


def imported(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_imports_run_one_way():
    for path in sources():
        floor = FLOORS.index(path.relative_to(ROOT).parts[0].removesuffix(".py"))
        above = {name for name in imported(path) if name.split(".")[0] in FLOORS[floor + 1 :]}
        assert not above, f"{path} imports {above}"


def test_imports_run_down_the_picture():
    """Every import counts, also one within a function, or for types alone."""
    folders = {path.relative_to(ROOT / "loop").parts[0].removesuffix(".py") for path in ROOT.glob("loop/**/*.py")}
    assert set(house.rows()) == folders - {"__init__"}
    assert not house.upward()


def test_measures_that_have_reached_their_goals_keep_them():
    reached = {measure.name for measure in house.measures() if measure.reached}
    assert reached >= REACHED


def test_collectives_stand_in_backends_alone():
    pattern = re.compile(r"\b(hvd|horovod\.tensorflow|tf\.distribute|all_reduce\(tf|strategy\.(run|reduce))\b")
    allowed = {"loop/commands/doctor.py"}  # asks Horovod what it was built with
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        if name.startswith("loop/backends/") or name in allowed:
            continue
        found = [line for line in code_of(path).splitlines() if pattern.search(line)]
        assert not found, f"{name}: {found}"


def test_every_file_says_first_what_it_is_for():
    for path in [*sources(), *ROOT.glob("tests/**/*.py"), *ROOT.glob("examples/*.py")]:
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_no_pickle_and_no_shell():
    for path in sources():
        # It hands a user's functions to processes that the training itself has started, through pipes without a name.
        if path.name == "reader_process.py":
            continue
        assert not {"pickle", "cloudpickle", "dill", "shelve"} & set(imported(path)), path
        assert "shell=True" not in path.read_text()


def test_no_file_holds_a_registry_address():
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert "uv.lock" not in listed.stdout.split()
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        assert "://" not in line, line


@pytest.mark.slow
def test_wheel_has_three_names_and_the_shipped_examples(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        capture_output=True, text=True, cwd=ROOT, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"callbacks", "cli.py", "loop"}
    assert {path.relative_to(ROOT).as_posix() for path in sources()} <= set(names)  # also those in a folder named runs
    assert {f"loop/examples/{name}.py" for name in [*task_loader.SHIPPED, "template"]} <= set(names)
    assert {"loop/py.typed", "callbacks/py.typed"} <= set(names)
    templates = (ROOT / "callbacks" / "run_record" / "templates").iterdir()
    assert {f"callbacks/run_record/templates/{path.name}" for path in templates} <= set(names)


def test_every_fault_has_a_test_that_exists():
    rows = [
        line for line in (ROOT / "docs" / "reliability.md").read_text().splitlines() if re.match(r"\| \d+ \|", line)
    ]
    assert [int(line.split("|")[1]) for line in rows] == list(range(1, 43))
    there = set(
        re.findall(r"def (test_\w+)", "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py")))
    )
    for line in rows:
        named = set(re.findall(r"`(test_\w+)`", line))
        assert named, line
        assert named <= there, named - there
