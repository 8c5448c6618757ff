"""The optimizers of a task: which objects can be one, and which of several trains which variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from loop.backends.base import Backend
from loop.errors import UsageError
from loop.model.variables import as_tf, is_legacy, keras_models, trainable_variables, variable_names
from loop.task import Model, Optimizer, TrainTask

AssignedOptimizers: TypeAlias = dict[str, tuple[Optimizer, list[int]]]
"""By name, "" for a single one: each optimizer, and the indices of its variables among the trainable ones."""


def assign_optimizers(task: TrainTask, model: Model, optimizer: Optimizer) -> AssignedOptimizers:
    """Finds which optimizer trains which variables.

    Args:
        task: the task.
        model: the model of the task.
        optimizer: what `build_optimizer` returned: an optimizer, or a dict of them.

    Raises:
        UsageError: an object isn't an optimizer; or a variable has no optimizer, or two.
    """
    if not isinstance(optimizer, Mapping):
        _check_optimizer(optimizer, model, "")
        return {"": (optimizer, list(range(len(trainable_variables(model)))))}

    if not optimizer:
        raise UsageError("build_optimizer() returned an empty dict: return at least one optimizer")
    assigned: AssignedOptimizers = {}
    for name, member in optimizer.items():
        which = f" for {name!r}" if name else ""
        _check_optimizer(member, model, which)
        assigned[name] = (member, [])
    for index, owner in enumerate(_owners(task, model, list(optimizer))):
        _, indices = assigned[owner]
        indices.append(index)
    return assigned


def check_are_new(task: TrainTask, model: Model, optimizers: AssignedOptimizers) -> None:
    """Refuses an optimizer that was built for another model: Keras would say so only in the middle of a step.

    Raises:
        UsageError: an optimizer doesn't know the variables that it is to train.
    """
    variables = trainable_variables(model)
    for optimizer, indices in optimizers.values():
        # Keras has no public way to ask this. The dict is empty, or missing, until the optimizer is built.
        name = "_index_dict" if is_legacy(optimizer) else "_trainable_variables_indices"
        known = getattr(optimizer, name, None)
        if known and any(optimizer._var_key(variables[index]) not in known for index in indices):
            raise UsageError(
                f"build_optimizer() of {type(task).__name__} returned an object of {type(optimizer).__name__} that was "
                "built for the variables of another model: make a new one in each call"
            )


@contextlib.contextmanager
def made_for(task: TrainTask, model: Model, optimizers: AssignedOptimizers, backend: Backend) -> Iterator[None]:
    """While optimizers are built: refuses a model, or an optimizer, that wasn't made for the backend.

    Raises:
        UsageError: the backend can't train the variables, or can't use an optimizer.
    """
    name = type(task).__name__
    model_problem = UsageError(
        f"build_model() of {name} returned a model that was made outside of it, or for another backend, and "
        f"{backend.name!r} can't train its variables: make a new model in each call; to go on from the weights of "
        "another, set them there, as by model.set_weights(...)"
    )
    variables = as_tf(trainable_variables(model))
    # TensorFlow itself refuses only the slots of such variables, and an optimizer may have none, or have them already.
    for optimizer, indices in optimizers.values():
        if not all(backend.trains(variables[index], optimizer) for index in indices):
            raise model_problem
    optimizer_problem = UsageError(
        f"build_optimizer() of {name} returned an optimizer that was made outside of it, or for another backend, and "
        f"{backend.name!r} can't use it: make a new one in each call"
    )
    is_foreign = not all(backend.made_optimizer(optimizer) for optimizer, _ in optimizers.values())
    # Its counter of steps would be there once for all replicas, which each count.
    if is_foreign and backend.own_variables and backend.local_replicas > 1:
        raise optimizer_problem
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if "distribute.Strategy" in str(error):
            raise (optimizer_problem if is_foreign else model_problem) from error
        raise


def _owners(task: TrainTask, model: Model, names: list[str]) -> list[str]:
    """The name of the optimizer of each trainable variable, in the order of the variables."""
    trained = trainable_variables(model)
    paths = variable_names(trained)
    indices = {id(variable): index for index, variable in enumerate(as_tf(trained))}
    owners: dict[int, str] = {}
    for name, variables in task.optimizer_variables(model, names).items():
        for variable in as_tf(variables):
            index = indices.get(id(variable))
            if index is None:
                continue  # a frozen variable
            if index in owners:
                raise UsageError(
                    f"the variable {paths[index]} belongs to two optimizers, {owners[index]!r} and {name!r}: "
                    "let optimizer_variables() give it to one, which several step.minimize(...) may use"
                )
            owners[index] = name
    without_owner = [path for index, path in enumerate(paths) if index not in owners]
    if without_owner:
        raise UsageError(
            f"no optimizer trains {', '.join(without_owner[:5])}: see TrainTask.optimizer_variables; what isn't to be "
            "trained needs trainable=False"
        )
    return [owners[index] for index in range(len(trained))]


def _check_optimizer(optimizer: Optimizer, model: Model, which: str) -> None:
    """Refuses an object that isn't a Keras optimizer, and one that would scale or average on one replica alone."""
    if isinstance(optimizer, type):
        name = optimizer.__name__
        raise UsageError(f"build_optimizer() returned the class {name}{which}: return an object of it, as {name}(...)")
    what = f"build_optimizer() returned {type(optimizer).__name__}{which}"
    if ".legacy." in type(optimizer).__module__:  # the optimizers of TensorFlow before 2.11
        raise UsageError(f"{what}, of optimizers.legacy: return tf_keras.optimizers.{type(optimizer).__name__}(...)")
    # By its methods, not its class: tf_keras, which may not be installed, has another base class.
    if not hasattr(optimizer, "build") or not hasattr(optimizer, "learning_rate"):
        raise UsageError(f"{what}: return a Keras optimizer of the model's family, or a dict of them")
    if type(optimizer).__name__ == "LossScaleOptimizer":
        raise UsageError(
            f"{what}: it would look at gradients that are not reduced. Return the optimizer within it, and use "
            "precision='mixed_float16', which scales the loss, or 'bfloat16', which needs no scale"
        )
    # Keras's own fit multiplies the loss by it. Here nothing does, and the gradients would be divided all the same.
    if getattr(optimizer, "loss_scale_factor", None):
        raise UsageError(
            f"{what} with loss_scale_factor={optimizer.loss_scale_factor}, by which it divides the gradients of a "
            "scaled loss: leave it out; precision='mixed_float16' scales the loss where that is needed"
        )
    # With `ema_overwrite_frequency`, the optimizer itself puts the averages into the model, in the compiled step.
    if getattr(optimizer, "use_ema", False) and not optimizer.ema_overwrite_frequency:
        raise UsageError(
            f"{what} with use_ema=True, whose averages Keras's own fit would give to the model at its end: leave "
            f"it out, and use ema={optimizer.ema_momentum} (--ema), which is evaluated, saved and returned"
        )
    # A plain `tf.Module` has variables of TensorFlow's own, which the optimizers of both families take.
    model_family = _family(model)
    optimizer_family = _family(optimizer)
    if model_family != optimizer_family and isinstance(model, keras_models()):
        raise UsageError(
            f"the model is of {model_family}, but its optimizer of {optimizer_family}: take both from one family"
        )


def _family(thing: object) -> str:
    """The name of the Keras family of a model or optimizer."""
    return "tf_keras" if is_legacy(thing) else "keras"
