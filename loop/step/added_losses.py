"""The losses that layers add in their calls, by replica: the replicas of one process share the layers.

Their forward passes are traced in turns: at a collective, and where a variable is assigned, the next replica goes on.
Keras 3 notes added losses on the layer, where each replica would drop those of the others, or find them as its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import keras
import tensorflow as tf

from loop.model.variables import layers
from loop.step.replica import Replica, current
from loop.task import Model


class AddedLosses:
    """Takes the place of the list of losses of a layer: each replica has a list of its own.

    Args:
        outside: the losses that were added outside of replicas.
    """

    def __init__(self, outside: Iterable[tf.Tensor]) -> None:
        self._outside = list(outside)
        self._by_replica: weakref.WeakKeyDictionary[Replica, list[tf.Tensor]] = weakref.WeakKeyDictionary()

    def _own(self) -> list[tf.Tensor]:
        replica = current()
        return self._outside if replica is None else self._by_replica.setdefault(replica, [])

    def clear(self) -> None:
        """See `list`; so for the other methods. They are those that Keras uses."""
        self._own().clear()

    def append(self, loss: tf.Tensor) -> None:
        self._own().append(loss)

    def extend(self, losses: Iterable[tf.Tensor]) -> None:
        self._own().extend(losses)

    def __getitem__(self, part: slice) -> list[tf.Tensor]:
        return self._own()[part]

    def __iter__(self) -> Iterator[tf.Tensor]:
        return iter(self._own())

    def __len__(self) -> int:
        return len(self._own())


def separate(model: Model) -> None:
    """Has the layers of Keras 3 note the losses that they add for each replica. Those of tf_keras do so by thread."""
    for layer in layers(model):
        if isinstance(layer, keras.Layer) and not isinstance(layer._losses, AddedLosses):
            object.__setattr__(layer, "_losses", AddedLosses(layer._losses))  # past Keras's tracking of attributes
