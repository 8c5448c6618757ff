"""float16 with dynamic loss scaling, and what happens where something isn't finite."""

import contextlib
import functools
import tempfile

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from callbacks import Callback, standard
from loop import ArrayData, TrainingError, UsageError, fit, predict
from loop.backends import create
from loop.step import loss_scale as scaling
from tests.tasks import Alarm, Plain, TwoRates, Weighted, regression


class Watch(Callback):
    """Writes down the scale of the loss and a weight, in each replica, after each step."""

    runs_on = "all"
    every = 1

    def __init__(self):
        self.scales, self.weights = [], []

    def on_steps_end(self, run, metrics):
        read = run.backend.local_values
        self.scales.append([float(value) for value in read(run.step.scale.scale)])
        self.weights.append([value.tobytes() for value in read(run.model.trainable_variables[0].value)])


class Infinite(Weighted):
    """The second half of the third batch, which is replica 1's, has an infinite input."""

    def build_optimizer(self):
        return keras.optimizers.SGD(0.01)

    def train_data(self):
        inputs, labels, weight = regression(80)
        inputs[55] = np.inf
        return ArrayData(inputs, labels, np.ones_like(weight))

    def eval_data(self):
        return None


def test_an_inf_on_one_replica_is_skipped_by_all(quiet):
    watch = Watch()
    options = {"epochs": 1, "batch_size": 20, "shuffle": False, "precision": "mixed_float16"}
    result = fit(Infinite(), backend=create("mirrored", 2), callbacks=quiet() + [watch], **options)
    assert all(len(set(scales)) == 1 for scales in watch.scales)
    assert all(len(set(weights)) == 1 for weights in watch.weights)
    scales = [each[0] for each in watch.scales]
    assert scales[1:] == [scales[0], scales[0] / 2, scales[0] / 2]
    assert scales[0] == 2.0**15 / 32  # the loss is a sum over 20 examples
    assert watch.weights[2] == watch.weights[1] != watch.weights[3]
    assert int(result.model.trainable_variables[0].shape[0]) == 5
    assert (result.steps, result.metrics["skipped_steps"]) == (4, 1)
    assert np.isfinite(result.metrics["loss"])


def test_float16_trains_to_the_same_as_float32_nearly(quiet):
    one = fit(Weighted(), epochs=3, batch_size=20, callbacks=quiet())
    results = [
        fit(Weighted(), epochs=3, batch_size=20, precision="mixed_float16", backend=backend, callbacks=quiet())
        for backend in ("single", create("mirrored", 3))
    ]
    assert results[0].model.compute_dtype == "float16"
    for result in results:
        assert all(variable.dtype == "float32" for variable in result.model.trainable_variables)
        assert result.metrics["eval_loss"] == pytest.approx(one.metrics["eval_loss"], rel=0.02)


class Half(Plain):
    def build_model(self):
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, dtype="mixed_float16", name="half")])

    def compute(self, model, batch, training):
        inputs, labels = batch
        return {"loss": tf.reduce_sum((tf.cast(model(inputs), labels.dtype) - labels) ** 2, -1)}


def test_float16_layers_of_a_run_without_a_loss_scale_are_named(quiet):
    options = {"epochs": 1, "batch_size": 50, "callbacks": quiet()}
    with pytest.warns(UserWarning, match=r"Dense 'half' computes in float16, but the loss isn't scaled: .*mixed_float"):
        fit(Half(), **options)
    fit(Half(), precision="mixed_float16", **options)


def test_the_scale_grows_and_is_kept_in_the_checkpoint(quiet, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "GROWTH_STEPS", 4)
    options = {"batch_size": 20, "precision": "mixed_float16"}

    def run(epochs, directory):
        return fit(Weighted(), epochs=epochs, callbacks=quiet(), run_dir=tmp_path / directory, **options)

    first = run(1, "a")
    assert first.metrics["loss_scale"] == 2.0**15 / 32 * 2  # after 4 of 6 steps
    again, whole = run(2, "a"), run(2, "b")
    assert again.metrics["loss_scale"] == whole.metrics["loss_scale"] == 2.0**15 / 32 * 8
    assert again.weights_sha256 == whole.weights_sha256


def test_what_float16_is_not_to_blame_for_stops_in_the_end(quiet):
    class Hopeless(Weighted):
        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return values | {"loss": values["loss"] * np.nan if training else values["loss"]}

    with pytest.raises(TrainingError, match=r"not finite \(nan or inf\): the loss, the gradient of .*kernel"):
        fit(Hopeless(), steps=200, batch_size=2, precision="mixed_float16", callbacks=quiet())


