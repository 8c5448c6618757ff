"""Export: what is written, a new process has loaded, and it had the same outputs; else nothing is written."""

import importlib.util
import os
import re
import resource
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from loop import ArrayData, UsageError, fit
from loop.commands import conversion, serving_layout
from loop.commands.export import distance, export
from loop.errors import TrainingError
from tests.tasks import Conv, Legacy, Plain, Unweighted, regression

INPUTS = regression(7)[0]


class Scaled(keras.layers.Layer):
    """A layer of the user's own, which Keras doesn't know."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, inputs):
        return inputs * self.scale


@keras.saving.register_keras_serializable()
class Private(keras.layers.Layer):
    """Gives something else in each process."""

    def call(self, inputs):
        return inputs + float(os.getpid())


class Two(tf.Module):
    """Takes a dict and a mask, gives a dict; holds Keras layers, and an `if` over a tensor."""

    def __init__(self, precision=tf.bfloat16):
        super().__init__()
        self.precision = precision
        self.left, self.right = keras.layers.Dense(2), Scaled()

    def __call__(self, inputs, mask, training):
        shown = self.right(inputs["a b"]) * mask
        if tf.reduce_sum(mask) > 1e6:
            shown = shown * 0
        return {"sum": self.left(shown), "both": [shown, tf.cast(shown, self.precision)], "none": None}


class Mixed(Unweighted):
    def build_model(self):
        return Two()

    def train_data(self):
        inputs, labels, _ = regression(self.examples)
        return ArrayData({"a b": inputs, "mask": np.ones_like(inputs), "label": labels})

    eval_data = train_data

    def compute(self, model, batch, training):
        outputs = model({"a b": batch["a b"]}, mask=batch["mask"], training=training)
        return {"loss": tf.reduce_sum((outputs["sum"] - batch["label"]) ** 2, -1)}


class InFloat32(Mixed):
    """ONNX Runtime doesn't round as bfloat16 does."""

    def build_model(self):
        return Two(tf.float32)


class Sided(Unweighted):
    """A functional Keras model of two inputs, one of any length."""

    def build_model(self):
        left, right = keras.Input((5,), name="left"), keras.Input((None, 1), name="right")
        pooled = keras.layers.Concatenate()([left, keras.layers.GlobalAveragePooling1D()(right)])
        return keras.Model([left, right], keras.layers.Dense(1)(pooled))

    def compute(self, model, batch, training):
        inputs, labels = batch
        return {"loss": tf.reduce_sum((model([inputs, inputs[..., None]], training=training) - labels) ** 2, -1)}


class Pair(keras.Model):
    """A subclassed model of two arguments, one of them a text."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, numbers, text):
        return self.dense(numbers) + tf.cast(tf.strings.length(text), tf.float32)


class Paired(Unweighted):
    def build_model(self):
        return Pair()

    def compute(self, model, batch, training):
        inputs, labels = batch
        return {"loss": tf.reduce_sum((model(inputs, tf.strings.as_string(inputs[:, :1])) - labels) ** 2, -1)}


@keras.saving.register_keras_serializable()
class Own(keras.Model):
    """A subclassed model that a Keras file can hold."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)


class InHalves(Unweighted):
    """Calls its model with inputs in bfloat16, which NumPy's files don't know."""

    def compute(self, model, batch, training):
        inputs, labels = batch
        return {"loss": tf.reduce_sum((model(tf.cast(inputs, tf.bfloat16)) - labels) ** 2, -1)}


class Unsaved(Own):
    """Keras doesn't know how to make it again."""

    def __init__(self, given):
        super().__init__()


class Layered(Unweighted):
    layer = Private

    def build_model(self):
        return keras.Sequential([keras.Input((5,)), self.layer(), keras.layers.Dense(1)])


def of_a_class_that_nobody_can_import():
    class Local(Scaled):
        pass

    task = Layered()
    task.layer = Local
    return task


class Split(Unweighted):
    """Never calls its model as a whole."""

    def compute(self, model, batch, training):
        return {"loss": tf.reduce_sum((model.layers[-1](model.layers[0](batch[0])) - batch[1]) ** 2, -1)}


