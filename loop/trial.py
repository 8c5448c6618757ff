"""Trying `compute` before anything is traced: the state that a trial changes is put back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state


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
