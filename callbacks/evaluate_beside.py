"""EvaluateBeside: evaluates the checkpoints in a process of its own, while training goes on."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from pathlib import Path

from callbacks import files
from callbacks.arguments import check
from callbacks.base import Callback, Every, Metrics, Run, SettingsError, as_floats
from callbacks.checkpoint import step_of
from callbacks.epoch_lines import numbers
from callbacks.formats import plural
from callbacks.run_record import journal
from callbacks.run_record.history import as_numbers
from callbacks.run_record.record import is_checkpoint
from callbacks.run_record.redaction import tell
from callbacks.side_process import SideProcess
from callbacks.system import named_gpus
from callbacks.types import JsonObject

FOLDER = "evaluations.tmp"
"""The folder in the run directory with the checkpoints that are to be evaluated; a store gets none of it."""
_PLACES = ("TF_CONFIG", "TFLOOP_JOB", "TFLOOP_LAUNCHER", "TFLOOP_WORKER", "TFLOOP_LOCAL_RANK")
"""Variables that tell this process its place in a job; those of Horovod are all that begin with its name."""
_AHEAD = 16
"""How many evaluations the process knows of: orders without end would fill its pipe, and block the training."""
_BETWEEN = 3.0
"""Seconds between two lines about evaluations, which may come too fast to be read."""


class EvaluateBeside(Callback):
    """Evaluates each checkpoint on the whole evaluation data in a process of its own, while training goes on.

    The results stand in the journal, the report and MLflow at the step of the checkpoint, and are printed as they come.
    A run that has finished waits for those that are missing; one that ends otherwise makes them when it goes on.
    `Checkpoint` says how often there is one. Other callbacks don't see the results: one that decides by an evaluation
    needs it in the run itself.

    The run itself must not evaluate: give `eval_every="never"`, as `tfloop train --eval-beside` does. The task must be
    in a file, since the process loads it anew. It has the lowest priority; on a machine without a free core or device,
    training is slower meanwhile.

    Args:
        device: where it computes: "cpu", or a GPU by its index, as "gpu:1", preferably one that the run doesn't use.
    """

    every: Every = "1s"

    def __init__(self, device: str = "cpu") -> None:
        is_device = isinstance(device, str) and re.fullmatch(r"cpu|gpu:\d+", device) is not None
        check(self, is_device, "give cpu, or a GPU such as gpu:1", device=device)
        self._device = device
        self._process: SideProcess | None = None
        self._pending: list[Path] = []
        self._ordered: set[Path] = set()
        self._metrics: dict[int, dict[str, float]] = {}  # by step
        self._errors: set[str] = set()
        self._unsaid = ""  # the line about the last evaluation, until it is printed
        self._said = -_BETWEEN  # when a line was printed last

    def on_setup(self, run: Run) -> None:
        if run.options["eval_every"] != "never":
            raise SettingsError(
                f"EvaluateBeside with eval_every={run.options['eval_every']!r}: the run would make the same "
                'evaluations itself: give eval_every="never" (--eval-every never)'
            )

        # The callback may serve several runs. `on_restore` reads the evaluations of this run's earlier attempts.
        self._metrics = {}
        self._errors = set()

    def on_restore(self, run: Run, path: Path | None) -> None:
        # The journal says what has been evaluated, and the folder what an earlier attempt has left to do.
        folder = files.make_directory(run.directory / FOLDER)
        known = set()
        for entry, _ in journal.read(run.directory / journal.NAME, events=("eval_end",)):
            # A malformed line is passed over.
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError, OverflowError):
                if entry.get("beside"):
                    known.add(entry["step"])
                    if entry["step"] <= run.progress.step:  # later steps are made again
                        self._metrics[entry["step"]] = as_numbers(entry["metrics"])
        self._pending = []
        for leftover in sorted(folder.iterdir()):
            if is_checkpoint(leftover) and step_of(leftover) not in known and step_of(leftover) <= run.progress.step:
                self._pending.append(leftover)
            else:  # it is incomplete, was evaluated, or is of a later step, which is made again
                shutil.rmtree(leftover, ignore_errors=True)
        # A kill may have come between the checkpoint and its copy in the folder.
        if path is not None and step_of(path) not in known and path.parent == run.directory / "checkpoints":
            self._keep(run, path)

    def on_fit_start(self, run: Run) -> None:
        if run.info["target"] is None:
            raise SettingsError(
                "EvaluateBeside: the task isn't defined in a file, from which another process could load it"
            )
        if self._process is None:  # it is there already where the workers of an elastic job have formed anew
            self._start(run)
        self._order()

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        self._take_answers(run, 0.0)

    def on_checkpoint(self, run: Run, reason: str) -> None:
        assert run.saved_path is not None
        if self._process is not None:
            self._keep(run, run.saved_path)
            self._order()

    def on_fit_end(self, run: Run, status: str) -> None:
        if self._process is None:
            return
        if status in ("finished", "stopped"):
            self._take_answers(run, 0.0)
            if self._pending and self._process is not None:
                tell(f"waiting for {plural(len(self._pending), 'evaluation')} ...")
            # A signal ends the waiting: what is missing is evaluated when the run goes on.
            while self._pending and self._process is not None and not run.signalled:
                self._take_answers(run, 1.0)
            self._say(every=0.0)
            for row in run.history:
                row |= self._metrics.get(int(row["step"]), {})
        self._end_process()
        if not self._pending:
            shutil.rmtree(run.directory / FOLDER, ignore_errors=True)

    def _start(self, run: Run) -> None:
        # Without the variables that give this worker its place in the job, and without its device.
        horovod = [name for name in os.environ if name.startswith("HOROVOD_")]
        environment = dict.fromkeys([*_PLACES, *horovod]) | {"CUDA_VISIBLE_DEVICES": _visible(self._device)}
        try:
            self._process = SideProcess("loop.commands.evaluate_beside", environment=environment)
        except OSError as error:
            tell(f"warning: checkpoints aren't evaluated: no process can be started: {error.strerror}")
            return
        options = {name: run.options[name] for name in ("batch_size", "precision")}
        # By stdin, since fields may be secrets.
        task = {"target": run.info["target"], "fields": run.info["hyperparameters"]}
        self._process.order({**task, "device": self._device, "options": options})
        self._ordered.clear()  # a new process has no orders yet

    def _order(self) -> None:
        """Orders the next evaluations, those that the process hasn't been told of."""
        for path in self._pending[:_AHEAD]:
            if self._process is not None and path not in self._ordered:
                self._process.order(str(path))
                self._ordered.add(path)

    def _keep(self, run: Run, path: Path) -> None:
        """Links a checkpoint's files into the folder until it is evaluated: the run may remove the original earlier."""
        kept = run.directory / FOLDER / path.name
        if kept in self._pending:
            return
        # Renamed when it is complete: `on_restore` takes each folder named like a checkpoint for a whole one.
        partial = kept.with_name(f"partial-{path.name}")
        try:
            shutil.copytree(path, partial, copy_function=_link)
            partial.rename(kept)
            self._pending.append(kept)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            tell(f"warning: {path.name} isn't evaluated: {error}")

    def _take_answers(self, run: Run, seconds: float) -> None:
        """Records the evaluations that have ended. Waits at most so many seconds for the first one."""
        try:
            while self._process is not None and (answer := self._process.answer(seconds)) is not None:
                self._take(run, answer)
                self._order()
                seconds = 0.0  # only the first answer is waited for
        except EOFError as error:
            tell(f"warning: checkpoints aren't evaluated any more: {error}; `tfloop evaluate` does it")
            self._end_process()
        self._say(_BETWEEN)

    def _end_process(self) -> None:
        if self._process is not None:
            self._process.end()
        self._process = None

    def _say(self, every: float) -> None:
        """Prints the last evaluation, unless another one was printed within so many seconds."""
        now = time.monotonic()
        if self._unsaid and now - self._said >= every:
            tell(self._unsaid)
            self._unsaid = ""
            self._said = now

    def _take(self, run: Run, answer: JsonObject) -> None:
        path = Path(answer["path"])
        if path not in self._pending:  # an interrupted attempt of an elastic job saved it; its step is made again
            return
        self._pending.remove(path)
        if "error" not in answer:
            self._write(run, answer)
        elif answer["error"] not in self._errors:  # once: all checkpoints may have the same error
            self._errors.add(answer["error"])
            tell(f"warning: {path.name} isn't evaluated: {answer['error']}")
        shutil.rmtree(path, ignore_errors=True)

    def _write(self, run: Run, answer: JsonObject) -> None:
        step = answer["step"]
        metrics = as_floats(answer["metrics"])  # nan is a text in JSON
        self._metrics[step] = metrics
        position: JsonObject = {"step": step, "epoch": answer["epoch"]}  # of the checkpoint, not of the run by now
        if answer["phase"]:
            position["phase"] = answer["phase"]
        journal.append(run, "eval_end", **position, beside=True, metrics=metrics)
        self._unsaid = f"step {step:,}: {numbers(metrics)}"


def _visible(device: str) -> str:
    """`CUDA_VISIBLE_DEVICES` of the process. An index counts the GPUs that this process may use, as TensorFlow's do."""
    if device == "cpu":
        return "-1"
    index = device.partition(":")[2]
    names = named_gpus()
    if names is None:
        return index
    return names[int(index)] if int(index) < len(names) else "-1"


def _link(source: str, target: str) -> None:
    """Gives a file a second name; where the file system can't, copies it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