@pytest.fixture
def trained(quiet, tmp_path):
    def run(task, **options):
        run_dir = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        fit(task, steps=2, batch_size=20, callbacks=quiet(), run_dir=run_dir, eval_every="never", **options)
        return run_dir

    return run


def served(path, **inputs):
    loaded = tf.saved_model.load(str(path))
    named = {name: tf.constant(value) for name, value in inputs.items()}
    return {name: value.numpy() for name, value in loaded.signatures["serving_default"](**named).items()}


def test_tf_keras_as_file_and_served_with_the_averages_of_its_weights(trained, tmp_path):
    import tf_keras

    run = trained(Legacy(), ema=0.9)
    assert "differ by" in export(Legacy(), run, tmp_path / "m.keras")
    export(Legacy(), run, tmp_path / "saved", check=False)
    export(None, run, tmp_path / "weights.npz")
    with np.load(tmp_path / "weights.npz") as file:
        a, b, c, d = (file[name] for name in file)
    expected = np.tanh(INPUTS @ a + b) @ c + d
    np.testing.assert_allclose(tf_keras.models.load_model(tmp_path / "m.keras")(INPUTS), expected, atol=1e-6)
    np.testing.assert_allclose(served(tmp_path / "saved", inputs=INPUTS)["output_0"], expected, atol=1e-6)


def test_plain_module(trained, tmp_path):
    run = trained(Plain())
    export(Plain(), run, tmp_path / "saved", check=False)
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    np.testing.assert_allclose(loaded.serve(INPUTS), INPUTS @ loaded.model.w + loaded.model.b, atol=1e-6)
    with pytest.raises(UsageError, match=r"^/proc/w.npz can't be written \(.*\): give another name$"):
        export(None, run, Path("/proc/w.npz"))
    with pytest.raises(UsageError, match=r"plain tf\.Module, not a Keras model"):
        export(Plain(), run, tmp_path / "m.keras")


def test_dict_and_keyword_inputs_and_several_outputs_of_a_module_with_keras_layers(trained, tmp_path):
    said = export(Mixed(), trained(Mixed()), tmp_path / "saved")
    assert said.startswith("loaded in a new process, its outputs for 3 examples differ by ")
    found = served(tmp_path / "saved", a_b=INPUTS, mask=np.zeros_like(INPUTS))
    assert {name: each.shape for name, each in found.items()} == {"sum": (7, 2), "both": (7, 5), "both_1": (7, 5)}
    assert found["both_1"].dtype == np.float32
    loaded = tf.saved_model.load(str(tmp_path / "saved"))
    assert loaded.serve({"a_b": INPUTS, "mask": INPUTS})["sum"].shape == (7, 2)


def test_several_inputs_of_a_keras_model_one_of_any_length(trained, tmp_path):
    run = trained(Sided())
    export(Sided(), run, tmp_path / "saved", check=False)
    export(Sided(), run, tmp_path / "m.keras")
    longer = np.random.default_rng(0).normal(size=(7, 11, 1)).astype("float32")
    expected = keras.models.load_model(tmp_path / "m.keras")([INPUTS, longer])
    outputs = served(tmp_path / "saved", input_0=INPUTS, input_1=longer)
    np.testing.assert_allclose(outputs["output_0"], expected, atol=1e-6)


def test_a_subclassed_keras_model_of_several_arguments(trained, tmp_path):
    run = trained(Paired())
    assert "differ by 0" in export(Paired(), run, tmp_path / "saved")
    one, two = (served(tmp_path / "saved", input_0=INPUTS, input_1=[[text]] * 7)["output_0"] for text in ("", "abc"))
    np.testing.assert_allclose(two, one + 3, atol=1e-6)


def test_a_subclassed_keras_model_as_a_keras_file(trained, tmp_path):
    task = Layered()
    task.build_model = Own
    run = trained(task)
    assert "differ by 0" in export(task, run, tmp_path / "m.keras")
    task.build_model = lambda: Unsaved(object())
    with pytest.raises(UsageError, match=r"Keras can't save this model \(.* must override `get_config\(\)`"):
        export(task, run, tmp_path / "n.keras")


def test_inputs_in_bfloat16(trained, tmp_path):
    assert "differ by 0" in export(InHalves(), trained(InHalves()), tmp_path / "saved")


