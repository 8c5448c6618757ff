"""What trying a task at its build leaves behind: nothing; and models that take batches of one size alone."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from loop import ArrayData, KerasTask, TrainTask, UsageError, fit
from loop.backends import create
from loop.step.build import build
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


@pytest.mark.parametrize("own_step", [False, True])
@pytest.mark.parametrize("take", ["gradient", "jacobian"])
def test_a_gradient_within_compute_is_tried_as_in_a_replica(take, own_step):
    """As for a penalty of each example's gradient. Of the copies of replicas, TensorFlow knows no gradient outside."""

    class Penalized(Unweighted):
        def compute(self, model, batch, training):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum((model(batch[0], training=training) - batch[1]) ** 2, -1)
            gradient = getattr(tape, take)(loss, model.trainable_variables[0].value)
            return {"loss": loss + tf.reduce_sum(gradient**2)}

        def train_step(self, model, step):
            step.minimize(lambda batch: self.compute(model, batch, training=True))

    if not own_step:
        del Penalized.train_step
    task = Penalized()
    built = build(task, create("mirrored", 2), "float32", _example(task))
    assert built.minimized == {"": ["loss"]}


def _example(task):
    return tf.nest.map_structure(lambda array: tf.constant(array[:3]), task.train_data().arrays)


@pytest.mark.filterwarnings("ignore:the steps change")  # on purpose: a trial must not change such state
@pytest.mark.parametrize("kind", [Lazy, Built, Legacy, OwnStep])
def test_one_step_on_ones_moves_a_mean_by_a_hundredth(kind, quiet):
    model = fit(kind(), steps=1, batch_size=8, callbacks=quiet()).model
    (mean,) = [variable for variable in model.variables if "moving_mean" in getattr(variable, "path", variable.name)]
    np.testing.assert_allclose(mean.numpy(), np.full(5, 0.01, "float32"), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:the steps change")  # on purpose: a trial must not change such state
def test_evaluation_without_compute_is_refused(quiet):
    class Evaluated(OwnStep):
        eval_data = Ones.train_data

    with pytest.raises(UsageError, match=r"Evaluated has eval_data\(\), but no compute\(\)"):
        fit(Evaluated(), steps=1, callbacks=quiet())
    assert fit(Evaluated(), steps=1, eval_every="never", callbacks=quiet()).steps == 1


def sequences(examples):
    random = np.random.default_rng(0)
    inputs = random.normal(size=(examples, 4, 3)).astype("float32")
    return inputs, inputs.sum((1, 2))[:, None]


class Carrying(Unweighted):
    """A recurrent layer that goes on, row by row, from the batch before."""

    family = keras

    def __init__(self, examples=32, held_out=None, streamed=False):
        super().__init__()
        self.size, self.held_out, self.streamed = examples, held_out, streamed

    def build_model(self):
        layers = self.family.layers
        first = self.family.Input((4, 3), batch_size=8)
        return self.family.Sequential([first, layers.LSTM(4, stateful=True), layers.Dense(1)])

    def build_optimizer(self):
        return self.family.optimizers.SGD(0.05)

    def train_data(self):
        arrays = sequences(self.size)
        return tf.data.Dataset.from_tensor_slices(arrays) if self.streamed else ArrayData(*arrays)

    def eval_data(self):
        return ArrayData(*sequences(self.held_out)) if self.held_out else None

    def compute(self, model, batch, training):
        return {"loss": tf.reduce_sum((model(batch[0], training=training) - batch[1]) ** 2, -1)}


class CarryingInTfKeras(Carrying):
    family = tf_keras


def state_of(model):
    return [np.asarray(state.numpy()) for state in tf.nest.flatten(model.layers[0].states)]


def test_a_stateful_layer_trains_as_in_keras(quiet):
    """Keras never resets it, neither between batches nor between epochs."""
    carrying = Carrying()
    task = KerasTask(carrying.build_model, carrying.build_optimizer, "mse", ArrayData(*sequences(32)))
    found = fit(task, epochs=2, callbacks=quiet(), **ROWS)
    keras.utils.set_random_seed(3)
    model = Carrying().build_model()
    model.compile(keras.optimizers.SGD(0.05), "mse")
    model.fit(*sequences(32), batch_size=8, epochs=2, shuffle=False, verbose=0)
    for ours, theirs in zip(found.model.trainable_variables, model.trainable_variables, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)
    for ours, theirs in zip(state_of(found.model), state_of(model), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "streamed"), [(Carrying, False), (CarryingInTfKeras, True)])
