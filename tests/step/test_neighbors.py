"""What is computed of an example may depend on its neighbors: several replicas say so, where it matters."""

from dataclasses import dataclass

import keras
import numpy as np
import pytest
import tensorflow as tf

import loop
from loop import ArrayData, TrainTask, backends, fit
from loop.errors import ReplicaWarning
from tests.exactness import Prime, largest_difference, regression


@dataclass
class Pairs(Prime):
    """Losses that look at the other rows of a batch, by name."""

    kind: str = "negatives"

    def compute(self, model, batch, training):
        values = super().compute(model, batch, training)
        loss = values["loss"]
        if self.kind == "several":  # it can't do without another example
            tf.debugging.assert_greater(tf.size(loss), 1)
        if self.kind in ("negatives", "several"):
            loss -= tf.reduce_logsumexp(model(batch[0]))
        elif self.kind == "repeated mean":
            return {"loss": tf.repeat(tf.reduce_mean(loss), tf.size(loss))}
        elif self.kind == "noise":
            loss += tf.random.uniform(tf.shape(loss), dtype=loss.dtype)
        return {"loss": loss}


class RunningMean(keras.layers.Layer):
    """Takes away a mean of all inputs so far."""

    def __init__(self, gathers):
        super().__init__()
        self.gathers = gathers

    def build(self, shape):
        self.mean = self.add_weight(shape=(shape[-1],), initializer="zeros", trainable=False, name="running")

    def call(self, inputs, training=False):
        if training:
            rows = loop.all_gather(inputs) if self.gathers else inputs
            self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(tf.stop_gradient(rows), 0))
        return inputs - self.mean


@dataclass
class Centred(Prime):
    gathers: bool = False

    def looked_up(self):
        return [RunningMean(self.gathers)]


class Balance(keras.layers.Layer):
    """Adds the product of two means, as the load balancing of a mixture of experts does."""

    def __init__(self, gathers=False, product=True, always=True):
        super().__init__()
        self.gathers = gathers
        self.product = product
        self.always = always

    def call(self, inputs, training=False):
        if training or self.always:
            rows = loop.all_gather(inputs) if self.gathers else inputs
            means = tf.reduce_mean(rows, 0), tf.reduce_mean(rows**2, 0)
            self.add_loss(tf.reduce_sum(means[0] * means[1] if self.product else means[1]))
        return inputs


@dataclass
class Balanced(Prime):
    gathers: bool = False
    product: bool = True
    always: bool = True

    def looked_up(self):
        return [keras.layers.Dense(5), keras.layers.Dropout(0.1), Balance(self.gathers, self.product, self.always)]


@dataclass
class Mixed(Prime):
    """Mixes each example with its neighbor, in training alone."""

    gathers: bool = False

    def compute(self, model, batch, training):
        inputs, labels, weight = batch
        if training and self.gathers:
            everyone = loop.all_gather(inputs)
            following = loop.first_row() + tf.range(1, tf.shape(inputs, tf.int64)[0] + 1)
            inputs = (inputs + tf.gather(everyone, following % tf.shape(everyone, tf.int64)[0])) / 2
        elif training:
            inputs = (inputs + tf.roll(inputs, 1, 0)) / 2
        return {"loss": super().compute(model, (inputs, labels, weight), training)["loss"]}


class MixesByDraw(keras.layers.Layer):
    """Mixes each example with another one, in a part that it draws for the batch; in training alone."""

    def __init__(self):
        super().__init__()
        self.seed = keras.random.SeedGenerator(3)

    def call(self, inputs, training=False):
        if not training:
            return inputs
        part = keras.random.uniform((), seed=self.seed)
        return part * inputs + (1 - part) * keras.ops.flip(inputs, 0)


@dataclass
class MixedByDraw(Prime):
    def looked_up(self):
        return [MixesByDraw()]


