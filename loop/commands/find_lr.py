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
from loop.model.variables import learning_rates
from loop.run.session import Session
from loop.step import approximations
from loop.step.train_step import EPOCH_ENDED, NOT_FINITE, TrainStep
from loop.task import TrainTask

FORMS = (".json", ".png", ".svg")
"""What `write` can write, by the end of the file's name."""
_MEMORY = 0.9  # of the moving average of losses
_DIVERGED = 4.0  # so many times the best loss is the end
_NOISE = 2.0  # a fall is one if it is so many standard deviations of a step's loss: chance has fewer in 99 of 100 tests


@dataclasses.dataclass(frozen=True)
class Found:
    """What the test has found.

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
        smoothed, width = np.array(self.smoothed), max(2, len(self.losses) // 10)
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
) -> Found:
    """Makes so many steps, with learning rates from `low` to `high`; stops where the loss diverges.

    Several optimizers keep the ratios of their rates: the first one has those from `low` to `high`.

    Args:
        task: the task.
        engine: the engine, in one process.
        options: the options of `fit`.
        steps: how many.
        low: the first learning rate.
        high: the last one.
        progress: is told of each step.

    Raises:
        UsageError: the task can't be trained, or its rates have no ratio.
    """
    options = (
        options | approximations.OFF | {"ema": None, "profile": None, "eval_every": "never", "on_nonfinite": "stop"}
    )
    session = Session(task, engine, options)  # of a task with phases: the first one
    built = session.built
    with engine.scope():
        rate = tf.Variable(low, trainable=False, dtype=tf.float64)
    ratios = _ratios(built.optimizer)
    for name, ratio in ratios.items():
        optimizer = built.optimizer[name] if name else built.optimizer
        optimizer.learning_rate = _rate(optimizer, rate, ratio)
    step = session.make_step()
    losses: list[float] = []
    rates = [float(each) for each in np.geomspace(low, high, steps)]
    best = math.inf
    for loss in _losses(step, rates, rate, list(built.minimized)):
        losses.append(loss)
        progress(1)
        now = _average(losses)[-1]
        best = min(best, now)
        if not math.isfinite(loss) or now > best + (_DIVERGED - 1) * abs(best):
            finite = losses if math.isfinite(loss) else losses[:-1]
            return Found(rates[: len(finite)], finite, True, ratios)
    return Found(rates, losses, False, ratios)


def _losses(step: TrainStep, rates: Sequence[float], rate: tf.Variable, minimized: Sequence[str]) -> Iterator[float]:
    """Makes a step with each rate, and gives its loss: the sum of all, where a step has several."""
    source = step.data.train
    handle, epoch, at = source.start(0, 0), 0, 0
    for each in rates:
        rate.assign(each)
        made = 0
        while not made:
            if at == source.steps_per_epoch:
                handle, epoch, at = source.next_epoch(handle), epoch + 1, 0
            made, ending, totals = step.train(handle, epoch, at, 1)
            if ending == NOT_FINITE:
                yield math.nan
                return
            if not made and not at:
                raise UsageError("train_data() has no examples: there is nothing to train on")
            at += made
            if ending == EPOCH_ENDED:
                handle, epoch, at = source.next_epoch(handle), epoch + 1, 0
        means = step.means(totals)
        yield sum(means[f"{name}_loss" if name else "loss"] for name in minimized)


def _ratios(optimizer: Any) -> dict[str, float]:
    """How many times the rate of the first optimizer each one's is, by name; "" for a single one."""
    if not isinstance(optimizer, Mapping):
        return {"": 1.0}
    rates = dict(zip(optimizer, learning_rates(optimizer), strict=True))
    for name, each in rates.items():
        if not each:
            raise UsageError(
                f"build_optimizer()[{name!r}] has {'a schedule' if each is None else each} as its learning rate: rates "
                "of several optimizers are scaled together, so give numbers > 0"
            )
    first = next(iter(rates.values()))
    return {name: (each or 0.0) / (first or 1.0) for name, each in rates.items()}


def _rate(optimizer: Any, rate: tf.Variable, ratio: float) -> Any:
    """A schedule that follows a variable."""
    if type(optimizer).__module__.startswith("tf_keras"):
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
    return [each / (1 - _MEMORY**count) for count, each in enumerate(sums) if count]


def lines(found: Found, width: int = 78) -> Iterator[str]:
    """The test for people: a plot, and what it suggests."""
    yield from plot(found, width)
    if found.diverged:
        yield f"the loss diverged at {found.rates[-1]:.1e}" if found.rates else "the loss is not finite from the start"
    if (best := found.suggestion) is None:
        yield "no suggestion: the loss falls nowhere; try other rates with --low and --high, or more --steps"
        return
    yield f"suggestion: {best:.1e}, where the loss falls fastest"
    for name, ratio in found.scaled.items():
        if name:
            yield f"  {name}: {ratio * best:.1e}"


def plot(found: Found, width: int, height: int = 16) -> list[str]:
    """The smoothed loss over the learning rate, for a terminal; a line where it falls fastest."""
    if len(found.rates) < 2:
        return []
    import plotext

    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    places = [math.log10(rate) for rate in found.rates]
    smoothed = found.smoothed
    shown = [(place, loss) for place, loss in zip(places, smoothed, strict=True) if loss <= found.top]
    figure.draw(figure.signal(*zip(*shown, strict=True), marker="braille").lines())
    if found.suggestion is not None:
        figure.line(math.log10(found.suggestion), "vertical", style="dotted")
    ends = math.ceil(places[0]), math.floor(places[-1]) + 1
    ticks = [float(each) for each in range(*ends)] or [places[0], places[-1]]
    figure.ruler("x").lim(places[0], places[-1])
    figure.ruler("x").ticks(ticks, [f"{10**each:.0e}" for each in ticks])
    return ["loss (smoothed) over learning rate", *figure.build().string(True).splitlines()]


def as_json(found: Found) -> dict[str, Any]:
    """The same for programs."""
    about: dict[str, Any] = jsonable(dataclasses.asdict(found) | {"smoothed": found.smoothed})
    return about | {"suggestion": found.suggestion}


def write(path: Path, found: Found) -> None:
    """Writes the plot, or the numbers, whole or not at all."""
    try:
        with replacing(path, aside=hidden_name(path)) as file:
            if path.suffix == ".json":
                file.write((json.dumps(as_json(found)) + "\n").encode())
            else:
                _draw(file, path.suffix[1:], found)
    except OSError as error:
        raise UsageError(f"--out {path}: {error.strerror}") from None


def _draw(file: IO[bytes], form: str, found: Found) -> None:
    from matplotlib.figure import Figure

    if not found.losses:
        raise UsageError("the loss is not finite from the start: there is nothing to plot")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.semilogx(found.rates, found.losses, color="0.75", label="each step")
    axes.semilogx(found.rates, found.smoothed, label="smoothed")
    if found.suggestion is not None:
        axes.axvline(found.suggestion, color="tab:red", linestyle=":", label=f"suggestion: {found.suggestion:.1e}")
    axes.set(xlabel="learning rate", ylabel="loss", ylim=(None, found.top))
    axes.legend()
    figure.savefig(file, format=form, dpi=120)
