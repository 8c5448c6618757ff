"""What `compute` may say of its values: a summed loss, a divisor that isn't the weight, values without weights."""

from dataclasses import dataclass

import keras
import numpy as np
import pytest
import tensorflow as tf

import loop
from loop import ArrayData, TrainTask, UsageError, fit
from loop.backends import create
from loop.errors import TrainingError
from loop.model.precision import keras_precision
from loop.step.metric_sums import MetricSums
from tests.exactness import largest_difference
from tests.tasks import Plain, TwoRates, Unweighted, Weighted, regression

EXAMPLES, BATCH, EPOCHS, RATE, CLIP = 101, 20, 2, 0.004, 2.0


def arrays():
    return [each.astype("float64") for each in regression(EXAMPLES)]


def engine(replicas):
    return create("mirrored", replicas) if replicas > 1 else "single"


@dataclass
class AsKeras(TrainTask):
    """A loss that is reduced as a Keras loss with sample weights is."""

    reduction: str = "sum"
    streamed: bool = False
    penalty: bool = True
    rate: float = RATE

    def __post_init__(self):
        self.loss_reduction = "sum" if self.reduction == "sum" else "mean"

    def build_model(self):
        regularizer = keras.regularizers.L2(1e-2) if self.penalty else None
        dense = keras.layers.Dense
        layers = [dense(4, "tanh", kernel_regularizer=regularizer), keras.layers.ActivityRegularization(0.1), dense(1)]
        return keras.Sequential([keras.Input((5,)), *layers] if self.penalty else [keras.Input((5,)), *layers[::2]])

    def build_optimizer(self):
        return keras.optimizers.SGD(self.rate, momentum=0.9)

    def train_data(self):
        return tf.data.Dataset.from_tensor_slices(tuple(arrays())) if self.streamed else ArrayData(*arrays())

    def eval_data(self):
        return self.train_data()

    def compute(self, model, batch, training):
        inputs, labels, weight = batch
        loss = tf.reduce_sum((model(inputs, training=training) - labels) ** 2, -1)
        values = {"loss": loss, "weight": weight}
        return values if self.reduction == "sum" else values | {"loss_count": tf.ones_like(loss)}


def by_keras(reduction, penalty, clip=None):
    """Weights, and the loss of the last epoch and of the evaluation, as Keras's own `fit` has them."""
    keras.utils.set_random_seed(0)
    with keras_precision("float64"):
        model = AsKeras(penalty=penalty).build_model()
        optimizer = keras.optimizers.SGD(RATE, momentum=0.9, global_clipnorm=clip)
        model.compile(optimizer, keras.losses.MeanSquaredError(reduction))
        inputs, labels, weight = arrays()
        settings = {"sample_weight": weight, "batch_size": BATCH, "verbose": 0}
        history = model.fit(inputs, labels, epochs=EPOCHS, shuffle=False, **settings).history
        evaluated = model.evaluate(inputs, labels, **settings)
    return [variable.numpy() for variable in model.trainable_variables], history["loss"][-1], evaluated


@pytest.fixture(scope="module")
def keras_fits():
    found = {}

    def once(*key):
        if key not in found:
            found[key] = by_keras(*key)
        return found[key]

    return once


@pytest.mark.parametrize(
    ("reduction", "replicas", "task", "options"),
    [
        ("sum", 1, {}, {"compile": "xla"}),
        ("sum", 1, {"streamed": True}, {"accumulate": 3}),
        ("sum", 2, {"streamed": True}, {}),
        ("sum", 3, {}, {"accumulate": 2, "clip_norm": CLIP}),
        ("sum_over_batch_size", 1, {}, {"compile": "xla"}),
        ("sum_over_batch_size", 2, {}, {}),
        ("sum_over_batch_size", 3, {"streamed": True}, {"accumulate": 2, "clip_norm": CLIP}),
    ],
)
def test_as_keras_reduces(reduction, replicas, task, options, keras_fits, quiet):
    """To rounding of float64, whatever the replicas: the last batch has one example. Keras's loss is a float32."""
    # A penalty of activations is a mean over the batch; of micro-batches of unequal size, it is one of means.
    evaluated = "epoch" if options.get("accumulate") else "never"  # where Keras's number can be compared
    found = fit(
        AsKeras(reduction, **task, penalty=not options.get("accumulate")), epochs=EPOCHS, batch_size=BATCH,
        backend=engine(replicas), precision="float64", shuffle=False, eval_every=evaluated, callbacks=quiet(),
        **options,
    )  # fmt: skip
    weights, loss, evaluated = keras_fits(reduction, not options.get("accumulate"), options.get("clip_norm"))
    assert largest_difference([variable.numpy() for variable in found.model.trainable_variables], weights) <= 1e-12
    if options.get("accumulate"):  # without penalties, which Keras counts in
        assert found.metrics["loss"] == pytest.approx(loss, rel=1e-6)
        assert found.metrics["eval_loss"] == pytest.approx(evaluated, rel=1e-6)


