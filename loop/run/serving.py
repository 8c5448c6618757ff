"""A model as it is served: the tensors with which `compute` calls it become the inputs of a SavedModel."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf

from loop.checkpoint.writer import arrays
from loop.data import Source
from loop.errors import UsageError, message_of
from loop.model.variables import carried_variables, model_variables
from loop.run.state import AVERAGES, assign_model, averaged, named_variables
from loop.step.build import BuiltModel
from loop.step.example_trace import of_size, put_back
from loop.step.replica import probing
from loop.step.sharding import SlicedVariable
from loop.step.tracing import as_written
from loop.task import Batch, Model, ModelCalls, TrainTask

if TYPE_CHECKING:
    from loop.run.run import Run


T = TypeVar("T")

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The arguments of a call, by position and by name: tensors in any structure, and other values."""

Outputs: TypeAlias = tf.Tensor | dict[str, tf.Tensor]
"""One tensor as it is; several by name."""

ServedArrays: TypeAlias = np.ndarray | dict[str, np.ndarray]
"""The same as arrays."""


def examples_for(built: BuiltModel, example: Batch) -> Batch:
    """Examples for a model to be called with: as many as it takes, if it takes batches of one size alone."""
    return example if built.fixed_rows is None else of_size(example, built.fixed_rows)


def export_run(run: Run, out: Path) -> tuple[ServedArrays, ServedArrays]:
    """Writes the model of a run that is under way as a SavedModel; see `Run.export`."""
    weights = {}
    for name, variable in named_variables(run).items():
        if name.startswith(("model/", AVERAGES)):
            if isinstance(variable, SlicedVariable):
                raise UsageError(
                    "run.export() during a training with shard_optimizer=True and ema: each worker has a part of the "
                    "averages; call it in on_fit_end, or use `tfloop export` on a checkpoint"
                )
            weights[name] = run.backend.snapshot(variable)
    tensors = averaged(arrays(weights))

    data = run.step.data
    # In a model of its own: the run's variables may be on several devices or servers, and hold no averages.
    built = run.session.build_again()
    assign_model(built.model, tensors)
    served = served_by(run.task, built, data.eval or data.train)
    save(served, out, out)
    return served.example(), served.outputs()


def served_by(task: TrainTask, built: BuiltModel, source: Source) -> Served:
    """The model as `compute` calls it, with examples of `source`.

    If examples are padded, the axes whose length padding decides are open.
    """
    args, kwargs = call_of(task, built.model, examples_for(built, source.example))
    return Served(built.model, args, kwargs, _longer_shapes(task, built, source))


def _longer_shapes(task: TrainTask, built: BuiltModel, source: Source) -> list[tf.TensorShape]:
    """The shapes of the model's inputs with more padding; empty if examples aren't padded, or can't be longer."""
    longer = source.longer_example()
    if longer is None:
        return []
    with contextlib.suppress(ValueError, tf.errors.InvalidArgumentError):  # a model that takes no other length
        call = call_of(task, built.model, examples_for(built, longer))
        return [tensor.shape for tensor in named_tensors(call, "input").values()]
    return []


def call_of(task: TrainTask, model: Model, batch: Batch) -> Arguments:
    """The arguments with which `compute` calls the model first, on a batch that is evaluated."""
    # What the call changes in the model, such as a counter of seeds, is put back.
    state = [*model_variables(model), *carried_variables(model)]
    with ModelCalls(model) as calls, probing(batch), put_back(state):
        task.compute(model, batch, training=False)
    if not calls.arguments:
        raise UsageError(
            f"compute() of {type(task).__name__} never calls the model as model(...), so that its inputs aren't known: "
            "give the model a __call__ and use it there, or export its weights to a file *.npz"
        )
    return calls.arguments[0]


