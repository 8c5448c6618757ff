"""Manifest: checks what a checkpoint's manifest says about its run, before anything is done with it.

The digest of a manifest shows only that it hasn't changed. Anyone can compute one, so the content is checked too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from loop.checkpoint import checkpoint_files
from loop.checkpoint.array_files import Json
from loop.options import LARGEST, PRECISIONS

Test: TypeAlias = Callable[[object], bool]

_NOT_FINITE = ("nan", "inf", "-inf")  # texts, since JSON has no such numbers


def verify(path: Path) -> Json:
    """Checks the files of a checkpoint, and what its manifest says about the run; returns the manifest.

    Raises:
        CheckpointError: it is damaged, or its manifest isn't that of a run.
    """
    manifest = checkpoint_files.verify(path)
    problem = _problem(manifest)
    if problem:
        raise checkpoint_files.CheckpointError(f"{path}: its manifest isn't that of a run ({problem})")
    return manifest


def _problem(manifest: Json) -> str:
    """What is wrong with a manifest, or ""."""
    for where, rules in _RULES.items():
        part: object = manifest if where == "" else manifest.get(where)
        if not isinstance(part, dict):
            return _said(where, part, "an object")
        for rule_name, (test, meant) in rules.items():
            optional = rule_name.endswith("?")
            name = rule_name.removesuffix("?")
            full_name = f"{where}.{name}" if where else name
            if name in part and not test(part[name]):
                return _said(full_name, part[name], meant)
            if name not in part and not optional:
                return f"it has no {full_name}"
    # Last: it relies on the types that are checked above.
    return _inconsistency(manifest)


def _inconsistency(manifest: Json) -> str:
    """How two values of a manifest contradict each other, or "". An epoch has at least one step."""
    progress = manifest["progress"]
    step = manifest["step"]
    for name in ("step_in_epoch", "epoch"):
        if progress[name] > progress["step"]:
            return f"{name} {progress[name]} after {progress['step']} steps"
    # The checkpoint of a bad step is that of the step before, named after the bad one.
    steps_ahead = (0, 1) if "bad" in manifest else (0,)
    if step - progress["step"] in steps_ahead:
        return ""
    return f"it is of step {step}, and stands at step {progress['step']}"


def _said(name: str, value: object, meant: str) -> str:
    return f"{name} is {value!r:.60}, not {meant}"


def _is_count(value: object) -> bool:
    # `type`, not `isinstance`, here and below: true and false of JSON are ints of Python's.
    return type(value) is int and 0 <= value < LARGEST


def _is_number(value: object) -> bool:
    if isinstance(value, str):
        return value in _NOT_FINITE
    # Finite, though Python's JSON reads NaN and Infinity: tfloop writes those as texts.
    return (type(value) is int or type(value) is float) and abs(value) < math.inf


def _is(*kinds: type) -> Test:
    return lambda value: type(value) in kinds


def _all(test: Test) -> Test:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _by_name(test: Test) -> Test:
    return lambda value: isinstance(value, dict) and all(map(test, value.values()))


def _is_worker(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    generators = value.get("random"), value.get("epoch_random", {})  # the second one is of streams alone
    return all(map(_is(dict), generators)) and _by_name(_is(dict))(value.get("callbacks"))


def _are_options(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    batch_size = value.get("batch_size", 1)
    has_size = type(batch_size) is int and 0 < batch_size < LARGEST
    return has_size and value.get("precision", "float32") in PRECISIONS


def _is_place(value: object) -> bool:
    if not isinstance(value, dict) or value.keys() != {"index", "step", "epoch", "ended"}:
        return False
    counts = [value["index"], value["step"], value["epoch"]]
    return type(value["ended"]) is bool and all(map(_is_count, counts))


def _is_best(value: object) -> bool:
    return isinstance(value, dict) and _is_count(value.get("step"))


def _is_bad_step(value: object) -> bool:
    return isinstance(value, dict) and _all(_is(str))(value.get("names"))


_COUNT = (_is_count, "a number of steps, epochs or examples")
# By the part of the manifest ("" is the whole) and the name ("?": it may be missing): the test, and what is meant.
_RULES: dict[str, dict[str, tuple[Test, str]]] = {
    "": {
        "step": _COUNT,
        "epoch_totals?": (_all(_is_number), "a list of numbers"),
        "replaces_totals?": (_is(bool), "true or false"),
        "epoch_metrics?": (_all(_is(str)), "a list of names"),
        "eval_metrics?": (_by_name(_is_number), "numbers by name"),
        "history?": (_all(_by_name(_is_number)), "a list of numbers by name"),
        "evaluated_at?": (lambda value: type(value) is int and -1 <= value < LARGEST, "a step"),
        "evaluating?": (_is(bool), "true or false"),
        "evaluated_sets?": (_by_name(_is_count), "steps by name"),
        "evaluated?": (_by_name(_is_number), "numbers by name"),
        "epoch_ends?": (_is(bool), "true or false"),
        "optimizers?": (_all(_is(str)), "a list of names"),
        "learning_rates?": (_all(lambda value: value is None or _is_number(value)), "a list of learning rates"),
        "workers?": (lambda value: bool(value) and _all(_is_worker)(value), "a list of workers' states"),
        "journal?": (_is_count, "a number of bytes"),
        "phase?": (_is_place, "a place among phases"),
        "best?": (_is_best, "the best step"),
        "bad?": (_is_bad_step, "what wasn't finite"),
    },
    "progress": dict.fromkeys(("step", "epoch", "step_in_epoch", "examples"), _COUNT),
    "run": {
        "task": (_is(str), "the name of a class"),
        "target?": (_is(str, type(None)), "a target"),
        "hyperparameters": (_is(dict), "an object"),
        "changed?": (_is(list), "a list of fields"),
        "options": (_are_options, "the options of a run"),
        "versions?": (_by_name(_is(str)), "texts by name"),
        "machine?": (_is(dict), "an object"),
        "backend?": (_is(str), "the name of a backend"),
        "replicas?": (_is_count, "a number"),
    },
}
