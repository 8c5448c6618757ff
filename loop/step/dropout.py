"""Dropout within `compute`: it draws as `loop.step.row_random` says, and keeps the masks of what is computed again.

A mask takes a byte for each number. To draw it again would take much longer than to read it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import tensorflow as tf

from loop.step.replica import current

_here = threading.local()


class Masks:
    """The masks that one segment draws in its first computation, for the second one: in the order of their drawing."""

    def __init__(self) -> None:
        self._masks: list[tf.Tensor] = []
        self._remaining: Iterator[tf.Tensor] | None = None
        self._graph: tf.Graph | None = None

    def noted(self) -> contextlib.AbstractContextManager[None]:
        """A context for the first computation: dropout notes the masks that it draws."""
        replace_dropout()
        self._masks = []
        return self._current(None)

    def given(self) -> contextlib.AbstractContextManager[None]:
        """A context for the second computation: dropout gets these masks, and draws none."""
        return self._current(iter(self._masks))

    @contextlib.contextmanager
    def _current(self, remaining: Iterator[tf.Tensor] | None) -> Iterator[None]:
        self._remaining = remaining
        self._graph = tf.compat.v1.get_default_graph()
        _here.masks = self
        try:
            yield
        finally:
            _here.masks = None

    def next(self, draw: Callable[[], tf.Tensor]) -> tf.Tensor:
        """The next mask."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            return draw()  # within a loop or a branch, from which no tensor gets into the second computation
        # Both computations trace the same Python, so masks are asked for in the same order.
        if self._remaining is not None:
            return next(self._remaining)
        mask = draw()
        self._masks.append(mask)
        return mask


def replace_dropout() -> None:
    """Has stateless dropout, with which Keras's layers drop, draw by `tf.random.stateless_uniform` within `compute`."""
    for module in (tf, tf.compat.v2):  # Keras 3 uses the first one, tf_keras the second one
        original = module.nn.experimental.stateless_dropout
        if not hasattr(original, "replaces"):
            module.nn.experimental.stateless_dropout = _dropout(original)


def _dropout(original: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    @functools.wraps(original)
    def function(
        x: tf.Tensor,
        rate: float | tf.Tensor,
        seed: tf.Tensor,
        rng_alg: str = "auto_select",
        noise_shape: tf.Tensor | Sequence[int] | None = None,
        name: str | None = None,
    ) -> tf.Tensor:
        masks: Masks | None = getattr(_here, "masks", None)
        draw = tf.random.stateless_uniform
        if _is_of_all_rows(x, noise_shape):
            draw = getattr(draw, "__wrapped__", draw)  # TensorFlow's own: the same on all replicas

        def sampler(shape: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
            def uniform() -> tf.Tensor:
                return draw(shape, seed, dtype=dtype)

            if masks is None:
                return uniform()
            # Dropout keeps the elements whose drawn number is at least the rate: 1 always is, 0 never.
            return tf.cast(masks.next(lambda: uniform() >= rate), dtype)

        if current() is None:
            return original(x, rate, seed, rng_alg, noise_shape, name)
        return tf.nn.experimental.general_dropout(x, rate, sampler, noise_shape, name)

    function.replaces = original  # type: ignore[attr-defined]
    return function


def _is_of_all_rows(x: tf.Tensor, noise_shape: tf.Tensor | Sequence[int] | None) -> bool:
    """Whether one mask is for all rows: its first size is 1, and that of the tensor is another one."""
    # A list, in which Keras puts sizes that aren't known while tracing as tensors.
    if not isinstance(noise_shape, list | tuple) or not noise_shape:
        return False
    return isinstance(noise_shape[0], int) and noise_shape[0] == 1 and x.shape[0] != 1
