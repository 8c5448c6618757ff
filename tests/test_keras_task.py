"""KerasTask against Keras's own `fit`: the same weights and metrics, on 1 replica and on several."""

import functools

import keras
import numpy as np
import pytest

from loop import KerasTask, UsageError, fit
from loop.backends import create
from loop.backends.base import Backend
from loop.model.precision import keras_precision

ROWS, BATCH = 21, 8
"""The last batch of an epoch has 5 examples: on 3 replicas, 1, 2 and 2 of them."""

BOUND = 1e-12
"""The tolerance for weights in float64, which are about 1: sums are computed in another order."""


@pytest.fixture(scope="module")
def engines():
    return {1: Backend(), 2: create("mirrored", 2), 3: create("mirrored", 3)}


def by_fit(compiled, data, class_weight=None, epochs=1):
    """The model after Keras's own `fit`, and the metrics of the last epoch."""
    keras.utils.set_random_seed(0)
    with keras_precision("float64"):
        model = compiled()
        x, y, weights = (*data, None)[:3]
        history = model.fit(
            x, y, sample_weight=weights, batch_size=BATCH, epochs=epochs, shuffle=False, class_weight=class_weight,
            verbose=0,
        ).history  # fmt: skip
    return model, {name: values[-1] for name, values in history.items()}


def by_task(task, quiet, backend, epochs=1, **options):
    callbacks = quiet(checkpoint=None, journal=None)
    options = {"batch_size": BATCH, "shuffle": False, "seed": 0, "precision": "float64"} | options
    return fit(task, epochs=epochs, backend=backend, callbacks=callbacks, **options)


def assert_same(found, expected, bound=BOUND):
    for one, other in zip(found.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=bound, atol=bound)


def dense(units=1, activation=None):
    layers = [keras.layers.Dense(4, "tanh", kernel_regularizer="l2"), keras.layers.Dense(units, activation)]
    return keras.Sequential([keras.Input((5,)), *layers])


def words():
    """A model of sequences, in which the word 0 is masked."""
    layers = [keras.layers.Embedding(4, 3, mask_zero=True), keras.layers.Dense(3, "softmax")]
    return keras.Sequential([keras.Input((6,), dtype="int64"), *layers])


def two_outputs():
    x = keras.Input((5,), name="x")
    hidden = keras.layers.Dense(4, "tanh")(x)
    size = keras.layers.Dense(1, name="size")(hidden)
    return keras.Model(x, {"size": size, "kind": keras.layers.Dense(3, "softmax", name="kind")(hidden)})


def two_masks():
    x, z = keras.Input((6,), dtype="int64"), keras.Input((6,), dtype="int64")
    table = keras.layers.Embedding(4, 3, mask_zero=True)
    outputs = [keras.layers.Dense(1, name="a")(table(x)), keras.layers.Dense(3, "softmax", name="b")(table(z))]
    return keras.Model([x, z], outputs)


def compiled(model, optimizer="sgd", **given):
    model.compile(optimizer, **given)
    return model


def cases():
    random = np.random.default_rng(0)
    x, real, kind = random.normal(size=(ROWS, 5)), random.normal(size=(ROWS, 1)), np.arange(ROWS) % 3
    weights = random.integers(0, 4, ROWS).astype("float64")
    text, other = random.integers(0, 4, (2, ROWS, 6))
    tags, by_word = random.integers(0, 3, (ROWS, 6)), random.integers(0, 4, (ROWS, 6)).astype("float64")
    losses = keras.losses
    return {
        "names": (
            lambda: compiled(dense(3, "softmax"), "adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"]),
            (x, kind), {"class_weight": {0: 2.0, 2: 0.5}},
        ),
        "signs": (
            lambda: compiled(dense(), loss="hinge"),
            (x, np.where(real > 0, 1, -1)), {"class_weight": {-1: 3.0, 1: 0.5}},
        ),
        "weights": (
            lambda: compiled(dense(), "rmsprop", loss="mse", metrics=["mae"], weighted_metrics=["mae", "mse"]),
            (x, real, weights), {},
        ),
        "sum": (
            lambda: compiled(
                dense(), loss=losses.MeanSquaredError(reduction="sum"), metrics=[keras.metrics.AUC(name="auc")]
            ),
            (x, (real > 0).astype("float64"), weights), {},
        ),
        "masks": (
            lambda: compiled(words(), loss="crossentropy", weighted_metrics=["acc"], metrics=["acc"]),
            (text, tags, by_word), {},
        ),
        "by weight": (
            lambda: compiled(
                words(), loss=losses.SparseCategoricalCrossentropy(reduction="mean_with_sample_weight"),
                loss_weights=[0.3],
            ),
            (text, tags, by_word), {},
        ),
        "outputs": (
            lambda: compiled(
                two_outputs(), loss={"size": "mse", "kind": "crossentropy"}, loss_weights={"size": 0.3, "kind": 2.0},
                metrics={"size": ["mae", "mse"], "kind": "accuracy"}, weighted_metrics={"size": ["mae"]},
            ),
            (x, {"size": real, "kind": kind}, {"size": weights, "kind": weights[::-1]}), {},
        ),
        "divisors": (
            lambda: compiled(
                two_masks(), loss=["mae", losses.SparseCategoricalCrossentropy(reduction="sum")],
                loss_weights=[1.0, 0.1], metrics=[["mae"], ["accuracy"]],
            ),
            ([text, other], [by_word[..., None], tags]), {},
        ),
    }  # fmt: skip