class CountsCalls(keras.layers.Layer):
    """Its outputs depend on how many calls training has made."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.calls.assign_add(1)
        return inputs * (1 + 0.1 * self.calls)


class Centres(keras.layers.Layer):
    """Takes away the mean of the batch."""

    def call(self, inputs):
        return inputs - keras.ops.mean(inputs, 0, keepdims=True)


@dataclass
class CountsAndCentres(Prime):
    def looked_up(self):
        return [CountsCalls(), Centres()]


@dataclass
class PairsInTraining(Pairs):
    """Its losses look at other rows in training alone."""

    def compute(self, model, batch, training):
        return super().compute(model, batch, training) if training else Prime.compute(self, model, batch, training)


OPTIONS = {"epochs": 1, "batch_size": 20, "precision": "float64"}


def test_a_loss_that_depends_on_other_examples_is_said_on_several_replicas(quiet, checks):
    with pytest.warns(UserWarning, match="depends on the other examples of its batch, of which each of 2 replicas"):
        fit(Pairs(dtype="float64"), backend=backends.create("mirrored", 2), callbacks=quiet(), **OPTIONS)
    # All rows are there: nothing to say.
    fit(Pairs(dtype="float64"), backend="single", callbacks=checks(), **OPTIONS)
    with pytest.warns(UserWarning, match="of which each of 2 micro-batches has only its own"):
        fit(Pairs(dtype="float64"), accumulate=2, callbacks=checks(), **OPTIONS)


def test_so_it_is_of_a_loss_that_fails_for_one_example_alone(checks):
    """It was taken for a loss of batches of one size, of which nothing was said."""
    given = {**OPTIONS, "epochs": None, "steps": 1, "drop_remainder": True}
    for task in (Pairs(dtype="float64", kind="several"), StepOfPairs(dtype="float64", kind="several")):
        with pytest.warns(UserWarning, match="depends on the other examples of its batch"):
            fit(task, backend=backends.create("mirrored", 2), callbacks=checks(), **given)


@pytest.mark.parametrize("batch_size", range(2, 12))
def test_so_it_is_whatever_the_size_of_a_batch(batch_size, checks):
    # By the mean of a batch: that of shares which have the same examples is the same.
    @dataclass
    class Relative(Prime):
        def compute(self, model, batch, training):
            loss = super().compute(model, batch, training)["loss"]
            return {"loss": loss * tf.stop_gradient(loss / tf.reduce_mean(loss)) ** 4}

    given = {**OPTIONS, "batch_size": batch_size, "epochs": None, "steps": 1}
    with pytest.warns(UserWarning, match="depends on the other examples of its batch"):
        fit(Relative(dtype="float64"), backend=backends.create("mirrored", 2), callbacks=checks(), **given)


@dataclass
class Similar(Prime):
    """Each loss has the mean similarity to the examples of the batch; the first ones may have weight 0."""

    without_weight: int = 0

    def train_data(self):
        inputs, labels, weight = regression(24, dtype=self.dtype)
        weight[: self.without_weight] = 0
        return ArrayData(inputs, labels, weight)

    def compute(self, model, batch, training):
        values = super().compute(model, batch, training)
        similarity = tf.matmul(batch[0], batch[0], transpose_b=True)
        return {"loss": values["loss"] + tf.reduce_mean(similarity, 1), "weight": batch[2]}


@pytest.mark.parametrize(("batch_size", "without_weight"), [(6, 0), (8, 2), (8, 3)])
def test_a_mean_over_the_batch_is_said_for_any_batch_and_weights(batch_size, without_weight, checks):
    """Both shares of 6 rows had one of each example, and so the mean of the whole; weights of 0 hid all."""
    options = OPTIONS | {"batch_size": batch_size}
    task = Similar(dtype="float64", without_weight=without_weight)
    with pytest.warns(UserWarning, match="depends on the other examples of its batch, of which each of 2 replicas"):
        fit(task, backend=backends.create("mirrored", 2), callbacks=checks(), **options)


class Circle(TrainTask):
    """A loss of pairs of one class, of which the first examples have none."""

    def build_model(self):
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), keras.layers.UnitNormalization()])

    def build_optimizer(self):
        return keras.optimizers.SGD(0.1)

    def train_data(self):
        inputs = regression(20)[0]
        return ArrayData(inputs, np.arange(20) % 5)

    def compute(self, model, batch, training):
        return {"loss": keras.losses.circle(batch[1], model(batch[0], training=training))}


def test_a_loss_of_pairs_is_said_also_where_the_first_examples_have_no_pair(checks):
    with pytest.warns(UserWarning, match="depends on the other examples of its batch"):
        fit(Circle(), batch_size=10, backend=backends.create("mirrored", 2), callbacks=checks())


class Normalized(Prime):
    def looked_up(self):
        return [keras.layers.SpectralNormalization(keras.layers.Dense(5))]


def test_what_each_micro_batch_changes_is_said(checks):
    with pytest.warns(UserWarning, match=r"changes .* in each call.* with accumulate=2 a step changes it 2 times"):
        fit(Normalized(dtype="float64"), accumulate=2, callbacks=checks(), **OPTIONS)
    fit(Normalized(dtype="float64"), backend=backends.create("mirrored", 2), callbacks=checks(), **OPTIONS)
    fit(Prime(dtype="float64", dropout=0.1), accumulate=2, callbacks=checks(), **OPTIONS)  # seeds count calls


def test_statistics_of_all_replicas_are_nothing_to_say(checks):
    class AlwaysTraining(Prime):
        def compute(self, model, batch, training):
            return super().compute(model, batch, training=True)

    task = AlwaysTraining(dtype="float64", batch_norm=True)
    fit(task, backend=backends.create("mirrored", 2), callbacks=checks(), **OPTIONS)


@pytest.mark.filterwarnings("ignore:the steps draw random numbers")
@pytest.mark.parametrize("kind", ["repeated mean", "noise"])
def test_a_loss_whose_sum_is_right_or_random_is_no_such_loss(kind, checks):
    for dropout in (0.0, 0.5):
        task = Pairs(dtype="float64", kind=kind, dropout=dropout)
        fit(task, backend=backends.create("mirrored", 2), callbacks=checks(), **OPTIONS)


def test_a_running_mean_of_a_replicas_own_rows_is_said(checks):
    with pytest.warns(UserWarning, match=r"compute\(\) changes .*running by its rows, of which each of 2 replicas"):
        fit(Centred(dtype="float64"), backend=backends.create("mirrored", 2), callbacks=checks(), **OPTIONS)


def test_a_running_mean_of_all_rows_is_that_of_one_replica(quiet):
    found = []
    for backend in ("single", backends.create("mirrored", 3)):
        result = fit(Centred(dtype="float64", gathers=True), backend=backend, callbacks=quiet(), **OPTIONS)
        found.append([variable.numpy() for variable in result.model.variables])
    assert largest_difference(*found) <= 1e-12  # another order of additions


@pytest.mark.parametrize("task", [Balanced(dtype="float64"), Balanced(dtype="float64", always=False)])
def test_a_penalty_that_is_no_mean_over_rows_is_said(task, checks):
    if not task.always:
        task.looked_up = lambda: [Balance(always=False)]
    with pytest.warns(UserWarning, match="adds a loss that isn't a mean over the rows of a batch"):
        fit(task, backend=backends.create("mirrored", 2), callbacks=checks(), **OPTIONS)


@pytest.mark.parametrize("task", [Balanced(dtype="float64", gathers=True), Balanced(dtype="float64", product=False)])
def test_a_penalty_of_all_rows_or_a_mean_is_nothing_to_say(task, checks):
    fit(task, backend=backends.create("mirrored", 2), callbacks=checks(), **OPTIONS)


def test_examples_that_are_mixed_in_training_alone_are_said(checks):
    with pytest.warns(UserWarning, match="depends on the other examples of its batch, of which each of 2 replicas"):
        fit(Mixed(dtype="float64"), backend=backends.create("mirrored", 2), callbacks=checks(), **OPTIONS)
    fit(Mixed(dtype="float64", gathers=True), backend=backends.create("mirrored", 2), callbacks=checks(), **OPTIONS)


@pytest.mark.parametrize(
    "task",
    [
        MixedByDraw(dtype="float64"),
        Mixed(dtype="float64", dropout=0.5),
        PairsInTraining(dtype="float64", dropout=0.5),
        CountsAndCentres(dtype="float64"),
    ],
)
def test_examples_that_are_mixed_beside_random_layers_or_counters_are_said(task, checks):
    with pytest.warns(UserWarning, match="depends on the other examples of its batch, of which each of 2 replicas"):
        fit(task, backend=backends.create("mirrored", 2), callbacks=checks(), **OPTIONS)


@dataclass
class Views(Prime):
    """Two views of each example go through the model as one batch, one after the other or side by side."""

    beside: bool = False

    def compute(self, model, batch, training):
        inputs, labels, weight = batch
        views = tf.stack([inputs, inputs[:, ::-1]], 1 if self.beside else 0)
        outputs = model(tf.reshape(views, [-1, 5]), training=training)
        outputs = tf.reshape(outputs, [-1, 2] if self.beside else [2, -1])
        loss = tf.reduce_sum((outputs - (labels if self.beside else labels[:, 0])) ** 2, 1 if self.beside else 0)
        # So great that what the draws make of it is a small part of it, as for a model that isn't trained yet.
        return {"loss": loss + 100, "weight": weight}


class StepOfViews(Views):
    def train_step(self, model, step):
        step.minimize(lambda batch: self.compute(model, batch, training=True))

    def compute(self, model, batch, training):
        return super().compute(model, batch, training) if training else Prime.compute(self, model, batch, training)


@pytest.mark.parametrize("kind", [Views, StepOfViews])
def test_draws_for_several_batches_as_one_are_said(kind, quiet, checks):
    two = backends.create("mirrored", 2)
    for batch_norm in (False, True):
        task = kind(dtype="float64", dropout=0.5, batch_norm=batch_norm)
        with pytest.warns(UserWarning, match="where Dropout or noise gets several batches as one"):
            fit(task, backend=two, callbacks=checks(), **OPTIONS)
        # Nothing is drawn.
        fit(kind(dtype="float64", batch_norm=batch_norm), backend=two, callbacks=checks(), **OPTIONS)
    found = []
    for backend in ("single", two):  # a row's numbers are side by side: nothing to say
        result = fit(kind(dtype="float64", dropout=0.5, beside=True), backend=backend, callbacks=quiet(), **OPTIONS)
        found.append([variable.numpy() for variable in result.model.variables])
    assert largest_difference(*found) <= 1e-12


class StepOfPairs(Pairs):
    """Its losses look at other rows in `train_step` alone."""

    def train_step(self, model, step):
        step.minimize(lambda batch: Pairs.compute(self, model, batch, training=True))

    def compute(self, model, batch, training):
        return Prime.compute(self, model, batch, training)


def test_a_training_step_whose_losses_depend_on_other_examples_is_said(checks):
    two = backends.create("mirrored", 2)
    for dropout in (0.0, 0.5):
        with pytest.warns(UserWarning, match="depends on the other examples of its batch, of which each of 2 replicas"):
            fit(StepOfPairs(dtype="float64", dropout=dropout), backend=two, callbacks=checks(), **OPTIONS)
        task = StepOfPairs(dtype="float64", kind="repeated mean", dropout=dropout)
        fit(task, backend=two, callbacks=checks(), **OPTIONS)  # its sum is right


class SlowRange(keras.layers.Layer):
    """Follows the greatest input slowly, as the ranges of quantization do."""

    def build(self, shape):
        self.top = self.add_weight(shape=(), initializer=keras.initializers.Constant(6), trainable=False, name="top")

    def call(self, inputs, training=False):
        if training:
            self.top.assign(0.999 * self.top + 0.001 * tf.reduce_max(inputs))
        return tf.minimum(inputs, tf.convert_to_tensor(self.top))


class Ranged(Prime):
    def looked_up(self):
        return [SlowRange()]


class StepOfRange(Ranged):
    def train_step(self, model, step):
        step.minimize(lambda batch: super(StepOfRange, self).compute(model, batch, training=True))

    def compute(self, model, batch, training):
        return super().compute(model, batch, training=False)


@pytest.mark.parametrize("kind", [Ranged, StepOfRange])
@pytest.mark.parametrize("first", [0, 1])
def test_a_slow_running_maximum_of_a_replicas_own_rows_is_said(kind, first, checks):
    class Ordered(kind):
        def train_data(self):
            inputs, labels, weights = regression(self.examples, dtype=self.dtype)
            inputs[first] += 3  # the greatest of the first few rows is this one
            return ArrayData(inputs, labels, weights)

    with pytest.warns(UserWarning, match=r"compute\(\) changes .*top by its rows, of which each of 2 replicas"):
        fit(Ordered(), backend=backends.create("mirrored", 2), callbacks=checks(), epochs=1, batch_size=20)


@dataclass
class ByPlace(Prime):
    """What it computes of an example depends on the example's place in the batch, or in its epoch."""

    kind: str = "weight"

    def compute(self, model, batch, training):
        inputs, labels, weight = batch
        places = tf.range(tf.shape(inputs)[0])
        if self.kind == "weight":
            weight = 1 / tf.cast(1 + places, weight.dtype)
        elif training:
            seeds = loop.example_seed() if self.kind == "seed of example" else tf.stack([places, 7 + 0 * places], 1)
            inputs = tf.map_fn(self._noisy, (inputs, seeds), fn_output_signature=inputs.dtype)
        return super().compute(model, (inputs, labels, weight), training)

    @staticmethod
    def _noisy(pair):
        inputs, seed = pair
        return inputs + tf.random.stateless_normal((5,), seed, dtype=inputs.dtype)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_what_depends_on_an_examples_place_in_the_batch_is_said(dropout, checks):
    two = backends.create("mirrored", 2)
    for kind in ("weight", "seed of place"):
        task = ByPlace(dtype="float64", kind=kind, dropout=dropout)
        with pytest.warns(UserWarning, match="depends on the other examples of its batch"):
            fit(task, backend=two, callbacks=checks(), **OPTIONS)
    task = ByPlace(dtype="float64", kind="seed of example", dropout=dropout)
    fit(task, backend=two, callbacks=checks(), **OPTIONS)  # the same on any number of replicas


