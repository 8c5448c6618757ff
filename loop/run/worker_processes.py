"""`fit(workers=N)`: trains in processes that are started for it, from a notebook, a script or another program."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

from callbacks import Callback, MLflowTracker, StandardSet, standard
from callbacks.arguments import plain_numbers
from callbacks.files import launch_path, write_text
from callbacks.run_record import history
from callbacks.run_record.redaction import tell
from loop.backends.base import Backend
from loop.checkpoint.array_files import Json
from loop.checkpoint.store import address
from loop.errors import BAD_INPUT, PREEMPTED, TrainingError, UsageError
from loop.launch.environment import LAUNCHER, forget_inherited_job, job_size
from loop.launch.process import WorkerProcess, printed_lines, start_worker, worker_command
from loop.options import DEFAULTS, with_defaults
from loop.run.patched_classes import patched
from loop.run.result import FitResult, read_weights
from loop.run.run_directory import new_name
from loop.run.session import NOT_TRAINED, Session, index_of
from loop.run.state import assign_model
from loop.target import cells, task_loader
from loop.target.fields import plain, set_fields
from loop.target.fields import typed as typed_field
from loop.task import Model, TrainTask, hyperparameters, target_of
from loop.task import defaults as field_defaults

SOURCE = "notebook_task.py"
"""The file in the run directory with the cells of a notebook that the task needs."""
_ERROR = "tfloop: error: "


def fit_in_workers(
    task: TrainTask,
    given: Mapping[str, object],
    workers: int,
    callbacks: Iterable[Callback] | None,
    run_dir: str | Path | None,
) -> FitResult:
    """Trains a task with `tfloop train --workers N`, whose output is shown here; `given` are the options of `fit`.

    Returns:
        The result, with a model on one device that has the weights of the run.

    Raises:
        UsageError: the task or an option can't be handed to other processes.
        TrainingError: the training has failed; its messages are shown above.
    """
    forget_inherited_job()  # in a script that a worker has started
    # A process that trains alone, with `workers=1`, has no job.
    if job_size() is not None or task_loader.started_by_fit():
        raise UsageError(
            f"fit(workers={workers}) in a worker of a job: in a script, call fit below "
            '`if __name__ == "__main__":`, since workers import the file; under a launcher, leave workers out'
        )
    # All that can be refused is refused here, before processes are started, which takes seconds.
    options = with_defaults(task, {**given, "backend": _backend(given["backend"])})
    arguments = [*_typed_options(task, given), *_typed_fields(task), *_tracking(callbacks)]
    address.check_run_dir(run_dir)
    where: str | Path
    if run_dir is not None and address.is_url(run_dir):
        where = address.read_url(str(run_dir))
        folder = address.place(where, address.SPOOLS)  # beside its directory here, which must begin with the lease
    else:
        where = folder = launch_path(run_dir or new_name(type(task).__name__)).resolve()
    target = target_of(task)
    source = None
    if target is None:
        source = cells.source_of(type(task))
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / SOURCE, source)
        target = f"{folder / SOURCE}:{type(task).__name__}"

    attached = f"--callback=@callbacks.attached:Attached={json.dumps(patched(type(task), source))}"
    printed = _train([target, *arguments, f"--workers={workers}", f"--run-dir={where}", attached])
    return _result(printed, _model(task, options, Path(printed["run_dir"])))


def _result(printed: Json, model: Model) -> FitResult:
    """The result, from what the command has printed."""
    values: Json = {}
    for field in dataclasses.fields(FitResult):
        if field.name in printed:  # all but the model
            values[field.name] = printed[field.name]
    # nan and infinities are texts in JSON.
    values["metrics"] = history.as_numbers(printed["metrics"])
    values["history"] = list(map(history.as_numbers, printed["history"]))
    values |= {"run_dir": Path(printed["run_dir"]), "model": model}
    return FitResult(**values)


def _backend(backend: object) -> str | None:
    if backend is not None and not isinstance(backend, str):
        raise UsageError(f"fit(workers=...) with backend={backend!r}: give the name of a backend, or leave it out")
    return backend


def _typed_options(task: TrainTask, given: Mapping[str, object]) -> list[str]:
    """The options of `fit` as they are typed. Refuses an option that can't be typed."""
    typed = []
    for name, value in given.items():
        flag = name.replace("_", "-")
        value = plain_numbers(value)
        if value is None:
            continue
        if value is True:
            typed.append(f"--{flag}")
        # Options that are on by default can be typed as off; and this one, which decides on examples.
        elif value is False and (DEFAULTS[name] or name == "drop_remainder"):
            typed.append(f"--no-{flag}")
        elif value is False and task.defaults.get(name):
            raise UsageError(f"fit(workers=...) with {name}={value!r}: put it into the task's defaults instead")
        elif value is not False:
            typed.append(f"--{flag}={_text(value)}")
    return typed


