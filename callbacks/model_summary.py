"""ModelSummary: shows the model's layers, their shapes, parameters and bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from callbacks.arguments import check
from callbacks.base import Callback, Run
from callbacks.run_record.redaction import tell

_HEAD = ("layer", "shape", "trained", "not trained", "bytes")


class ModelSummary(Callback):
    """Prints a table at the start: a row for each layer of a Keras model, or for each variable of a `tf.Module`.

    The shape of a layer is that of its output, if it is known, and the shape of a variable its own. Parameters are
    floating-point numbers; not trained are those of frozen layers, and statistics.

    Args:
        stream: where to; stderr if None.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        good = stream is None or hasattr(stream, "write")
        check(self, good, "give a stream that can be written to, or None", stream=stream)
        self.stream = stream

    def on_setup(self, run: Run) -> None:
        tell(summary(run), self.stream)


def summary(run: Run) -> str:
    """The table, and what there is in all."""
    weights = {id(v): (name, v, trained) for name, v, trained in run.weights if _dtype(v).is_floating}
    rows = []
    left = dict(weights)
    for name, layer in _layers(run.model, ""):
        own = [key for key in (id(_tf(v)) for v in layer.variables) if key in weights]
        rows.append((name, _output(layer), *_numbers(weights[key] for key in own)))
        for key in own:
            left.pop(key, None)
    rows += [(name, str(tuple(v.shape)), *_numbers([(name, v, trained)])) for name, v, trained in left.values()]
    table = [_HEAD, *(tuple(map(str, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(cell.ljust(n) if at < 2 else cell.rjust(n) for at, (cell, n) in enumerate(zip(row, widths))).rstrip()
        for row in table
    ]
    trained, others, size = _numbers(weights.values())
    slots = sum(_bytes(v) for v in run.variables if id(v) not in {id(v) for _, v, _ in run.weights})
    total = f"{trained or 0} parameters are trained, {others or 0} are not: {size}, and {_size(slots)} of the optimizer"
    return "\n".join([*lines, total])


def _layers(model: Any, indent: str) -> Iterator[tuple[str, Any]]:
    """The layers of a Keras model, those of models within it indented below them."""
    for layer in getattr(model, "layers", ()):
        yield f"{indent}{layer.name} ({type(layer).__name__})", layer
        yield from _layers(layer, indent + "  ")


def _output(layer: Any) -> str:
    """The shape of a layer's output, or shapes."""
    import tensorflow as tf

    with contextlib.suppress(Exception):  # a layer that was never called with a symbolic tensor has none
        return ", ".join(str((None, *each.shape[1:])) for each in tf.nest.flatten(layer.output))
    with contextlib.suppress(Exception):  # not every layer can tell
        return str((None, *layer.compute_output_shape(layer.get_build_config()["input_shape"])[1:]))
    return "?"


def _numbers(weights: Iterable[tuple[str, Any, bool]]) -> tuple[str, str, str]:
    """How many parameters are trained, how many aren't, and their bytes."""
    found = list(weights)
    counts = (sum(v.shape.num_elements() for _, v, own in found if own is trained) for trained in (True, False))
    trained, others = (f"{count:,}" if count else "" for count in counts)
    return trained, others, _size(sum(_bytes(v) for _, v, _ in found)) if found else ""


def _tf(variable: Any) -> Any:
    """The TensorFlow variable behind one of Keras 3."""
    import tensorflow as tf

    return variable if isinstance(variable, tf.Variable) else variable.value


def _dtype(variable: Any) -> Any:
    import tensorflow as tf

    return tf.as_dtype(variable.dtype)


def _bytes(variable: Any) -> int:
    return int(variable.shape.num_elements()) * int(_dtype(variable).size)


def _size(count: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
