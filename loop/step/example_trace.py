"""Trying `compute` before anything is traced: with which batches, and what it leaves as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state

from loop.data import RowCounts
from loop.errors import UsageError
from loop.step.metric_sums import try_metrics
from loop.step.replica import all_gathers, probing
from loop.step.values import check, content
from loop.task import TrainTask


class Trial:
    """Tries functions of a batch, such as `compute`, and finds out whether they take batches of one size alone.

    Args:
        example: a few examples as a batch.
        rows: how many rows batches have in the run; None: not known.
        stateful: how many rows the state has that the model carries from batch to batch; 0: not known; None: there
            is no such state.
        inputs: the batch sizes that the model's inputs name.

    Attributes:
        metrics: Keras metrics by the name of the value that each is updated with.
        fixed: how many rows a batch must have; None: any number.
    """

    def __init__(
        self,
        example: Any,
        rows: RowCounts | None = None,
        stateful: int | None = None,
        inputs: Sequence[int] = (),
    ) -> None:
        self._example, self._rows = example, rows
        self.metrics: Mapping[str, Any] = {}
        self._stateful = stateful is not None
        # The likeliest first: what a replica gets of a whole batch; what the model names; the whole batch.
        likely = [stateful or 0, *(reversed(rows.whole) if rows else ()), *inputs, rows.batch_size if rows else 0]
        self._likely = [n for n in dict.fromkeys(likely) if n]
        self.fixed: int | None = None

    def names(self, compute: Callable[[Any], Any]) -> list[str]:
        """Calls a function of a batch, and gives the names of its values, the loss first.

        Raises:
            UsageError: the values are not as they must be, or the run has batches that the function doesn't take.
        """
        if self.fixed is not None:
            return self._of_size(compute, self.fixed)
        names, fixed = self._first_that_works(lambda: self._of_few(compute), lambda n: self._of_size(compute, n))
        if fixed is not None:
            self.fixed = fixed
            self._check_others(compute, fixed)
        return names

    def call(self, function: Callable[[Any], Any]) -> Any:
        """Calls a function of a batch, with one that it takes."""
        few = self._example
        return self._first_that_works(lambda: function(few), lambda n: function(of_size(few, n)))[0]

    def _first_that_works(self, of_few: Callable[[], Any], of_size: Callable[[int], Any]) -> tuple[Any, int | None]:
        """What is returned for a few rows; or for as many as the run has, and how many those are."""
        problem: Exception | None = None
        if not self._stateful or not self._likely:
            try:
                return of_few(), None
            except UsageError as error:
                if error.__cause__ is None:  # else it tells of shapes that TensorFlow or Keras didn't like
                    raise
                problem = error
            except Exception as error:
                problem = error
        for n in self._likely:
            try:
                return of_size(n), n
            except Exception as error:
                problem = problem or error
        assert problem is not None
        raise problem

    def _of_few(self, compute: Callable[[Any], Any]) -> list[str]:
        """Calls it with a few examples and with one."""
        # Once more with one example: a mean over examples can have the right shape by chance, but not twice.
        example, metrics = self._example, self.metrics
        n, gathers = int(tf.shape(tf.nest.flatten(example)[0])[0]), all_gathers()
        with probing(n):
            values = compute(example)
            names = check(values, n, None, tuple(metrics))
            try_metrics(metrics, values)
        with probing(1):
            alone = compute(tf.nest.map_structure(lambda tensor: tensor[:1], example))
            check(alone, 1, names, tuple(metrics))
        for name in () if all_gathers() != gathers else set(values) - set(metrics):
            shape, of_one = (list(tf.convert_to_tensor(content(each[name])).shape) for each in (values, alone))
            if any(size == n != 1 == one for size, one in zip(shape[1:], of_one[1:], strict=False)):
                raise UsageError(
                    f'compute() returned "{name}" of shape {shape} for {n} examples, and of shape {of_one} for one: '
                    "each is paired with each other one, as by labels of shape [n] minus predictions of shape [n, 1]. "
                    "Give both one shape, as by tf.squeeze(predictions, -1); or take the other examples from "
                    "loop.all_gather(...)"
                )
        return names

    def _of_size(self, compute: Callable[[Any], Any], n: int) -> list[str]:
        """Calls it with so many rows, which repeat the examples."""
        with probing(n):
            values = compute(of_size(self._example, n))
            names = check(values, n, None, tuple(self.metrics))
            try_metrics(self.metrics, values)
        return names

    def _check_others(self, compute: Callable[[Any], Any], n: int) -> None:
        """Refuses a run with batches that a function doesn't take, which has taken one of n rows."""
        rows = self._rows
        if rows is None:
            return

        def fails(other: int) -> bool:
            try:
                return other != n and (other == 0 or not self._of_size(compute, other))
            except Exception:
                return True

        only = f"the model takes batches of {n} rows alone (a stateful layer, keras.Input(batch_size=...), a reshape)"
        if wrong := [other for other in rows.whole if fails(other)]:
            shared = " and ".join(
                [f"{rows.replicas} replicas"] * (rows.replicas > 1) + [f"accumulate={rows.parts}"] * (rows.parts > 1)
            )
            raise UsageError(
                f"{only}, but of batch_size={rows.batch_size} {f'with {shared} ' if shared else ''}it gets "
                f"{' or '.join(map(str, wrong))}: use batch_size={n * rows.replicas * rows.parts}"
            )
        if wrong := [other for other in rows.short if fails(other)]:
            of = "may have fewer" if wrong == [0] else f"has {' or '.join(map(str, wrong))}"
            raise UsageError(f"{only}, and the last one of an epoch {of}: use drop_remainder=True (--drop-remainder)")

    def grow(self, compute: Callable[[Any], Any], penalties: list[list[float]]) -> bool:
        """Whether a penalty doubles with the examples, of which a mean would be the same."""
        with probing(2 * int(tf.shape(tf.nest.flatten(self._example)[0])[0])):
            compute(tf.nest.map_structure(lambda tensor: tf.concat([tensor, tensor], 0), self._example))
        pairs = zip(penalties[0], penalties[-1], strict=False)
        return any(once != 0 and np.isclose(twice, 2 * once, rtol=0.02) for once, twice in pairs)


