"""Tries `compute` before it is traced: finds which sizes of batches it takes, and changes no variable for good."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf

from loop.backends.base import Backend
from loop.data import RowCounts, count
from loop.errors import UsageError
from loop.model.variables import Layer, Variable, as_tf, made_variables, sums_dtype
from loop.step.metric_sums import try_metrics
from loop.step.replica import all_gathers, as_in_replica, probing
from loop.step.values import Value, check, content
from loop.task import Batch, Model, Optimizer, TrainTask, Values

Compute: TypeAlias = Callable[[Batch], Values]
"""A function of a batch that returns what `TrainTask.compute` would."""
Watch: TypeAlias = Callable[[Compute, Sequence[str]], None]
"""A function that is called with a function of a batch, and the names of its values."""
T = TypeVar("T")


class Trial:
    """Tries functions of a batch, such as `compute`, and finds out whether they take batches of one size alone.

    Args:
        example: a few examples as a batch.
        rows: the numbers of rows that batches have in the run; None: not known.
        stateful: the number of rows in the state that the model carries from batch to batch; 0: not known; None: there
            is no such state.
        inputs: the batch sizes that the model's inputs demand.

    Attributes:
        example: a few examples as a batch.
        rows: the numbers of rows that batches have in the run; None: not known.
        metrics: Keras metrics by the name of the value that each is updated with.
        fixed_rows: the number of rows that a batch must have; None: any number.
        seen: what the last function has returned for a few examples, and for the first of them alone; None: it takes
            batches of one size alone, or it has called `all_gather`.
    """

    def __init__(
        self, example: Batch, rows: RowCounts | None = None, stateful: int | None = None, inputs: Sequence[int] = ()
    ) -> None:
        self.example = example
        self.rows = rows
        self.metrics: Mapping[str, keras.metrics.Metric] = {}
        self._stateful = stateful is not None
        # The most likely first: the rows of a replica, the sizes of the model's inputs, the size of the whole batch.
        likely = [stateful or 0]
        if rows is not None:
            likely += reversed(rows.whole)
        likely += inputs
        if rows is not None:
            likely.append(rows.batch_size)
        self._likely = [size for size in dict.fromkeys(likely) if size]
        self.fixed_rows: int | None = None
        self.seen: tuple[Values, Values] | None = None

    def names(self, compute: Compute) -> list[str]:
        """Calls a function of a batch, and returns the names of its values, the loss first.

        Raises:
            UsageError: the values are not as they must be, or the run has batches that the function doesn't take.
        """
        # Found by an earlier trial: `compute` is tried before each `minimize` of a `train_step`.
        if self.fixed_rows is not None:
            return self._of_size(compute, self.fixed_rows)
        names, fixed = self._first_that_works(lambda: self._of_few(compute), lambda n: self._of_size(compute, n))
        if fixed is not None:
            self.fixed_rows = fixed
            self._check_others(compute, fixed)
        return names

    def call(self, function: Callable[[Batch], object]) -> None:
        """Calls a function of a batch, with a batch that it takes."""
        few = self.example
        self._first_that_works(lambda: function(few), lambda n: function(of_size(few, n)))

    def _first_that_works(self, of_few: Callable[[], T], of_size: Callable[[int], T]) -> tuple[T, int | None]:
        """The result for a few rows, and None; or the result for a likely number of rows, and that number."""
        problem: Exception | None = None
        # A stateful model takes as many rows as its state has, so a few rows aren't tried.
        if not self._stateful or not self._likely:
            try:
                return of_few(), None
            except UsageError as error:
                # A mistake in the task has no cause. With a cause it is about shapes: another number of rows may fit.
                if error.__cause__ is None:
                    raise
                problem = error
            except Exception as error:
                problem = error
        for n in self._likely:
            try:
                return of_size(n), n
            except Exception as error:
                problem = problem or error  # the first one: it belongs to the sizes that most models take
        assert problem is not None
        raise problem

    def _of_few(self, compute: Compute) -> list[str]:
        """Calls `compute` with a few examples, and with one of them; returns the names of the values."""
        metrics = self.metrics
        n = int(count(self.example))
        self.seen = None  # what an earlier function has returned
        gathers_before = all_gathers()

        with probing(self.example):
            values = compute(self.example)
            names = check(values, n, None, tuple(metrics))
            try_metrics(metrics, values)

        # Once more with one example: a mean over examples can have the right shape by chance, but not twice.
        one = tf.nest.map_structure(lambda tensor: tensor[:1], self.example)
        with probing(one):
            values_of_one = compute(one)
            check(values_of_one, 1, names, tuple(metrics))

        if all_gathers() == gathers_before:  # with `all_gather`, pairing examples with each other is the purpose
            for name in set(values) - set(metrics):
                _check_unpaired(name, n, values[name], values_of_one[name])
            self.seen = values, values_of_one
        return names

    def _of_size(self, compute: Compute, n: int) -> list[str]:
        """Calls `compute` with n rows, which repeat the examples; returns the names of the values."""
        batch = of_size(self.example, n)
        with probing(batch):
            values = compute(batch)
            names = check(values, n, None, tuple(self.metrics))
            try_metrics(self.metrics, values)
        return names

    def _check_others(self, compute: Compute, n: int) -> None:
        """Refuses a run with batches that `compute` doesn't take, after it has taken one of n rows."""
        rows = self.rows
        if rows is None:
            return
        only = f"the model takes batches of {n} rows alone (a stateful layer, keras.Input(batch_size=...), a reshape)"

        # Whole batches: with another `batch_size`, each part has the rows that the model takes.
        if refused := self._refused(compute, n, rows.whole):
            shared = [f"{rows.replicas} replicas"] if rows.replicas > 1 else []
            if rows.parts > 1:
                shared.append(f"accumulate={rows.parts}")
            with_shared = f"with {' and '.join(shared)} " if shared else ""
            raise UsageError(
                f"{only}, but of batch_size={rows.batch_size} {with_shared}it gets "
                f"{' or '.join(map(str, refused))}: use batch_size={n * rows.replicas * rows.parts}"
            )

        # The last batch of an epoch can be left out instead.
        if refused := self._refused(compute, n, rows.short):
            short = "may have fewer" if refused == [0] else f"has {' or '.join(map(str, refused))}"
            raise UsageError(
                f"{only}, and the last one of an epoch {short}: use drop_remainder=True (--drop-remainder)"
            )

    def _refused(self, compute: Compute, n: int, sizes: Sequence[int]) -> list[int]:
        """Those of some sizes of a batch that `compute` doesn't take, after it has taken one of n rows."""
        return [size for size in sizes if size != n and not self._takes(compute, size)]

    def _takes(self, compute: Compute, n: int) -> bool:
        """Whether `compute` takes batches of n rows; False for 0, which stands for a number that isn't known."""
        try:
            return n > 0 and bool(self._of_size(compute, n))
        except Exception:
            return False

    @property
    def replicas(self) -> int:
        """The number of replicas that share a batch in the run."""
        return 1 if self.rows is None else self.rows.replicas

    @property
    def shares_batches(self) -> bool:
        """Whether several replicas, or several micro-batches, share a batch in the run."""
        return self.replicas * self.parts > 1

    @property
    def parts(self) -> int:
        """The number of micro-batches of a batch in the run."""
        return 1 if self.rows is None else self.rows.parts

    def grow(self, compute: Compute, penalties: list[list[float]]) -> bool:
        """Whether a penalty doubles with the number of examples, and so is a sum over them instead of a mean.

        Args:
            compute: adds the penalties of its call to `penalties`.
            penalties: the penalties of each call so far. The first call had each example once.
        """
        doubled = tf.nest.map_structure(lambda tensor: tf.concat([tensor, tensor], 0), self.example)
        with probing(doubled):
            compute(doubled)
        # Not strict: a layer may add another number of penalties from call to call.
        for once, twice in zip(penalties[0], penalties[-1], strict=False):
            # A sum over the rows has doubled, up to rounding.
            if once != 0 and np.isclose(twice, 2 * once, rtol=0.02):
                return True
        return False


