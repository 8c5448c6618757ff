"""The variables, layers and penalties of a model, whatever its family: Keras 3, `tf_keras` or a plain `tf.Module`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import keras
import numpy as np
import tensorflow as tf

from loop.task import Model, Optimizer

Variable: TypeAlias = "keras.Variable | tf.Variable"
"""A variable of a model of any family."""
Layer: TypeAlias = Any
"""A layer of either Keras family; they share no class."""
T = TypeVar("T")


def keras_models() -> tuple[type, ...]:
    """The model classes of the Keras families that are loaded."""
    legacy = sys.modules.get("tf_keras")  # not imported: that takes seconds, and only its users have such models
    # Not cached, since a task may import tf_keras later.
    return (keras.Model, legacy.Model) if legacy else (keras.Model,)


def is_legacy(thing: object) -> bool:
    """Whether an object is of `tf_keras`, also if its class is the user's own."""
    return any(base.__module__.split(".")[0] == "tf_keras" for base in type(thing).__mro__)


def as_tf(variables: Sequence[Variable]) -> list[tf.Variable]:
    """The TensorFlow variables behind Keras 3 variables; others as they are."""
    return list(map(_tf_variable, variables))


def _tf_variable(variable: Variable) -> tf.Variable:
    return variable.value if isinstance(variable, keras.Variable) else variable


def keras_layers(model: Model) -> list[keras.Layer]:
    """The Keras 3 layers that a plain tf.Module holds: TensorFlow doesn't count their variables as the module's."""
    return [] if isinstance(model, keras_models()) else list(model._flatten(predicate=_is_keras_layer))


def _outer_layers(model: Model) -> list[Layer]:
    """A Keras model; or the layers of both Keras families that a plain tf.Module holds, which may share inner ones."""
    if isinstance(model, keras_models()):
        return [model]
    return list(model._flatten(predicate=_is_any_layer))


def _is_keras_layer(value: object) -> bool:
    return isinstance(value, keras.Layer)


def _is_any_layer(value: object) -> bool:
    legacy = sys.modules.get("tf_keras")
    if legacy and isinstance(value, legacy.layers.Layer):
        return not isinstance(value, legacy.metrics.Metric)  # a layer there, too
    return _is_keras_layer(value)


def _is_keras_variable(value: object) -> bool:
    return isinstance(value, keras.Variable)


def _is_seed_generator(value: object) -> bool:
    return isinstance(value, keras.random.SeedGenerator)


def layers(model: Model) -> list[Layer]:
    """All layers of a model, also those within other layers and within a plain tf.Module; each once."""
    unique: dict[int, Layer] = {}
    # By identity: a shared layer is met several times, and belongs to the list once.
    for outer in _outer_layers(model):
        for layer in outer._flatten_layers(include_self=True, recursive=True):
            unique[id(layer)] = layer
    return list(unique.values())


def trainable_variables(model: Model) -> list[Variable]:
    """The model's trainable variables, in its own order; of a tf.Module also those of its Keras layers."""
    # The order is that of gradients, slots and checkpoints: it must not change.
    variables = list(model.trainable_variables)
    for layer in keras_layers(model):
        variables += layer.trainable_variables
    return _unique(variables + [variable for variable in loose_variables(model) if variable.trainable])


def all_variables(model: Model) -> list[Variable]:
    """All variables of the model, in its own order; of a tf.Module also those of its Keras layers."""
    # The order is that of checkpoints: it must not change.
    variables = list(model.variables)
    for layer in keras_layers(model):
        variables += layer.variables
    return _unique(variables + loose_variables(model))


def handles(variables: Sequence[tf.Variable]) -> Iterator[tf.Tensor]:
    """The handles of variables; of one that each replica has, those of all replicas."""
    for variable in variables:
        for part in getattr(variable, "values", [variable]):
            yield part.handle


