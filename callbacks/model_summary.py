"""ModelSummary: shows the model's layers, their shapes, parameters and bytes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Container, Iterator, Sequence
from typing import TextIO

from callbacks import formats
from callbacks.arguments import check
from callbacks.base import Callback, Run
from callbacks.run_record.redaction import tell
from callbacks.types import Foreign, Model, Variable

_HEAD = ("layer", "shape", "trained", "not trained", "bytes")


class ModelSummary(Callback):
    """Prints a table at the start: a row for each layer of a Keras model, or for each variable of a `tf.Module`.

    The shape of a layer is that of its output, if it is known. Parameters are floating-point numbers; those of frozen
    layers, and statistics, are not trained.

    Args:
        stream: where the table is printed; None: stderr.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        is_stream = stream is None or hasattr(stream, "write")
        check(self, is_stream, "give a stream that can be written to, or None", stream=stream)
        self.stream = stream

    def on_setup(self, run: Run) -> None:
        tell(summary(run), self.stream)


@dataclasses.dataclass
class _Count:
    """Parameters that are trained, those that aren't, and the bytes of both."""

    trained: int = 0
    fixed: int = 0
    size: int = 0

    def add(self, variable: Variable, is_trained: bool) -> None:
        elements = int(variable.shape.num_elements())
        self.trained += elements * is_trained
        self.fixed += elements * (not is_trained)
        self.size += _bytes(variable)

    def cells(self) -> tuple[str, str, str]:
        trained = f"{self.trained:,}" if self.trained else ""
        fixed = f"{self.fixed:,}" if self.fixed else ""
        return trained, fixed, formats.size(self.size) if self.size else ""


def summary(run: Run) -> str:
    """The table, with the totals in a line below it."""
    # The totals are those of floating-point weights; seeds and counters aren't parameters.
    total = _Count()
    weights = {}  # by identity: names need not be unique, and variables can't be compared
    floats = {}
    for weight in run.weights:
        variable = weight[1]
        weights[id(variable)] = weight
        if _dtype(variable).is_floating:
            floats[id(variable)] = weight
    for _, variable, is_trained in floats.values():
        total.add(variable, is_trained)

    rows: list[tuple[str, ...]] = [_HEAD]
    in_layers: set[int] = set()
    # The variables of an inner layer count in the rows of both layers; the total is made of each variable once.
    for name, layer in _layers(run.model, ""):
        count = _Count()
        for variable in layer.variables:
            key = id(_tf(variable))
            if key in floats:
                count.add(*floats[key][1:])
                in_layers.add(key)
        rows.append((name, _output(layer), *count.cells()))
    # The weights outside of all layers, and those of a `tf.Module`, which has none.
    for key, (name, variable, is_trained) in floats.items():
        if key not in in_layers:
            count = _Count()
            count.add(variable, is_trained)
            rows.append((name, str(tuple(variable.shape)), *count.cells()))

    slots = _bytes_beside(weights, run)
    parameters = f"{total.cells()[0] or 0} parameters are trained, {total.cells()[1] or 0} are not"
    return "\n".join(
        [*_aligned(rows), f"{parameters}: {formats.size(total.size)}, and {formats.size(slots)} of the optimizer"]
    )


def _bytes_beside(weights: Container[int], run: Run) -> int:
    """The bytes of the run's variables that aren't weights of the model; these are given by identity."""
    count = 0
    for variable in (*run.variables, *run.sliced_variables):
        if id(variable) not in weights:
            count += _bytes(variable)
    return count


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table: names and shapes start in one column, numbers end in one."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = []
        for index, (text, width) in enumerate(zip(row, widths, strict=True)):
            cells.append(text.ljust(width) if index < 2 else text.rjust(width))
        yield "  ".join(cells).rstrip()


def _layers(model: Model, indent: str) -> Iterator[tuple[str, Foreign]]:
    """The layers of a Keras model; the layers of a model within it follow, indented."""
    for layer in getattr(model, "layers", ()):
        yield f"{indent}{layer.name} ({type(layer).__name__})", layer
        yield from _layers(layer, indent + "  ")


def _output(layer: Foreign) -> str:
    """The shape of a layer's output, or its shapes; "?" if it isn't known."""
    import tensorflow as tf

    with contextlib.suppress(Exception):  # a layer that was never called with a symbolic tensor has none
        return ", ".join(str((None, *tensor.shape[1:])) for tensor in tf.nest.flatten(layer.output))
    with contextlib.suppress(Exception):  # not every layer can compute it
        return str((None, *layer.compute_output_shape(layer.get_build_config()["input_shape"])[1:]))
    return "?"


def _tf(variable: Variable) -> Variable:
    """The TensorFlow variable behind one of Keras 3."""
    import tensorflow as tf

    return variable if isinstance(variable, tf.Variable) else variable.value


def _dtype(variable: Variable) -> Foreign:
    import tensorflow as tf

    return tf.as_dtype(variable.dtype)


def _bytes(variable: Variable) -> int:
    return int(variable.shape.num_elements()) * int(_dtype(variable).size)