def _check_unpaired(name: str, n: int, value: Value, value_of_one: Value) -> None:
    """Refuses a value in which examples are paired with each other: another axis grows with their number, too.

    Args:
        name: the name of the value.
        n: the number of examples.
        value: the value for n examples.
        value_of_one: the value for one example.
    """
    shape = list(tf.convert_to_tensor(content(value)).shape)
    of_one = list(tf.convert_to_tensor(content(value_of_one)).shape)
    for size, size_of_one in zip(shape[1:], of_one[1:], strict=False):
        # An axis that merely has n elements keeps them for one example.
        if n != 1 and size == n and size_of_one == 1:
            raise UsageError(
                f'compute() returned "{name}" of shape {shape} for {n} examples, and of shape {of_one} for one: '
                "each is paired with each other one, as by labels of shape [n] minus predictions of shape [n, 1]. "
                "Give both one shape, as by tf.squeeze(predictions, -1); or take the other examples from "
                "loop.all_gather(...)"
            )


def of_size(example: Batch, n: int) -> Batch:
    """A batch of n rows, which repeat the rows of an example."""
    rows = tf.range(n) % tf.shape(tf.nest.flatten(example)[0])[0]
    return tf.nest.map_structure(lambda tensor: tf.gather(tensor, rows), example)


def check_stateful(layers: Sequence[Layer], rows: RowCounts | None) -> int | None:
    """The number of rows in the state that stateful layers carry from batch to batch; see `Trial`.

    Raises:
        UsageError: on several replicas, or with micro-batches, a row would not get the state of the row before it.
    """
    if not layers:
        return None
    if rows is not None and (rows.replicas > 1 or rows.parts > 1):
        how = f"{rows.replicas} replicas" if rows.replicas > 1 else f"accumulate={rows.parts}"
        raise UsageError(
            f"{layers[0].name} is stateful: row i of a batch goes on from row i of the batch before, which with {how} "
            "it can't: train on one replica without accumulate, or use stateful=False"
        )
    # All states have the rows of a batch, so the first one that exists tells their number.
    for layer in layers:
        for state in tf.nest.flatten(layer.states or []):
            if state is not None:
                return int(state.shape[0])
    return 0