@pytest.mark.parametrize("replicas", [1, 3])
def test_skip_goes_on_without_the_bad_step(replicas, quiet):
    backend = create("mirrored", replicas) if replicas > 1 else "single"
    result = fit(
        Alarm(), epochs=2, batch_size=20, on_nonfinite="skip", eval_every="never", backend=backend, callbacks=quiet()
    )
    assert (result.steps, result.examples) == (12, 202)
    assert [row["skipped_steps"] for row in result.history] == [1, 1]
    assert all(np.isfinite(row["loss"]) for row in result.history)
    assert all(np.isfinite(variable.numpy()).all() for variable in result.model.variables)


def test_skipping_everything_is_no_training(quiet):
    class Nan(Plain):
        def compute(self, model, batch, training):
            return {"loss": super().compute(model, batch, training)["loss"] * np.nan}

    with pytest.raises(TrainingError, match="epoch 1: all 6 steps were skipped"):
        fit(Nan(), batch_size=20, on_nonfinite="skip", eval_every="never", callbacks=quiet())


def test_an_epoch_may_end_before_a_scale_is_found(quiet):
    """Of one step, even: full batches of large losses."""

    class Large(Weighted):
        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return values | {"loss": values["loss"] * 1e3}

        def build_optimizer(self):
            return keras.optimizers.SGD(1e-5)

    result = fit(Large(), epochs=12, batch_size=101, precision="mixed_float16", eval_every="never", callbacks=quiet())
    skipped = [row["skipped_steps"] for row in result.history]
    assert (skipped[0], skipped[-1], result.steps) == (1, 0, 12)
    assert np.isnan(result.history[0]["loss"])
    assert np.isfinite(result.metrics["loss"])


def test_error_names_step_and_variables(quiet):
    class Branch(Plain):
        """The gradient of `b` alone is infinite."""

        def compute(self, model, batch, training):
            @tf.custom_gradient
            def steep(b):
                return b, lambda upstream: upstream * np.inf

            return {"loss": tf.reduce_sum((batch[0] @ model.w + steep(model.b.read_value()) - batch[1]) ** 2, -1)}

    with pytest.raises(
        TrainingError, match=r"step 1 \(epoch 1\): not finite \(nan or inf\): the gradient of b; nothing"
    ):
        fit(Branch(), batch_size=20, callbacks=quiet())


def test_weights_that_sum_to_zero_over_the_whole_set_are_refused(quiet):
    class Weightless(Weighted):
        def compute(self, model, batch, training):
            return super().compute(model, batch, training) | {"weight": 0.0 * batch[2]}

    with pytest.raises(UsageError, match="the weights of all examples sum to zero"):
        fit(Weightless(), eval_every="never", callbacks=quiet())


@pytest.mark.parametrize("problem", ["not finite", "without weight"])
def test_a_run_may_end_with_steps_of_an_epoch_that_train_nothing(problem, quiet):
    """An epoch has 5 steps, and the first batch of each, but for that of the first epoch, trains nothing."""

    class FirstBatch(Plain):
        def build_model(self):
            model = super().build_model()
            model.steps = tf.Variable(0.0, trainable=False)
            return model

        def train_step(self, model, step):
            super().train_step(model, step)
            model.steps.assign_add(1.0)

        def compute(self, model, batch, training):
            loss = super().compute(model, batch, training)["loss"]
            weight = tf.where(model.steps == 5.0, 0.0, tf.ones_like(loss))
            bad = tf.where(model.steps == 5.0, np.nan, loss)
            return {"loss": bad} if problem == "not finite" else {"loss": loss, "weight": weight}

    def run(steps):
        options = {"batch_size": 20, "on_nonfinite": "skip", "eval_every": "never"}
        return fit(FirstBatch(examples=100), steps=steps, callbacks=quiet(), **options)

    warned = pytest.warns(
        match="epoch 2: the weights of its 20 examples so far sum to zero, so that their means are nan"
    )
    with warned if problem == "without weight" else contextlib.nullcontext():
        longer = run(6)
    assert longer.status == "finished"
    assert np.isnan(longer.metrics["loss"])
    for after, before in zip(longer.model.trainable_variables, run(5).model.trainable_variables, strict=True):
        np.testing.assert_array_equal(after, before)


def test_an_optimizer_may_wait_for_another_one(quiet):
    class Waiting(TwoRates):
        def train_step(self, model, step):
            for name, weight in (("body", 0.0), ("head", 1.0)):
                step.minimize(lambda batch, weight=weight: self.weighed(model, batch, weight), name)

        def weighed(self, model, batch, weight):
            loss = self.compute(model, batch, training=True)["loss"]
            return {"loss": loss, "weight": weight * tf.ones_like(loss)}

    result = fit(Waiting(), callbacks=quiet(), epochs=1, eval_every="never")
    assert np.isnan(result.metrics["body_loss"])
    assert np.isfinite(result.metrics["head_loss"])


