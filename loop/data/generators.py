"""Generators of Python in a pipeline: whether each iteration of the pipeline begins with a new one."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import tensorflow as tf

from loop.data.pipelines import parts_of
from loop.errors import UsageError


class OpenGenerator(NamedTuple):
    """An iterator of Python from which an iterator of a pipeline reads."""

    iterator: Iterator[object]  # what the user's function has returned
    make: Callable[[], Iterator[object]]  # calls that function once more


def open_generators(dataset: tf.data.Dataset) -> list[OpenGenerator]:
    """The iterators of Python from which the iterators of a pipeline read now."""
    opened: list[OpenGenerator] = []
    for part in parts_of(dataset):
        for function in part._functions():
            opened += _of_part(getattr(function, "_func", None))
    return opened


def _of_part(function: object) -> list[OpenGenerator]:
    """See `open_generators`; of the part of a pipeline that calls this function."""
    # By what TensorFlow keeps in closures, since a pipeline doesn't tell in another way.
    opens = _cells(function).get("get_iterator_id_fn")
    if opens is None:
        return []
    kept = _cells(opens.cell_contents)
    state = kept["generator_state"].cell_contents

    def make() -> Iterator[object]:
        arguments = [argument.numpy() for argument in kept["args"].cell_contents]
        return iter(state._generator(*arguments))

    return [OpenGenerator(iterator, make) for iterator in list(state._iterators.values())]


def _cells(function: object) -> dict[str, types.CellType]:
    """The variables of a function that belong to the function around it, by their names."""
    if not inspect.isfunction(function) or function.__closure__ is None:
        return {}
    return dict(zip(function.__code__.co_freevars, function.__closure__, strict=True))


def check_made_anew(generators: Sequence[OpenGenerator]) -> None:
    """Refuses a generator that the next iteration of its pipeline would continue, instead of beginning again.

    `generators` are those of an iteration that has ended.

    Raises:
        UsageError: what that iteration has read is lost to the next one.
    """
    # The number of references to an iterator that only its `OpenGenerator` holds.
    alone = OpenGenerator(iter(()), lambda: iter(()))
    unheld = sys.getrefcount(alone.iterator)
    for generator in generators:
        held = sys.getrefcount(generator.iterator) > unheld
        # The function is called once more only if there is a reason to: it may count its calls.
        if held and _only_goes_on(generator.iterator) and generator.make() is generator.iterator:
            raise UsageError(
                f"tf.data.Dataset.from_generator: its function returns the same {type(generator.iterator).__name__} in "
                "each call, and what was read of it before the training would be lost: return a new one in each call"
            )


def _only_goes_on(iterator: Iterator[object]) -> bool:
    # An `__iter__` of the user's own may begin again; those of Python's own iterators never do.
    return not isinstance(getattr(type(iterator), "__iter__", None), types.FunctionType)