class StepTrial:
    """Takes the place of the step while `train_step` is tried: notes the names of its values, and trains nothing.

    Args:
        names: the names of the optimizers.
        model: the model.
        trial: tries the functions that `minimize` is called with.
        backend: the backend, in whose scope it is.
        watch: called with each function, after it was tried, and the names of its values.

    Attributes:
        minimized: the names of the values of each `minimize`, by the optimizer's name.
    """

    def __init__(self, names: Sequence[str], model: Model, trial: Trial, backend: Backend, watch: Watch) -> None:
        self._names = names
        self._model = model
        self._trial = trial
        self._backend = backend
        self._watch = watch
        self.minimized: dict[str, list[str]] = {}

    def minimize(self, values: Compute, optimizer: str = "") -> dict[str, tf.Tensor]:
        """See `loop.step.step_trace.StepTrace.minimize`."""
        if not callable(values):
            raise UsageError(
                f"step.minimize({type(values).__name__}): give a function of a batch that returns the values, such as "
                "lambda batch: self.compute(model, batch, training=True)"
            )
        if optimizer and optimizer not in self._names:
            existing = ", ".join(self._names) or "only one, without a name"
            raise UsageError(f"step.minimize(..., {optimizer!r}): build_optimizer() has no such optimizer ({existing})")
        compute = as_in_replica(self._backend, values)
        names = self._trial.names(compute)
        self._watch(values, names)
        if self.minimized.setdefault(optimizer, names) != names:
            raise UsageError(
                f"step.minimize(..., {optimizer!r}) was called with values {', '.join(self.minimized[optimizer])}, and "
                f"again with {', '.join(names)}: return the same values"
            )
        # The number does not matter: `train_step` may compute with the means, but nothing is trained here.
        without_state = [name for name in names if name not in self._trial.metrics]
        # But their type does: the task may multiply a float64 loss by one of them.
        return dict.fromkeys(without_state, tf.constant(1.0, sums_dtype(self._model)))


def tried_step(
    task: TrainTask, optimizer: Optimizer, model: Model, trial: Trial, backend: Backend, watch: Watch
) -> dict[str, list[str]]:
    """Tries the task's own `train_step`; returns the names of the values of each `step.minimize` in it.

    See `StepTrial` for `watch`.
    """
    names = list(optimizer) if isinstance(optimizer, Mapping) else []
    step = StepTrial(names, model, trial, backend, watch)
    task.train_step(model, step)
    if not step.minimized:
        raise UsageError("train_step() never called step.minimize(...): nothing is trained")
    return step.minimized


@contextlib.contextmanager
def recorded(made: list[tf.Variable]) -> Iterator[None]:
    """A context that adds each variable that is created in it to `made`."""

    def creator(create: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        variable = create(**arguments)
        made.append(variable)
        return variable

    with tf.variable_creator_scope(creator):
        yield


@contextlib.contextmanager
def put_back(variables: Iterable[tf.Variable]) -> Iterator[None]:
    """A context that gives variables back, at its end, the values that they had at its start.

    Variables that are made within it get back their first values.

    Args:
        variables: the variables that may change.
    """
    # In the CPU's memory, a value that is read shares the variable's buffer until one of them changes. So only
    # variables that do change are copied.
    before = {}
    for variable in variables:
        before[id(variable)] = (variable, _value(variable))

    def creator(create: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        variable = create(**arguments)
        # While a function of the task is traced, a new variable has no value yet that could be read.
        if tf.executing_eagerly():
            before.setdefault(id(variable), (variable, _value(variable)))
        return variable

    try:
        with tf.variable_creator_scope(creator):
            yield
    finally:
        for variable, value in before.values():
            variable.assign(value)


def _value(variable: tf.Variable) -> tf.Tensor | np.ndarray:
    """The value of a variable."""
    # A variable that parameter servers hold in shards can't be read as one tensor.
    return variable.numpy() if hasattr(variable, "variables") else variable.read_value()


def held_by(owner: object) -> list[tf.Variable]:
    """The variables in an object's attributes, and in the models, layers, metrics and seed generators there."""
    variables: list[Variable] = []
    for attribute in getattr(owner, "__dict__", {}).values():
        for value in members(attribute):
            if isinstance(value, tf.Variable | keras.Variable):
                variables.append(value)
            elif isinstance(value, keras.random.SeedGenerator):
                variables.append(value.state)
            elif isinstance(value, tf.Module | keras.Layer | keras.metrics.Metric):
                variables += made_variables(value)
    return as_tf(variables)


def members(value: object) -> Iterable[object]:
    """The values in a list, tuple or dict; of any other value, itself."""
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, list | tuple):
        return value
    return (value,)