def test_evaluation_without_weight_is_told(quiet):
    class Unweighed(Weighted):
        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return values | {"weight": values["weight"] if training else 0.0 * values["weight"]}

    with pytest.warns(UserWarning, match="the weights of all evaluation examples sum to zero"):
        assert np.isnan(fit(Unweighed(), callbacks=quiet()).metrics["eval_loss"])


def test_clip_value_bites_on_the_reduced_gradient(quiet):
    """Three replicas clip what one does: the global gradient, not their own."""
    one, three = (
        fit(Weighted(), epochs=1, batch_size=20, clip_value=0.01, backend=backend, callbacks=quiet())
        for backend in ("single", create("mirrored", 3))
    )
    np.testing.assert_allclose(one.model.get_weights()[0], three.model.get_weights()[0], rtol=1e-5, atol=1e-7)
    with pytest.raises(UsageError, match=r"clip_norm=1.0 and clip_value=0.1: give one of the two"):
        fit(Weighted(), clip_norm=1.0, clip_value=0.1, callbacks=quiet())


class Stateful(Alarm):
    """All that a bad step could leave traces in: statistics of a batch, momentum, averages, a metric."""

    def build_model(self):
        layers = [keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((5,)), *layers])

    def build_optimizer(self):
        return keras.optimizers.Adam(0.01)

    def build_metrics(self):
        return {"error": keras.metrics.MeanSquaredError()}

    def compute(self, model, batch, training):
        predictions = model(batch[0], training=training)
        return {"loss": keras.losses.mean_squared_error(batch[1], predictions), "error": (batch[1], predictions)}


@functools.cache
def skipping(replicas, accumulate, steps_per_call):
    """The result of a run with two bad steps; the random examples below have some runs in common."""
    return fit(
        Stateful(), epochs=2, batch_size=20, on_nonfinite="skip", eval_every="never", ema=0.9,
        backend=create("mirrored", replicas) if replicas > 1 else "single", accumulate=accumulate,
        steps_per_call=steps_per_call, run_dir=tempfile.mkdtemp(), callbacks=standard(mlflow=None, progress=None),
    )  # fmt: skip


@pytest.mark.parametrize("replicas", [1, 2])
@settings(max_examples=3, deadline=None)
@given(in_a_call=st.integers(2, 12), accumulate=st.sampled_from([1, 2]))
def test_what_comes_behind_a_bad_step_in_the_same_call_was_not_made(replicas, in_a_call, accumulate):
    one, many = (skipping(replicas, accumulate, steps) for steps in (1, in_a_call))
    assert one.weights_sha256 == many.weights_sha256
    assert one.history == many.history
    assert [row["skipped_steps"] for row in many.history] == [1, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"accumulate": 2, "clip_norm": 1.0}, r"^accumulate=2 and clip_norm=1.0: .*/inputs_scale is its new value"),
        ({"precision": "mixed_float16"}, "^precision='mixed_float16': the gradient"),
        ({"backend": 2}, "^2 replicas: the gradient"),
    ],
)
def test_scales_of_float8_are_not_added_up_divided_or_clipped(options, said, quiet):
    """A step set them to such a result, without a word."""

    class Float8(Plain):
        def build_model(self):
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, dtype="float32")])
            model.layers[0].quantize("float8")
            return model

    if "backend" in options:
        options["backend"] = create("mirrored", options["backend"])
    with pytest.raises(UsageError, match=said):
        fit(Float8(), callbacks=quiet(), **options)


def test_compute_is_traced_in_the_float_type_that_it_is_tried_in(quiet, tmp_path):
    """Keras's default type was float32 in the step, and float64 where the task was built and tried."""

    class Asks(Plain):
        def build_model(self):
            return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1), keras.layers.AlphaDropout(0.1, seed=1)])

        def eval_data(self):
            return self.train_data()

        def compute(self, model, batch, training):
            inputs, labels = tf.nest.map_structure(lambda part: keras.ops.cast(part, keras.config.floatx()), batch[:2])
            loss = tf.reduce_sum((model(inputs, training=training) - labels) ** 2, -1)
            return {"loss": loss, "wide": tf.fill(tf.shape(loss), loss.dtype.size)}

    result = fit(Asks(), precision="float64", batch_size=50, callbacks=quiet(), run_dir=tmp_path / "run")
    assert result.metrics["wide"] == result.metrics["eval_wide"] == 8
    assert predict(Asks(), tmp_path / "run", precision="float64").dtype == "float64"
    assert keras.config.floatx() == "float32"
