"""The option `compile="auto"`: measures the run's steps in the graph and in XLA, and takes the faster of the two."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
import warnings
from typing import TYPE_CHECKING

import tensorflow as tf

from callbacks.files import read_json
from callbacks.run_record.redaction import tell
from loop.data import Data, StreamSource
from loop.data.host_random import random_state, set_random_state
from loop.errors import UsageError, message_of
from loop.model.variables import carried_variables
from loop.run.pace import Pace
from loop.step.batch_norm import global_seeds
from loop.step.example_trace import held_by, put_back
from loop.step.train_step import EPOCH_ENDED, NOT_FINITE, TrainStep

if TYPE_CHECKING:
    from loop.run.run import Run

AUTO, GRAPH, XLA = "auto", "graph", "xla"
SECONDS = 1.5
"""How long the calls of each way take together, without the first one, which compiles."""
GAIN = 1.05
"""How many times as fast XLA must be to be taken. Less may be noise."""


class _XLARefusedError(Exception):
    """Why XLA can't compile the task."""


def settle(run: Run, data: Data) -> None:
    """Replaces the option `auto` by `graph` or `xla`, before the step is made. Nothing else of the run is changed.

    A resumed run takes what `run.json` says of the attempt before, so that its bits are those of a run that was never
    stopped. Otherwise a single device measures; several replicas take the graph.
    """
    before = read_json(run.directory / "run.json").get("options")
    choice = before.get("compile") if isinstance(before, dict) else None  # a file that anyone may have changed
    if run.options["compile"] != AUTO:
        # Only for a new run, which can still choose.
        if choice is None and run.options["compile"] == GRAPH and run.backend.name == "single":
            _tell_of_gpu()
        return

    if choice not in (GRAPH, XLA):
        choice = _faster(run, data) if run.backend.name == "single" else _untried(run)
    # The chief's: other machines may not have its run directory, and different steps would wait for each other.
    run.options["compile"] = run.backend.broadcast_json(choice)


@functools.cache
def _tell_of_gpu() -> None:
    """Says, once in a process, that XLA may be faster on a GPU: docs/gpu.md has figures."""
    if tf.config.list_logical_devices("GPU"):
        tell(
            "note: compile=graph on a GPU: compile='auto' (--compile auto) measures XLA beside it, which is several "
            "times as fast for models of many small layers"
        )


def _untried(run: Run) -> str:
    """The graph, for several replicas."""
    if run.backend.is_chief:
        tell(f"compile=auto takes graph: XLA is tried with backend='single' alone, and not with {run.backend.name!r}")
    return GRAPH


def _faster(run: Run, data: Data) -> str:
    """Makes steps in both ways, takes them back, and returns the faster way."""
    # All that steps change is put back, so that the run has the bits of one that has measured nothing.
    built = run.session.built
    variables = [*built.variables, *built.sliced_variables, *carried_variables(built.model)]
    variables += [*held_by(run.task), *global_seeds()]
    generators = random_state()
    try:
        with run.watchdog.phase("measuring the graph against XLA"), put_back(variables):
            measured = _data_to_measure(data)
            if measured is None:
                tell(
                    "compile=auto takes graph: steps are measured on a second data set, and this one can't be made "
                    "again: train_data() returns the same object in each call, or shuffles within a repeat, below a "
                    "cache or within one of several parts"
                )
                return GRAPH
            in_graph, in_xla = _step_seconds(run, measured)
    except _XLARefusedError as error:
        tell(f"compile=auto takes graph: XLA can't compile this task ({error})")
        return GRAPH
    finally:
        # Only now that the iterators are gone: one that reads ahead may draw from these generators.
        set_random_state(generators)

    choice = XLA if in_xla * GAIN < in_graph else GRAPH
    tell(
        f"compile=auto takes {choice}: a step takes {1e3 * in_graph:.3g} ms in the graph, {1e3 * in_xla:.3g} ms in XLA"
    )
    return choice


def _data_to_measure(data: Data) -> Data | None:
    """Data like that of the run, from which steps may be measured; None: there is none."""
    if not isinstance(data.train, StreamSource):
        return data
    # Each iterator of a data set that shuffles has another order, also those that are only measured.
    again = None if data.train.again is None else data.train.again()
    return None if again is None else dataclasses.replace(data, train=again)


def _step_seconds(run: Run, data: Data) -> tuple[float, float]:
    """The seconds of a step in the graph and in XLA. An `_XLARefusedError` if XLA can't compile the task."""
    graph = _contender(run, data, GRAPH)
    try:
        xla = _contender(run, data, XLA)
    except (UsageError, tf.errors.OpError) as error:
        raise _XLARefusedError(message_of(error)) from None
    # In turns, so that what slows the machine down for a while slows both ways down.
    while graph.seconds < SECONDS or xla.seconds < SECONDS:
        graph.call()
        xla.call()
    return graph.step_seconds, xla.step_seconds


def _contender(run: Run, data: Data, way: str) -> _Contender:
    """One way to make steps, compiled."""
    run.options["compile"] = way
    step = run.session.make_step(data)
    contender = _Contender(step, run.options["steps_per_call"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "XLA can't compile this task")  # it is said below
        contender.call()  # the first one traces and compiles, and isn't measured
    if step.xla_refusal:
        raise _XLARefusedError(step.xla_refusal)
    return contender


class _Contender:
    """One way to make steps, in the graph or in XLA, and the seconds that they take.

    Attributes:
        seconds: of all calls but the first; infinite where there is nothing to measure: a step wasn't finite, or the
            data has no examples.
    """

    def __init__(self, step: TrainStep, steps_per_call: int | str) -> None:
        self.seconds = 0.0
        self._step = step
        self._pace = Pace(steps_per_call)
        self._source = step.data.train
        self._restart()
        self._of_calls: list[float] = []

    @property
    def step_seconds(self) -> float:
        """The median of the seconds of a step, over the calls."""
        return statistics.median(self._of_calls) if self._of_calls else float("inf")

    def call(self) -> None:
        """Makes a call of steps, from where the last one has ended; at the end of an epoch, from its start."""
        steps = self._pace.steps
        if self._source.steps_per_epoch is not None:
            steps = min(steps, self._source.steps_per_epoch - self._position)
        begun = time.perf_counter()
        made, ending, _ = self._step.train(self._iterator, 0, self._position, steps)
        seconds = time.perf_counter() - begun
        if self._pace.calls and made:
            self.seconds += seconds
            self._of_calls.append(seconds / made)
        self._pace.record(made, seconds)

        self._position += made
        if ending == NOT_FINITE or not self._position:
            self.seconds = float("inf")  # no measure: it ends the loop in `_step_seconds`
        if ending == EPOCH_ENDED or self._position == self._source.steps_per_epoch:
            self._restart()

    def _restart(self) -> None:
        self._position = 0
        self._iterator = self._source.start(0, 0)
