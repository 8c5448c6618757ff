"""The lines of each path that depends on a GPU: all of them run in the tests, on GPUs that these make up.

`python -m tests.campaigns.gpu_lines` runs the tests of docs/gpu.md in this process, watches the functions of its table,
and prints each of their lines that has not run. It ends with 1 if there is one, or if a test fails.
"""

import collections
import dis
import importlib
import re
import sys
import types

import pytest

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "gpu.md"
ROW = re.compile(r"^\| `(?P<path>[\w/]+\.py)` \| .*? \| (?P<functions>.*?) \| (?P<tests>.*?) \|$", re.MULTILINE)
NAMES_A_GPU = re.compile(r"gpu|nccl|visible_devices|local_rank", re.IGNORECASE)


def table():
    """What docs/gpu.md has: file, name, and whether all lines count, of each function; and its tests."""
    functions = []
    tests = set()
    for row in ROW.finditer(PAGE.read_text()):
        for italic, name in re.findall(r"(\*?)`([\w.]+)`", row["functions"]):
            functions.append((row["path"], name, not italic))
        tests.update(re.findall(r"\.\./(tests/[\w/]+\.py#\w+)", row["tests"]))
    return functions, sorted(tests)


def code_of(path, name):
    """The code of a function of that file, and of what is defined in it."""
    found = importlib.import_module(path.removesuffix(".py").replace("/", ".").removesuffix(".__init__"))
    for part in name.split("."):
        found = getattr(found, part)
    codes = [found.__code__]
    # One that is only imported there would be watched by the lines of another file.
    assert codes[0].co_filename == str(ROOT / path), f"{PAGE.name}: {name} isn't defined in {path}"
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return codes


def lines_of(code, path, whole):
    """The lines of a function that can run, by number, but for the one that defines it."""
    text = (ROOT / path).read_text().splitlines()
    lines = {}
    for _, line in dis.findlinestarts(code):
        if line is not None and line != code.co_firstlineno and (whole or NAMES_A_GPU.search(text[line - 1])):
            lines[line] = text[line - 1].strip()
    return lines


def main():
    functions, tests = table()
    watched = {}
    for path, name, whole in functions:
        for code in code_of(path, name):
            watched[code] = (path, name, lines_of(code, path, whole))
    seen = collections.defaultdict(set)

    def trace(frame, event, argument):
        if frame.f_code not in watched:
            return None

        def lines(frame, event, argument):
            seen[frame.f_code].add(frame.f_lineno)
            return lines

        return lines

    sys.settrace(trace)
    ended = pytest.main(["-q", "-p", "no:cacheprovider", *(f"{ROOT}/{test.replace('#', '::')}" for test in tests)])
    sys.settrace(None)
    missed = 0
    for code_object, (path, name, lines) in watched.items():
        for line in sorted(lines.keys() - seen[code_object]):
            missed += 1
            print(f"{path}:{line} in {name}: {lines[line]}")
    count = sum(len(lines) for _, _, lines in watched.values())
    print(f"{len(functions)} functions, {count} lines, {missed} of them not run")
    return int(bool(ended or missed))


if __name__ == "__main__":
    sys.exit(main())
