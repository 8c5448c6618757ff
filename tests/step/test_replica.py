"""What differs between replicas and what must not: random numbers, seeds of examples, gathered batches, statistics."""

import itertools
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from hypothesis import given, settings
from hypothesis import strategies as st

import loop
from callbacks import Callback, Checkpoint
from loop import ArrayData, TrainTask, UsageError, evaluate, fit
from loop.backends import create
from loop.backends.base import Backend
from loop.data import Rows
from loop.step import row_random as rowwise
from loop.step.replica import Replica, within
from tests.exactness import largest_difference, trained, weights_of
from tests.tasks import Plain, Unweighted, regression


def engine(replicas):
    return create("mirrored", replicas) if replicas > 1 else "single"


def weights(result):
    return [variable.numpy() for variable in weights_of(result.model)]


class Drawing(keras.layers.Layer):
    """Multiplies sequences [n, t, 5] by what it draws in training, in a way that is named."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.dropout = keras.layers.Dropout(0.5, seed=1, noise_shape=(1, None, 5) if kind == "of all rows" else None)
        self.seed = keras.random.SeedGenerator(2)

    def call(self, inputs, training=False):
        rows = keras.ops.shape(inputs)[0]
        if not training:
            return inputs
        if self.kind == "time first":
            turned = self.dropout(keras.ops.transpose(inputs, (1, 0, 2)), training=True)
            return keras.ops.transpose(turned, (1, 0, 2))
        if self.kind == "gamma":
            return inputs * keras.random.gamma((rows, 1, 1), 2.0, seed=self.seed)
        if self.kind == "shuffle":
            return inputs + keras.random.shuffle(inputs, seed=self.seed)
        return self.dropout(inputs, training=True)


class Sequences(Unweighted):
    kind = "of all rows"

    def build_model(self):
        time = None if self.kind == "of all rows" else 3
        layers = [Drawing(self.kind), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((time, 5)), *layers])

    def train_data(self):
        inputs, labels = regression(24)[:2]
        return ArrayData(np.stack([inputs, -inputs, 2 * inputs], 1), labels)

    eval_data = train_data


def test_a_mask_of_all_rows_is_the_same_on_all_replicas(quiet):
    one, two = (
        fit(Sequences(), epochs=1, batch_size=8, eval_every="never", backend=engine(n), callbacks=quiet())
        for n in (1, 2)
    )
    assert largest_difference(weights(two), weights(one)) <= 5e-6


@pytest.mark.filterwarnings("ignore:the loss of an example depends on the other examples")  # also said, where it shows
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("time first", r"draw random numbers of shape \[3, None, 5\], whose first axis isn't that of the examples"),
        ("gamma", "draw random numbers for each example by `gamma`"),
        ("shuffle", r"mix the examples of a batch by `keras.random.shuffle`: each of 2 replicas"),
    ],
)
def test_what_cannot_be_drawn_by_row_is_said_on_several_replicas(kind, message, quiet):
    task = Sequences()
    task.kind = kind
    options = {"steps": 1, "batch_size": 8, "eval_every": "never", "callbacks": quiet()}
    with pytest.warns(UserWarning, match=message):
        fit(task, backend=engine(2), **options)
    fit(task, backend="single", **options)


class Choosing(Sequences):
    """Chooses a category for each example, as the actions of a policy."""

    by_row = True

    def compute(self, model, batch, training):
        logits = model(batch[0], training=training) * tf.constant([[1.0, -1.0, 0.5]])
        if self.by_row:
            u = keras.random.uniform(tf.shape(logits), seed=self.seeds)
            chosen = tf.argmax(logits - tf.math.log(-tf.math.log(u)), -1)
        else:
            chosen = keras.random.categorical(logits, 1, seed=self.seeds)[:, 0]
        return {"loss": -tf.gather(tf.nn.log_softmax(logits), chosen, batch_dims=1)}

    def build_model(self):
        model = super().build_model()
        model.seeds = self.seeds = keras.random.SeedGenerator(3)
        return model


def test_categories_are_the_same_on_all_replicas_as_the_warning_says(quiet):
    options = {"epochs": 1, "batch_size": 8, "eval_every": "never"}
    one, two = (fit(Choosing(), **options, backend=engine(n), callbacks=quiet()) for n in (1, 2))
    assert largest_difference(weights(two), weights(one)) <= 5e-6
    task = Choosing()
    task.by_row = False
    with pytest.warns(UserWarning, match=r"by `categorical`, .* Choose tf.argmax\(logits - tf.math.log"):
        fit(task, **options, backend=engine(2), callbacks=quiet())


class Augmented(TrainTask):
    def build_model(self):
        augmentation = keras.layers.RandAugment(value_range=(0, 1), num_ops=1)
        return keras.Sequential([keras.Input((4, 4, 3)), augmentation, keras.layers.Flatten(), keras.layers.Dense(1)])

    def build_optimizer(self):
        return keras.optimizers.SGD(0.01)

    def train_data(self):
        images = np.random.default_rng(1).uniform(size=(8, 4, 4, 3)).astype("float32")
        return ArrayData(images, images[:, 0, 0, :1])

    eval_data = train_data

    def compute(self, model, batch, training):
        images, labels = batch
        return {"loss": keras.losses.mean_squared_error(labels, model(images, training=training))}


@pytest.mark.filterwarnings("ignore:the loss of an example depends on the other examples")  # also said, if it is drawn
def test_a_histogram_of_all_images_of_a_batch_is_said_on_several_replicas(quiet):
    """RandAugment equalizes in one of eleven draws only, which a trial may not meet."""
    options = {"steps": 1, "batch_size": 8, "eval_every": "never", "callbacks": quiet()}
    with pytest.warns(UserWarning, match="layers equalize the images of a batch as one.*each of 2 replicas"):
        fit(Augmented(), backend=engine(2), **options)
    fit(Augmented(), backend="single", **options)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 9), inner=st.integers(1, 7), cuts=st.lists(st.integers(0, 9), max_size=3),
    dtype=st.sampled_from([tf.float32, tf.float64, tf.bfloat16, tf.int32, tf.int64]), seed=st.integers(0, 99),
)  # fmt: skip
def test_parts_of_a_draw_are_the_draw(rows, inner, cuts, dtype, seed):
    """Whatever the cut, what the replicas draw is together what TensorFlow would draw for all rows."""
    arguments = {"maxval": 1000} if dtype.is_integer else {}
    whole = tf.random.stateless_uniform([rows, inner], [seed, 7], dtype=dtype, **arguments).numpy()
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    parts = []
    for low, high in itertools.pairwise(edges):
        own = Rows(
            tf.zeros([high - low, 3]), tf.constant(low, tf.int64), *2 * [tf.constant(0, tf.int64)], tf.range(low, high)
        )
        with within(Replica(Backend(), own, seed=0, most=rows)):
            parts.append(rowwise.uniform([high - low, inner], [seed, 7], dtype=dtype, **arguments).numpy())
            if dtype.is_floating:
                assert rowwise.normal([high - low, inner], [seed, 7], dtype=dtype).shape == [high - low, inner]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_draws_with_arguments_are_parts_too(dtype):
    """0.1 and 0.3 were rounded to 32 bits in float64."""
    normal, uniform = {"mean": 0.3, "stddev": 0.1, "dtype": dtype}, {"minval": 0.1, "maxval": 0.3, "dtype": dtype}
    whole = tf.random.stateless_normal([7, 5], [1, 2], **normal).numpy()
    whole_uniform = tf.random.stateless_uniform([7, 5], [1, 2], **uniform).numpy()
    own = Rows(tf.zeros([4, 1]), tf.constant(3, tf.int64), *2 * [tf.constant(0, tf.int64)], tf.range(3, 7))
    with within(Replica(Backend(), own, seed=0, most=7)):
        part = rowwise.normal([4, 5], [1, 2], **normal).numpy()
        part_uniform = rowwise.uniform([4, 5], [1, 2], **uniform).numpy()
    np.testing.assert_array_equal(part, whole[3:])
    np.testing.assert_array_equal(part_uniform, whole_uniform[3:])


@pytest.mark.parametrize("replicas", [2, 3])
def test_dropout_is_the_same_on_any_number_of_replicas(replicas):
    """In float64 nothing but the masks could make such a difference."""
    fields = {"dropout": 0.5, "dtype": "float64"}
    one, many = (trained(engine(n), fields, {}) for n in (1, replicas))
    assert largest_difference(weights(many), weights(one)) <= 1e-12
    without = trained("single", {"dtype": "float64"}, {})
    assert largest_difference(weights(one)[:2], weights(without)[:2]) > 1e-3


@pytest.mark.parametrize("legacy", [False, True])
def test_dropout_differs_between_replicas_and_repeats(legacy, quiet):
    """Each replica has one row of ones; what dropout makes of them is the loss."""
    layers = tf_keras if legacy else keras

    class Masks(Plain):
        def build_model(self):
            inputs = layers.Input((100,))
            outputs = layers.layers.Dropout(0.5)(layers.layers.Dense(100, kernel_initializer="zeros")(inputs) + 1.0)
            return layers.Model(inputs, outputs)

        def build_optimizer(self):
            return layers.optimizers.SGD(0.0)

        def train_data(self):
            return ArrayData(np.zeros([8, 100], "float32"))

        def eval_data(self):
            return None

        def compute(self, model, batch, training):
            mask = model(batch, training=training)
            other = tf.reverse(loop.all_gather(mask), [0])[tf.cast(loop.first_row(), tf.int32) :][: tf.shape(mask)[0]]
            differ = tf.reduce_mean(tf.abs(mask - other), -1)  # half of the elements differ, by 2
            code = tf.reduce_sum(mask * tf.range(100.0), -1)
            return {"loss": tf.reduce_mean(mask, -1), "differ": differ, "code": code}

    first, again, alone = (
        fit(Masks(), epochs=2, batch_size=2, backend=engine(n), callbacks=quiet(), seed=5) for n in (2, 2, 1)
    )
    assert first.metrics["differ"] > 0.5
    assert first.history == again.history
    if not legacy:
        assert first.metrics["code"] == pytest.approx(alone.metrics["code"], rel=1e-6)
    assert first.history[0]["code"] != first.history[1]["code"]


@pytest.mark.parametrize("streamed", [False, True])
def test_example_seeds_belong_to_examples(streamed, quiet):
    """What is drawn with them is on average what one replica draws, and in another epoch something else."""

    class Augmented(Plain):
        def train_data(self):
            arrays = regression(21)[:2]
            return tf.data.Dataset.from_tensor_slices(arrays) if streamed else ArrayData(*arrays)

        eval_data = train_data

        def compute(self, model, batch, training):
            seeds, other = loop.example_seed(), loop.example_seed(salt=1)
            draw = tf.map_fn(lambda seed: tf.random.stateless_uniform([], seed), seeds, fn_output_signature=tf.float32)
            more = tf.map_fn(lambda seed: tf.random.stateless_uniform([], seed), other, fn_output_signature=tf.float32)
            loss = tf.reduce_sum((model(batch[0] * draw[:, None]) - batch[1]) ** 2, -1)
            return {"loss": loss, "draw": draw, "more": more}

    one, three = (
        fit(Augmented(), epochs=2, batch_size=4, backend=engine(n), callbacks=quiet(), shuffle=True) for n in (1, 3)
    )
    for rows in zip(one.history, three.history, strict=True):
        assert rows[1]["draw"] == pytest.approx(rows[0]["draw"], rel=1e-6)
        assert rows[1]["loss"] == pytest.approx(rows[0]["loss"], rel=1e-5)
        assert rows[0]["draw"] != pytest.approx(rows[0]["more"], rel=1e-3)
    assert one.history[0]["draw"] != pytest.approx(one.history[1]["draw"], rel=1e-3)
    assert one.history[0]["eval_draw"] == one.history[1]["eval_draw"]


def test_salt_out_of_range_is_refused():
    with pytest.raises(UsageError, match="give a salt from 0 to 65535"):
        loop.example_seed(70000)


def test_gathered_evaluation_is_exact_on_streams_too(quiet):
    """A loss that looks at the whole batch, from a stream whose last batches leave replicas without rows."""

    class Contrast(Unweighted):
        def train_data(self):
            return tf.data.Dataset.from_tensor_slices(regression(21)[:2])

        eval_data = train_data

        def compute(self, model, batch, training):
            own = model(batch[0], training=training)
            everyone = loop.all_gather(own)
            place = tf.cast(loop.first_row(), tf.int32) + tf.range(tf.shape(own)[0])
            logits = -tf.abs(own - tf.transpose(everyone))
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(place, logits)
            return {"loss": loss, "rows": tf.ones_like(loss) * tf.cast(tf.shape(everyone)[0], tf.float32)}

    one, two, three = (fit(Contrast(), epochs=2, batch_size=4, backend=engine(n), callbacks=quiet()) for n in (1, 2, 3))
    assert one.metrics["rows"] == (5 * 4 * 4 + 1) / 21
    for many in (two, three):
        # The last bias has no gradient but rounding: relative to itself it would differ.
        assert largest_difference(weights(many)[:-1], weights(one)[:-1]) <= 5e-6
        assert many.metrics["eval_loss"] == pytest.approx(one.metrics["eval_loss"], rel=1e-6)
        assert many.metrics["rows"] == pytest.approx(one.metrics["rows"], rel=1e-6)


@pytest.mark.parametrize(
    ("value", "fix"),
    [(1.0, "float32(): give numbers of shape [n, ...]"), (["a"], "string(1,): give tf.strings.to_hash_bucket_fast(x")],
)
def test_gather_of_something_else_is_refused(value, fix, quiet):
    class Wrong(Plain):
        def compute(self, model, batch, training):
            loop.all_gather(tf.constant(value))
            return super().compute(model, batch, training)

    with pytest.raises(UsageError, match=re.escape(fix)):
        fit(Wrong(), callbacks=quiet())


class Normed(Plain):
    """BatchNormalization, of either family."""

    kind = keras

    def build_model(self):
        layers = self.kind.layers
        return self.kind.Sequential(
            [self.kind.Input((5,)), layers.Dense(4), layers.BatchNormalization(momentum=0.7), layers.Dense(1)]
        )

    def build_optimizer(self):
        return self.kind.optimizers.SGD(0.05)

    def compute(self, model, batch, training):
        return {"loss": tf.reduce_sum((model(batch[0], training=training) - batch[1]) ** 2, -1)}


class LegacyNormed(Normed):
    kind = tf_keras


@pytest.mark.parametrize("task", [Normed, LegacyNormed])
def test_synchronised_statistics_are_those_of_the_whole_batch(task, quiet):
    options = {"epochs": 2, "batch_size": 20, "eval_every": "never", "precision": "float32"}
    one, three = (fit(task(), backend=engine(n), callbacks=quiet(), **options) for n in (1, 3))
    for own, other in zip(one.model.variables, three.model.variables, strict=True):
        if "float" in str(own.dtype):
            np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=1e-4, atol=1e-5)


def test_unsynchronised_statistics_are_averaged_before_they_are_used(quiet, tmp_path):
    """Evaluation and checkpoint have the mean of the replicas' statistics, and all replicas have it too."""

    class Look(Callback):
        runs_on = "all"
        every = 1

        def on_steps_end(self, run, metrics):
            norm = run.model.layers[1]
            self.means, self.variances = (
                np.array(run.backend.local_values(variable.value))
                for variable in (norm.moving_mean, norm.moving_variance)
            )

        def on_checkpoint(self, run, reason):
            prints = run.fingerprints()
            assert prints[0] == prints[1] == prints[2]

    look = Look()
    separate = fit(
        Normed(), epochs=2, batch_size=20, sync_batch_norm=False, backend=engine(3), run_dir=tmp_path / "run",
        callbacks=quiet(checkpoint=Checkpoint(background=False)) + [look],
    )  # fmt: skip
    assert np.abs(look.means[0] - look.means[1]).max() > 1e-3
    norm = separate.model.layers[1]
    np.testing.assert_allclose(norm.moving_mean.numpy(), look.means.mean(0), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(norm.moving_variance.numpy(), look.variances.mean(0), rtol=1e-6, atol=1e-7)
    assert evaluate(Normed(), tmp_path / "run")["eval_loss"] == pytest.approx(separate.metrics["eval_loss"], rel=1e-6)


@pytest.mark.parametrize("axis", [-1, 1])
def test_masked_batch_norm_is_the_same_on_any_number_of_replicas(axis, quiet):
    class Masked(Plain):
        def build_model(self):
            return keras.Sequential(
                [
                    keras.Input((4, 3)),
                    keras.layers.Masking(),
                    keras.layers.BatchNormalization(axis, momentum=0.7),
                    keras.layers.GlobalAveragePooling1D(),
                    keras.layers.Dense(1),
                ]
            )

        def train_data(self):
            random = np.random.default_rng(1)
            inputs = random.normal(2.0, 1.0, [31, 4, 3]).astype("float32")
            inputs[random.random([31, 4]) < 0.4] = 0.0
            return ArrayData(inputs, inputs.sum((1, 2))[:, None])

        eval_data = train_data

        def compute(self, model, batch, training):
            return {"loss": tf.reduce_sum((model(batch[0], training=training) - batch[1]) ** 2, -1)}

        def build_optimizer(self):
            return keras.optimizers.SGD(0.01)

    one, three = (fit(Masked(), epochs=2, batch_size=8, backend=engine(n), callbacks=quiet()) for n in (1, 3))
    assert largest_difference(weights(three), weights(one)) <= 2e-5


def test_what_a_layer_adds_to_the_loss_is_that_of_its_own_replica(quiet):
    """At a collective the other replica is traced, which dropped it."""

    class Penalised(Normed):
        def build_model(self):
            first = keras.layers.Dense(4, activity_regularizer=keras.regularizers.L2(1.0))
            inner = [first, keras.layers.BatchNormalization(momentum=0.7), keras.layers.Dense(1)]
            return keras.Sequential([keras.Input((5,)), *inner])

        def train_data(self):
            return ArrayData(*regression(24)[:2])

        eval_data = train_data

    options = {"epochs": 2, "batch_size": 8, "eval_every": "never"}
    one, two = (fit(Penalised(), backend=engine(n), callbacks=quiet(), **options) for n in (1, 2))
    assert largest_difference(weights(two), weights(one)) <= 1e-3


def test_seeded_shuffle_of_a_stream_is_the_same_on_any_number_of_replicas_and_after_a_resume(quiet, tmp_path):
    """What needs all replicas must not read the stream once more: its seeds would go on."""

    class Shuffled(Normed):
        def build_model(self):
            return keras.Sequential(
                [
                    keras.Input((5,)),
                    keras.layers.Dense(4),
                    keras.layers.BatchNormalization(momentum=0.7),
                    keras.layers.Dropout(0.2),
                    keras.layers.Dense(1),
                ]
            )

        def train_data(self):
            return tf.data.Dataset.from_tensor_slices(regression(31)[:2]).shuffle(30, seed=5)

        def eval_data(self):
            return None

    def run(replicas, epochs, directory):
        options = {"epochs": epochs, "batch_size": 4, "backend": engine(replicas)}
        return fit(Shuffled(), callbacks=quiet(), run_dir=tmp_path / directory, **options)

    one, three = run(1, 2, "one"), run(3, 2, "three")
    assert three.metrics["loss"] == pytest.approx(one.metrics["loss"], rel=1e-4)
    for replicas, whole in ((1, one), (3, three)):
        run(replicas, 1, f"again-{replicas}")
        assert run(replicas, 2, f"again-{replicas}").weights_sha256 == whole.weights_sha256


def test_infinite_buffers_and_frozen_layers_stay_as_they_are(quiet):
    class Buffered(Unweighted):
        def build_model(self):
            inputs = keras.Input((5,))
            frozen = keras.layers.BatchNormalization(trainable=False, name="frozen")
            return keras.Sequential([inputs, frozen, Masked(), keras.layers.Dense(1)])

    class Masked(keras.layers.Layer):
        def build(self, shape):
            self.mask = self.add_weight(shape=(5,), initializer=keras.initializers.Constant(-np.inf), trainable=False)

        def call(self, inputs):
            return tf.maximum(inputs, self.mask)

    result = fit(Buffered(), epochs=1, batch_size=20, backend=engine(2), callbacks=quiet())
    assert np.all(result.model.layers[1].mask.numpy() == -np.inf)


def test_power_iterations_go_on_without_rows(quiet):
    class Spectral(Unweighted):
        def build_model(self):
            inner = keras.layers.SpectralNormalization(keras.layers.Dense(4))
            return keras.Sequential([keras.Input((5,)), inner, keras.layers.Dense(1)])

    one, three = (fit(Spectral(), epochs=2, batch_size=20, backend=engine(n), callbacks=quiet()) for n in (1, 3))
    assert largest_difference(weights(three), weights(one)) <= 2e-5


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_end_of_a_stream_changes_no_state(replicas, quiet):
    """The empty step with which an epoch ends drew masks and iterated: the next epoch had other numbers."""

    class Both(Unweighted):
        streamed = True

        def build_model(self):
            layers = keras.layers
            inner = [layers.Dropout(0.5, seed=1), layers.SpectralNormalization(layers.Dense(4)), layers.Dense(1)]
            return keras.Sequential([keras.Input((5,)), *inner])

        def train_data(self):
            arrays = regression(16)[:2]
            return tf.data.Dataset.from_tensor_slices(arrays) if self.streamed else ArrayData(*arrays)

        def eval_data(self):
            return None

    class Arrays(Both):
        streamed = False

    options = {"epochs": 2, "batch_size": 8, "backend": engine(replicas), "shuffle": False}
    stream, arrays = (fit(task(), callbacks=quiet(), **options).model for task in (Both, Arrays))
    for own, other in zip(stream.variables, arrays.variables, strict=True):
        np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=1e-4, atol=1e-5)