class Served(tf.Module):
    """A model with a function `serve` of its tensors alone: one tensor as it is, or several in a dict by name.

    Args:
        model: the model.
        args: the arguments that it is called with; tensors become inputs, other values are fixed.
        kwargs: the same by name.
        other_shapes: the shapes of the same tensors in another call; an axis that differs is open.
    """

    def __init__(
        self, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any], other_shapes: Sequence[tf.TensorShape] = ()
    ) -> None:
        super().__init__()
        self.model: Model = model
        inputs = named_tensors((args, kwargs), "input")
        if not inputs:
            raise UsageError("compute() calls the model without a tensor: there is nothing to serve")
        if list(inputs) == ["input_0"]:  # the name that servers and clients expect of a single input
            inputs = {"inputs": inputs["input_0"]}
        self._call = Hidden((args, kwargs))
        self._inputs = Hidden(inputs)
        self._other_shapes = Hidden(list(other_shapes))
        specs = {name: self._spec(index, leaf, name) for index, (name, leaf) in enumerate(inputs.items())}
        self._specs = Hidden(specs)
        self.serve = tf.function(self._serve, input_signature=[_as_served(specs)], autograph=False)

    def _spec(self, index: int, leaf: tf.Tensor, name: str) -> tf.TensorSpec:
        """The shape of an input: any number of examples, and open axes where the model leaves them open."""
        known = [symbol.shape for symbol in getattr(self.model, "inputs", None) or ()]
        sizes = [None, *leaf.shape[1:]] if leaf.shape.rank else []  # a scalar has no axis of examples
        shape = tf.TensorShape(sizes)
        others = self._other_shapes.value
        if len(others) == len(self._inputs.value) and others[index].rank == shape.rank:
            shape = shape.most_specific_common_supertype([others[index]])  # open in the axes that differ
        # The model's own shape wins, if its inputs are those of this call.
        if len(known) == len(self._inputs.value) and tf.TensorShape(known[index]).is_compatible_with(leaf.shape):
            shape = tf.TensorShape(known[index])
        return tf.TensorSpec(shape, leaf.dtype, name)

    def _serve(self, inputs: Outputs) -> Outputs:
        if not isinstance(inputs, dict):
            inputs = {next(iter(self._inputs.value)): inputs}
        return self.call(inputs)

    def call(self, inputs: dict[str, tf.Tensor]) -> Outputs:
        """The model's outputs."""
        args, kwargs = self._with_inputs(inputs[name] for name in self._inputs.value)
        return plain_outputs(as_written(called)(self.model, args, kwargs))

    def named_function(self) -> tf.types.experimental.PolymorphicFunction:
        """The model as a function that takes one tensor for each named input and returns a dict of named outputs."""
        specs = self._specs.value

        def serve(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
            outputs = self.call(dict(zip(specs, tensors, strict=True)))
            return outputs if isinstance(outputs, dict) else {"output_0": outputs}

        return tf.function(serve, input_signature=list(specs.values()), autograph=False)

    def named_example(self) -> dict[str, np.ndarray]:
        """The examples that it was made with, by the name of the input."""
        return arrays(self._inputs.value)

    def example(self) -> ServedArrays:
        """The examples that it was made with, as `serve` takes them."""
        return _as_served(self.named_example())

    def outputs(self) -> ServedArrays:
        """The outputs of `serve` for these examples."""
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), self.serve(self.example()))

    def skeleton(self) -> object:
        """The arguments of the model as JSON values; an input is `{"input": name}`."""
        return self._with_inputs({"input": name} for name in self._inputs.value)

    def _with_inputs(self, values: Iterator[object]) -> Arguments:
        """The arguments of the model with these values for its inputs, in the order of their names."""
        # That is the order of the tensors in the arguments, too.
        return keras.tree.map_structure(lambda leaf: next(values) if tf.is_tensor(leaf) else leaf, self._call.value)


def _as_served(named: dict[str, T]) -> T | dict[str, T]:
    """Several values by name as they are; one without its name."""
    return named if len(named) > 1 else next(iter(named.values()))


class Hidden(Generic[T]):
    """Hides a value in a `tf.Module` from TensorFlow, which would save it with the module."""

    def __init__(self, value: T) -> None:
        self.value = value


def called(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls the model. A function by itself, so that AutoGraph converts it."""
    return model(*args, **kwargs)


def plain_outputs(outputs: Any) -> Outputs:
    """The outputs of a model: one tensor as it is, several by name; bfloat16, which few programs read, as float32."""
    tensors = named_tensors(outputs, "output")
    for name, tensor in tensors.items():
        # A new value under the same key: that is safe while the dict is read.
        if tensor.dtype == tf.bfloat16:
            tensors[name] = tf.cast(tensor, tf.float32)
    return tensors["output_0"] if tf.is_tensor(outputs) else tensors


def named_tensors(structure: Any, kind: str) -> dict[str, tf.Tensor]:
    """The tensors of a structure, named by their keys in it; `kind_0`, `kind_1` and so on without keys."""
    tensors: dict[str, tf.Tensor] = {}
    for path, leaf in keras.tree.flatten_with_path(structure):
        if not tf.is_tensor(leaf):
            continue
        keys = [key for key in path if isinstance(key, str)]
        name = re.sub(r"\W", "_", "_".join(keys))  # TensorFlow takes letters, digits and _ alone
        if not name or name in tensors:  # keys of different structures may become the same name
            name = f"{name or kind}_{len(tensors)}"
        tensors[name] = leaf
    return tensors


def save(served: Served, partial: Path, out: Path) -> None:
    """Writes the model to `partial`, in the format that the name of `out` asks for."""
    if out.suffix != ".keras":
        with _without_guessed_signatures():
            tf.saved_model.save(served, str(partial), signatures={"serving_default": served.serve})
        return
    if not hasattr(served.model, "save"):
        raise UsageError(f"{out}: the model is a plain tf.Module, not a Keras model: export it to a directory")
    try:
        served.model.save(partial)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise UsageError(
            f"{out}: Keras can't save this model ({message_of(error)}): export it to a directory"
        ) from None


@contextlib.contextmanager
def _without_guessed_signatures() -> Iterator[None]:
    """Within it, Keras 3 gives TensorFlow no signature of a model.

    Keras guesses one argument of floats for a subclassed model. TensorFlow traces it, which fails for any other model.
    """
    name = "_default_save_signature"
    [owner] = [base for base in keras.Layer.__mro__ if name in vars(base)]
    guess = vars(owner)[name]
    setattr(owner, name, None)
    try:
        yield
    finally:
        setattr(owner, name, guess)
