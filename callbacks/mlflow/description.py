"""Description: what MLflow's pages say of a run in words: its name, its note, and the values that it ends with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from callbacks.base import shown_status
from callbacks.files import read_json
from callbacks.formats import lasting, number, plural
from callbacks.run_record.record import Record
from callbacks.run_record.redaction import HIDDEN, mask, redact
from callbacks.run_record.values import as_dict, as_list
from callbacks.types import Json, JsonObject

BEST = "best/"
"""The names of best values begin with this: MLflow's charts have a section for each such beginning."""
SPEED = "examples_per_second"
_LONGEST_NAME = 100  # characters of a run's name
_LONGEST_VALUE = 24  # characters of a value in it
_ESCAPES = str.maketrans({character: "\\" + character for character in "\\`*_[]<>#|~"})
"""What makes characters plain that mean something in Markdown."""


def run_name(directory: Path, about: JsonObject) -> str:
    """The name of a run: the fields that differ from the task's defaults, of a trial those that its sweep tries.

    Where no field differs, it is the name of the run directory, which has the task's.
    """
    sweep = read_json(directory.parent / "run.json")
    if "sweep" in about:
        names: list[str] = []
    elif "sweep" in sweep:
        names = list(sweep.get("hyperparameters", {}))
    else:
        names = list(map(str, as_list(about.get("changed"))))
    fields = as_dict(about.get("hyperparameters"))
    shown = {name: fields[name] for name in names if name in fields}
    # Redacted as a dict: the name of a field says whether its value is a secret.
    return values(redact(shown))[:_LONGEST_NAME] or mask(directory.name)


def values(fields: Mapping[str, Json]) -> str:
    """Fields with their values, as `hidden=16 lr=0.03`; secrets and long values are left out."""
    texts = []
    for name, value in fields.items():
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
        if len(text) <= _LONGEST_VALUE and HIDDEN not in text:
            texts.append(f"{name}={text}")
    return mask(" ".join(texts))


def note(about: JsonObject, of: Record, status: str) -> str:
    """The description of a run with this status, by its `run.json` and its record, as Markdown; what failed first."""
    lines = [f"**{_plain(of.task or 'Run')}** · {shown_status(status)}"]
    if status == "failed" and of.faults:
        fault = of.faults[-1]
        lines.append(f"**Failed at step {fault.step:,}:** {_plain(fault.text)}")
    if "sweep" in about:
        lines += _best_trial(about)
    else:
        lines.append(" · ".join(_facts(of)))
    for metric, (step, value) in best_values(of).items():
        lines.append(f"best {_plain(metric)}: {number(value)} at step {step:,}")
    command = of.provenance.get("command")
    if isinstance(command, str):
        lines.append(f"`{command.replace('`', '')}`")
    lines.append(f"`{str(of.path).replace('`', '')}`")
    # Masked before it is cut: half of a secret would no longer be found. Older MLflow takes 5000 characters of a tag.
    return mask("\n\n".join(lines))[:5000]


def best_values(of: Record) -> dict[str, tuple[int, float]]:
    """The best value of each metric of epochs and evaluations whose name says what is best, with its step."""
    bests = {}
    for name in of.curves:
        if name.startswith(("step/", "system/", "best_")):  # none of these is a result
            continue
        best = of.best(name)
        if best is not None and math.isfinite(best[1]):
            bests[name] = best
    return bests


def _facts(of: Record) -> list[str]:
    """How a run was made, in a few words."""
    facts = [of.backend]
    if of.replicas:
        facts.append(plural(of.replicas, "replica"))
    if of.parameters is not None:
        facts.append(f"{of.parameters:,} parameters")
    if of.steps:
        facts += [plural(of.steps, "step"), lasting(of.seconds)]
    return list(filter(None, facts))


def _best_trial(about: JsonObject) -> list[str]:
    """The line about the best trial of a sweep."""
    best = about.get("best")
    if not isinstance(best, dict):
        return []
    # `run.json` may be damaged or a stranger's, so each entry is checked.
    tried = values(as_dict(best.get("params")))
    value = best.get("value")
    shown = f": {best.get('metric')} {number(value)}" if isinstance(value, int | float) else ""
    trial = _plain(str(best.get("trial")))
    return [f"best: **{trial}** ({_plain(tried)}){_plain(shown)}"]


def _plain(text: str) -> str:
    """A text that Markdown shows as it is, in one line."""
    one_line = " ".join(text.split())
    return one_line.translate(_ESCAPES)
