"""`compile="auto"`: the faster of two ways, as if it had been asked for by name."""

import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import callbacks
from loop import ArrayData, TrainingError, fit
from loop.backends import create
from loop.run import compile_choice
from tests.tasks import Conv, Weighted, regression


def trained(task, run_dir=None, **options):
    options = {"epochs": 2, "batch_size": 16, "backend": "single", "seed": 3, "eval_every": "never"} | options
    return fit(task, run_dir=run_dir, callbacks=callbacks.standard(mlflow=None, progress=None), **options)


def taken(result):
    return json.loads((result.run_dir / "run.json").read_text())["options"]["compile"]


@pytest.fixture
def quick(monkeypatch):
    """What is measured is of no interest."""
    monkeypatch.setattr(compile_choice, "SECONDS", 0.01)


@pytest.fixture(params=["graph", "xla"])
def faster(quick, monkeypatch, request):
    """Lets either way be the faster one."""
    monkeypatch.setattr(compile_choice, "GAIN", 1e9 if request.param == "graph" else 0.0)
    return request.param


class Drawing(Conv):
    """Beside BatchNormalization, dropout and Adam, state that isn't the model's: the seed of Keras, and a counter."""

    def __init__(self):
        self.steps = tf.Variable(0.0)

    def eval_data(self):
        return self.train_data()

    def compute(self, model, batch, training):
        if training:
            self.steps.assign_add(1.0)
        images, labels = batch
        return super().compute(model, (images + self.steps * keras.random.normal([8, 8, 1]), labels), training)


@pytest.mark.filterwarnings("ignore:the steps change Drawing.steps, the seed of keras.random")
def test_what_was_measured_or_evaluated_leaves_no_trace_in_the_numbers(faster, capsys):
    auto = trained(Drawing(), compile="auto", ema=0.9)
    assert taken(auto) == faster
    assert f"compile=auto takes {faster}: a step takes " in capsys.readouterr().err
    assert auto.weights_sha256 == trained(Drawing(), compile=faster, ema=0.9, eval_every=5).weights_sha256


class LookedAt(Weighted):
    """A callback asks for the options before the choice is made."""

    def build_callbacks(self):
        return [callbacks.LambdaCallback(setup=lambda run: run.info["options"])]


def test_a_resumed_run_keeps_the_way_and_measures_nothing(faster, tmp_path, monkeypatch):
    trained(LookedAt(), tmp_path / "run", compile="auto", eval_every="epoch", epochs=1)
    monkeypatch.setattr(compile_choice, "_faster", lambda *_: pytest.fail("measured again"))
    resumed = trained(LookedAt(), tmp_path / "run", compile="auto", eval_every="epoch")
    assert taken(resumed) == faster
    assert resumed.weights_sha256 == trained(Weighted(), compile=faster).weights_sha256


def test_all_workers_take_the_way_of_the_chief(tmp_path):
    """A worker of another machine may not have the run's directory: its steps waited for the chief's, and theirs."""
    backend = SimpleNamespace(name="horovod", is_chief=False, broadcast_json=lambda choice: "xla")
    run = SimpleNamespace(options={"compile": "auto"}, directory=tmp_path, backend=backend)
    compile_choice.settle(run, None)
    assert run.options["compile"] == "xla"


def test_a_stream_begins_at_its_first_example_also_if_it_draws_numbers(faster):
    class Streamed(Weighted):
        def train_data(self):
            arrays = super().train_data().arrays
            signature = tf.nest.map_structure(lambda array: tf.TensorSpec(array.shape[1:], array.dtype), arrays)

            def examples():
                for index in np.random.permutation(len(arrays[0])):
                    yield tuple(array[index] for array in arrays)

            return tf.data.Dataset.from_generator(examples, output_signature=signature)

    auto = trained(Streamed(), compile="auto", prefetch=8)
    assert taken(auto) == faster
    assert auto.weights_sha256 == trained(Streamed(), compile=faster, prefetch=8).weights_sha256


class Shuffled(Weighted):
    """A stream, of which each iterator has another order."""

    def train_data(self):
        return tf.data.Dataset.from_tensor_slices(super().train_data().arrays).shuffle(200, seed=5)