class SummedRates(TwoRates):
    """Two optimizers, in one step or in two of their own; a sum with the rate r is a mean with the rate 16 r."""

    def __init__(self, loss_reduction, own_step=False):
        super().__init__(examples=96)
        self.loss_reduction, self.own_step = loss_reduction, own_step
        self.rate = 2.0**-7 if loss_reduction == "sum" else 2.0**-3

    def build_optimizer(self):
        return {name: keras.optimizers.SGD(self.rate) for name in ("body", "head")}

    def eval_data(self):
        return None

    def compute(self, model, batch, training):
        inputs, labels = batch
        error = tf.cast(model(inputs, training=training), tf.float32) - labels
        return {"loss": tf.reduce_sum(error**2, -1)}

    def train_step(self, model, step):
        for name in ("body", "head") if self.own_step else ("",):
            step.minimize(lambda batch: self.compute(model, batch, training=True), name)


@pytest.mark.parametrize(
    ("replicas", "own_step", "options"),
    [(2, False, {"precision": "mixed_float16"}), (3, True, {}), (1, False, {"compile": "xla"})],
)
def test_a_summed_loss_with_several_optimizers_and_a_loss_scale(replicas, own_step, options, quiet):
    """To the bit: batch and rates are powers of 2."""
    mean, summed = (
        fit(
            SummedRates(reduction, own_step), epochs=1, batch_size=16, backend=engine(replicas), callbacks=quiet(),
            **options,
        )
        for reduction in ("mean", "sum")
    )  # fmt: skip
    assert summed.weights_sha256 == mean.weights_sha256
    name = "body_loss" if own_step else "loss"
    assert summed.metrics[name] == pytest.approx(16 * mean.metrics[name], rel=1e-5)


class SomeBad:
    """Twenty examples of whole numbers, of which each fifth can't be read."""

    good = tuple(index for index in range(20) if index % 5)

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index not in self.good:
            raise ValueError("bad")
        return np.array([index % 3, 1.0]), np.array([index % 7 - 3.0])


@dataclass
class SummedWithBad(TrainTask):
    """A summed loss with a penalty, over examples of which some are left out, or aren't there."""

    loss_reduction = "sum"
    there: bool = True

    def build_model(self):
        penalty = keras.regularizers.L2(0.25)
        return keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones", kernel_regularizer=penalty)]
        )

    def build_optimizer(self):
        return keras.optimizers.SGD(2.0**-8)

    def train_data(self):
        if self.there:
            return loop.IndexedData(SomeBad(), on_bad_example="skip")
        examples = [SomeBad()[index] for index in SomeBad.good]
        return ArrayData(*map(np.stack, zip(*examples, strict=True)))

    def eval_data(self):
        return self.train_data()

    def compute(self, model, batch, training):
        inputs, labels = batch
        return {"loss": tf.reduce_sum((model(inputs, training=training) - labels) ** 2, -1)}


@pytest.mark.filterwarnings("ignore:example")
@pytest.mark.parametrize(("replicas", "options"), [(1, {}), (1, {"accumulate": 2}), (3, {})])
def test_a_summed_loss_counts_no_examples_that_are_left_out(replicas, options, quiet):
    """Penalties count once, and the mean over batches weighs the rows that are there. To the bit: all is exact."""
    without, left_out = (
        fit(
            SummedWithBad(there), batch_size=32, shuffle=False, precision="float64", callbacks=quiet(),
            backend=engine(replicas if there else 1), **(options if there else {}),
        )
        for there in (False, True)
    )  # fmt: skip
    assert left_out.weights_sha256 == without.weights_sha256
    assert left_out.metrics == without.metrics


@pytest.mark.parametrize("options", [{"local_steps": 2}, {"reduction": "adasum"}])
def test_a_summed_loss_is_refused_where_replicas_make_steps_of_their_own(options, quiet):
    with pytest.raises(UsageError, match=r"with loss_reduction='sum': replicas average steps"):
        fit(SummedRates("sum"), backend=engine(2), callbacks=quiet(), **options)


def test_another_loss_reduction_is_refused(quiet):
    with pytest.raises(UsageError, match=r"SummedRates.loss_reduction is 'total': give 'mean'"):
        fit(SummedRates("total"), callbacks=quiet())


class Counting(Unweighted):
    """Two classes, of which one weighs a fifth; what is counted has weights, or has none."""

    def build_metrics(self):
        return {name: keras.metrics.TruePositives() for name in ("found", "found_weighed")}

    def compute(self, model, batch, training):
        positive = batch[1][:, 0] > 0
        weight = tf.where(positive, 0.2, 0.0)
        values = super().compute(model, batch, training)
        right = tf.cast(positive, tf.float32)
        return values | {
            "weight": weight,
            "found": loop.unweighted((positive, right)),
            "found_weighed": (positive, right),
            "right": loop.unweighted(right),
            "right_weighed": right,
            "two": loop.unweighted(tf.stack([right, right], 1)),
            "first": loop.unweighted(batch[0][:, 0]),
        }


