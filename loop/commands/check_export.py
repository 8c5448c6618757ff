"""The process that tries an exported model: loads it as a user would, and writes its outputs for some inputs.

    python -m loop.commands.check_export MODEL INPUTS.npz OUTPUTS.npz HOW

HOW is JSON: `call`, for a Keras file, what the model is called with, with `{"input": name}` in place of an input;
`family`, keras or tf_keras; `target`, whose file has the classes of the model.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from operator import attrgetter
from typing import Any

import numpy as np
from ml_dtypes import bfloat16

from loop.errors import named


def main(model: str, question: str, answer: str, how: str) -> None:
    """Loads the model, calls it, and writes what it returns."""
    about = json.loads(how)
    with np.load(question, allow_pickle=False) as file:
        # Of bfloat16, which NumPy's files don't know, they have the bytes alone.
        inputs = {name: value.view(bfloat16) if value.dtype.kind == "V" else value for name, value in file.items()}
    if model.endswith(".onnx"):
        outputs = onnx_outputs(model, inputs)
    elif model.endswith(".tflite"):
        outputs = litert_outputs(model, inputs)
    else:
        outputs = tensorflow_outputs(model, inputs, about)
    np.savez(answer, allow_pickle=False, **outputs)


def onnx_outputs(model: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of an ONNX file, by name."""
    import onnxruntime

    # On the CPU, where the expected outputs were computed.
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = list(map(attrgetter("name"), session.get_outputs()))
    return dict(zip(names, session.run(names, inputs), strict=True))


def litert_outputs(model: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of a LiteRT file, by name."""
    from ai_edge_litert.interpreter import Interpreter

    outputs: dict[str, np.ndarray] = Interpreter(model).get_signature_runner("serving_default")(**inputs)
    return outputs


def tensorflow_outputs(model: str, inputs: dict[str, np.ndarray], about: dict[str, Any]) -> dict[str, np.ndarray]:
    """The outputs of a SavedModel or a Keras file, by name."""
    import tensorflow as tf

    from loop.commands.export import as_arrays
    from loop.run.serving import plain_outputs

    tensors = {name: tf.constant(value) for name, value in inputs.items()}
    if about["call"] is None:  # a SavedModel needs no class of the task
        outputs = tf.saved_model.load(model).signatures["serving_default"](**tensors)
    else:
        if about["target"]:  # loading it registers the classes of the model
            from loop.target import task_loader

            with contextlib.suppress(Exception):  # not all that the task needs is here: the model may need none of it
                task_loader.load(about["target"])
        # Imported by name: Keras 3 and tf_keras have files of different formats.
        loaded = importlib.import_module(f"{about['family']}.models").load_model(model)
        args, kwargs = filled(about["call"], tensors)
        outputs = plain_outputs(loaded(*args, **kwargs))
    return as_arrays(outputs)


def filled(call: Any, inputs: dict[str, Any]) -> Any:
    """What the model is called with, with the inputs in their places."""
    if isinstance(call, list):
        return [filled(part, inputs) for part in call]
    if not isinstance(call, dict):  # a constant, such as training=False
        return call
    if set(call) == {"input"} and isinstance(call["input"], str):
        return inputs[call["input"]]
    return {name: filled(part, inputs) for name, part in call.items()}


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Exception as error:
        sys.exit(named(error))  # in one line: `export` shows the last one of stderr
