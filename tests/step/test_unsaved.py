"""A variable that the steps change and no checkpoint has is said at the start: a resume would not be exact."""

import random
import re
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from loop import ArrayData, TrainTask, backends, fit

INPUTS = np.random.default_rng(0).normal(size=(24, 4)).astype("float32")


class Counting(keras.layers.Layer):
    """Counts its calls in a variable of TensorFlow, which Keras doesn't count as the layer's, or in one of its own."""

    def __init__(self, own):
        super().__init__()
        self.own = own

    def build(self, shape):
        self.calls = self.add_weight(initializer="zeros", trainable=False) if self.own else tf.Variable(0.0)

    def call(self, inputs, training=False):
        if training:
            self.calls.assign_add(1.0)
        return inputs * (1 + 0.01 * self.calls)


class Task(TrainTask):
    def build_model(self):
        return keras.Sequential([keras.Input((4,)), *self.layers(), keras.layers.Dense(1)])

    def layers(self):
        return []

    def build_optimizer(self):
        return keras.optimizers.Adam(0.01)

    def train_data(self):
        return ArrayData(INPUTS)

    def compute(self, model, batch, training):
        outputs = tf.cast(model(batch, training=training)[:, 0], tf.float32)
        return {"loss": self.factor(model, batch, training) * tf.square(outputs - 1)}

    def factor(self, model, batch, training):
        return 1.0


class Measuring(keras.layers.Layer):
    """Has a metric of its own, as a guide of Keras has it."""

    def __init__(self):
        super().__init__()
        self.mean = keras.metrics.Mean()

    def call(self, inputs):
        self.mean.update_state(inputs)
        return inputs


class WithMetric(Task):
    def layers(self):
        return [Measuring()]


class InTheTask(Task):
    def __init__(self):
        self.count = tf.Variable(1.0)

    def factor(self, model, batch, training):
        if training:
            self.count.assign_add(1.0)
        return 0.1 * self.count


class KerasVariable(InTheTask):
    def __init__(self):
        self.count = keras.Variable(1.0)


class Generator(Task):
    def __init__(self):
        self.numbers = tf.random.Generator.from_seed(1)

    def factor(self, model, batch, training):
        return self.numbers.uniform([])


class GlobalSeed(Task):
    def factor(self, model, batch, training):
        return keras.random.uniform([])


class InALayer(Task):
    def layers(self):
        return [Counting(own=False)]


class InTheModel(Task):
    def layers(self):
        return [Counting(own=True), keras.layers.Dropout(0.5), keras.layers.BatchNormalization()]


class Teacher(Task):
    """Holds a model that it reads alone."""

    def __init__(self):
        self.teacher = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1), keras.layers.BatchNormalization()])
        self.teacher.trainable = False
        self.table = tf.Variable(tf.ones([9]), trainable=False)

    def factor(self, model, batch, training):
        return tf.cast(self.teacher(batch)[:, 0], tf.float32) ** 2 + tf.gather(self.table, 3)


class Weight(keras.layers.Layer):
    """Has a variable of TensorFlow, which Keras doesn't count as the layer's."""

    def build(self, shape):
        self.weight = tf.Variable(1.0)

    def call(self, inputs):
        return inputs * self.weight


class HeadInTheTask(Task):
    def __init__(self):
        self.head = keras.layers.Dense(1)

    def build_model(self):
        self.head.build((None, 4))
        return super().build_model()

    def factor(self, model, batch, training):
        return tf.cast(self.head(batch)[:, 0], tf.float32) ** 2


class ModelInAList(HeadInTheTask):
    def __init__(self):
        super().__init__()
        self.heads = [keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])]
        self.head = None

    build_model = Task.build_model

    def factor(self, model, batch, training):
        return tf.cast(self.heads[0](batch)[:, 0], tf.float32) ** 2


