"""Measures of how the code reads, with their goals: `python -m tests.campaigns.house`.

Exit code 1 if a goal isn't reached. A number is a symptom, not the disease: code that is cut up until it fits a goal,
and reads no better, has missed the point. `tests/test_architecture.py` holds the goals that are reached.
"""

import ast
import functools
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]

BRANCHES = (ast.If, ast.For, ast.While, ast.IfExp, ast.ExceptHandler, ast.comprehension, ast.BoolOp, ast.match_case)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Measure(NamedTuple):
    """One measure: what it is, its value, where the value was found, and its goal."""

    name: str
    value: float
    goal: float
    where: str = ""
    at_least: bool = False

    @property
    def reached(self) -> bool:
        """Whether the value is as good as the goal."""
        return self.value >= self.goal if self.at_least else self.value <= self.goal


class Source:
    """A file of the product, read once."""

    def __init__(self, path: Path) -> None:
        text = path.read_text()
        self.name = path.relative_to(ROOT).as_posix()
        self.tree = ast.parse(text)
        self.nodes = list(ast.walk(self.tree))
        self.lines = text.splitlines()
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        self.comments = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
        docstrings = self._docstring_lines()
        self.code = {
            number
            for number, line in enumerate(self.lines, 1)
            if line.strip() and number not in docstrings and not line.strip().startswith("#")
        }

    def _docstring_lines(self) -> set[int]:
        found: set[int] = set()
        for node in self.nodes:
            if not isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) or ast.get_docstring(node) is None:
                continue
            found |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        return found

    def code_lines(self, node: ast.AST) -> int:
        """The lines of code of a class or function."""
        return sum(number in self.code for number in range(node.lineno, node.end_lineno + 1))

    def of(self, *kinds: type[ast.AST]) -> list[ast.AST]:
        """The nodes of these kinds."""
        return [node for node in self.nodes if isinstance(node, kinds)]


@functools.cache
def sources() -> list[Source]:
    """All files of the product."""
    paths = [*ROOT.glob("loop/**/*.py"), *ROOT.glob("callbacks/**/*.py"), ROOT / "cli.py"]
    return [Source(path) for path in sorted(paths)]


def complexity(function: ast.AST) -> int:
    """The cyclomatic complexity of a function (McCabe 1976), those within it counted with it."""
    count = 1
    for node in ast.walk(function):
        if isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        elif isinstance(node, BRANCHES):
            count += 1
    return count


def is_self(node: ast.AST) -> bool:
    """Whether an expression is `self`."""
    return isinstance(node, ast.Name) and node.id == "self"


def attributes(kind: ast.ClassDef) -> int:
    """How many attributes the methods of a class assign."""
    found = set()
    for method in kind.body:
        for node in ast.walk(method) if isinstance(method, FUNCTIONS) else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node.value):
                found.add(node.attr)
    return len(found)


def rows() -> list[str]:
    """The folders and files of `loop/`, from the top down, as the picture in docs/architecture.md has them."""
    picture = (ROOT / "docs" / "architecture.md").read_text().split("```text\n")[1].split("```")[0]
    cells = [line.split("│")[2].strip() for line in picture.splitlines() if line.count("│") == 4]
    return [name for name in cells if name]