def made_variables(owner: tf.Module | keras.Layer | keras.metrics.Metric) -> list[Variable]:
    """The variables that a model, a layer or a metric has so far."""
    try:
        return list(owner.variables)
    except ValueError:  # a model of tf_keras says so if it is to make them when it is first called
        return []


def _unique(variables: Sequence[Variable]) -> list[Variable]:
    """Each variable once: the layers that a tf.Module holds may share some, as a model and its encoder do."""
    return list({id(variable): variable for variable in variables}.values())


def loose_variables(model: Model) -> list[keras.Variable]:
    """The Keras 3 variables that a plain tf.Module holds itself, and the states of its seed generators.

    TensorFlow doesn't count them as variables of the module.
    """
    if isinstance(model, keras_models()):
        return []
    seeds = model._flatten(predicate=_is_seed_generator)
    return [*model._flatten(predicate=_is_keras_variable), *(generator.state for generator in seeds)]


def stateful_layers(model: Model) -> list[Layer]:
    """The recurrent layers of a model that carry their state from batch to batch."""
    return list(filter(_carries_state, layers(model)))


def _carries_state(layer: Layer) -> bool:
    # Other layers may be called stateful, too, such as metrics of `tf_keras`; only recurrent ones have states.
    return getattr(layer, "stateful", False) and hasattr(layer, "states")


def carried_variables(model: Model) -> list[tf.Variable]:
    """The states of stateful layers that Keras doesn't count as variables of the model: [rows of a batch, ...]."""
    counted = set(map(id, model_variables(model)))  # by identity: a variable of TensorFlow has no hash
    states = tf.nest.flatten([layer.states for layer in stateful_layers(model)])
    return [variable for variable in as_tf(states) if id(variable) not in counted]


def fixed_inputs(model: Model) -> list[int]:
    """The batch sizes that the inputs of a Keras model demand."""
    inputs = getattr(model, "inputs", None) if isinstance(model, keras_models()) else None
    sizes = set()
    for tensor in tf.nest.flatten(inputs or []):
        if len(tensor.shape) and tensor.shape[0] is not None:
            sizes.add(tensor.shape[0])
    return sorted(sizes)


def losses(model: Model) -> list[tf.Tensor]:
    """The penalties that the model's layers added in the last call: scalars."""
    # A plain tf.Module may hold Keras layers, whose penalties it doesn't collect; or it has `losses` of its own.
    if isinstance(model, keras_models()) or (hasattr(model, "losses") and not keras_layers(model)):
        return list(model.losses)
    penalties: list[tf.Tensor] = []
    counted: set[int] = set()  # the layers and variables whose penalties are among them
    for outer in _outer_layers(model):
        inner = _not_counted(outer._flatten_layers(), counted)
        if is_legacy(outer):
            for layer in inner:
                penalties += _legacy_penalties(layer)
            continue
        # In the order of Keras's own `losses`.
        for layer in inner:
            penalties += layer._get_own_losses()
        for variable in _not_counted(outer.trainable_variables, counted):
            if variable.regularizer is not None:
                penalties.append(variable.regularizer(variable))
    return penalties


