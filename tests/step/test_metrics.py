"""Metrics that aren't means over examples, and evaluation that is exact for every size."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.metrics import f1_score, roc_auc_score

import loop
from loop import ArrayData, UsageError, fit
from loop.backends import create
from loop.step.metric_sums import MetricSums, try_metrics
from tests.products import singles
from tests.tasks import Plain, Unweighted, regression


def engine(replicas):
    return create("mirrored", replicas) if replicas > 1 else "single"


class Judged(Unweighted):
    """Scores on a grid, so that the AUC of Keras, which counts by thresholds, is the exact one."""

    size: int = 101
    log = None

    def __init__(self, size=101):
        super().__init__()
        self.size = size

    def eval_data(self):
        random = np.random.default_rng(self.size)
        truth = random.integers(0, 2, self.size)
        scores = np.clip(np.round(truth * 0.3 + random.normal(0.4, 0.25, self.size), 2), 0, 1)
        weight = random.integers(1, 4, self.size).astype("float32")
        return ArrayData(truth.astype("int64"), scores.astype("float32"), weight)

    def train_data(self):
        return ArrayData(*Judged(40).eval_data().arrays)

    def build_metrics(self):
        grid = [-0.005 + 0.01 * i for i in range(1, 101)]
        return {
            "auc": keras.metrics.AUC(thresholds=grid),
            "f1": keras.metrics.F1Score(threshold=0.5),
            "perplexity": loop.Perplexity(),
        }

    def compute(self, model, batch, training):
        truth, scores, weight = batch
        loss = tf.reduce_sum((model(tf.tile(scores[:, None], [1, 5])) - 1.0) ** 2, -1)
        return {
            "loss": loss,
            "weight": weight,
            "auc": (truth, scores),
            "f1": (truth[:, None], scores[:, None]),
            "perplexity": scores,
            "score": scores,
        }


@pytest.mark.parametrize(
    ("size", "replicas"), [(1, 3), (19, 3), (20, 3), (21, 3), (101, 3), *singles([101, 21], [1, 2])]
)
def test_evaluation_is_exact_for_every_size(size, replicas, quiet):
    task = Judged(size)
    truth, scores, weight = task.eval_data().arrays
    metrics = fit(task, steps=1, batch_size=20, backend=engine(replicas), callbacks=quiet()).metrics
    mean = np.average(scores.astype("float64"), weights=weight)
    assert metrics["eval_score"] == pytest.approx(mean, rel=1e-6)
    assert metrics["eval_perplexity"] == pytest.approx(np.exp(mean), rel=1e-6)
    if len(set(truth)) == 2:
        assert metrics["eval_auc"] == pytest.approx(roc_auc_score(truth, scores, sample_weight=weight), abs=1e-6)
        expected = f1_score(truth, scores > 0.5, sample_weight=weight)
        assert metrics["eval_f1_0"] == pytest.approx(expected, abs=1e-6)


def test_no_evaluation_data_at_all(quiet):
    with pytest.raises(UsageError, match=r"eval_data\(\) has no examples"):
        fit(Judged(0), steps=1, callbacks=quiet())


@pytest.mark.parametrize("replicas", [1, 3])
def test_metrics_of_training_are_those_of_the_epoch(replicas, quiet):
    truth, scores, weight = Judged().train_data().arrays
    result = fit(Judged(), epochs=2, batch_size=7, backend=engine(replicas), callbacks=quiet(), accumulate=2)
    for row in result.history:
        assert row["auc"] == pytest.approx(roc_auc_score(truth, scores, sample_weight=weight), abs=1e-6)
    assert list(result.metrics)[:4] == ["loss", "auc", "f1_0", "perplexity"]


class Confusion(keras.metrics.Metric):
    """How often each class is taken for each."""

    def __init__(self):
        super().__init__(name="confusion")
        self.counts = self.add_variable((2, 2), "zeros", name="counts")

    def update_state(self, truth, found, sample_weight=None):
        self.counts.assign_add(tf.math.confusion_matrix(truth, found, 2, dtype=self.counts.dtype))

    def result(self):
        return self.counts.value


def test_own_metric_with_a_matrix_as_its_result(quiet):
    class Confused(Judged):
        def build_metrics(self):
            return {"confusion": Confusion()}

        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return {"loss": values["loss"], "confusion": (batch[0], tf.cast(batch[1] > 0.5, tf.int64))}

    truth, scores, _ = Judged().eval_data().arrays
    metrics = fit(Confused(), steps=1, batch_size=20, backend=engine(3), callbacks=quiet()).metrics
    for i in range(2):
        for j in range(2):
            assert metrics[f"eval_confusion_{i}_{j}"] == np.sum((truth == i) & ((scores > 0.5) == j))


class Itself(Confusion):
    """Its result is its variable, as Keras allows: not the value of it."""

    def result(self):
        return self.counts


def test_a_metric_may_return_its_variable(quiet):
    class Confused(Judged):
        metric = Confusion

        def build_metrics(self):
            return {"confusion": self.metric()}

        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return {"loss": values["loss"], "confusion": (batch[0], tf.cast(batch[1] > 0.5, tf.int64))}

    def metrics(metric):
        task = Confused()
        task.metric = metric
        return fit(task, steps=1, batch_size=20, callbacks=quiet()).metrics

    assert metrics(Itself) == metrics(Confusion)


class Largest(keras.metrics.Metric):
    """No sum; as Keras makes its state if nothing else is said, it claims to be one."""

    def __init__(self, aggregation="sum"):
        super().__init__(name="largest")
        self.largest = self.add_variable((), "zeros", name="largest", aggregation=aggregation)

    def update_state(self, value, sample_weight=None):
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(value)))

    def result(self):
        return self.largest.value


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"largest": Largest()}, "the state 'largest' of 'largest' isn't a sum that starts from 0"),
        ({"largest": Largest("none")}, "the state 'largest' of 'largest' isn't a sum that starts from 0"),
        ({"auc": keras.metrics.AUC()}, r"has 'auc', but compute\(\) returns no value of that name"),
        ({"loss": keras.metrics.Mean()}, "that name is taken"),
        ({"x": print}, "return a metric of Keras 3"),
        ([], r"build_metrics\(\) returned list: return a dict"),
    ],
)
def test_metrics_that_cannot_be_put_together_are_refused(metrics, message, quiet):
    class Wrong(Plain):
        def build_metrics(self):
            return metrics

        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return values | ({"largest": batch[0]} if "largest" in metrics else {})

    with pytest.raises(UsageError, match=message):
        fit(Wrong(), callbacks=quiet())


def test_a_metric_of_whole_batches_is_refused(quiet):
    """Each replica would take the mean of its own rows: on 1 and on 2 replicas there would be other numbers."""

    class OfBatches(Plain):
        columns = slice(1)  # shape [n, 1]

        def build_metrics(self):
            return {"error": self.metric}

        def compute(self, model, batch, training):
            pair = (batch[1][:, self.columns], model(batch[0])[:, self.columns])
            return super().compute(model, batch, training) | {"error": pair}

    def train(metric, columns=slice(1)):
        task = OfBatches()
        task.metric, task.columns = metric, columns
        return fit(task, steps=1, batch_size=20, callbacks=quiet()).metrics["error"]

    def mean(labels, predictions):
        return tf.reduce_mean(tf.abs(labels - predictions))

    assert train(keras.metrics.MeanAbsoluteError()) > 0
    for metric, columns in ((keras.metrics.MeanMetricWrapper(mean), slice(1)), (keras.metrics.MeanAbsoluteError(), 0)):
        with pytest.raises(UsageError, match=r"'error' of several examples isn't made of those of each example"):
            train(metric, columns)


def test_counts_stay_exact_when_they_are_large(quiet):
    class Counting(Plain):
        def build_metrics(self):
            return {"count": keras.metrics.Sum()}

        def train_data(self):
            return ArrayData(*(np.tile(array, [400, 1]) for array in regression(101)[:2]))

        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return values | {"count": tf.ones_like(values["loss"]) * 1000.0}

    result = fit(Counting(), batch_size=101, callbacks=quiet(), eval_every="never")
    assert result.metrics["count"] == pytest.approx(40400 * 1000.0, rel=1e-7)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda batch: batch[1], r"F1Score, the metric 'f1', can't be updated with tensors of shape \[3\], \[3\]"),
        (lambda batch: (batch[0], batch[1]), "F1Score, the metric 'f1', can't be updated"),
    ],
)
def test_metric_with_wrong_arguments_is_refused(value, message, quiet):
    class Wrong(Judged):
        def compute(self, model, batch, training):
            return super().compute(model, batch, training) | {"f1": value(batch)}

    with pytest.raises(UsageError, match=message):
        fit(Wrong(), callbacks=quiet())


def test_a_result_that_is_a_dict_is_a_number_for_each_key():
    class Counted(keras.metrics.Mean):
        def result(self):
            return {"mean": super().result(), "pair": [super().result(), self.count]}

    sums = MetricSums(["loss", "m"], {"m": Counted()})
    values = {"loss": tf.ones([3]), "m": tf.constant([1.0, 2.0, 6.0])}
    try_metrics(sums.metrics, values)
    means = sums.means(np.array([6.0, 3.0]), sums.states(values).numpy())
    assert means == {"loss": 2.0, "m_mean": 3.0, "m_pair_0": 3.0, "m_pair_1": 3.0}


def test_metric_may_have_weights_of_its_own(quiet):
    class Own(Judged):
        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return values | {"auc": (batch[0], batch[1], tf.ones_like(batch[2]))}

    truth, scores, _ = Own().eval_data().arrays
    metrics = fit(Own(), steps=1, batch_size=20, backend=engine(3), callbacks=quiet()).metrics
    assert metrics["eval_auc"] == pytest.approx(roc_auc_score(truth, scores), abs=1e-6)


def test_value_that_is_named_like_an_element_of_a_metric_is_refused(quiet):
    class Clash(Judged):
        def compute(self, model, batch, training):
            return super().compute(model, batch, training) | {"f1_0": batch[1]}

    with pytest.raises(UsageError, match="compute\\(\\) returns 'f1_0', but that is an element of the metric 'f1'"):
        fit(Clash(), callbacks=quiet())


@pytest.mark.parametrize("replicas", [1, 3])
def test_keras_task_takes_keras_metrics(replicas, quiet):
    inputs = regression(101)[0]
    labels = (inputs[:, :1] > 0).astype("float32")

    def model():
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, "sigmoid")])

    task = loop.KerasTask(
        model, lambda: keras.optimizers.SGD(0.1), "binary_crossentropy", ArrayData(inputs, labels),
        ArrayData(inputs, labels), metrics={"auc": keras.metrics.AUC(), "error": lambda y, p: tf.abs(y - p)},
    )  # fmt: skip
    result = fit(task, epochs=2, batch_size=20, backend=engine(replicas), callbacks=quiet())
    auc = keras.metrics.AUC()
    auc.update_state(labels, result.model(inputs))
    assert result.metrics["eval_auc"] == pytest.approx(float(auc.result()), abs=1e-6)
    assert result.metrics["eval_error"] == pytest.approx(np.abs(labels - result.model(inputs)).mean(), rel=1e-5)


def test_a_metric_whose_state_is_of_integers_sees_floats(quiet):
    """As Keras's `fit` hands them over: a probability that is cast to an integer is 0."""
    inputs = regression(101)[0]
    labels = (inputs[:, :1] > 0).astype("float32")

    class Judging(loop.TrainTask):
        def build_model(self):
            return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, "sigmoid")])

        def build_optimizer(self):
            return keras.optimizers.SGD(0.1)

        def build_metrics(self):
            return {"iou": keras.metrics.BinaryIoU()}

        def train_data(self):
            return ArrayData(inputs, labels)

        def eval_data(self):
            return self.train_data()

        def compute(self, model, batch, training):
            found = model(batch[0], training=training)
            return {"loss": keras.losses.binary_crossentropy(batch[1], found), "iou": (batch[1], found)}

    task = Judging()
    by_keras = loop.KerasTask(
        task.build_model, task.build_optimizer, "binary_crossentropy", task.train_data(), task.eval_data(),
        metrics={"iou": keras.metrics.BinaryIoU()},
    )  # fmt: skip
    for either in (task, by_keras):
        result = fit(either, epochs=2, batch_size=20, callbacks=quiet())
        witness = keras.metrics.BinaryIoU()
        witness.update_state(labels, result.model(inputs))
        assert 0 < float(witness.result()) < 1
        assert result.metrics["eval_iou"] == pytest.approx(float(witness.result()), abs=1e-6)


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("ignored", [None, 2])
def test_keras_task_weighs_what_keras_masks_as_keras_does(replicas, ignored, quiet):
    random = np.random.default_rng(0)
    words, labels = random.integers(0, 3, (23, 6)), random.integers(0, 4, (23, 6))

    def model():
        layers = [keras.layers.Embedding(3, 4, mask_zero=ignored is None), keras.layers.Dense(4)]
        return keras.Sequential([keras.Input((6,), dtype="int64"), *layers])

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=ignored)
    task = loop.KerasTask(model, lambda: keras.optimizers.SGD(0.5), loss, ArrayData(words, labels))
    result = fit(task, epochs=1, batch_size=8, shuffle=False, backend=engine(replicas), callbacks=quiet())
    keras.utils.set_random_seed(0)
    witness = model()
    witness.compile(keras.optimizers.SGD(0.5), loss)
    witness.fit(words, labels, batch_size=8, shuffle=False, verbose=0)
    for found, expected in zip(result.model.get_weights(), witness.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def mean_of_squares(labels, predictions):
    return keras.ops.mean((labels - predictions) ** 2, -1)


class OwnLoss(keras.losses.Loss):
    def call(self, labels, predictions):
        return mean_of_squares(labels, predictions)


@pytest.mark.parametrize(
    ("loss", "shape", "weights"),
    [
        (mean_of_squares, [21], None),  # labels [n], predictions [n, 1]: a difference would have the shape [n, n]
        (keras.losses.binary_crossentropy, [21], None),
        ("MeanSquaredError", [21, 1], None),  # the name of a class
        (OwnLoss(), [21, 1], None),  # labels that are integers
        (OwnLoss("x", "mean_with_sample_weight"), [21, 1], [21, 1]),
    ],
)
def test_keras_task_hands_a_loss_what_keras_hands_it(loss, shape, weights, quiet):
    inputs = regression(21)[0]
    data = [inputs, (inputs[:, 0] > 0).astype("int64").reshape(shape)]
    data += [np.arange(21.0).reshape(weights)] if weights else []

    def model():
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, "sigmoid")])

    def compiled(loss):
        keras.utils.set_random_seed(0)
        model_ = model()
        model_.compile(keras.optimizers.SGD(0.5), loss)
        return model_

    if callable(loss) and not isinstance(loss, OwnLoss):
        data[1] = data[1].astype("float32")
    task = loop.KerasTask(model, lambda: keras.optimizers.SGD(0.5), loss, ArrayData(*data))
    result = fit(task, epochs=1, batch_size=8, shuffle=False, callbacks=quiet())
    witness = compiled(loss)
    witness.fit(*data[:2], sample_weight=data[2] if weights else None, batch_size=8, shuffle=False, verbose=0)
    for found, expected in zip(result.model.get_weights(), witness.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_keras_task_computes_no_loss_in_16_bits(quiet):
    inputs = regression(21)[0]
    seen = []

    def loss(labels, predictions):
        seen.append(predictions.dtype)
        return mean_of_squares(labels, predictions)

    def model():
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])

    task = loop.KerasTask(model, lambda: keras.optimizers.SGD(0.5), loss, ArrayData(inputs, inputs[:, 0]))
    fit(task, steps=1, precision="bfloat16", callbacks=quiet())
    assert set(seen) == {tf.float32}


