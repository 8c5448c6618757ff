"""What trying a task at its build leaves behind: nothing; and models that take batches of one size alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from loop import ArrayData, TrainTask, UsageError, fit
from loop.backends import create
from loop.build import build
from tests.tasks import Unweighted

ROWS = {"batch_size": 8, "shuffle": False, "seed": 3}


class Ones(Unweighted):
    """Examples that are all 1, and a `compute` that always trains."""

    def train_data(self):
        return ArrayData(np.ones([8, 5], "float32"), np.ones([8, 1], "float32"))

    def eval_data(self):
        return None

    def compute(self, model, batch, training):
        return {"loss": tf.reduce_sum((model(batch[0], training=True) - batch[1]) ** 2, -1)}


class Normed(keras.Model):
    """Makes its variables at its first call."""

    def __init__(self):
        super().__init__()
        self.layers_in_order = [
            keras.layers.BatchNormalization(),
            keras.layers.SpectralNormalization(keras.layers.Dense(4)),
            keras.layers.Dropout(0.5, seed=7),
            keras.layers.Dense(1),
        ]

    def call(self, inputs, training=False):
        for layer in self.layers_in_order:
            inputs = layer(inputs, training=training)
        return inputs + 0 * keras.random.normal([1]) if training else inputs


class Counter(tf.Module):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.w, self.calls = tf.Variable(tf.zeros([5, 1])), tf.Variable(0)
        self._untracked = {"calls": tf.Variable(0)}

    def __call__(self, inputs, training=False):
        for calls in (self.calls, self._untracked["calls"]):
            calls.assign_add(1)
        return inputs @ self.w


class Lazy(Ones):
    def build_model(self):
        return Normed()


class Built(Ones):
    def build_model(self):
        model = Normed()
        model(tf.zeros([1, 5]))
        return model


class Counted(Ones):
    def build_model(self):
        return Counter()


class Legacy(Ones):
    def build_model(self):
        layers = [tf_keras.layers.BatchNormalization(), tf_keras.layers.Dropout(0.5), tf_keras.layers.Dense(1)]
        return tf_keras.Sequential(layers)

    def build_optimizer(self):
        return tf_keras.optimizers.SGD(0.1)


class OwnStep(Lazy):
    """Has no `compute`, and changes state in its training step."""

    compute = TrainTask.compute

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(5)

    def train_step(self, model, step):
        step.minimize(lambda batch: Ones.compute(self, model, batch, True))
        self.seeds.next()


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("kind", [Lazy, Built, Counted, Legacy, OwnStep])
def test_a_trial_changes_no_state(kind, replicas):
    """Neither of variables that were there, nor of those that are made by it."""
    keras.utils.set_random_seed(3)
    task, made = kind(), {}

    def creator(create, **arguments):
        variable = create(**arguments)
        made[id(variable)] = (variable, variable.numpy())
        return variable

    engine = create("mirrored", replicas) if replicas > 1 else create("single")
    with engine.scope(), tf.variable_creator_scope(creator):
        built = build(task, engine, "float32", _example(task))
    assert len(made) > 3
    for variable, first in made.values():
        for value in engine.local_values(variable):
            np.testing.assert_array_equal(value, first, str(variable.name))
    if kind is OwnStep:
        np.testing.assert_array_equal(task.seeds.state.numpy(), [5, 0])
        assert built.values == []


def _example(task):
    return tf.nest.map_structure(lambda array: tf.constant(array[:3]), task.train_data().arrays)


@pytest.mark.parametrize("kind", [Lazy, Built, Legacy, OwnStep])
def test_one_step_on_ones_moves_a_mean_by_a_hundredth(kind, quiet):
    model = fit(kind(), steps=1, batch_size=8, callbacks=quiet()).model
    (mean,) = [variable for variable in model.variables if "moving_mean" in getattr(variable, "path", variable.name)]
    np.testing.assert_allclose(mean.numpy(), np.full(5, 0.01, "float32"), rtol=1e-6)


def test_evaluation_without_compute_is_refused(quiet):
    class Evaluated(OwnStep):
        eval_data = Ones.train_data

    with pytest.raises(UsageError, match=r"Evaluated has eval_data\(\), but no compute\(\)"):
        fit(Evaluated(), steps=1, callbacks=quiet())
    assert fit(Evaluated(), steps=1, eval_every="never", callbacks=quiet()).steps == 1