def test_what_cannot_be_loaded_or_differs_is_not_written_unless_it_is_not_checked(trained, tmp_path):
    task = of_a_class_that_nobody_can_import()
    run = trained(task)
    with pytest.raises(TrainingError, match=r"can't load it .*register_keras_serializable") as caught:
        export(task, run, tmp_path / "m.keras")
    assert "\n" not in str(caught.value)
    split = trained(Split())
    with pytest.raises(UsageError, match=r"Split never calls the model as model\(\.\.\.\)"):
        export(Split(), split, tmp_path / "saved")
    assert {path.name for path in tmp_path.iterdir()} == {"run-0", "run-1"}
    export(task, run, tmp_path / "m.keras", check=False)

    task = Layered()
    with pytest.raises(TrainingError, match=r"its outputs for 3 examples differ by \d"):
        export(task, trained(task), tmp_path / "n.keras")
    assert not (tmp_path / "n.keras").exists()


def test_outputs_are_compared_by_the_greatest_of_them():
    a = np.array([1000.0, np.nan, np.inf, 0.5], "f4")
    assert distance(a, a) == 0
    assert distance(a, a + np.array([1e-3, 0, 0, 0], "f4")) == pytest.approx(1e-6, rel=0.1)
    assert distance(np.array([0.1]), np.array([0.2])) == pytest.approx(0.1)
    assert np.isnan(distance(np.array([0.1]), np.array([np.nan])))
    assert distance(np.array([1, 2]), np.array([1, 3])) == 1


def onnx_model(path):
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    shapes = {value.name: value.shape for value in [*session.get_inputs(), *session.get_outputs()]}
    return shapes, lambda **inputs: dict(zip(names, session.run(names, inputs), strict=True))


@pytest.mark.parametrize("name", ["m.npz", "m.keras", "saved"])
def test_a_disk_that_is_full_leaves_nothing_and_is_named(name, trained, tmp_path):
    """The largest size of a file stands for the disk: the system refuses the same calls, with another number."""
    run = trained(Conv())
    out = tmp_path / name
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, most[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            export(Conv(), run, out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, most)
    assert raised.value.filename == str(out)
    assert not list(tmp_path.glob(f"*{name}*"))


def litert_model(path):
    from ai_edge_litert.interpreter import Interpreter

    runner = Interpreter(str(path)).get_signature_runner("serving_default")
    details = runner.get_input_details() | runner.get_output_details()
    shapes = {name: value["shape_signature"].tolist() for name, value in details.items()}
    return shapes, runner


RUNTIMES = {"m.onnx": onnx_model, "m.tflite": litert_model}


@pytest.mark.parametrize("name", RUNTIMES)
def test_another_runtime_has_the_same_outputs_with_each_family(name, trained, tmp_path):
    """Pictures with BatchNorm, a tf_keras model and a plain module; any number of examples."""
    pictures = np.random.default_rng(0).normal(size=(7, 8, 8, 1)).astype("float32")
    for task, inputs, outputs in ((Conv(), pictures, 10), (Legacy(), INPUTS, 1), (Plain(), INPUTS, 1)):
        run = trained(task)
        said = export(task, run, tmp_path / name)
        assert re.fullmatch(r"loaded in a new process, its outputs for \d+ examples differ by \S+", said)
        shapes, call = RUNTIMES[name](tmp_path / name)
        any_number = "batch" if name == "m.onnx" else -1
        assert shapes == {"inputs": [any_number, *inputs.shape[1:]], "output_0": [any_number, outputs]}
        export(task, run, tmp_path / "saved", check=False)
        expected = served(tmp_path / "saved", inputs=inputs)["output_0"]
        np.testing.assert_allclose(call(inputs=inputs)["output_0"], expected, atol=1e-5)
        (tmp_path / name).unlink()
        (tmp_path / "saved").rename(tmp_path / f"saved-{type(task).__name__}")


@pytest.mark.parametrize("name", RUNTIMES)
def test_another_runtime_takes_named_inputs_and_gives_named_outputs(name, trained, tmp_path):
    run = trained(InFloat32())
    export(InFloat32(), run, tmp_path / name)
    shapes, call = RUNTIMES[name](tmp_path / name)
    assert set(shapes) == {"a_b", "mask", "sum", "both", "both_1"}
    export(InFloat32(), run, tmp_path / "saved", check=False)
    expected = served(tmp_path / "saved", a_b=INPUTS, mask=2 * np.ones_like(INPUTS))
    found = call(a_b=INPUTS, mask=2 * np.ones_like(INPUTS))
    for output, value in expected.items():
        np.testing.assert_allclose(found[output], value, atol=1e-5)


class Unknown(Layered):
    """An operation that neither runtime has."""

    def build_model(self):
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1), keras.layers.Lambda(tf.math.bessel_i0e)])