def test_a_stream_that_shuffles_has_the_order_of_a_run_that_measures_nothing(faster, tmp_path):
    """The iterators that were measured counted as epochs: how many, was a matter of the clock."""
    whole = trained(Shuffled(), compile=faster)
    trained(Shuffled(), tmp_path / "run", compile="auto", epochs=None, steps=10)  # within the second epoch of 7 steps
    resumed = trained(Shuffled(), tmp_path / "run", compile="auto")
    assert taken(resumed) == faster
    assert (resumed.steps, resumed.weights_sha256) == (whole.steps, whole.weights_sha256)


def test_a_stream_that_cannot_be_made_again_is_left_to_the_graph(quick, capsys):
    made = Shuffled().train_data()

    class Same(Shuffled):
        def train_data(self):
            return made

    auto = trained(Same(), compile="auto")
    assert taken(auto) == "graph"
    assert "compile=auto takes graph: steps are measured on a second data set, and" in capsys.readouterr().err
    assert auto.weights_sha256 == trained(Shuffled()).weights_sha256


class Carrying(Weighted):
    """A recurrent layer that goes on from its state of the batch before, which Keras counts as no variable."""

    def build_model(self):
        layers = [keras.layers.Reshape((5, 1)), keras.layers.GRU(3, stateful=True), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((5,), batch_size=16), *layers])


def test_the_state_of_a_recurrent_layer_is_put_back(faster):
    options = {"shuffle": False, "drop_remainder": True, "epochs": 1}
    auto = trained(Carrying(), compile="auto", **options)
    assert taken(auto) == faster
    assert auto.weights_sha256 == trained(Carrying(), compile=faster, **options).weights_sha256


@pytest.mark.parametrize("options", [[], "xla", {"compile": ["xla"]}])
def test_a_record_that_says_nothing_is_no_choice(options, tmp_path, monkeypatch):
    run = tmp_path / "run"
    trained(Weighted(), run, epochs=1)
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"options": options}))
    measured = []
    monkeypatch.setattr(compile_choice, "_faster", lambda *_: measured.append(True) or "graph")
    assert taken(trained(Weighted(), run, compile="auto")) == "graph"
    assert measured == [True]


class Named(Weighted):
    """Each example has a name."""

    def train_data(self):
        return ArrayData(*regression(self.examples), np.array([f"row {row}" for row in range(self.examples)]))

    def compute(self, model, batch, training):
        return super().compute(model, batch[:3], training)


def test_a_task_that_xla_refuses_is_left_to_the_graph(quick, capsys):
    """It was measured twice in the graph."""
    auto = trained(Named(), compile="auto")
    assert taken(auto) == "graph"
    assert "takes graph: XLA can't compile this task (its data has texts)" in capsys.readouterr().err


def test_several_replicas_take_the_graph(capsys):
    auto = trained(Weighted(), compile="auto", backend=create("mirrored", 2), epochs=1)
    assert taken(auto) == "graph"
    assert "XLA is tried with backend='single' alone, and not with 'mirrored'" in capsys.readouterr().err


def test_a_step_that_is_not_finite_ends_the_measuring(quick):
    class Broken(Weighted):
        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return values | {"loss": values["loss"] * float("nan")}

    with pytest.raises(TrainingError, match=r"step 1 .*not finite"):
        trained(Broken(), compile="auto")


@pytest.mark.parametrize(("gpus", "way", "told"), [(1, "graph", 1), (1, "xla", 0), (0, "graph", 0)])
def test_who_trains_in_the_graph_on_a_gpu_is_told_of_xla_once(gpus, way, told, tmp_path, monkeypatch, capsys):
    logical = tf.config.list_logical_devices
    made_up = [tf.config.LogicalDevice("/device:GPU:0", "GPU")] * gpus
    monkeypatch.setattr(
        compile_choice.tf.config, "list_logical_devices", lambda kind=None: made_up if kind == "GPU" else logical(kind)
    )
    compile_choice._tell_of_gpu.cache_clear()
    for name in ("run", "other"):
        trained(Weighted(), tmp_path / name, epochs=1, compile=way)
    compile_choice._tell_of_gpu.cache_clear()
    trained(Weighted(), tmp_path / "run", epochs=2, compile=way)  # a resumed run isn't told again
    assert capsys.readouterr().err.count("compile='auto' (--compile auto) measures XLA") == told