@pytest.mark.parametrize(("replicas", "options"), [(1, {"compile": "xla"}), (3, {"accumulate": 2})])
def test_unweighted_values_count_examples(replicas, options, quiet):
    inputs, labels, _ = regression(101)
    positive = int((labels > 0).sum())
    found = fit(Counting(), epochs=1, batch_size=20, backend=engine(replicas), callbacks=quiet(), **options).metrics
    for prefix in ("", "eval_"):
        assert found[f"{prefix}found"] == positive
        assert found[f"{prefix}found_weighed"] == pytest.approx(0.2 * positive, rel=1e-6)
        assert found[f"{prefix}right"] == found[f"{prefix}two"] == positive / 101
        assert found[f"{prefix}right_weighed"] == 1.0
        assert found[f"{prefix}first"] == pytest.approx(inputs[:, 0].mean(dtype="float64"), rel=1e-5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (lambda loss: {"loss": loop.unweighted(loss)}, r'"loss" as loop.unweighted\(...\), which is for metrics'),
        (
            lambda loss: {"loss": loss, "loss_count": tf.ones([tf.size(loss), 2])},
            '"loss_count" of shape .3, 2. beside "loss"',
        ),
        (lambda loss: {"loss": loss, "loss_count": tf.constant(1.0)}, 'a scalar for "loss_count"'),
    ],
)
def test_misplaced_marks_are_refused(values, message, quiet):
    class Wrong(Plain):
        def compute(self, model, batch, training):
            return values(super().compute(model, batch, training)["loss"])

    with pytest.raises(UsageError, match=message):
        fit(Wrong(), callbacks=quiet())


def test_what_is_counted_may_be_the_examples_of_a_loss_per_element(quiet):
    """The loss of a sequence is the sum over its tokens, and that of a batch the mean over sequences."""

    class Sequences(Weighted):
        def compute(self, model, batch, training):
            tokens = (model(batch[0], training=training) - tf.constant([[1.0, 2.0, 3.0]])) ** 2
            return {"loss": tokens, "loss_count": tf.ones([tf.shape(tokens)[0]])}

    class Added(Weighted):
        def compute(self, model, batch, training):
            tokens = (model(batch[0], training=training) - tf.constant([[1.0, 2.0, 3.0]])) ** 2
            return {"loss": tf.reduce_sum(tokens, -1)}

    one, other = (fit(task(), epochs=1, batch_size=20, callbacks=quiet()) for task in (Sequences, Added))
    weights = [[variable.numpy() for variable in each.model.trainable_variables] for each in (one, other)]
    assert largest_difference(*weights) <= 1e-5
    assert one.metrics["eval_loss"] == pytest.approx(other.metrics["eval_loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("divisor", "replicas", "options"), [(np.nan, 1, {}), (np.inf, 1, {"accumulate": 2}), (np.inf, 3, {})]
)
def test_a_divisor_that_is_not_finite_is_found_before_the_weights_change(divisor, replicas, options, quiet):
    inputs, labels, _ = regression(100)
    divisors = np.ones(100, "float32")
    divisors[50] = divisor

    class Divided(Unweighted):
        def train_data(self):
            return ArrayData(inputs, labels, divisors)

        def eval_data(self):
            return None

        def build_model(self):
            return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])

        def build_optimizer(self):
            return keras.optimizers.SGD(0.01)

        def compute(self, model, batch, training):
            loss = super().compute(model, batch[:2], training)["loss"]
            return {"loss": loss, "loss_count": batch[2]}

    def train(examples, **more):
        settings = {"batch_size": 20, "shuffle": False, "callbacks": quiet(), **options, **more}
        result = fit(Divided(), steps=examples // 20, backend=engine(replicas), **settings)
        return [weight.numpy() for weight in result.model.weights]

    # The third batch makes no step.
    assert largest_difference(train(60, on_nonfinite="skip"), train(40)) == 0
    with pytest.raises(TrainingError, match="step 3"):
        train(60)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_a_metric_ignores_masked_elements_in_any_precision(dtype):
    metric = keras.metrics.MeanSquaredError()
    predictions = tf.zeros([2, 3, 1], dtype)
    predictions._keras_mask = tf.constant([[True, False, False], [True, True, False]])
    labels = tf.constant([[1.0, 50.0, 50.0], [2.0, 3.0, 50.0]])[..., tf.newaxis]
    sums = MetricSums(["loss", "mse"], {"mse": metric})
    total, count = sums.states({"mse": (labels, predictions)}).numpy()
    assert total / count == pytest.approx((1 + 4 + 9) / 3)
