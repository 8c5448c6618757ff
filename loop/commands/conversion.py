"""Converts a served model to the formats of other runtimes: ONNX and LiteRT, with named inputs and outputs."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import TYPE_CHECKING

from loop.errors import UsageError, named

if TYPE_CHECKING:
    import tensorflow as tf

    from loop.run.serving import Served

EXTRAS = {".onnx": ("onnx", ("tf2onnx", "onnxruntime")), ".tflite": ("litert", ("ai_edge_litert",))}
"""By the ending of a file: the extra that installs what writes and checks it, and the modules that this brings."""

OPSET = 18
"""The version of ONNX's operators: the newest that tf2onnx writes."""


def check_installed(out: Path) -> None:
    """Refuses a format whose packages are not installed. None of them is imported."""
    extra, modules = EXTRAS.get(out.suffix, ("", ()))
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise UsageError(f"{out}: {name} is not installed; install it with pip install 'tfloop[{extra}]'")


def convert(served: Served, partial: Path, out: Path) -> None:
    """Writes a model to `partial` as the ending of `out` asks for: `.onnx` or `.tflite`.

    Refuses a model with an operation that the format has no counterpart for.
    """
    writer = _write_onnx if out.suffix == ".onnx" else _write_litert
    function = served.named_function()
    try:
        writer(function, partial)
    except OSError:  # a disk that is full says nothing of the model: `export` tells it
        raise
    except Exception as error:  # the converters raise whatever type an unknown operation leads to
        raise UsageError(f"{out}: {_reason(error)}: export the model to a directory (SavedModel)") from None


def _write_onnx(function: tf.types.experimental.PolymorphicFunction, path: Path) -> None:
    """Writes an ONNX file. Axes of any length have names; the first one is `batch`."""
    import onnx
    import tf2onnx

    proto, _ = tf2onnx.convert.from_function(function, input_signature=function.input_signature, opset=OPSET)
    for value in [*proto.graph.input, *proto.graph.output]:
        for axis, size in enumerate(value.type.tensor_type.shape.dim):
            if not size.HasField("dim_value"):
                size.dim_param = f"{value.name}_{axis}" if axis else "batch"
    # An operation that ONNX lacks is left in the graph under TensorFlow's name: this check finds it.
    onnx.checker.check_model(proto)
    onnx.save(proto, path)


def _write_litert(function: tf.types.experimental.PolymorphicFunction, path: Path) -> None:
    """Writes a LiteRT file with the signature `serving_default`, of LiteRT's own operations alone."""
    import tensorflow as tf
    from tensorflow.python.framework import convert_to_constants

    concrete = function.get_concrete_function()
    # The converter of TensorFlow 2.21 loses the values of variables that it is handed: they become constants first.
    frozen = convert_to_constants.convert_variables_to_constants_v2(concrete)
    for operation in frozen.graph.get_operations():
        # Freezing makes a table of `tf.lookup` an input, which the function below can't give.
        if operation.type.startswith("LookupTable"):
            raise ValueError(f"'tf.{operation.type}' op")  # as the converter names what it doesn't know
    names = sorted(concrete.structured_outputs)
    module = tf.Module()

    def serve(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        return dict(zip(names, frozen(*tensors), strict=True))

    module.serve = tf.function(serve, input_signature=function.input_signature, autograph=False)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([module.serve.get_concrete_function()], module)
    path.write_bytes(converter.convert())


def _reason(error: Exception) -> str:
    """What a converter can't do, in one line."""
    text = str(error)
    unknown = re.search(r"No Op registered for (\w+)", text)
    if unknown:
        return f"ONNX has no operation for TensorFlow's {unknown[1]}"
    operations = sorted(set(re.findall(r"'tf\.(\w+)' op", text)))
    if operations:
        return f"LiteRT has no operation for TensorFlow's {', '.join(operations)}"
    return f"the model can't be converted ({named(error)})"