class Experts(keras.layers.Layer):
    """Each example goes to one of two halves of the features, as long as fewer than three before it have gone there."""

    def call(self, inputs):
        chosen = tf.one_hot(tf.cast(inputs[:, 0] > 0, tf.int32), 2, dtype=inputs.dtype)
        has_room = tf.cast(tf.cumsum(chosen, 0) < 3, inputs.dtype)
        return inputs * tf.reduce_sum(chosen * has_room, 1, keepdims=True)


def test_experts_that_take_a_few_examples_of_a_batch_are_said(checks):
    class Task(Prime):
        def looked_up(self):
            return [Experts()]

        def compute(self, model, batch, training):
            return {"loss": super().compute(model, batch, training)["loss"]}

    with pytest.warns(UserWarning, match="depends on the other examples of its batch"):
        fit(Task(dtype="float64", dropout=0.5), backend=backends.create("mirrored", 2), callbacks=checks(), **OPTIONS)


class HardestPairs(Prime):
    """The loss of an example counts if the batch has another one of its sign."""

    def compute(self, model, batch, training):
        inputs, labels, _ = batch
        signs = tf.sign(labels[:, 0])
        others = tf.reduce_sum(tf.cast(signs[:, None] == signs, inputs.dtype), 1) - 1
        loss = tf.reduce_sum((model(inputs, training=training) - labels) ** 2, -1)
        return {"loss": loss, "weight": tf.cast(others > 0, inputs.dtype)}