def of_size(example: Any, n: int) -> Any:
    """A batch of n rows, which repeat those of an example."""
    rows = tf.range(n) % tf.shape(tf.nest.flatten(example)[0])[0]
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), example)


def check_stateful(layers: Sequence[Any], rows: RowCounts | None) -> int | None:
    """How many rows the state of layers has that is carried from batch to batch; see `Trial`.

    Raises:
        UsageError: on several replicas, or with micro-batches, the rows that follow each other would go astray.
    """
    if not layers:
        return None
    if rows is not None and (rows.replicas > 1 or rows.parts > 1):
        how = f"{rows.replicas} replicas" if rows.replicas > 1 else f"accumulate={rows.parts}"
        raise UsageError(
            f"{layers[0].name} is stateful: row i of a batch goes on from row i of the batch before, which with {how} "
            "it can't: train on one replica without accumulate, or use stateful=False"
        )
    states = [state for layer in layers for state in tf.nest.flatten(layer.states or [])]
    sizes = [int(state.shape[0]) for state in states if state is not None]
    return sizes[0] if sizes else 0


class StepTrial:
    """Stands for the step in a `train_step` that is tried: takes the names of its values, and trains nothing."""

    def __init__(self, names: Sequence[str], trial: Trial) -> None:
        self._names, self._trial = names, trial
        self.phases: dict[str, list[str]] = {}

    def minimize(self, values: Callable[[Any], Any], optimizer: str = "") -> dict[str, tf.Tensor]:
        """See `loop.step.step_trace.StepTrace.minimize`."""
        if not callable(values):
            raise UsageError(
                f"step.minimize({type(values).__name__}): give a function of a batch that returns the values, such as "
                "lambda batch: self.compute(model, batch, training=True)"
            )
        if optimizer and optimizer not in self._names:
            there = ", ".join(self._names) or "only one, without a name"
            raise UsageError(f"step.minimize(..., {optimizer!r}): build_optimizer() has no such optimizer ({there})")
        names = self._trial.names(values)
        if self.phases.setdefault(optimizer, names) != names:
            raise UsageError(
                f"step.minimize(..., {optimizer!r}) was called with values {', '.join(self.phases[optimizer])}, and "
                f"again with {', '.join(names)}: return the same values"
            )
        return {name: tf.constant(1.0) for name in names if name not in self._trial.metrics}


def tried_step(task: TrainTask, optimizer: Any, model: Any, trial: Trial) -> dict[str, list[str]]:
    """Tries the task's own `train_step`; the names of the values of each of its `step.minimize`."""
    step = StepTrial(list(optimizer) if isinstance(optimizer, Mapping) else [], trial)
    task.train_step(model, step)
    if not step.phases:
        raise UsageError("train_step() never called step.minimize(...): nothing is trained")
    return step.phases


@contextlib.contextmanager
def recorded(made: list[tf.Variable]) -> Iterator[None]:
    """Adds each variable to `made` that is created within."""

    def creator(create: Callable[..., Any], **arguments: Any) -> Any:
        variable = create(**arguments)
        made.append(variable)
        return variable

    with tf.variable_creator_scope(creator):
        yield


@contextlib.contextmanager
def put_back(variables: Iterable[tf.Variable]) -> Iterator[None]:
    """Takes variables back to what they were; those that are created within, to what they were at first.

    Args:
        variables: those that may change.
    """
    # Of memory of the CPU, what is read is the variable's own buffer: nothing is copied unless it is changed.
    before = {id(variable): (variable, _value(variable)) for variable in variables}

    def creator(create: Callable[..., Any], **arguments: Any) -> Any:
        variable = create(**arguments)
        if tf.executing_eagerly():
            before.setdefault(id(variable), (variable, _value(variable)))
        return variable

    try:
        with tf.variable_creator_scope(creator):
            yield
    finally:
        for variable, value in before.values():
            variable.assign(value)


def _value(variable: tf.Variable) -> Any:
    # One that parameter servers hold in shards can't be read as a tensor.
    return variable.numpy() if hasattr(variable, "variables") else variable.read_value()


def held_by(owner: Any) -> list[tf.Variable]:
    """The variables in an object's attributes: by themselves, of a model, a layer, a metric or a generator of seeds."""
    found: list[Any] = []
    for attribute in getattr(owner, "__dict__", {}).values():
        for value in _parts(attribute):
            if isinstance(value, tf.Variable | keras.Variable):
                found.append(value)
            elif isinstance(value, keras.random.SeedGenerator):
                found.append(value.state)
            elif isinstance(value, tf.Module | keras.Layer | keras.metrics.Metric):
                found += value.variables
    return _tensorflow(found)


def _parts(value: Any) -> Iterator[Any]:
    """A value, or those in a list, tuple or dict of them."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple):
        yield from value
    else:
        yield value


def global_seeds() -> list[tf.Variable]:
    """The state of Keras's global generator of seeds, if it is there."""
    generator = global_state.get_global_attribute("global_seed_generator")
    return [] if generator is None else _tensorflow([generator.state])


def _tensorflow(variables: Iterable[Any]) -> list[tf.Variable]:
    return [variable.value if isinstance(variable, keras.Variable) else variable for variable in variables]