def test_a_frozen_layer_goes_on_drawing(quiet):
    """The last batch of 101 has one example: all replicas but one have nothing, and must count up the seed, too."""

    class Frozen(Unweighted):
        def build_model(self):
            frozen = keras.Sequential(
                [keras.Input((5,)), keras.layers.Dense(4, use_bias=False), keras.layers.Dropout(0.5)]
            )
            frozen.trainable = False
            return keras.Sequential([frozen, keras.layers.Dense(1)])

    options = {"epochs": 2, "batch_size": 20, "eval_every": "never"}
    one, three = (fit(Frozen(), backend=engine(n), callbacks=quiet(), **options) for n in (1, 3))
    assert largest_difference(weights(three), weights(one)) <= 5e-6
    seeds = [variable for variable in three.model.variables if "float" not in variable.dtype]
    assert len(seeds) == 1
    assert len({value.numpy().tobytes() for value in seeds[0].value.values}) == 1


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_stand_in_that_is_not_finite_counts_nothing(replicas, quiet):
    """Example 0, which stands in for replicas without rows, is nan itself: one step of each epoch is skipped."""

    class Hurt(Unweighted):
        def build_model(self):
            return keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.1), keras.layers.Dense(1)])

        def train_data(self):
            inputs, labels = regression(101)[:2]
            inputs[0] = np.nan
            return ArrayData(inputs, labels)

    result = fit(
        Hurt(), epochs=1, batch_size=20, on_nonfinite="skip", eval_every="never", backend=engine(replicas),
        callbacks=quiet(),
    )  # fmt: skip
    assert result.metrics["skipped_steps"] == 1