def test_a_weight_that_depends_on_other_examples_is_said(checks):
    with pytest.warns(UserWarning, match="depends on the other examples of its batch"):
        fit(HardestPairs(dtype="float64"), backend=backends.create("mirrored", 2), callbacks=checks(), **OPTIONS)


class Sharp(Prime):
    """Its loss is that of weights which a gradient over the rows at hand has moved."""

    def compute(self, model, batch, training):
        inputs, labels, _ = batch
        if not training:
            return {"loss": tf.reduce_sum((model(inputs) - labels) ** 2, -1)}
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(inputs, training=True) - labels) ** 2)
        weights = [variable.value for variable in model.trainable_variables]
        moved = [weight + gradient for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True)]
        state = [variable.value for variable in model.non_trainable_variables]
        outputs, _ = model.stateless_call(moved, state, inputs, training=True)
        return {"loss": tf.reduce_sum((outputs - labels) ** 2, -1)}


class StepOfSharp(Sharp):
    def train_step(self, model, step):
        step.minimize(lambda batch: Sharp.compute(self, model, batch, training=True))


@pytest.mark.parametrize("kind", [Sharp, StepOfSharp])
def test_a_gradient_over_the_rows_of_a_replica_is_said(kind, checks):
    """Of the copies of replicas, TensorFlow knows no gradient outside of a replica: such a trial is made in one."""
    with pytest.warns(UserWarning, match="depends on the other examples of its batch, of which each of 2 replicas"):
        fit(kind(dtype="float64"), backend=backends.create("mirrored", 2), callbacks=checks(), **OPTIONS)