def masked():
    return keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(9, 2, mask_zero=True)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_fn": {"a": "mse"}}, "Keras can't put together losses, metrics"),
        ({"loss_fn": "mze"}, "Could not interpret loss identifier: mze"),
        ({"metrics": ["acuracy"]}, "acuracy"),
        ({"optimizer_fn": "adan"}, "'adan'.*no optimizer of that name"),
        ({"optimizer_fn": keras.optimizers.SGD(0.1)}, "optimizer_fn=SGD.*lambda: keras.optimizers"),
        ({"optimizer_fn": None}, "an optimizer, or leave out the others"),
        ({"loss_fn": lambda y, p: keras.ops.mean((y - p) ** 2)}, "returned a scalar: return one value per element"),
        ({"metrics": [lambda y, p: keras.ops.mean(y - p)]}, "isn't made of those of each example"),
        ({"model_fn": keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])}, "model_fn=Sequential.*lambda"),
        (
            {
                "model_fn": masked,
                "weighted_metrics": ["mae"],
                "train": ArrayData(np.ones((5, 4), "int32"), np.ones((5, 4, 2)), np.ones(5)),
            },
            r"the metric .mae., can.t be updated .*: Incompatible shapes: \[3\] vs\. \[3,4\]\. compute",
        ),
        ({"train": ArrayData(np.zeros((4, 5), "float32"))}, r"these are of one EagerTensor.*ArrayData\(inputs, inputs"),
    ],
)
def test_keras_task_refuses_what_it_can_not_take(changes, message, quiet):
    given = {
        "model_fn": lambda: keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)]),
        "optimizer_fn": lambda: keras.optimizers.SGD(0.5),
        "loss_fn": "mse",
        "train": ArrayData(*regression(8)[:2]),
    }
    with pytest.raises(UsageError, match=message):
        fit(loop.KerasTask(**given | changes), steps=1, callbacks=quiet())


