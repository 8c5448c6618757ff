"""The pages that are made of the program itself: the Python API by theme, and the reference of the command line."""

from __future__ import annotations

import ast
import html
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent

THEMES: dict[str, dict[str, list[str]]] = {
    "loop": {
        "Training": ["fit", "TrainTask", "ArrayData", "KerasTask", "FitResult", "Phase"],
        "Data": ["IndexedData", "StreamData", "Padding", "records", "sequences", "mix"],
        "Inside compute": ["all_gather", "first_row", "example_seed", "unweighted", "Perplexity"],
        "Where and how it is computed": ["device", "remat"],
        "After training": ["evaluate", "predict", "compare"],
        "Runs and errors": ["Run", "UsageError", "TrainingError", "PeerError", "__version__"],
    },
    "callbacks": {
        "Your own": [
            "Callback", "Run", "Schedule", "Metrics", "EVENTS", "LambdaCallback", "FromKeras", "SettingsError",
        ],
        "The standard set": ["standard", "StandardSet", "complete"],
        "Saving and stopping": ["Checkpoint", "EarlyStopping", "EMA", "Sentinel"],
        "Learning rates": ["LearningRateScaling", "ReduceOnPlateau", "LearningRateMonitor"],
        "Showing and recording": [
            "Progress", "Journal", "Report", "MLflowTracker", "TensorBoard", "CSVLogger", "ModelSummary",
            "SamplePredictions", "SystemMetrics", "Timer", "Profiler", "Notify", "TrainerStatus",
        ],
        "Data and variables": ["ShardData", "BroadcastVariables"],
    },
}  # fmt: skip
"""The public names of each package by theme, those that most need first. A name that is in none comes last."""

WITHOUT_MEMBERS = {
    "loop.Run": "What callbacks see of a run: [`callbacks.Run`](callbacks.md#callbacks.base.Run).",
    "loop.Padding": "More in [Examples of different lengths](../data.md#examples-of-different-lengths).",
}
"""Classes whose members are internals, and where to read on."""


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages."""
    for package in THEMES:
        files.append(File.generated(config, f"api/{package}.md", content=api(package)))
    files.append(File.generated(config, "api/command-line.md", content=command_line()))
    return files


def api(package: str) -> str:
    """A page with the public names of a package by theme."""
    tree = ast.parse((ROOT / package / "__init__.py").read_text())
    names, homes = public_names(tree, package)
    parts = [f"# `{package}`\n\n{(ast.get_docstring(tree) or '').splitlines()[0]}"]
    for theme, members in themes(package, names).items():
        parts.append(f"## {theme}")
        for name in members:
            where = f"::: {homes.get(name, f'{package}.{name}')}"
            pointer = WITHOUT_MEMBERS.get(f"{package}.{name}")
            # Without members, and without the attributes that the docstring lists.
            options = "\n    options:\n      members: false\n      show_docstring_attributes: false" if pointer else ""
            parts.append(where + options + (f"\n\n{pointer}" if pointer else ""))
    return "\n\n".join(parts)


def public_names(tree: ast.Module, package: str) -> tuple[list[str], dict[str, str]]:
    """What `__all__` of a package lists, and where each name is defined."""
    homes = {}
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{package}."):
            for alias in node.names:
                homes[alias.name] = f"{node.module}.{alias.name}"
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = ast.literal_eval(node.value)
    return names, homes


def themes(package: str, names: list[str]) -> dict[str, list[str]]:
    """The names that a package has, by theme; those without a theme come last."""
    chosen = {}
    left = set(names)
    for theme, members in THEMES[package].items():
        chosen[theme] = [name for name in members if name in left]
        left -= set(members)
    if left:
        chosen["Other names"] = sorted(left)
    return chosen


def command_line() -> str:
    """A page with all commands, their arguments and options, from the typer app itself."""
    import typer

    import cli

    group = typer.main.get_command(cli.app)
    parts = [
        "# Command line",
        "All commands and options, as `tfloop COMMAND --help` shows them. What they are for, in a table: "
        "[Commands](../commands.md).",
    ]
    for command in commands(group, "tfloop"):
        parts += command
    return "\n\n".join(parts)


def commands(group: Any, path: str) -> list[list[str]]:
    """The sections of a group's commands, and of the groups in it."""
    sections = []
    for name, command in group.commands.items():
        full_name = f"{path} {name}"
        context = command.context_class(command, info_name=full_name)
        sections.append(section(command, context, full_name))
        if hasattr(command, "commands"):
            sections += commands(command, full_name)
    return sections


def section(command: Any, context: Any, name: str) -> list[str]:
    """A command: what it does, how it is typed, and a table for each group of its options."""
    usage = " ".join(command.collect_usage_pieces(context))
    parts = [f"## {name}", escaped(command.help or ""), f"```text\n{name} {usage}\n```"]
    tables: dict[str, list[str]] = {}
    for parameter in command.params:
        record = parameter.get_help_record(context)
        if record is None or getattr(parameter, "hidden", False):
            continue
        typed, meaning = record
        panel = getattr(parameter, "rich_help_panel", None) or ""
        tables.setdefault(panel, []).append(f"| `{typed.replace('|', chr(92) + '|')}` | {escaped(meaning)} |")
    for panel, rows in tables.items():
        head = f"| {panel or 'argument or option'} | |\n|---|---|\n"
        parts.append(head + "\n".join(rows))
    return parts


def escaped(text: str) -> str:
    """A text of a help page as Markdown, in one line."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|").replace("[", "\\[").replace("*", "\\*")
