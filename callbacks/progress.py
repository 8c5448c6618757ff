"""Progress: a bar on a terminal, plain lines in a log. Only the chief shows it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

from callbacks import notebook
from callbacks.arguments import check, is_number
from callbacks.base import Callback, Every, Metrics, Run, as_floats, of_training, shown_status
from callbacks.epoch_lines import EpochLines, State, epoch_of, numbers
from callbacks.formats import number, plural
from callbacks.run_record.redaction import mask, shown, tell
from callbacks.types import Foreign

RELAY = "TFLOOP_PROGRESS"
"""Environment variable: "relay" makes a worker write its progress as marked lines, which its launcher draws."""
MARK = "\x1etfloop "
"""Starts a relayed state. More than a control character, with which a task may begin lines of its own."""
_BAR_WIDTH = 34  # columns of the shortest useful bar and of the text beside it, without epoch and metrics
_SHOWN = ("task", "parameters", "backend", "replicas", "workers", "batch_size")
"""The entries of `run.info` that are shown."""


class Progress(Callback):
    """Shows step, loss and other metrics, examples per second and the remaining time.

    Args:
        every: how often the bar is drawn; see `Callback`. Each epoch has a line; if there are more than 20, at most one
            in three seconds has, and the last one. In a log, there is also a line every `log_seconds`.
        log_seconds: the time between two lines of a log within an epoch, in seconds.
    """

    def __init__(self, every: Every = "0.2s", log_seconds: float = 10.0) -> None:
        check(self, is_number(log_seconds, 0), "give a number of seconds >= 0", log_seconds=log_seconds)
        self.every = every
        self._started = False
        self._show = _relay if os.environ.get(RELAY) == "relay" else Display(log_seconds=log_seconds).update

    def on_fit_start(self, run: Run) -> None:
        self._started = True
        self._update(self._state(run, "start", {}))

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        self._update(self._state(run, "steps", metrics))

    def on_epoch_end(self, run: Run, metrics: Metrics) -> None:
        self._update(self._state(run, "epoch", metrics))

    def on_fit_end(self, run: Run, status: str) -> None:
        if not self._started:  # the run failed before `on_fit_start`
            return
        # The number of the current epoch, from 1: after the last step of an epoch, the next one has not started.
        epoch = run.progress.epoch
        if run.progress.step_in_epoch > 0 or epoch == 0:
            epoch += 1
        self._update(self._state(run, "end", {}) | {"epoch": epoch, "status": status, "why": run.stop_reason})

    def _update(self, state: State) -> None:
        # A terminal or a launcher that is gone isn't a reason to stop training.
        with contextlib.suppress(OSError):
            self._show(state)

    @staticmethod
    def _state(run: Run, kind: str, metrics: Mapping[str, float]) -> State:
        return {
            "kind": kind,
            "metrics": as_floats(metrics),
            "step": run.progress.step,
            "total": run.total_steps,
            "epoch": run.progress.epoch + 1,
            # `steps` ends the run wherever its epoch is, so the number of epochs isn't known.
            "epochs": None if run.options["steps"] else run.options["epochs"],
            "speed": run.examples_per_second,
            "run": {name: run.info[name] for name in _SHOWN},
            "directory": str(run.directory),
        }


def _relay(state: State) -> None:
    """Writes a state as a marked line on stderr."""
    print(MARK + json.dumps(state), file=sys.stderr, flush=True)


class Display:
    """Draws the states of one run: with tqdm on a terminal, as a widget or a line in a notebook, else as plain lines.

    Args:
        stream: where to draw; None: stderr, in a notebook stdout.
        log_seconds: seconds between two plain lines within an epoch.
        epoch_seconds: the shortest time between the lines of two epochs, in a run of many epochs.
    """

    def __init__(self, stream: TextIO | None = None, log_seconds: float = 10.0, epoch_seconds: float = 3.0) -> None:
        self.notebook = stream is None and notebook.active()
        self.stream = stream or notebook.stream()
        self.terminal = not self.notebook and self.stream.isatty()
        self.log_seconds = log_seconds
        self._epochs = EpochLines(epoch_seconds)
        self._bar: Foreign = None
        self._last_line = time.monotonic()

    def update(self, state: State) -> None:
        # The task names its metrics: a name may hold what controls a terminal.
        metrics = {shown(name): value for name, value in state["metrics"].items()}
        # The kinds are those that `Progress` gives: start, steps, epoch, end.
        getattr(self, f"_{state['kind']}")({**state, "metrics": metrics})

    def _start(self, state: State) -> None:
        self._close_bar()  # the workers of an elastic job may have formed anew
        run = state["run"]
        workers = run["workers"]
        replicas = plural(run["replicas"], "replica")
        where = f"{run['backend']}, {replicas}" + (f" on {workers} workers" if workers > 1 else "")
        self.line(f"{run['task']}: {run['parameters']:,} parameters, {where}, global batch {run['batch_size']}")
        self.line(f"run directory: {shown(state['directory'])}")
        if state["step"]:
            self.line(f"going on from step {state['step']:,}")
        if state["step"] == state["total"]:  # nothing is left to do, so there is no bar
            return
        if self.notebook:
            self._bar = notebook.bar(state["total"], state["step"])
        elif self.terminal:
            from tqdm import tqdm

            form = None  # tqdm's own, where there is no total
            if state["total"]:
                form = "{desc}{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
            self._bar = tqdm(
                total=state["total"], initial=state["step"], unit="step", file=self.stream, dynamic_ncols=True,
                bar_format=form,
            )  # fmt: skip

    def _steps(self, state: State) -> None:
        if self._bar is not None:
            self._move_bar(state)
        elif time.monotonic() - self._last_line >= self.log_seconds:
            total = f"/{state['total']:,}" if state["total"] else ""
            self.line(f"step {state['step']:,}{total}  {numbers(state['metrics'])}  {state['speed']:,.0f} examples/s")

    def _epoch(self, state: State) -> None:
        self._move_bar(state)
        self._epoch_line(self._epochs.take(state, time.monotonic()))

    def _end(self, state: State) -> None:
        # First, so that the last epoch has its line, however fast it was.
        self._epoch_line(self._epochs.held())
        self._move_bar(state)
        self._close_bar()
        why = f" ({shown(state['why'])})" if state["why"] else ""
        self.line(f"{shown_status(state['status'])} at step {state['step']:,}{why}, {state['speed']:,.0f} examples/s")

    def _move_bar(self, state: State) -> None:
        """Draws the bar, if there is one, with the epoch, the metrics and the step of a state."""
        if self._bar is None:
            return
        self._bar.set_description_str(epoch_of(state) + " ", refresh=False)
        if state["metrics"]:  # else the bar keeps the last ones
            room = self._columns() - len(epoch_of(state)) - 2 * len(f"{state['total'] or 0}") - _BAR_WIDTH
            self._bar.set_postfix_str(_beside_bar(state, room), refresh=False)
        self._bar.update(state["step"] - self._bar.n)

    def _close_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar = None

    def _epoch_line(self, state: State | None) -> None:
        if state is not None:
            columns = self._columns() if self.terminal else None
            self.line(self._epochs.text(state, columns))

    def _columns(self) -> int:
        """The width of the terminal; asked each time, since the user may change it."""
        with contextlib.suppress(OSError, ValueError):
            return os.get_terminal_size(self.stream.fileno()).columns or 80
        return 80

    def line(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        # Every line counts: where epochs are short, a log has no lines within them.
        self._last_line = time.monotonic()
        text = mask(text)
        if self._bar is not None:
            self._bar.write(text, file=self.stream)
        else:
            print(text, file=self.stream, flush=True)


def _beside_bar(state: State, room: int) -> str:
    """The text beside the bar: the first metric, and the speed and a second metric if there is room for them.

    The metrics of the evaluation are in the line of the epoch.
    """
    texts = [f"{name} {number(value)}" for name, value in of_training(state["metrics"]).items()]
    first, *others = texts[:2]
    text = first
    speed = f", {state['speed']:,.0f} examples/s"
    # The speed gets room before the second metric, but stands after it.
    if len(text + speed) <= room:
        text += speed
    if others and len(f"{text}  {others[0]}") <= room:
        text = f"{first}  {others[0]}{text.removeprefix(first)}"
    return text


@contextlib.contextmanager
def stages(total: int, stream: TextIO) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows the next stage of a command: on a terminal with a bar, else in a line of its own."""
    if not stream.isatty():
        yield lambda text: tell(shown(text), stream)  # which doesn't fail on a full disk
        return
    from tqdm import tqdm

    form = "{percentage:3.0f}%|{bar:20}| {desc} [{elapsed}]"
    with tqdm(total=total, file=stream, bar_format=form, dynamic_ncols=True, leave=False) as bar:
        ended = itertools.count()  # the number of stages before the one that is shown

        def show(text: str) -> None:
            bar.n = next(ended)
            bar.set_description_str(shown(text))

        yield show


@contextlib.contextmanager
def counted(total: int | None, unit: str, stream: TextIO) -> Iterator[Callable[[int], object]]:
    """Yields a function that takes the number of pieces done: on a terminal it moves a bar, else it does nothing."""
    if not stream.isatty():
        yield lambda count: None
        return
    from tqdm import tqdm

    with tqdm(total=total, unit=unit, file=stream, dynamic_ncols=True, leave=False) as bar:
        yield bar.update