def test_value_of_each_pair_of_examples_is_refused(quiet):
    class Paired(Unweighted):
        def compute(self, model, batch, training):
            inputs, labels = batch
            return {"loss": (labels[:, 0] - model(inputs)[:, :1]) ** 2}

    with pytest.raises(UsageError, match=r"\[3, 3\] for 3 examples, and of shape \[1, 1\] for one.*squeeze"):
        fit(Paired(), steps=1, callbacks=quiet())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("more", None, '"more" as NoneType: return a tensor'),
        ("weight", None, '"weight" as NoneType: return a tensor'),
        ("more", (tf.zeros([3, 1]), tf.zeros([3, 2])), '"more" as tuple: return a tensor'),
        (1, tf.zeros([3]), "a value named 1"),
        ("", tf.zeros([3]), "a value named ''"),
        ("epoch", tf.zeros([3]), "a value named 'epoch'"),  # would take the place of the counter in `history`
        ("eval_loss", tf.zeros([3]), "a value named 'eval_loss'"),
    ],
)
def test_values_that_are_no_tensors_and_names_that_are_taken_are_refused(name, value, message, quiet):
    class Odd(Unweighted):
        def compute(self, model, batch, training):
            return super().compute(model, batch, training) | {name: value}

    with pytest.raises(UsageError, match=message):
        fit(Odd(), steps=1, callbacks=quiet())