def test_collectives_within_a_function_of_the_models_own(quiet):
    class Inner(tf.Module):
        def __init__(self):
            super().__init__()
            self.parts = [keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]

        @tf.function
        def __call__(self, inputs, training=False):
            for part in self.parts[:1]:
                inputs = part(inputs)
            return self.parts[2](self.parts[1](inputs, training=training))

    class Wrapped(Unweighted):
        def build_model(self):
            return Inner()

    options = {"epochs": 1, "batch_size": 20, "eval_every": "never"}
    assert np.isfinite(fit(Wrapped(), callbacks=quiet(), **options).metrics["loss"])
    with pytest.raises(UsageError, match=r"within a tf.function, .* take the @tf.function away"):
        fit(Wrapped(), callbacks=quiet(), backend=engine(3), **options)
    separate = fit(Wrapped(), callbacks=quiet(), sync_batch_norm=False, **options)
    assert np.isfinite(separate.metrics["loss"])


def test_a_model_that_serves_twice_takes_the_second_setting(quiet):
    from loop import KerasTask

    def run(model, synchronised):
        task = KerasTask(lambda: model, lambda: keras.optimizers.SGD(0.0), "mse", ArrayData(*regression(31)[:2]))
        options = {"batch_size": 6, "sync_batch_norm": synchronised, "backend": backend}
        return fit(task, epochs=1, callbacks=quiet(), **options).metrics["loss"]

    backend = engine(3)
    with backend.scope():
        models = []
        for _ in range(2):
            keras.utils.set_random_seed(0)
            models.append(
                keras.Sequential(
                    [keras.Input((5,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
                )
            )
    fresh = run(models[0], False)
    assert run(models[1], True) != fresh
    assert run(models[1], False) == pytest.approx(fresh, rel=1e-6)


def test_seed_outside_of_compute_is_refused():
    with pytest.raises(UsageError, match=r"belongs into compute\(\)"):
        loop.example_seed()


@pytest.mark.parametrize(
    ("examples", "replicas", "options", "known"),
    [
        (40, 1, {}, 20), (40, 1, {"accumulate": 2}, 10), (45, 1, {}, None), (45, 1, {"drop_remainder": True}, 20),
        (40, 1, {"accumulate": 3}, None), (40, 2, {}, None),
    ],
)  # fmt: skip
def test_the_graph_knows_the_rows_of_batches_that_are_all_alike(examples, replicas, options, known, quiet):
    seen = []

    class Task(Plain):
        def eval_data(self):
            return None

        def compute(self, model, batch, training):
            seen.append(batch[0].shape[0])
            return super().compute(model, batch, training)

    fit(Task(examples), epochs=2, batch_size=20, backend=engine(replicas), callbacks=quiet(), **options)
    assert seen[-1] == known


class Hardest(Plain):
    """Counts examples that aren't among the easier half of the batch: a batch of one has no half."""

    def eval_data(self):
        return ArrayData(*regression(33)[:2])

    def compute(self, model, batch, training):
        loss = super().compute(model, batch, training)["loss"]
        everyone = loop.all_gather(loss)
        easiest = tf.math.top_k(-everyone, tf.size(everyone) // 2).values[-1]
        rows = tf.zeros_like(loss) + tf.cast(tf.size(everyone), loss.dtype)
        return {"loss": loss, "rows": rows, "weight": tf.cast(loss >= -easiest, loss.dtype)}


def test_rows_that_fill_up_a_batch_are_not_gathered(quiet):
    """It is taken for a model of batches of 20 rows, so that the short batch of the evaluation is filled up."""
    found = []
    for replicas in (1, 2):
        found.append(fit(Hardest(40), batch_size=20, backend=engine(replicas), callbacks=quiet()).metrics)
    assert found[0]["eval_rows"] == pytest.approx(found[1]["eval_rows"])
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], rel=1e-5)
