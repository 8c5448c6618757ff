"""The mistakes that users make first: each is one line with the fix, before the first step."""

import re
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from callbacks import Callback, EarlyStopping
from loop import ArrayData, TrainTask, UsageError, backends, fit
from tests.tasks import Plain

INPUTS = np.random.default_rng(0).normal(size=(40, 8)).astype("float32")
LABELS = (INPUTS[:, 0] > 0).astype("int64")


def losses(labels, logits):
    return keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)


class Task(TrainTask):
    """A task without a mistake; `error` is what its `compute` does instead."""

    def __init__(self, error=None):
        self.error = error

    def build_model(self):
        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])

    def build_optimizer(self):
        return keras.optimizers.SGD(0.1)

    def train_data(self):
        return ArrayData(INPUTS, LABELS)

    def compute(self, model, batch, training):
        inputs, labels = batch
        logits = model(inputs, training=training)
        return {"loss": losses(labels, logits)} if self.error is None else self.error(labels, logits)


class OneHot(Task):
    def train_data(self):
        return ArrayData(INPUTS, np.eye(2, dtype="float32")[LABELS])


class Texts(Task):
    def train_data(self):
        return ArrayData(INPUTS.astype(str), LABELS)


class OneExample(Task):
    def compute(self, model, batch, training):
        return {"loss": losses(batch[1], model(batch[0][0], training=training))}


class Compiled(Task):
    def build_model(self):
        model = super().build_model()
        model.compile("sgd", "mse")
        return model

    def build_optimizer(self):
        return None


class OtherEvaluation(Task):
    def eval_data(self):
        return ArrayData(INPUTS[:, :4], LABELS)


class BareArrays(Task):
    def train_data(self):
        return INPUTS, LABELS


class Softmax(Task):
    def build_model(self):
        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, "softmax")])


class NoTraining(Task):
    def compute(self, model, batch):
        return {"loss": losses(batch[1], model(batch[0]))}


class NoSelf(Task):
    def build_model():
        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])


class BatchAsDict(Task):
    def compute(self, model, batch, training):
        return {"loss": losses(batch["label"], model(batch["image"]))}


class OptimizerClass(Task):
    def build_optimizer(self):
        return keras.optimizers.SGD


class OptimizerInCompute(Task):
    """Its loss depends on the optimizer's step."""

    def build_optimizer(self):
        self.optimizer = keras.optimizers.SGD(0.1)
        return self.optimizer

    def compute(self, model, batch, training):
        values = super().compute(model, batch, training)
        return {"loss": tf.cast(self.optimizer.iterations, tf.float32) * values["loss"]}


class AnyArguments(Task):
    def compute(self, *arguments, **named):
        return super().compute(*arguments, **named)


def numpy_method(labels, logits):
    return {"loss": tf.constant(logits.numpy()[:, 0] ** 2)}


def numpy_function(labels, logits):
    return {"loss": np.square(logits).sum(-1)}


