"""`compile="xla"`: many steps in one program, with the numbers of the graph; or the graph, with the reason."""

import dataclasses
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import callbacks
from loop import ArrayData, TrainingError, UsageError, fit
from loop.backends import create
from loop.commands.verify import verify
from loop.data import open_data
from loop.model.variables import model_variables
from loop.options import with_defaults
from loop.step.build import build
from loop.step.replica import current
from loop.step.train_step import TrainStep
from tests.conftest import ROOT
from tests.tasks import Conv, Weighted, regression


def trained(task, chosen=(), **options):
    options = {"epochs": 2, "batch_size": 16, "backend": "single", "seed": 3} | options
    return fit(task, callbacks=callbacks.standard(mlflow=None, progress=None) + list(chosen), **options)


def weights(result):
    return [variable.numpy() for variable in model_variables(result.model)]


class Sure(Conv):
    """Without dropout: XLA has a generator of its own."""

    def build_model(self):
        model = super().build_model()
        return keras.Sequential([layer for layer in model.layers if not isinstance(layer, keras.layers.Dropout)])


def test_same_as_the_graph_with_batch_norm_adam_and_a_short_last_batch():
    graph, xla = (trained(Sure(), precision="float64", compile=how) for how in ("graph", "xla"))
    for ours, expected in zip(weights(xla), weights(graph), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-7, atol=1e-9)
    for row, expected in zip(xla.history, graph.history, strict=True):
        assert row == pytest.approx(expected, rel=1e-7)


class Curved(Weighted):
    """Its loss has a derivative by the inputs, in whose gradient XLA takes the weights for constants."""

    def compute(self, model, batch, training):
        inputs, labels, weight = batch
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            slopes = (model(inputs, training=training) - labels) ** 2
        return {"loss": tf.reduce_sum(tape.batch_jacobian(slopes, inputs) ** 2, [1, 2]), "weight": weight}