class HeadOfTheModel(Task):
    """A Sequential model doesn't count the layers that are its attributes, a functional one does."""

    functional = False

    def build_model(self):
        model = super().build_model()
        if self.functional:
            model = keras.Model(model.inputs, model.outputs)
        model.head = keras.layers.Dense(1)
        model.head.build((None, 4))
        return model

    def factor(self, model, batch, training):
        return tf.cast(model.head(batch)[:, 0], tf.float32) ** 2


class HeadOfAFunctionalModel(HeadOfTheModel):
    functional = True


class WeightOfALoss(Task):
    def __init__(self):
        self.log_sigma = tf.Variable(0.0)

    def factor(self, model, batch, training):
        return tf.exp(-self.log_sigma)


class WeightInALayer(Task):
    def layers(self):
        return [Weight()]


class NoisySGD(keras.optimizers.SGD):
    """Draws noise with a seed that Keras doesn't count as the optimizer's."""

    def build(self, variables):
        super().build(variables)
        self.noise = keras.random.SeedGenerator(1)

    def update_step(self, gradient, variable, learning_rate):
        noise = keras.random.normal(variable.shape, seed=self.noise)
        super().update_step(gradient + 0.01 * noise, variable, learning_rate)


class InTheOptimizer(Task):
    def build_optimizer(self):
        return NoisySGD(0.1, momentum=0.9)


LOST = "the steps change {}, which no checkpoint has"
UNTRAINED = "the steps use {}, which isn't a part of the model"


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (InTheTask, "InTheTask.count", LOST),
        (KerasVariable, "KerasVariable.count", LOST),
        (Generator, "Generator.numbers", LOST),
        (GlobalSeed, "the seed of keras.random", LOST),
        (InALayer, "Counting.calls", LOST),
        (InTheOptimizer, "NoisySGD.noise", LOST),
        (HeadInTheTask, "HeadInTheTask.head", UNTRAINED),
        (ModelInAList, "ModelInAList.heads", UNTRAINED),
        (
            HeadOfTheModel,
            "Sequential.head",
            f"{UNTRAINED}: it isn't trained, and no checkpoint has it. A Sequential model",
        ),
        (WeightOfALoss, "WeightOfALoss.log_sigma", UNTRAINED),
        (WeightInALayer, "Weight.weight", UNTRAINED),
        (WithMetric, "Measuring.mean", "the steps update {}: such a metric is neither reported nor saved"),
    ],
)
def test_what_is_not_of_the_model_is_named(kind, name, message, quiet):
    with pytest.warns(UserWarning, match=re.escape(message.format(name))):
        fit(kind(), callbacks=quiet(), batch_size=8)


class HiddenSeed(Task):
    def factor(self, model, batch, training):
        return tf.random.uniform([])


class SeedOfTheModel(Task):
    """Does as the warnings say."""

    def build_model(self):
        model = super().build_model()
        model.seed = keras.random.SeedGenerator(1)
        return model

    def factor(self, model, batch, training):
        return keras.random.uniform(tf.shape(batch)[:1], seed=model.seed)


class SampledLoss(SeedOfTheModel):
    """Draws the classes of a sampled loss with the seed of the model."""

    def factor(self, model, batch, training):
        classes = tf.cast(keras.random.randint([2], 0, 9, seed=model.seed), tf.int64)
        labels = tf.cast(batch[:, :1] > 0, tf.int64)
        sampled = classes, tf.ones_like(batch[:, :1]), tf.ones([2])
        weights = tf.ones([9, 4]), tf.zeros([9])
        return tf.nn.sampled_softmax_loss(*weights, labels, batch, 2, 9, sampled_values=sampled)


def test_random_numbers_whose_state_is_hidden_are_named(quiet):
    with pytest.warns(UserWarning, match="the steps draw random numbers with RandomUniform, whose state"):
        fit(HiddenSeed(), callbacks=quiet(), batch_size=8)