@pytest.mark.parametrize("case", cases())
def test_what_compile_takes_trains_as_in_fit(case, engines, quiet):
    make, data, options = cases()[case]
    witness, expected = by_fit(make, data, **options)
    for replicas in (1, 3):
        result = by_task(KerasTask.from_compiled(make, data, **options), quiet, engines[replicas])
        assert_same(result.model, witness)
        same = [name for name in expected if not name.endswith("loss")]  # a loss: see docs/coming-from/keras-fit.md
        assert {name: result.metrics[name] for name in same} == pytest.approx({name: expected[name] for name in same})


def test_one_task_trains_on_one_backend_after_the_other(engines, quiet):
    """Its metrics are made again for each engine: those of another strategy can't be read."""
    make, data, options = cases()["names"]
    task = KerasTask.from_compiled(make, data, **options)
    found = [by_task(task, quiet, engines[replicas]).metrics for replicas in (2, 3, 1, 2)]
    assert found[0] == found[3]
    for metrics in found[1:3]:
        assert metrics == pytest.approx(found[0])


def test_what_from_compiled_takes_can_be_given(engines, quiet):
    make, data, options = cases()["names"]
    witness, _ = by_fit(make, data, **options)
    task = KerasTask(
        lambda: dense(3, "softmax"), "adam", keras.losses.sparse_categorical_crossentropy, data, data,
        metrics={"right": keras.metrics.sparse_categorical_accuracy}, **options,
    )  # fmt: skip
    result = by_task(task, quiet, engines[2])
    assert_same(result.model, witness)
    assert {"right", "eval_right"} < result.metrics.keys()


class Untold(keras.Model):
    """Its `call` has no argument `training`."""

    def __init__(self):
        super().__init__()
        self.parts = [keras.layers.Dropout(0.5), keras.layers.BatchNormalization(), keras.layers.Dense(1)]

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


def test_a_model_that_is_not_told_of_training_trains_as_in_fit_and_is_warned_of(engines, quiet):
    _, data, _ = cases()["weights"]

    def make():
        return compiled(Untold(), loss="mse")

    witness, _ = by_fit(make, data)
    with pytest.warns(UserWarning, match="Untold.call\\(\\) has no argument `training`.*dropout.*, batch_norm"):
        result = by_task(KerasTask.from_compiled(make, data), quiet, engines[1])
    assert_same(result.model, witness)


class OwnStep(keras.Sequential):
    def train_step(self, data):
        return {}


class OwnLoss(keras.Sequential):
    def compute_loss(self, **given):
        return 0.0


class Reducing(keras.losses.Loss):
    def __call__(self, labels, predictions, sample_weight=None):
        return keras.ops.mean((labels - predictions) ** 2)


def averaging(frequency):
    return keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=frequency)


def test_evaluation_data_may_have_weights_beside_class_weights(quiet):
    _, data, options = cases()["names"]
    make = functools.partial(compiled, loss="sparse_categorical_crossentropy", weighted_metrics=["accuracy"])
    held_out = (*data, np.random.default_rng(0).integers(0, 4, ROWS).astype("float64"))
    task = KerasTask.from_compiled(lambda: make(dense(3, "softmax")), data, held_out, **options)
    result = by_task(task, quiet, "single")
    with keras_precision("float64"):
        witness = make(dense(3, "softmax"))
    witness.set_weights(result.model.get_weights())
    expected = witness.evaluate(*held_out[:2], sample_weight=held_out[2], verbose=0, return_dict=True)
    assert result.metrics["eval_accuracy"] == pytest.approx(expected["accuracy"])


class TotalDistance(keras.metrics.Metric):
    """Made before the training, and so with a state of float32; a function of a user converts nothing."""

    def __init__(self):
        super().__init__(name="distance", dtype="float32")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, labels, predictions, sample_weight=None):
        self.total.assign_add(keras.ops.sum(keras.ops.abs(labels - predictions)))

    def result(self):
        return self.total


def test_an_own_metric_gets_labels_and_predictions_of_one_dtype(quiet):
    _, data, _ = cases()["weights"]
    task = KerasTask(dense, "adam", "mse", data[:2], data[:2], metrics=[TotalDistance()])
    result = by_task(task, quiet, "single")
    inputs, labels = data[:2]
    distance = np.abs(labels.reshape(ROWS, 1) - result.model.predict(inputs, verbose=0)).sum()
    assert result.metrics["eval_distance"] == pytest.approx(distance, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (OwnStep, {}, r"OwnStep has a train_step\(\) of its own, which KerasTask would not call: port.*compute\(\)"),
        (OwnLoss, {}, r"OwnLoss has a compute_loss\(\) of its own"),
        (keras.Sequential, {"loss": Reducing()}, "the loss Reducing overrides __call__.*override call"),
        (keras.Sequential, {"optimizer": averaging(2)}, r"SGD\(use_ema=True\).*use ema=0.99"),
        (keras.Sequential, {"optimizer": averaging(None)}, r"SGD\(use_ema=True\)"),
        (keras.Sequential, {"loss": None}, "there is no loss"),
        (keras.Sequential, None, "a model that isn't compiled"),
    ],
)
def test_what_would_train_otherwise_than_fit_is_refused(kind, given, message, quiet):
    _, data, _ = cases()["weights"]

    def make():
        model = kind([keras.Input((5,)), keras.layers.Dense(1)])
        return model if given is None else compiled(model, **({"loss": "mse"} | given))

    with pytest.raises(UsageError, match=message):
        fit(KerasTask.from_compiled(make, data[:2]), steps=1, callbacks=quiet())


@pytest.mark.parametrize("weights", ["balanced", np.ones(2), {"0": 1.0}])
def test_class_weights_that_are_not_by_class_are_refused(weights):
    with pytest.raises(UsageError, match=r"class_weight=.*give a dict with a weight for the number of each class"):
        KerasTask(keras.Sequential, "adam", "mse", (np.ones((2, 1)), np.ones(2)), class_weight=weights)