class SmoothAndBalanced(Balanced):
    def compute(self, model, batch, training):
        with tf.GradientTape() as tape:
            loss = super().compute(model, batch, training)["loss"]
        gradient = tape.gradient(loss, model.trainable_variables[0].value)
        return {"loss": loss + tf.reduce_sum(gradient**2)}


def test_a_product_of_means_beside_a_gradient_is_said(checks):
    with pytest.warns(ReplicaWarning) as warned:
        fit(SmoothAndBalanced(dtype="float64"), backend=backends.create("mirrored", 2), callbacks=checks(), **OPTIONS)
    assert "adds a loss that isn't a mean over the rows" in " ".join(str(warning.message) for warning in warned)


class Greatest(Prime):
    """Looks for the greatest row at hand, as the mining of hard examples does."""

    def compute(self, model, batch, training):
        return {"loss": super().compute(model, batch, training)["loss"] + tf.reduce_max(batch[0])}


class StepOfGreatest(Greatest):
    def train_step(self, model, step):
        step.minimize(lambda batch: Greatest.compute(self, model, batch, training=True))


@pytest.mark.parametrize("kind", [Greatest, StepOfGreatest])
@pytest.mark.parametrize("greatest", [0, 1, 2])
def test_the_greatest_of_the_rows_of_a_replica_is_said(kind, greatest, checks):
    """It is the same in all shares of a few examples, where each share has that example."""

    class Ordered(kind):
        def train_data(self):
            inputs, labels, weights = regression(self.examples, dtype=self.dtype)
            inputs[greatest] += 3
            return ArrayData(inputs, labels, weights)

    with pytest.warns(UserWarning, match="depends on the other examples of its batch"):
        fit(Ordered(dtype="float64"), backend=backends.create("mirrored", 2), callbacks=checks(), **OPTIONS)