class DrawsWhileTraced(Task):
    def __init__(self, draw):
        self.draw = draw

    def factor(self, model, batch, training):
        return self.draw() if training else 1.0


@pytest.mark.parametrize("draw", [random.random, np.random.uniform])
def test_random_numbers_that_python_draws_while_the_step_is_traced_are_said(draw, quiet):
    with pytest.warns(UserWarning, match="runs while the step is traced, and not at each step"):
        fit(DrawsWhileTraced(draw), callbacks=quiet(), batch_size=8)
    fit(DrawsWhileTraced(np.random.default_rng(1).uniform), callbacks=quiet(), batch_size=8)  # the same in each run


class CallsPython(Task):
    def __init__(self, function):
        self.function = function

    def factor(self, model, batch, training):
        return tf.cast(tf.numpy_function(self.function, [], tf.float64), tf.float32)


def test_python_with_a_state_that_the_steps_call_is_said(quiet):
    """Draws of NumPy differed from replica to replica, and after a resume, without a word."""
    with pytest.warns(UserWarning, match=r"^compute\(\) calls Python, .* that gives other values"):
        fit(CallsPython(np.random.uniform), callbacks=quiet(), batch_size=8)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*calls Python, by")
        fit(CallsPython(lambda: 2.0), callbacks=quiet(), batch_size=8)


def test_the_first_seed_of_keras_is_no_such_draw(quiet):
    with pytest.warns(UserWarning, match="change the seed of keras.random, which no checkpoint has"):
        fit(DrawsWhileTraced(lambda: keras.random.uniform(())), callbacks=quiet(), batch_size=8)


class Line(tf.Module):
    def __init__(self):
        self.slope = tf.Variable(tf.ones([4, 1]))
        self.seed = keras.random.SeedGenerator(1)

    def __call__(self, inputs, training=False):
        return inputs @ self.slope


class SeedOfAModule(SeedOfTheModel):
    def build_model(self):
        return Line()


@pytest.mark.parametrize(
    "kind", [InTheModel, Teacher, SeedOfTheModel, SeedOfAModule, SampledLoss, HeadOfAFunctionalModel]
)
def test_what_is_saved_or_never_changed_is_not_named(kind, quiet, tmp_path):
    def weights(*epochs):
        for epoch in epochs:
            run_dir = tmp_path / str(len(epochs))
            keras.utils.set_random_seed(0)  # for the model of the teacher, which isn't part of the run
            result = fit(kind(), batch_size=8, epochs=epoch, run_dir=run_dir, ema=0.9)
        return result.weights_sha256

    assert weights(2) == weights(1, 2)


def test_on_several_replicas_the_variables_of_all_are_known(quiet):
    fit(InTheModel(), callbacks=quiet(), batch_size=8, backend=backends.create("mirrored", 2))
    with pytest.warns(UserWarning, match=re.escape("Counting.calls, which no checkpoint has")):
        fit(InALayer(), callbacks=quiet(), batch_size=8, backend=backends.create("mirrored", 2))


class HoldsAModelToCome(Task):
    def __init__(self):
        self.spare = tf_keras.Sequential([tf_keras.layers.Dense(2)])  # neither built nor called


def test_a_task_may_hold_a_model_that_has_no_variables_yet(quiet):
    assert fit(HoldsAModelToCome(), callbacks=quiet()).steps == 1


class Tables(Task):
    """Looks a number up in a table, which it may also change."""

    def __init__(self, changes):
        self.table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 1.0)
        self.changes = changes

    def factor(self, model, batch, training):
        key = tf.constant(1, tf.int64)
        if training and self.changes:
            self.table.insert(key, 1 + self.table.lookup(key))
        return self.table.lookup(key)


def test_a_table_that_the_steps_change_is_named(quiet):
    with pytest.warns(UserWarning, match="^the steps change a lookup table, which no checkpoint has"):
        fit(Tables(True), callbacks=quiet())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*lookup table")
        fit(Tables(False), callbacks=quiet())