MISTAKES = {
    "texts": (Texts(), "the examples have texts where compute() takes numbers (float32): encode them in train_data()"),
    "a mean": (Task(lambda y, x: {"loss": tf.reduce_mean(losses(y, x))}), "never a mean (shape [n])"),
    "one-hot labels": (OneHot(), "give classes, as by labels.argmax(-1)"),
    "a tensor's numpy()": (Task(numpy_method), "use TensorFlow's functions instead of NumPy's"),
    "NumPy's functions": (Task(numpy_function), "use TensorFlow's functions instead of NumPy's"),
    "int and float": (
        Task(lambda y, x: {"loss": tf.square(x[:, 0] - y)}),
        "compute() mixes float32 and int64: cast one of them, as by tf.cast(x, tf.float32)",
    ),
    "no batch dimension": (OneExample(), "compute() can't take examples of shapes [8], []"),
    "compile instead of an optimizer": (Compiled(), "return the optimizer from build_optimizer()"),
    "a loss without a name": (Task(losses), 'return a dict with a per-example "loss", as in {"loss": values}'),
    "a metric that isn't named": (
        Task(lambda y, x: {"loss": losses(y, x), "accuracy": (y, x)}),
        "leave it out, or name the Keras metric that it is for in build_metrics()",
    ),
    "another shape in the evaluation": (
        OtherEvaluation(),
        "eval_data() has other examples than train_data(), float32 [4], int64 [] instead of float32 [8], int64 []",
    ),
    "compute without training": (
        NoTraining(),
        "compute() of NoTraining can't be called as tfloop does (got an unexpected keyword argument 'training'): "
        "define it as def compute(self, model, batch, training)",
    ),
    "a batch of tuples taken for a dict": (
        BatchAsDict(),
        "compute() looks up a name in a tuple. If that is the batch, unpack it, as by inputs, labels = batch",
    ),
    "a label without a class": (
        Task(lambda y, x: {"loss": losses(y + 7, x)}),
        "and the model tells 2 classes apart: give labels from 0",
    ),
    "a layer of compute's own": (
        Task(lambda y, x: {"loss": losses(y, keras.layers.Dense(2)(x))}),
        "compute() makes a layer or a variable, which would be another one in each step: make it in build_model()",
    ),
    "the optimizer in compute": (
        OptimizerInCompute(),
        "compute() uses self.optimizer, which isn't set yet: build_optimizer() sets it, and is called after compute()",
    ),
    "the class of an optimizer": (OptimizerClass(), "returned the class SGD: return an object of it, as SGD(...)"),
    "a method without self": (NoSelf(), "define it as def build_model(self)"),
    "arrays without ArrayData": (BareArrays(), "train_data() returned tuple: return ArrayData(...)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_first_mistake_is_one_line_with_the_fix_and_no_step_is_made(name, quiet):
    task, fix = MISTAKES[name]
    with pytest.raises(UsageError, match=re.escape(fix)) as refused:
        fit(task, callbacks=quiet())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("backend", ["single", backends.Backend()], ids=["made later", "made before"])
def test_a_program_for_tensorflow_1_is_told_what_to_leave_out(backend, quiet):
    with tf.Graph().as_default(), pytest.raises(UsageError, match="eager execution is off: leave out"):
        fit(Plain(), epochs=1, callbacks=quiet(), run_dir="run", backend=backend)
    assert not Path("run").exists()


def test_the_line_of_the_user_stands_in_the_message(quiet):
    with pytest.raises(UsageError, match=r"test_mistakes\.py, line \d+, in numpy_method"):
        fit(Task(numpy_method), callbacks=quiet())


def test_a_metric_that_is_not_there_is_named(quiet):
    with pytest.raises(UsageError, match="this run has no such metric; did you mean 'loss'"):
        fit(Task(), callbacks=quiet() + [EarlyStopping("val_loss")])


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        (EarlyStopping("loss"), "callbacks is an object of type EarlyStopping: give a list of Callback objects"),
        ([keras.callbacks.History()], "those of Keras within callbacks.FromKeras(...)"),
    ],
)
def test_callbacks_that_are_none_are_refused(given, fix):
    with pytest.raises(UsageError, match=re.escape(fix)):
        fit(Task(), callbacks=given)


def test_what_a_callback_misspells_is_refused_or_warned_of(quiet, capsys):
    class Misspelt(Callback):
        def on_epoch_begin(self, run):
            """Keras's name of `on_epoch_start`."""

    fit(Task(), callbacks=quiet() + [Misspelt()])
    assert "warning: the loop calls no on_epoch_begin of Misspelt; the hooks of a call" in capsys.readouterr().err
    Misspelt.runs_on = "chef"
    with pytest.raises(UsageError, match="Misspelt: runs_on='chef': give chief or all"):
        fit(Task(), callbacks=quiet() + [Misspelt()])


def test_a_task_that_forgets_to_return_its_callbacks_is_refused(quiet):
    class Forgets(Task):
        def build_callbacks(self):
            EarlyStopping("loss")

    with pytest.raises(UsageError, match=r"build_callbacks\(\) returned an object of type NoneType: give a list"):
        fit(Forgets(), callbacks=quiet())


def test_softmax_twice_is_warned_of(quiet):
    with pytest.warns(UserWarning, match="does not represent logits"):
        fit(Softmax(), callbacks=quiet())


def test_without_a_mistake_it_trains_on_evaluation_data_of_another_type(quiet):
    class Doubles(Task):
        def eval_data(self):
            return ArrayData(INPUTS.astype("float64"), LABELS)

    assert "eval_loss" in fit(Doubles(), callbacks=quiet()).metrics