def imported(tree: ast.AST) -> list[str]:
    """The folders and files of `loop/` that a file imports, wherever the import stands, also for types alone."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "loop":
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("loop."):
            found.append(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found += [alias.name.split(".")[1] for alias in node.names if alias.name.startswith("loop.")]
    return found


@functools.cache
def arrows() -> dict[tuple[str, str], str]:
    """The imports between the folders and files of `loop/`, each with a file that has it."""
    found = {}
    for path in ROOT.glob("loop/**/*.py"):
        where = path.relative_to(ROOT / "loop").parts[0].removesuffix(".py")
        if where == "__init__":  # the public names
            continue
        for name in imported(ast.parse(path.read_text())):
            if name != where:
                found[where, name] = path.relative_to(ROOT).as_posix()
    return found


def upward() -> list[str]:
    """The imports that run against the picture, each as a line."""
    order = rows()
    return [
        f"{path} imports {name}, which stands above {where}"
        for (where, name), path in arrows().items()
        if order.index(name) < order.index(where)
    ]


def written_from_outside() -> list[str]:
    """The attributes of a run that are written elsewhere than in its class."""
    found = set()
    for source in sources():
        if source.name.startswith("loop/") and source.name != "loop/run/run.py":
            for node in source.of(ast.Attribute):
                if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) in ("run", "self._run", "self.run"):
                    found.add(node.attr)
    return sorted(found)


def measures() -> list[Measure]:
    """Every measure of today."""
    files = sources()
    rooms = [path for path in (ROOT / "loop").iterdir() if path.is_dir() or path.suffix == ".py"]
    rooms = [path for path in rooms if path.name != "__pycache__"]
    against = upward()
    outside = written_from_outside()
    lines = {source.name: len(source.lines) for source in files}
    classes, class_attributes, class_methods, functions, complexities = {}, {}, {}, {}, {}
    for source in files:
        for node in source.of(ast.ClassDef):
            name = f"{source.name}:{node.name}"
            classes[name] = source.code_lines(node)
            class_attributes[name] = attributes(node)
            class_methods[name] = sum(isinstance(each, FUNCTIONS) for each in node.body)
        for node in source.of(*FUNCTIONS):
            name = f"{source.name}:{node.name}"
            functions[name] = source.code_lines(node)
            complexities[name] = complexity(node)
    code = sum(len(source.code) for source in files)
    comprehensions = sum(len(source.of(*COMPREHENSIONS)) for source in files)
    assignments = sum(
        isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
        for source in files
        for node in source.of(ast.Assign)
    )
    annotated = sum(
        "Any" in line and (":" in line or "->" in line) and "import" not in line
        for source in files
        for line in source.lines
    )
    branches = sum(value - 1 for value in complexities.values())
    comments = sum(len(source.comments) for source in files)

    def greatest(name: str, values: dict[str, int], goal: int) -> Measure:
        where, value = Counter(values).most_common(1)[0]
        return Measure(name, value, goal, where)

    return [
        Measure("folders and files side by side in loop/", len(rooms), 16),
        Measure("imports between them", len(arrows()), 70),
        Measure("imports that run upward", len(against), 0, "; ".join(against)),
        greatest("lines of the longest file", lines, 400),
        greatest("lines of code of the biggest class", classes, 250),
        greatest("lines of code of the longest function", functions, 40),
        greatest("most attributes of a class", class_attributes, 15),
        greatest("most methods of a class", class_methods, 20),
        greatest("greatest cyclomatic complexity", complexities, 12),
        Measure("functions above a complexity of 15", sum(value > 15 for value in complexities.values()), 0),
        Measure("branches per 100 lines of code", round(100 * branches / code), 18),
        Measure("comprehensions per 1,000", round(1000 * comprehensions / code), 20),
        Measure("assignments of tuples per 1,000", round(1000 * assignments / code), 5),
        Measure("comments per 100 lines of code", round(100 * comments / code, 1), 7, at_least=True),
        Measure("lines with Any in annotations", annotated, 200),
        Measure("lines of loop/, callbacks/ and cli.py", sum(lines.values()), 20000),
        Measure("attributes of Run written from outside", len(outside), 0, ", ".join(outside)),
    ]


def main() -> int:
    """Prints the table; returns the exit code."""
    found = measures()
    for measure in found:
        mark = "  " if measure.reached else "! "
        print(f"{mark}{measure.name:42} {measure.value:>8} (goal {measure.goal})  {measure.where}"[:150])
    reached = sum(measure.reached for measure in found)
    print(f"{reached} of {len(found)} goals are reached")
    return int(reached < len(found))


if __name__ == "__main__":
    sys.exit(main())