def test_carried_state_is_in_the_checkpoint_and_evaluation_has_its_own(kind, streamed, quiet, tmp_path):
    def run(directory, epochs, held_out):
        task = kind(held_out=held_out, streamed=streamed)
        return fit(task, epochs=epochs, run_dir=tmp_path / directory, callbacks=quiet(), **ROWS)

    whole = run("whole", 2, 19)
    run("resumed", 1, 19)
    resumed, unseen = run("resumed", 2, 19), run("unseen", 2, None)
    assert resumed.weights_sha256 == whole.weights_sha256 == unseen.weights_sha256
    assert resumed.metrics["eval_loss"] == whole.metrics["eval_loss"]
    for one, other in zip(state_of(resumed.model), state_of(whole.model), strict=True):
        assert np.abs(one).max() > 0
        np.testing.assert_array_equal(one, other)
    # Of 19 examples the last batch has 3, and is filled up; row by row, with a state that begins with zeros.
    model, (inputs, labels) = whole.model, sequences(19)
    for layer in model.layers[:1]:
        layer.reset_states()
    filled = np.concatenate([inputs, np.zeros([5, 4, 3], "float32")])
    outputs = np.concatenate([model(filled[start : start + 8]).numpy() for start in (0, 8, 16)])[:19]
    assert whole.metrics["eval_loss"] == pytest.approx(np.mean((outputs - labels) ** 2, dtype="float64"), rel=1e-5)


def test_rows_that_fill_up_an_evaluation_count_for_nothing(quiet):
    """In no metric with a mask, and in no divisor of the losses of several outputs."""

    def build_model():
        words = keras.Input((4,), batch_size=8)
        masked = keras.layers.Embedding(5, 3, mask_zero=True)(words)
        carried = keras.layers.GRU(3, stateful=True, return_sequences=True)(masked)
        return keras.Model(words, {name: keras.layers.Dense(1, name=name)(carried) for name in "ab"})

    words = np.tril(np.ones([8, 4], "int64"))[::-1] + np.eye(8, 4, dtype="int64")[::-1]
    held_out = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [4, 1, 2, 3]])

    def data(inputs):
        labels = np.where(inputs == 0, 50, inputs)[..., None].astype("float32")  # the masked ones would stand out
        return ArrayData(inputs, {"a": labels, "b": 2 * labels})

    metrics = {"a": [keras.metrics.MeanSquaredError(name="mse")], "b": []}
    losses = {"a": "mse", "b": "mse"}
    task = KerasTask(
        build_model, Carrying().build_optimizer, losses, data(words), data(held_out), weighted_metrics=metrics
    )
    found = fit(task, epochs=1, callbacks=quiet(), **ROWS).metrics
    assert found["eval_a_mse"] == pytest.approx(found["eval_a_loss"], rel=1e-5)
    assert found["eval_loss"] == pytest.approx(found["eval_a_loss"] + found["eval_b_loss"], rel=1e-5)


class Fixed(Carrying):
    """A batch of constant size, by a reshape that Keras doesn't know of."""

    def build_model(self):
        first = keras.layers.Lambda(lambda inputs: tf.reshape(inputs, [8, 12]))
        layers = [first, keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((4, 3)), *layers])

    def build_optimizer(self):
        return keras.optimizers.SGD(0.05)


class Flexible(Fixed):
    def build_model(self):
        layers = [keras.layers.Reshape([12]), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
        return keras.Sequential([keras.Input((4, 3)), *layers, keras.layers.Dense(1)])


@pytest.mark.parametrize(
    ("streamed", "replicas", "options"),
    [(True, 2, {"batch_size": 16}), (False, 1, {"compile": "xla"})],
)
def test_a_model_of_one_batch_size_trains_and_is_evaluated(streamed, replicas, options, quiet):
    """To the bit as one that takes any; the last batch of the evaluation has one row."""
    backend = create("mirrored", replicas) if replicas > 1 else "single"
    options = {**ROWS, "drop_remainder": True, "backend": backend, **options}
    fixed, flexible = (
        fit(kind(37, 17, streamed), epochs=2, callbacks=quiet(), **options) for kind in (Fixed, Flexible)
    )
    for one, other in zip(fixed.model.get_weights(), flexible.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    assert fixed.metrics["eval_loss"] == pytest.approx(flexible.metrics["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("task", "replicas", "options", "message"),
    [
        (Carrying(), 2, {}, r"lstm.* is stateful: row i of a batch .* which with 2 replicas it can't: train on one"),
        (Carrying(), 1, {"accumulate": 2}, r"which with accumulate=2 it can't"),
        (Carrying(37), 1, {}, r"takes batches of 8 rows alone .*the last one of an epoch has 5: use drop_remainder"),
        (Fixed(37, streamed=True), 1, {}, r"takes batches of 8 rows alone .*the last one of an epoch has 5"),
        (Fixed(64), 2, {}, r"of batch_size=8 with 2 replicas it gets 4: use batch_size=16"),
        (Fixed(64, 64), 1, {"batch_size": 16, "accumulate": 2}, r"in an evaluation each replica gets 16 of"),
    ],
)
def test_batches_of_other_sizes_are_refused(task, replicas, options, message, quiet):
    backend = create("mirrored", replicas) if replicas > 1 else "single"
    with pytest.raises(UsageError, match=message):
        fit(task, backend=backend, callbacks=quiet(), **{**ROWS, **options})