def test_a_method_may_take_its_arguments_in_any_way(quiet):
    class Wrapped(Task):
        compute = tf.function(Task.compute)

    class Static(Task):
        @staticmethod
        def compute(*arguments, training):
            return Task().compute(*arguments, training)

    for task in (AnyArguments(), Wrapped(), Static()):
        assert "loss" in fit(task, callbacks=quiet()).metrics


def test_a_step_may_call_compute_with_its_defaults_and_arguments_of_its_own(quiet):
    class Scaled(Task):
        arguments = {"scale": 2.0}

        def compute(self, model, batch, training=True, scale=1.0):
            values = super().compute(model, batch, training)
            return {"loss": scale * values["loss"]}

        def train_step(self, model, step):
            step.minimize(lambda batch: self.compute(model, batch, **self.arguments))

    assert "loss" in fit(Scaled(), callbacks=quiet()).metrics

    class Wide(Scaled):
        arguments = {"training": True}

        def build_model(self):
            return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])

    with pytest.raises(UsageError, match=r"the model takes inputs of shape \[5\]"):
        fit(Wide(), callbacks=quiet())


class Texts(Task):
    def build_model(self):
        model = super().build_model()
        module = tf.Module()
        module.model = model
        module.names = tf.Variable(["cat", "dog"], trainable=False, name="names")
        return module

    def compute(self, model, batch, training):
        return super().compute(model.model, batch, training)


def test_a_variable_of_texts_is_refused(quiet):
    with pytest.raises(UsageError, match=r"the variable names of the model has the dtype string, .*StringLookup"):
        fit(Texts(), callbacks=quiet())


class Quantized(Texts):
    def build_model(self):
        module = super().build_model()
        module.names = tf.Variable(tf.zeros([2], tf.qint8), trainable=False, name="steps")
        return module


def test_a_variable_that_no_checkpoint_can_restore_is_refused(quiet):
    with pytest.raises(UsageError, match=r"the variable steps of the model has the dtype qint8, .*tf\.int8"):
        fit(Quantized(), callbacks=quiet())


class Body(tf.Module):
    def __init__(self, family, frozen):
        super().__init__()
        self.body, self.head = family.layers.Dense(4, name="body"), keras.layers.Dense(2)
        self.body.trainable = not frozen

    def __call__(self, inputs, training):
        return self.head(self.body(inputs, training=training), training=training)


class WithBody(Task):
    def __init__(self, *arguments):
        super().__init__()
        self.arguments = arguments

    def build_model(self):
        return Body(*self.arguments)


def test_a_frozen_layer_that_a_module_trains_is_named(quiet):
    with pytest.warns(UserWarning, match=r"^body of Body has trainable=False, and is trained: the trainable_variables"):
        fit(WithBody(tf_keras, True), callbacks=quiet())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*trainable=False")
        fit(WithBody(tf_keras, False), callbacks=quiet())
        fit(WithBody(keras, True), callbacks=quiet())


class Counting(Texts):
    """Counts how often the first class was seen, in a variable of which it changes one element."""

    by_row = True

    def build_model(self):
        module = super().build_model()
        module.names = tf.Variable(tf.zeros([2]), trainable=False, name="seen")
        return module

    def compute(self, model, batch, training):
        if self.by_row:
            model.names.scatter_nd_add([[0]], [1.0])
        else:
            model.names.assign(tf.tensor_scatter_nd_add(model.names, [[0]], [1.0]))
        return super().compute(model, batch, training)


class CountingAsTold(Counting):
    by_row = False


def test_rows_of_a_variable_can_be_changed_on_replicas_as_the_message_says(quiet):
    backend = backends.create("mirrored", 2)
    with pytest.raises(
        UsageError, match=r"v\.assign\(tf\.tensor_scatter_nd_add\(v, .*test_mistakes\.py, line \d+, in "
    ):
        fit(Counting(), backend=backend, callbacks=quiet())
    result = fit(CountingAsTold(), backend=backend, epochs=1, batch_size=20, callbacks=quiet())
    np.testing.assert_array_equal(result.model.names.numpy(), [2.0, 0.0])
