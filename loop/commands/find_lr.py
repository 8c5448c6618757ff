"""`tfloop find-lr`: the learning rate range test (Smith 2017, arXiv:1506.01186, section 3.3).

Trains with a learning rate that grows exponentially from step to step, and finds where the loss falls fastest. Data,
compiled step and backend are those of a training; but nothing is written, and no callback is called.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import tensorflow as tf

from callbacks.run_record.journal import jsonable
from callbacks.types import JsonObject
from loop.backends.base import Backend
from loop.commands import command_line
from loop.errors import UsageError
from loop.model.variables import is_legacy, learning_rates
from loop.options import Options
from loop.run.session import Session
from loop.step import approximations
from loop.step.train_step import NOT_FINITE
from loop.task import Optimizer, TrainTask

_DECAY = 0.9
"""The weight of the old average in the moving average of losses."""
_DIVERGED = 4.0
"""The test ends when the smoothed loss is this many times the best one."""
_NOISE = 2.0
"""The loss must fall by this many standard deviations of a step's loss. Chance does that in 1 of 100 tests."""


@dataclasses.dataclass(frozen=True)
class RangeTest:
    """The result of a range test."""

    rates: list[float]  # the learning rate of each step; of several optimizers, that of the first one
    losses: list[float]  # the loss of each step, before the weights are updated
    diverged: bool  # whether the test ended because the loss diverged
    # The ratio of each optimizer's rate to that of the first one, by name; "" for a single optimizer.
    scaled: dict[str, float]

    @property
    def smoothed(self) -> list[float]:
        """The losses, smoothed by an exponential moving average, which is corrected for its start at 0."""
        return _average(self.losses)

    @property
    def suggestion(self) -> float | None:
        """The rate at which the loss falls fastest, before its minimum; None if it falls no more than by chance."""
        # The fall is measured over a tenth of the steps. The first tenth is left out: its average has too few losses.
        smoothed = np.array(self.smoothed)
        width = max(2, len(self.losses) // 10)
        end = 0  # after the minimum
        if len(smoothed) > width:
            end = width + int(np.argmin(smoothed[width:])) + 1
        if end <= 2 * width:
            return None

        # Of differences between steps, so that the fall itself doesn't count: their variance is twice that of a loss.
        noise = np.std(np.diff(self.losses[:end])) / math.sqrt(2)
        if np.max(smoothed[width:end]) - smoothed[end - 1] < _NOISE * noise:
            return None
        steepest = int(np.argmin(smoothed[2 * width : end] - smoothed[width : end - width]))
        return self.rates[steepest + width + width // 2]  # in the middle of that stretch

    @property
    def top(self) -> float:
        """The greatest loss that a plot shows. How far the loss diverges is of no interest."""
        # As far above the greatest loss before the minimum as that lies above the minimum.
        smoothed = self.smoothed
        return 2 * max(smoothed[: int(np.argmin(smoothed)) + 1]) - min(smoothed)


def find_lr(
    task: TrainTask,
    backend: Backend,
    options: Options,
    steps: int,
    low: float,
    high: float,
    progress: Callable[[int], object] = lambda count: None,
) -> RangeTest:
    """Makes up to `steps` steps, with learning rates from `low` to `high`; stops when the loss diverges.

    Several optimizers keep the ratios of their rates: the first one has the rates from `low` to `high`. Of a task with
    phases, the first phase is tested. The backend is in one process. `progress` is called with 1 after each step.

    Raises:
        UsageError: the task can't be trained, or its rates have no ratio.
    """
    # The test ends where the loss isn't finite: skipping such steps would hide it.
    options = options | approximations.OFF
    options |= {"ema": None, "profile": None, "eval_every": "never", "on_nonfinite": "stop"}
    session = Session(task, backend, options)
    # The compiled step reads the rate from a variable, so that it needs no new trace for each rate.
    with backend.scope():
        rate = tf.Variable(low, trainable=False, dtype=tf.float64)
    optimizers = session.built.optimizer
    ratios = _ratios(optimizers)
    for name, ratio in ratios.items():
        optimizer = optimizers[name] if name else optimizers
        optimizer.learning_rate = _schedule(optimizer, rate, ratio)
    session.make_step()  # only now: the step is traced with the schedules

    losses: list[float] = []
    rates: list[float] = np.geomspace(low, high, steps).tolist()
    best = math.inf
    for loss in _losses(session, rates, rate):
        losses.append(loss)
        progress(1)
        smoothed = _average(losses)[-1]
        best = min(best, smoothed)
        # With `abs`, because a loss may be negative: then 4 times the best one would be better still.
        if not math.isfinite(loss) or smoothed > best + (_DIVERGED - 1) * abs(best):
            finite = losses if math.isfinite(loss) else losses[:-1]
            return RangeTest(rates[: len(finite)], finite, True, ratios)
    return RangeTest(rates, losses, False, ratios)


def _losses(session: Session, rates: Sequence[float], rate: tf.Variable) -> Iterator[float]:
    """Makes a step with each rate; yields the loss of each, or the sum if a step has several losses."""
    names = [f"{name}_loss" if name else "loss" for name in session.built.minimized]
    steps = session.steps()
    for value in rates:
        rate.assign(value)
        ending, totals = next(steps)
        if ending == NOT_FINITE:
            yield math.nan
            return
        means = session.step.means(totals)
        yield sum(means[name] for name in names)


def _ratios(optimizer: Optimizer) -> dict[str, float]:
    """The ratio of each optimizer's rate to that of the first one, by name; "" for a single optimizer."""
    if not isinstance(optimizer, Mapping):
        return {"": 1.0}
    ratios: dict[str, float] = {}
    first = 0.0
    for name, rate in zip(optimizer, learning_rates(optimizer), strict=True):
        if not rate:
            raise UsageError(
                f"build_optimizer()[{name!r}] has {'a schedule' if rate is None else rate} as its learning rate: rates "
                "of several optimizers are scaled together, so give numbers > 0"
            )
        first = first or rate
        ratios[name] = rate / first
    return ratios


def _schedule(optimizer: Optimizer, rate: tf.Variable, ratio: float) -> object:
    """A schedule of the optimizer's family, whose rate is that of a variable times `ratio`."""
    if is_legacy(optimizer):
        from tf_keras.optimizers.schedules import LearningRateSchedule
    else:
        from keras.optimizers.schedules import LearningRateSchedule

    class Followed(LearningRateSchedule):
        def __call__(self, step: tf.Tensor) -> tf.Tensor:
            return tf.cast(rate * ratio, tf.float32)

        def get_config(self) -> JsonObject:
            return {"ratio": ratio}

    return Followed()


def _average(losses: Sequence[float]) -> list[float]:
    """The exponential moving average after each loss, corrected for its start at 0 (as in Adam)."""
    averages = []
    average = 0.0
    for count, loss in enumerate(losses, 1):
        average = _DECAY * average + (1 - _DECAY) * loss
        averages.append(average / (1 - _DECAY**count))
    return averages


def lines(test: RangeTest, width: int = 78) -> Iterator[str]:
    """The test for people: a plot, and what it suggests."""
    yield from plot(test, width)
    if test.diverged:
        yield f"the loss diverged at {test.rates[-1]:.1e}" if test.rates else "the loss is not finite from the start"
    if (best := test.suggestion) is None:
        yield "no suggestion: the loss falls no more than by chance; try other --low and --high, or more --steps"
        return
    yield f"suggestion: {best:.1e}, where the loss falls fastest"
    for name, ratio in test.scaled.items():
        if name:  # "" is a single optimizer, whose rate has been shown
            yield f"  {name}: {ratio * best:.1e}"


def plot(test: RangeTest, width: int) -> list[str]:
    """The smoothed loss over the learning rate, for a terminal; with a line where it falls fastest."""
    if len(test.rates) < 2:
        return []
    import plotext

    figure = plotext.figure  # one for the whole process: it still has what was drawn before
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, 16)

    # The powers are drawn, and their ticks show the rates: so the axis is logarithmic.
    powers = list(map(math.log10, test.rates))
    shown = [point for point in zip(powers, test.smoothed, strict=True) if point[1] <= test.top]
    figure.draw(figure.signal(*zip(*shown, strict=True), marker="braille").lines())
    if test.suggestion is not None:
        figure.line(math.log10(test.suggestion), "vertical", style="dotted")

    whole_powers = range(math.ceil(powers[0]), math.floor(powers[-1]) + 1)
    ticks = list(map(float, whole_powers)) or [powers[0], powers[-1]]
    figure.ruler("x").lim(powers[0], powers[-1])
    figure.ruler("x").ticks(ticks, [f"{10**tick:.0e}" for tick in ticks])
    return ["loss (smoothed) over learning rate", *figure.build().string(True).splitlines()]


def as_json(test: RangeTest) -> JsonObject:
    """The test for programs."""
    fields: JsonObject = jsonable(dataclasses.asdict(test) | {"smoothed": test.smoothed})
    return fields | {"suggestion": test.suggestion}


def write(path: Path, test: RangeTest) -> None:
    """Writes the plot or, into a .json file, the numbers; whole or not at all."""
    with command_line.written_out(path) as file:
        if path.suffix == ".json":
            file.write((json.dumps(as_json(test)) + "\n").encode())
        else:
            _draw(file, path.suffix[1:], test)


def _draw(file: IO[bytes], form: str, test: RangeTest) -> None:
    """Writes the plot as a picture."""
    from matplotlib.figure import Figure  # without pyplot, which would look for a display

    if not test.losses:
        raise UsageError("the loss is not finite from the start: there is nothing to plot")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.semilogx(test.rates, test.losses, color="0.75", label="each step")
    axes.semilogx(test.rates, test.smoothed, label="smoothed")
    if test.suggestion is not None:
        axes.axvline(test.suggestion, color="tab:red", linestyle=":", label=f"suggestion: {test.suggestion:.1e}")
    axes.set(xlabel="learning rate", ylabel="loss", ylim=(None, test.top))
    axes.legend()
    figure.savefig(file, format=form, dpi=120)