def test_the_weights_are_read_as_the_steps_have_left_them():
    """Each block was undone: it was taken for finite, but what it had made was read as it was before."""
    graph, xla = (trained(Curved(), epochs=None, steps=6, eval_every="never", compile=how) for how in ("graph", "xla"))
    for ours, expected in zip(weights(xla), weights(graph), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


class Often(callbacks.Callback):
    """Cuts the compiled calls after every few steps."""

    every = 3


def test_where_calls_end_does_not_change_a_bit():
    options = {"compile": "xla", "eval_every": "never"}
    often = trained(Weighted(), [Often()], **options)
    assert trained(Weighted(), **options).weights_sha256 == often.weights_sha256


@dataclasses.dataclass
class Spiked(Weighted):
    """One example whose loss is infinite: its batch comes at some step, within a block."""

    def train_data(self):
        inputs, labels, weight = super().train_data().arrays
        labels[70] = np.inf
        return ArrayData(inputs, labels, np.ones_like(weight))


@pytest.mark.parametrize("on_nonfinite", ["stop", "skip"])
def test_a_step_that_is_not_finite_is_the_same_step_and_changes_nothing(on_nonfinite, tmp_path):
    def ending(how):
        keras.utils.clear_session(free_memory=False)  # the names of layers start anew
        try:
            options = {"batch_size": 8, "on_nonfinite": on_nonfinite, "eval_every": "never"}
            return trained(Spiked(), compile=how, run_dir=tmp_path / how, **options)
        except TrainingError as error:
            return str(error).replace(str(tmp_path / how), "RUN")

    graph, xla = ending("graph"), ending("xla")
    if on_nonfinite == "stop":
        assert graph == xla
        assert "the loss" in xla
        assert "the gradient of" in xla
        return
    assert xla.metrics["skipped_steps"] == graph.metrics["skipped_steps"] == 1
    for ours, expected in zip(weights(xla), weights(graph), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


class Opaque(Weighted):
    """Calls Python within the step, which XLA can't compile."""

    def compute(self, model, batch, training):
        values = super().compute(model, batch, training)
        values["error"] = tf.ensure_shape(tf.py_function(lambda x: x, [values["error"]], tf.float32), [None])
        return values


class Sized(Weighted):
    """Makes a tensor whose size depends on values, which XLA can't."""

    def compute(self, model, batch, training):
        values = super().compute(model, batch, training)
        size = 2 + tf.cast(tf.reduce_sum(batch[2]), tf.int32)
        return values | {"ones": tf.reduce_sum(tf.ones([size])) * tf.ones_like(values["error"])}


@pytest.mark.parametrize(
    ("task", "reason"),
    [(Opaque, ".*EagerPyFunc.*"), (Sized, "Input 0 .* with op Fill must be a compile-time constant.")],
)
def test_what_xla_cannot_compile_is_said_and_left_to_the_graph(task, reason):
    with pytest.warns(UserWarning, match=rf"XLA can't compile this task \({reason}\): as compile='graph'"):
        xla = trained(task(), compile="xla")
    assert xla.weights_sha256 == trained(task(), eval_every="never").weights_sha256


@pytest.mark.parametrize("streams", [False, True])
def test_texts_are_left_to_the_graph(streams):
    """With a layer that hashes them, XLA ended the process."""

    class Hashed(Weighted):
        def build_model(self):
            layers = [keras.layers.Hashing(7), keras.layers.CategoryEncoding(7, "one_hot"), keras.layers.Dense(1)]
            return keras.Sequential([keras.Input([1], dtype="string"), *layers])

        def train_data(self):
            texts = np.array([[f"row {row % 9}"] for row in range(self.examples)])
            data = (texts, *regression(self.examples)[1:])
            return tf.data.Dataset.from_tensor_slices(data) if streams else ArrayData(*data)

    with pytest.warns(UserWarning, match="XLA can't compile this task .its data has texts.: as compile='graph'"):
        xla = trained(Hashed(), compile="xla", eval_every="never")
    assert xla.weights_sha256 == trained(Hashed(), eval_every="never").weights_sha256


@pytest.mark.parametrize(
    ("kind", "reason"), [("text", "Detected unsupported.*AsString.*"), ("loop", "XLA compilation requires a fixed .*")]
)
def test_what_xla_cannot_compile_of_a_stream_has_its_fix(kind, reason):
    """It was an error of TensorFlow that named a node of the graph, or the program that couldn't be converted."""

    class Streamed(Weighted):
        def train_data(self):
            return tf.data.Dataset.from_tensor_slices(regression(self.examples))

        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            if kind == "text":
                return values | {"digits": tf.strings.length(tf.as_string(values["error"]))}
            loss = values["loss"]
            while tf.reduce_max(loss) > 1e-3:  # XLA must know how often, to keep what the gradient needs
                loss *= 0.5
            return values | {"loss": loss}

    with pytest.raises(UsageError, match=rf"^compile='xla': XLA can't compile a step .{reason}: use compile='graph'"):
        trained(Streamed(), compile="xla")


@pytest.mark.filterwarnings(r"ignore:compute\(\) changes .* by its rows|compute\(\) changes .* in each call")
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_micro_batch_without_rows_beside_a_layer_that_counts_calls(replicas):
    """Its stand-in was chosen by a branch, after which XLA didn't know the number of rows."""

    class Normalized(Weighted):
        def build_model(self):
            layer = keras.layers.SpectralNormalization(keras.layers.Dense(4))
            return keras.Sequential([keras.Input([5]), layer, keras.layers.Dense(1)])

        def compute(self, model, batch, training):
            # The gradient of this slice was what XLA refused.
            return {"loss": model(batch[0], training=training)[..., 0] ** 2}

    backend = create("mirrored", replicas) if replicas > 1 else "single"
    options = {"batch_size": 2, "accumulate": 2, "precision": "float64", "eval_every": "never", "backend": backend}
    in_graph, in_xla = (weights(trained(Normalized(examples=5), compile=way, **options)) for way in ("graph", "xla"))
    for one, other in zip(in_graph, in_xla, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)


def test_the_program_is_compiled_once(tmp_path):
    source = """
import callbacks
from loop import fit
from tests.tasks import Weighted

class Often(callbacks.Callback):
    every = 3

fit(Weighted(), epochs=4, batch_size=8, compile="xla", callbacks=callbacks.standard(mlflow=None) + [Often()])
"""
    logs = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "device_compiler=1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", source], cwd=tmp_path, env=os.environ | logs, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Compilation of XLA executable time") == 1, done.stderr


@dataclasses.dataclass
class Noted(Weighted):
    """Notes where the rows of its replica begin, as XLA sees it."""

    def compute(self, model, batch, training):
        if training:
            self.first = current().rows.first
        return super().compute(model, batch, training)


def test_what_a_random_layer_draws_does_not_depend_on_an_argument_of_the_program():
    """XLA must know how many numbers it draws; of an argument it knows that at times only."""
    task = Noted()
    trained(task, compile="xla", batch_size=1, accumulate=2, epochs=1)  # one part of two has no row
    assert task.first == 0
    assert not tf.is_tensor(task.first)


def test_several_replicas_refuse_random_layers():
    """XLA makes other floats of the same random bits: one replica and several would differ."""
    with pytest.raises(UsageError, match="compile='xla' on 2 replicas: random layers"):
        trained(Conv(), backend=create("mirrored", 2), compile="xla", epochs=1)
    with pytest.raises(UsageError, match="compile='xla' on 2 replicas"):
        verify(Dropped(), 16, (2,), compile="xla")
    assert trained(Dropped(), backend=create("mirrored", 2), epochs=1, eval_every="never").steps > 0


class Dropped(Weighted):
    """Dropout alone, without anything that needs other replicas."""

    def build_model(self):
        return keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.3), keras.layers.Dense(1)])


