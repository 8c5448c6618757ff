"""Seeds: the global generators of Python and NumPy, from which callbacks and data pipelines may draw on the host."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, TypeAlias

import keras
import numpy as np

from loop.errors import UsageError

RandomState: TypeAlias = dict[str, Any]
"""The states of the global generators of Python and NumPy, as values of JSON."""

_training: list[int] = []
"""The threads that train now, by their numbers."""


@contextlib.contextmanager
def used_by_this_thread() -> Iterator[None]:
    """A context in which a thread seeds the generators, and draws from them; warns if another thread does so, too."""
    thread = threading.get_ident()
    if set(_training) - {thread}:
        warnings.warn(
            "another thread of this process trains, too: both seed the same random generators, so that initial weights "
            "differ from time to time. Train one after the other, or in processes, as by fit(..., workers=1)",
            stacklevel=1,  # by this line: the caller's is one of Python's own
        )
    _training.append(thread)
    try:
        yield
    finally:
        _training.remove(thread)


def seed_generators(seed: int) -> None:
    """Seeds the global generators of Python, NumPy, TensorFlow and Keras, from which initial weights are drawn."""
    keras.utils.set_random_seed(seed)
    # tf_keras has a generator of its own once its `set_random_seed` has been called, and draws from it ever after.
    legacy = sys.modules.get("tf_keras")
    if legacy:
        legacy.utils.set_random_seed(seed)


def random_state() -> RandomState:
    """The states of the global generators of Python and NumPy, from which callbacks may draw between the calls."""
    # As values of JSON, in which a checkpoint keeps them: the many numbers of a generator are one text.
    version, python, spare = random.getstate()
    name, numpy, *rest = np.random.get_state(legacy=True)
    return {
        "python": [version, np.array(python, np.uint32).tobytes().hex(), spare],
        "numpy": [name, np.array(numpy, np.uint32).tobytes().hex(), *rest],
    }


def set_random_state(state: RandomState) -> None:
    """Takes the generators back to where `random_state` found them."""

    def words(text: str) -> np.ndarray:
        return np.frombuffer(bytes.fromhex(text), np.uint32)

    try:
        version, python, spare = state["python"]
        random.setstate((version, tuple(map(int, words(python))), spare))
        name, numpy, *rest = state["numpy"]
        np.random.set_state((name, words(numpy), *rest))
    # From a file that may be damaged or written by another version, so that anything may be wrong with it.
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"the checkpoint's state of the random generators is none ({error})") from None