def _text(value: object) -> str:
    """The value of an option as it is typed: several with commas between them."""
    if isinstance(value, dict):
        value = [f"{key}={pace}" for key, pace in value.items()]
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _typed_fields(task: TrainTask) -> list[str]:
    """The hyperparameters that differ from their defaults, as they are typed. Refuses one that can't be typed."""
    defaults: dict[str, object] = {}
    usual = field_defaults(type(task)).values()
    if usual and not any(value is dataclasses.MISSING for value in usual):
        defaults = hyperparameters(type(task)())
    typed = []
    changed = {}
    for name, value in hyperparameters(task).items():
        if _equal(defaults.get(name, dataclasses.MISSING), value):
            continue
        if not isinstance(value, str | int | float | list | tuple | None):
            raise UsageError(
                f"fit(workers=...): the field {name} of {type(task).__name__} is {type(value).__name__}, which can't "
                "be handed to other processes: make it in a method, of fields that are numbers or texts"
            )
        text = f"{name}={typed_field(value)}"
        read = set_fields(type(task), [text], "fit(workers=...)")[name]
        if plain(read) != plain(value):  # such as the text "none" of a field of type `str | None`
            raise UsageError(
                f"fit(workers=...): the field {name} of {type(task).__name__} is {value!r}, and other processes would "
                f"take what is typed for it, {text}, for {read!r}: give another value"
            )
        typed.append(f"--set={text}")
        changed[name] = value
    _check_attributes(task, changed)
    return typed


def _check_attributes(task: TrainTask, changed: Json) -> None:
    """Refuses a number or text that was set on the task and isn't a field: other processes make a task of its fields.

    Anything else, such as data or a model, is what methods of the task have kept there.

    Raises:
        UsageError: one differs from that of a new task.
    """
    kind = type(task).__name__
    try:
        new = type(task)(**changed)
    except Exception:  # other processes can't make one, either, and say why
        return
    for name, value in vars(task).items():
        is_plain = isinstance(value, str | int | float) and not name.startswith("_")
        if is_plain and name not in changed and not _equal(getattr(new, name, value), value):
            raise UsageError(
                f"fit(workers=...): {name} of this {kind} was set, but it isn't a field, and other processes make a "
                f"{kind} of its fields alone: make {kind} a @dataclass with the field {name}"
            )


def _equal(one: object, other: object) -> bool:
    with contextlib.suppress(Exception):  # of arrays, say, which have no single answer
        return bool(type(one) is type(other) and one == other)  # the type too: True equals 1, and is typed otherwise
    return False


def _tracking(callbacks: Iterable[Callback] | None) -> list[str]:
    """The options of the command that do what the given callbacks ask for. Refuses callbacks that it can't pass on."""
    if callbacks is None:
        return []
    kinds = set(map(type, callbacks))
    usual = {type(callback): _settings(callback) for callback in standard()}
    is_usual = isinstance(callbacks, StandardSet) and usual.keys() - {MLflowTracker} <= kinds <= usual.keys()
    # A callback that was made with other settings would be replaced by the usual one without a warning.
    if not is_usual or any(_settings(callback) != usual[type(callback)] for callback in callbacks):
        raise UsageError(
            "fit(workers=...) with callbacks: objects can't be handed to other processes: return them from the task's "
            "build_callbacks(), and leave callbacks out, or give callbacks.standard(mlflow=None)"
        )
    return [] if MLflowTracker in kinds else ["--track=off"]


def _settings(callback: Callback) -> dict[str, object]:
    """The attributes of a callback that its arguments have set: not its private ones, and not the best value so far."""
    settings = {}
    for name, value in vars(callback).items():
        if not name.startswith(("_", "best")):
            settings[name] = value
    return settings


def _train(arguments: list[str]) -> Json:
    """Runs `tfloop train`, and shows its output; returns the fields of its result.

    Raises:
        UsageError: it has refused something.
        TrainingError: it has failed.
    """
    environment = dict(os.environ)
    # In a trial of a sweep, the variable names the launcher of this process, and the command would end at once: see
    # `die_with_parent`.
    environment.pop(LAUNCHER, None)
    environment[task_loader.STARTER] = str(os.getpid())
    process = start_worker(worker_command(["train", *arguments, "--json"]), environment)
    results: list[str] = []
    stdout = process.stdout
    assert stdout is not None

    # Both pipes are read at the same time: a full one would stop the process.
    reader = Thread(target=lambda: results.extend(printed_lines(process, stdout)), daemon=True)
    reader.start()
    problem = ""
    try:
        problem = _shown(process)
        code = process.wait()
    finally:
        process.kill()  # only after an error here: else it has ended
        with process:  # waits for it, and closes its pipes
            reader.join()

    if code in (0, PREEMPTED) and results:
        fields: Json = json.loads(results[-1])
        return fields
    error = UsageError if code == BAD_INPUT else TrainingError
    raise error(problem or f"the training has ended with exit code {code}: see above")


def _shown(process: WorkerProcess) -> str:
    """Shows what the process prints until it has ended; an interrupt is passed on. Returns its last error."""
    assert process.stderr is not None
    problem = ""
    lines = printed_lines(process, process.stderr)
    while True:
        try:
            for line in lines:
                if line.startswith(_ERROR):
                    problem = line.removeprefix(_ERROR)
                else:
                    tell(line)
            return problem
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
            # The interrupt has ended the generator.
            lines = printed_lines(process, process.stderr)


def _model(task: TrainTask, options: Mapping[str, Any], directory: Path) -> Model:
    """The model with the weights that are the result of a run, on one device of this process."""
    weights, manifest = read_weights(directory)
    # The model is only built here: options that need several replicas, or a training, are off.
    options = {**options, **NOT_TRAINED, "eval_every": "never"}
    index = index_of(manifest, task)
    session = Session(task, Backend(), options, index, trained_on=manifest["run"].get("replicas", 1))
    assign_model(session.built.model, weights)
    return session.built.model