def nested_optimizers(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """An optimizer and those in its attributes, such as the one that `LossScaleOptimizer` wraps; all of Keras 3."""
    optimizers = [] if is_legacy(optimizer) else [optimizer]
    for known_optimizer in optimizers:  # the list grows meanwhile
        for value in list(vars(known_optimizer).values()):
            for member in _members(value):
                is_known = any(member is known for known in optimizers)
                if isinstance(member, keras.optimizers.Optimizer) and not is_known:
                    optimizers.append(member)
    return optimizers


def _members(value: object) -> list[object]:
    """What a list, a tuple or a dict has in it; any other value alone."""
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else [value]


def _not_counted(things: Sequence[T], counted: set[int]) -> list[T]:
    """The things whose ids aren't in a set, which then has them."""
    new = [thing for thing in things if id(thing) not in counted]
    counted.update(map(id, new))
    return new


def _legacy_penalties(layer: Layer) -> list[tf.Tensor]:
    """The penalties of a layer of `tf_keras`, without those of the layers within it."""
    own = list(layer._eager_losses or layer._losses)
    own += [regularizer() for regularizer in layer._callable_losses]
    return list(filter(tf.is_tensor, own))  # a loaded layer has a text in place of them


def model_variables(model: Model) -> list[tf.Variable]:
    """The TensorFlow variables of the model."""
    return as_tf(all_variables(model))


def optimizer_variables(optimizer: Optimizer) -> list[tf.Variable]:
    """All variables of an optimizer, or of a dict of them: counter, learning rate, slots."""
    variables: list[tf.Variable] = []
    if isinstance(optimizer, Mapping):
        for member in optimizer.values():
            variables += optimizer_variables(member)
        return variables
    # A property in Keras 3, a method in tf_keras.
    own = optimizer.variables
    if callable(own):
        own = own()
    variables = as_tf(own)
    rate = getattr(optimizer, "_learning_rate", None)  # tf_keras doesn't list it
    if isinstance(rate, tf.Variable) and id(rate) not in map(id, variables):
        variables.append(rate)
    # A wrapper of one's own may not list those of the optimizer within it: a resumed run would lose its slots.
    for inner in nested_optimizers(optimizer)[1:]:
        known = set(map(id, variables))
        variables += [variable for variable in as_tf(inner.variables) if id(variable) not in known]
    return variables


def sums_dtype(model: Model) -> tf.DType:
    """The type in which a step adds up losses, weights and values of a model."""
    # float32 with 16-bit models, too: float16 counts exactly up to 2048 only.
    wide = any(variable.dtype == "float64" for variable in as_tf(trainable_variables(model)))
    return tf.float64 if wide else tf.float32


def bytes_of(variables: Sequence[tf.Variable]) -> int:
    """The memory that variables take in each replica, in bytes."""
    total = 0
    for variable in variables:
        total += _elements(variable) * variable.dtype.size
    return total


def _elements(variable: tf.Variable) -> int:
    return int(variable.shape.num_elements())


def updates_rows(optimizer: Optimizer) -> bool:
    """Whether an optimizer leaves a row unchanged whose gradient is 0: only Keras 3's plain SGD does."""
    # Each of these options changes rows without a gradient, or looks at all rows together.
    names = ("momentum", "clipnorm", "global_clipnorm", "clipvalue", "gradient_accumulation_steps")
    return type(optimizer) is keras.optimizers.SGD and not any(getattr(optimizer, name) for name in names)


def optimizers_of(optimizer: Optimizer) -> list[Optimizer]:
    """An optimizer, or those of a dict of them, as a list."""
    return list(optimizer.values()) if isinstance(optimizer, Mapping) else [optimizer]


def class_names(optimizer: Optimizer) -> list[str]:
    """The name of the class of an optimizer, or of each of a dict of them."""
    return [type(member).__name__ for member in optimizers_of(optimizer)]


def learning_rates(optimizer: Optimizer) -> list[float | None]:
    """The learning rate of an optimizer, or of each of a dict of them; None for a schedule."""
    rates: list[float | None] = []
    for member in optimizers_of(optimizer):
        # `learning_rate` of a schedule is its value at this step; the attribute holds the schedule itself.
        rate = getattr(member, "_learning_rate", member.learning_rate)
        if callable(rate):
            rates.append(None)
        else:
            rates.append(float(np.asarray(rate)))
    return rates


def variable_names(variables: Sequence[Variable]) -> list[str]:
    """The names of variables that users know: paths in Keras 3."""
    return list(map(_known_name, variables))


def _known_name(variable: Variable) -> str:
    # A TensorFlow name ends with the number of an output, ":0", which tells users nothing.
    return getattr(variable, "path", None) or variable.name.split(":")[0]


def parameters(model: Model) -> int:
    """The number of trainable parameters."""
    return sum(map(_elements, as_tf(trainable_variables(model))))