def test_dropout_without_batch_norm_is_refused_too():
    with pytest.raises(UsageError, match="compile='xla' on 3 replicas"):
        trained(Dropped(), backend=create("mirrored", 3), compile="xla", epochs=1)
    assert trained(Dropped(), compile="xla", epochs=1).steps > 0


def open_shapes(compiled):
    """The operations within what XLA compiles whose shapes aren't fully known; and how many operations there are."""
    functions = compiled.graph.as_graph_def(add_shapes=True).library.function
    library = {function.signature.name: function for function in functions}
    inside = [name for name, function in library.items() if function.attr["_XlaMustCompile"].b]
    nodes = []
    for name in inside:
        for node in library[name].node_def:
            nodes.append(node)
            called = [value.func.name for value in node.attr.values() if value.func.name in library]
            inside += [other for other in called if other not in inside]
    names = []
    for node in nodes:
        shapes = [tf.TensorShape(shape) for shape in node.attr["_output_shapes"].list.shape]
        if not all(shape.is_fully_defined() for shape in shapes):
            names.append(f"{node.op} {node.name}")
    return names, len(nodes)


@pytest.mark.parametrize(
    ("replicas", "examples", "is_static"), [(1, 64, True), (1, 70, True), (2, 64, True), (2, 70, False)]
)
def test_where_batches_divide_evenly_a_replicas_whole_step_has_static_shapes(replicas, examples, is_static):
    """As a TPU needs it: forward pass, loss, sums and gradients are compiled, and know all their sizes.

    On one replica whole steps are a program, the optimizer in it, and the short last step is left to the graph.
    """

    @dataclasses.dataclass
    class Even(Weighted):
        def train_data(self):
            return ArrayData(*(array[:examples] for array in super().train_data().arrays))

    task = Even()
    backend = create("mirrored", replicas) if replicas > 1 else create("single")
    options = with_defaults(task, {"batch_size": 16, "compile": "xla"}) | {"backend": backend.name}
    data = open_data(task, options)
    built = build(task, backend, "float32", data.train.example)
    step = TrainStep(task, built, backend, data.sharded(backend, "example"), options)
    numbers = [tf.constant(number, tf.int64) for number in (0, 0, 2)]
    compiled = step._train.get_concrete_function(step.data.train.start(0, 0), *numbers)
    names, count = open_shapes(compiled)
    assert count > 50
    assert (names == []) == is_static
