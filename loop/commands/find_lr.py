"""`tfloop find-lr`: the learning rate range test (Smith 2017, arXiv:1506.01186, section 3.3).

Trains with a learning rate that grows exponentially from step to step, and looks where the loss falls fastest. All is
that of a training: data, compiled step, engine; but nothing is written, and no callback is called.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import tensorflow as tf

from callbacks.files import hidden_name, replacing
from callbacks.run_record.journal import jsonable
from loop.backends.base import Backend
from loop.errors import UsageError
from loop.model.variables import is_legacy, learning_rates
from loop.run.session import Session
from loop.step import approximations
from loop.step.train_step import NOT_FINITE
from loop.task import TrainTask

FORMS = (".json", ".png", ".svg")
"""What `write` can write, by the end of the file's name."""
_MEMORY = 0.9  # of the moving average of losses
_DIVERGED = 4.0  # so many times the best loss is the end
_NOISE = 2.0  # a fall is one if it is so many standard deviations of a step's loss: chance has fewer in 99 of 100 tests


@dataclasses.dataclass(frozen=True)
class RangeTest:
    """What a range test has found.

    Attributes:
        rates: the learning rate of each step; of the first optimizer, where there are several.
        losses: the loss of each, before the step.
        diverged: whether that is where it ended.
        scaled: by the names of several optimizers, how many times the rate of the first one theirs was.
    """

    rates: list[float]
    losses: list[float]
    diverged: bool
    scaled: dict[str, float]

    @property
    def smoothed(self) -> list[float]:
        """The losses, smoothed: an exponential moving average, without the weight of a beginning at 0."""
        return _average(self.losses)

    @property
    def suggestion(self) -> float | None:
        """The rate at which the loss falls fastest, before it is smallest; None if it falls no more than by chance.

        How fast is measured over a tenth of the steps. The first tenth, of which there is no average yet, is left out.
        """
        smoothed = np.array(self.smoothed)
        width = max(2, len(self.losses) // 10)
        end = width + int(np.argmin(smoothed[width:])) + 1 if len(smoothed) > width else 0
        if end <= 2 * width:
            return None
        noise = np.std(np.diff(self.losses[:end])) / math.sqrt(2)
        if np.max(smoothed[width:end]) - smoothed[end - 1] < _NOISE * noise:
            return None
        steepest = int(np.argmin(smoothed[2 * width : end] - smoothed[width : end - width]))
        return self.rates[steepest + width + width // 2]

    @property
    def top(self) -> float:
        """The greatest loss that a plot shows: how far it diverges is of no interest."""
        smoothed = self.smoothed
        return 2 * max(smoothed[: int(np.argmin(smoothed)) + 1]) - min(smoothed)


def find_lr(
    task: TrainTask,
    engine: Backend,
    options: dict[str, Any],
    steps: int,
    low: float,
    high: float,
    progress: Callable[[int], Any] = lambda count: None,
) -> RangeTest:
    """Makes so many steps, with learning rates from `low` to `high`; stops where the loss diverges.

    Several optimizers keep the ratios of their rates: the first one has those from `low` to `high`.

    Args:
        task: the task.
        engine: the backend, in one process.
        options: the options of `fit`.
        steps: how many.
        low: the first learning rate.
        high: the last one.
        progress: is called with 1 after each step.

    Raises:
        UsageError: the task can't be trained, or its rates have no ratio.
    """
    options = options | approximations.OFF
    options |= {"ema": None, "profile": None, "eval_every": "never", "on_nonfinite": "stop"}
    session = Session(task, engine, options)  # of a task with phases: the first one
    # The compiled step reads a variable, so that another rate needs no other trace.
    with engine.scope():
        rate = tf.Variable(low, trainable=False, dtype=tf.float64)
    optimizers = session.built.optimizer
    ratios = _ratios(optimizers)
    for name, ratio in ratios.items():
        optimizer = optimizers[name] if name else optimizers
        optimizer.learning_rate = _rate(optimizer, rate, ratio)
    session.make_step()
    losses: list[float] = []
    rates: list[float] = np.geomspace(low, high, steps).tolist()
    best = math.inf
    for loss in _losses(session, rates, rate):
        losses.append(loss)
        progress(1)
        smoothed = _average(losses)[-1]
        best = min(best, smoothed)
        if not math.isfinite(loss) or smoothed > best + (_DIVERGED - 1) * abs(best):
            finite = losses if math.isfinite(loss) else losses[:-1]
            return RangeTest(rates[: len(finite)], finite, True, ratios)
    return RangeTest(rates, losses, False, ratios)


def _losses(session: Session, rates: Sequence[float], rate: tf.Variable) -> Iterator[float]:
    """Makes a step with each rate, and gives its loss: the sum of all, where a step has several."""
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


def _ratios(optimizer: Any) -> dict[str, float]:
    """How many times the rate of the first optimizer each one's is, by name; "" for a single one."""
    if not isinstance(optimizer, Mapping):
        return {"": 1.0}
    rates = dict(zip(optimizer, learning_rates(optimizer), strict=True))
    for name, rate in rates.items():
        if not rate:
            raise UsageError(
                f"build_optimizer()[{name!r}] has {'a schedule' if rate is None else rate} as its learning rate: rates "
                "of several optimizers are scaled together, so give numbers > 0"
            )
    first = next(iter(rates.values()))
    return {name: (rate or 0.0) / (first or 1.0) for name, rate in rates.items()}


def _rate(optimizer: Any, rate: tf.Variable, ratio: float) -> Any:
    """A schedule that follows a variable."""
    if is_legacy(optimizer):
        from tf_keras.optimizers.schedules import LearningRateSchedule
    else:
        from keras.optimizers.schedules import LearningRateSchedule

    class Followed(LearningRateSchedule):
        def __call__(self, step: Any) -> Any:
            return tf.cast(rate * ratio, tf.float32)

        def get_config(self) -> dict[str, Any]:
            return {"ratio": ratio}

    return Followed()


def _average(losses: Sequence[float]) -> list[float]:
    """An exponential moving average, without the weight of a beginning at 0."""
    sums = itertools.accumulate(losses, lambda sum_, loss: _MEMORY * sum_ + (1 - _MEMORY) * loss, initial=0.0)
    return [total / (1 - _MEMORY**count) for count, total in enumerate(sums) if count]


def lines(test: RangeTest, width: int = 78) -> Iterator[str]:
    """The test for people: a plot, and what it suggests."""
    yield from plot(test, width)
    if test.diverged:
        yield f"the loss diverged at {test.rates[-1]:.1e}" if test.rates else "the loss is not finite from the start"
    if (best := test.suggestion) is None:
        yield "no suggestion: the loss falls nowhere; try other rates with --low and --high, or more --steps"
        return
    yield f"suggestion: {best:.1e}, where the loss falls fastest"
    for name, ratio in test.scaled.items():
        if name:
            yield f"  {name}: {ratio * best:.1e}"


def plot(test: RangeTest, width: int, height: int = 16) -> list[str]:
    """The smoothed loss over the learning rate, for a terminal; a line where it falls fastest."""
    if len(test.rates) < 2:
        return []
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    powers = [math.log10(rate) for rate in test.rates]
    shown = [point for point in zip(powers, test.smoothed, strict=True) if point[1] <= test.top]
    figure.draw(figure.signal(*zip(*shown, strict=True), marker="braille").lines())
    if test.suggestion is not None:
        figure.line(math.log10(test.suggestion), "vertical", style="dotted")
    whole_powers = range(math.ceil(powers[0]), math.floor(powers[-1]) + 1)
    ticks = list(map(float, whole_powers)) or [powers[0], powers[-1]]
    figure.ruler("x").lim(powers[0], powers[-1])
    figure.ruler("x").ticks(ticks, [f"{10**tick:.0e}" for tick in ticks])
    return ["loss (smoothed) over learning rate", *figure.build().string(True).splitlines()]


def as_json(test: RangeTest) -> dict[str, Any]:
    """The same for programs."""
    about: dict[str, Any] = jsonable(dataclasses.asdict(test) | {"smoothed": test.smoothed})
    return about | {"suggestion": test.suggestion}


def write(path: Path, test: RangeTest) -> None:
    """Writes the plot, or the numbers, whole or not at all."""
    try:
        with replacing(path, aside=hidden_name(path)) as file:
            if path.suffix == ".json":
                file.write((json.dumps(as_json(test)) + "\n").encode())
            else:
                _draw(file, path.suffix[1:], test)
    except OSError as error:
        raise UsageError(f"--out {path}: {error.strerror}") from None


def _draw(file: IO[bytes], form: str, test: RangeTest) -> None:
    from matplotlib.figure import Figure

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