class LooksUp(Layered):
    """A table of `tf.lookup`."""

    def build_model(self):
        lookup = keras.layers.IntegerLookup(vocabulary=[1, 2], output_mode="one_hot")
        inputs = keras.Input((5,))
        number = keras.layers.Lambda(lambda inputs: tf.cast(inputs[:, :1], tf.int64))(inputs)
        return keras.Model(inputs, keras.layers.Dense(1)(lookup(number)))


class Noisy(Layered):
    """Random numbers, which each runtime draws by itself."""

    def build_model(self):
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1), keras.layers.Lambda(noise)])


def noise(inputs):
    return inputs + tf.random.uniform(tf.shape(inputs))


@pytest.mark.filterwarnings("ignore:the steps draw random numbers")
def test_what_another_runtime_lacks_or_computes_otherwise_is_refused_in_a_line(trained, tmp_path):
    run = trained(Unknown())
    for name, runtime in (("m.onnx", "ONNX"), ("m.tflite", "LiteRT")):
        with pytest.raises(
            UsageError, match=rf"{name}: {runtime} has no operation for TensorFlow's BesselI0e"
        ) as caught:
            export(Unknown(), run, tmp_path / name)
        assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"m.tflite: LiteRT has no operation for TensorFlow's LookupTableFindV2"):
        export(LooksUp(), trained(LooksUp()), tmp_path / "m.tflite")
    with pytest.raises(TrainingError, match=r"its outputs for 3 examples differ by \d"):
        export(Noisy(), trained(Noisy()), tmp_path / "m.onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"run-0", "run-1", "run-2"}


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in LACKING else find_spec(name))
    for name, module, extra in (("m.onnx", "tf2onnx", "onnx"), ("m.tflite", "ai_edge_litert", "litert")):
        with pytest.raises(UsageError, match=rf"{module} is not installed; .* 'tfloop\[{extra}\]'"):
            conversion.check_installed(tmp_path / name)
    conversion.check_installed(tmp_path / "saved")


LACKING = ("tf2onnx", "ai_edge_litert")


def test_the_layout_of_tensorflow_serving(trained, tmp_path):
    """What the Dockerfile copies is there, where Serving looks for the model that it names; TensorFlow loads it."""
    run = trained(Mixed())
    said = export(Mixed(), run, tmp_path / "image", serving=True)
    assert said.startswith("loaded in a new process")
    lines = (tmp_path / "image" / "Dockerfile").read_text().splitlines()
    steps = [line.split() for line in lines if line and not line.startswith("#")]
    assert steps == [
        ["ARG", "SERVING=latest"],
        ["FROM", "tensorflow/serving:${SERVING}"],
        ["ENV", "MODEL_NAME=mixed"],
        ["COPY", "mixed", "/models/mixed"],  # Serving's own entry point reads /models/$MODEL_NAME
    ]
    assert [path.name for path in (tmp_path / "image" / "mixed").iterdir()] == ["1"]
    found = served(tmp_path / "image" / "mixed" / "1", a_b=INPUTS, mask=np.zeros_like(INPUTS))
    assert set(found) == {"sum", "both", "both_1"}
    assert serving_layout.how_to_start(tmp_path / "image").startswith(f"serve it: docker build -t mixed {tmp_path}")


@pytest.mark.parametrize(
    ("task", "name"),
    [("Digits", "digits"), ("CharLM", "char_lm"), ("MNISTTask", "mnist_task"), ("_A__b", "a_b"), ("Ü", "model")],
)
def test_names_that_docker_takes(task, name):
    assert serving_layout.model_name(task) == name
