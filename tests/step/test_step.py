"""The mathematics: the same numbers as a hand-written single-device loop, on any number of replicas."""

from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from loop import ArrayData, TrainingError, UsageError, fit
from loop.backends import create
from loop.data import open_data
from loop.options import with_defaults
from loop.step.build import build
from loop.step.forward import ForwardPass
from loop.step.train_step import TrainStep
from tests.exactness import largest_difference
from tests.tasks import Alarm, Legacy, Plain, Streamed, Unweighted, Weighted, regression


def test_bfloat16_computes_in_it_and_keeps_float32_variables(quiet):
    found = fit(Weighted(), epochs=1, precision="bfloat16", callbacks=quiet())
    assert found.model.compute_dtype == "bfloat16"
    assert all(variable.dtype == "float32" for variable in found.model.trainable_variables)
    assert keras.config.dtype_policy().name == "float32"  # given back


def test_a_policy_of_keras_that_layers_do_not_have_is_said(quiet):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        with pytest.warns(UserWarning, match=r"policy of Keras is 'mixed_bfloat16', .* give fit precision='bfloat16'"):
            fit(Weighted(), steps=1, callbacks=quiet())
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("kind", [Legacy, Plain, Streamed])
def test_every_kind_of_model_and_data(kind, quiet):
    one, two = (
        fit(kind(), epochs=3, batch_size=20, backend=backend, callbacks=quiet())
        for backend in ("single", create("mirrored", 2))
    )
    assert (one.steps, one.examples) == (two.steps, two.examples) == (18, 303)
    assert two.metrics["eval_loss"] == pytest.approx(one.metrics["eval_loss"], rel=1e-5)
    assert one.history[-1]["loss"] < one.history[0]["loss"]


def test_weights_are_drawn_from_the_seed_whatever_tf_keras_was_seeded_with(quiet):
    found = []
    for seed in (1, 2):
        tf_keras.utils.set_random_seed(seed)
        found.append(fit(Legacy(), steps=1, callbacks=quiet()).weights_sha256)
    assert found[0] == found[1]


def test_evaluation_is_exact_for_a_short_last_batch(quiet):
    inputs, labels, weight = Weighted().eval_data().arrays
    for replicas in (1, 2, 3):
        backend = create("mirrored", replicas) if replicas > 1 else "single"
        found = fit(Weighted(), steps=1, batch_size=30, backend=backend, callbacks=quiet())
        error = found.model(inputs).numpy() - labels
        expected = np.sum(np.sum(error.astype("float64") ** 2, -1) * weight) / weight.sum()
        assert found.metrics["eval_loss"] == pytest.approx(expected, rel=1e-6)


def test_not_finite_stops_and_names_the_step(quiet, tmp_path):
    with pytest.raises(TrainingError, match=r"step [1-6] .*not finite"):
        fit(Alarm(), epochs=1, batch_size=20, callbacks=quiet(), run_dir=tmp_path / "run")


def test_regularisation_counts_once_whatever_the_replicas(quiet):
    class Still(Weighted):
        """Its loss is 0: only the regularisation moves the weights."""

        def compute(self, model, batch, training):
            return {"loss": 0.0 * model(batch[0], training=training)[:, 0]}

    options = {"epochs": 1, "batch_size": 101, "eval_every": "never", "callbacks": quiet()}
    weights = [fit(Still(), backend=create("mirrored", n), **options).model.get_weights()[0] for n in (1, 3)]
    np.testing.assert_array_equal(weights[0], weights[1])


@pytest.mark.parametrize(("compiled", "replicas"), [("graph", 1), ("graph", 2), ("xla", 1)])
def test_a_batch_without_weight_moves_the_statistics_alone(compiled, replicas, quiet):
    """The rest is as if training had begun with the second batch."""
    inputs, labels, _ = regression(40)

    class Begun(Weighted):
        def build_model(self):
            normed = keras.layers.BatchNormalization(momentum=0.5)
            return keras.Sequential([keras.Input((5,)), normed, keras.layers.Dense(1)])

        def train_data(self):
            weight = (np.arange(40) >= 20).astype("float32")
            return ArrayData(inputs[self.begin :], labels[self.begin :], weight[self.begin :])

    backend = create("mirrored", replicas) if replicas > 1 else "single"
    settings = {"backend": backend, "batch_size": 20, "compile": compiled, "shuffle": False, "eval_every": "never"}
    models = []
    for begin in (0, 20):
        Begun.begin = begin
        models.append(fit(Begun(), epochs=1, ema=0.9, callbacks=quiet(), **settings).model)
    for one, other in zip(models[0].trainable_variables, models[1].trainable_variables, strict=True):
        np.testing.assert_array_equal(one, other)

    normed = keras.layers.BatchNormalization(momentum=0.5)
    for first in (0, 20):
        normed(inputs[first : first + 20], training=True)
    for one, other in zip(models[0].layers[0].non_trainable_variables, normed.non_trainable_variables, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_values_may_be_of_other_shapes_than_the_loss(quiet):
    class PerToken(Weighted):
        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return values | {"token": tf.ones([tf.shape(batch[0])[0], 7]) * 3.0}

    assert fit(PerToken(), epochs=1, eval_every="never", callbacks=quiet()).metrics["token"] == 3.0


def test_partly_disconnected_names_the_variables(quiet):
    class Partly(Plain):
        def compute(self, model, batch, training):
            return {"loss": tf.reduce_sum((batch[0] @ model.w - batch[1]) ** 2, -1)}

    with pytest.warns(UserWarning, match="the loss doesn't depend on b"):
        fit(Partly(), epochs=1, callbacks=quiet())


def test_loss_that_depends_on_nothing_is_refused(quiet):
    class Blind(Plain):
        def compute(self, model, batch, training):
            return {"loss": batch[1][:, 0]}

    with pytest.raises(UsageError, match="depends on no variable"):
        fit(Blind(), epochs=1, callbacks=quiet())


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_batch_norm_never_sees_an_empty_batch(streamed, replicas, quiet):
    """Its statistics would be nan; here one replica, and the end of a stream, have no rows."""

    class Normed(Plain):
        def build_model(self):
            return keras.Sequential([keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])

        def train_data(self):
            arrays = regression(21)[:2]
            return tf.data.Dataset.from_tensor_slices(arrays) if streamed else ArrayData(*arrays)

        eval_data = train_data

    backend = create("mirrored", replicas) if replicas > 1 else "single"
    for accumulate in (1, 3):
        result = fit(Normed(), epochs=2, batch_size=4, accumulate=accumulate, backend=backend, callbacks=quiet())
        assert np.isfinite(result.metrics["eval_loss"])
        assert all(np.isfinite(weights).all() for weights in result.model.get_weights())


def test_weight_of_an_example_weighs_all_its_elements(quiet):
    class PerElement(Weighted):
        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return values | {"column": tf.abs(batch[0][:, :1]), "matrix": tf.abs(batch[0])}

    inputs, _, weight = regression(101)
    metrics = fit(PerElement(), epochs=1, batch_size=20, callbacks=quiet()).metrics
    column = (np.abs(inputs[:, 0]) * weight).sum() / weight.sum()
    matrix = (np.abs(inputs) * weight[:, None]).sum() / (5 * weight.sum())
    assert metrics["eval_column"] == pytest.approx(column, rel=1e-5)
    assert metrics["eval_matrix"] == pytest.approx(matrix, rel=1e-5)


@pytest.mark.parametrize("replicas", [1, 3])
def test_values_that_python_computes_are_weighed_too(replicas, quiet):
    """The graph doesn't know the shape of what `tf.numpy_function` returns."""

    class Scored(Weighted):
        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            row = tf.numpy_function(lambda inputs: np.abs(inputs[:, 0]), [batch[0]], tf.float32)
            matrix = tf.numpy_function(np.abs, [batch[0]], tf.float32)
            return values | {"row": row, "matrix": matrix}

    inputs, _, weight = regression(101)
    backend = create("mirrored", replicas) if replicas > 1 else "single"
    metrics = fit(Scored(), epochs=1, batch_size=20, backend=backend, callbacks=quiet()).metrics
    row = (np.abs(inputs[:, 0]) * weight).sum() / weight.sum()
    matrix = (np.abs(inputs) * weight[:, None]).sum() / (5 * weight.sum())
    for name, expected in (("row", row), ("matrix", matrix)):
        assert metrics[name] == pytest.approx(expected, rel=1e-5)
        assert metrics[f"eval_{name}"] == pytest.approx(expected, rel=1e-5)


def test_module_with_keras_layers_trains_them_and_restores_them(quiet, tmp_path):
    class Mixed(tf.Module):
        def __init__(self):
            super().__init__()
            self.scale = tf.Variable(1.0, name="scale")
            self.parts = [keras.layers.Dense(3, kernel_regularizer="l2"), keras.layers.Dense(1)]

        def __call__(self, inputs, training=False):
            return self.parts[1](self.parts[0](inputs)) * self.scale

    class Task(Plain):
        def build_model(self):
            return Mixed()

    def run(epochs, directory):
        return fit(Task(), epochs=epochs, eval_every="never", callbacks=quiet(), run_dir=tmp_path / directory)

    first = run(1, "a")
    assert np.abs(first.model.parts[0].bias.numpy()).max() > 0
    assert run(2, "a").weights_sha256 == run(2, "b").weights_sha256 != first.weights_sha256


@pytest.mark.parametrize("family", [keras, tf_keras])
def test_module_whose_keras_models_share_layers_trains_as_one_of_them(family, quiet):
    """Shared weights were trained twice, and penalties of tf_keras were left out."""

    class Shared(tf.Module):
        def __init__(self, full):
            super().__init__()
            self.encoder = full.layers[0]
            self.other = family.Sequential([self.encoder, family.layers.ReLU()])
            self.other.build((None, 5))
            self.norm = full.layers[1]
            self.full = full

        def __call__(self, inputs, training=False):
            return self.full(inputs, training=training)

    @dataclass
    class Task(Unweighted):
        wrapped: bool = False

        def build_model(self):
            penalty = family.regularizers.L2(0.1)
            encoder = family.Sequential([family.layers.Dense(3, use_bias=False, kernel_regularizer=penalty)])
            full = family.Sequential([encoder, family.layers.BatchNormalization(), family.layers.Dense(1, name="last")])
            full.build((None, 5))
            for place, weight in enumerate(full.trainable_variables):
                weight.assign(np.random.default_rng(place).normal(size=weight.shape))
            return Shared(full) if self.wrapped else full

        def build_optimizer(self):
            return family.optimizers.SGD(0.01)

    def train(wrapped, replicas):
        options = {"backend": "single"}
        if replicas > 1:
            options = {"backend": create("mirrored", replicas), "eval_every": "never"}
        result = fit(Task(wrapped=wrapped), epochs=1, batch_size=20, callbacks=quiet(), **options)
        return result.metrics, [weight.numpy() for weight in (result.model.full if wrapped else result.model).weights]

    metrics, weights = train(True, 1)
    expected, expected_weights = train(False, 1)
    assert metrics == expected
    assert largest_difference(weights, expected_weights) == 0
    assert largest_difference(train(True, 2)[1], weights) < 1e-5


@pytest.mark.parametrize(
    ("compute", "message"),
    [
        # A mean over examples, in the shape that as many features have:
        (
            lambda model, x, training: {"loss": tf.reduce_mean((model(x) - 1.0) ** 2 * tf.ones([1, 3]), 0)},
            "for 1 example:",
        ),
        (
            lambda model, x, training: {"loss": model(x)[:, 0]} | ({} if training else {"extra": x}),
            "loss, extra at first, and now loss: return the same values always",
        ),
        (
            lambda model, x, training: {"loss": tf.reduce_mean(model(x)) if training else model(x)[:, 0]},
            'a scalar for "loss"',
        ),
        (
            lambda model, x, training: {"loss": model(x), "weight": model(x), "metric": x},
            r'"metric" of shape \[3, 5\], which',
        ),
    ],
)
def test_means_and_misfits_are_refused(compute, message, quiet):
    class Wrong(Plain):
        def compute(self, model, batch, training):
            return compute(model, batch[0], training)

    with pytest.raises(UsageError, match=message):
        fit(Wrong(), callbacks=quiet())


@pytest.mark.parametrize("replicas", [1, 2])
def test_evaluations_may_have_other_values_as_the_message_says(replicas, quiet):
    class Evaluated(Weighted):
        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return values if training else values | {"extra": values["loss"] + 1}

        def train_step(self, model, step):
            step.minimize(lambda batch: self.compute(model, batch, training=True))

    found = fit(Evaluated(), callbacks=quiet(), backend=create("mirrored", replicas)).metrics
    assert "extra" not in found
    assert found["eval_extra"] == pytest.approx(found["eval_loss"] + 1)


def test_loss_scale_optimizer_is_refused(quiet):
    class Scaled(Plain):
        def build_optimizer(self):
            return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))

    with pytest.raises(UsageError, match=r"returned LossScaleOptimizer: .* precision='mixed_float16'"):
        fit(Scaled(), callbacks=quiet())


class Penalty(keras.layers.Layer):
    def __init__(self, reduce, always=True):
        super().__init__()
        self.reduce = reduce
        self.always = always

    def call(self, inputs, training=None):
        if training or self.always:
            self.add_loss(0.1 * self.reduce(inputs**2))
        return inputs


def test_penalties_of_activations_are_means_or_refused(quiet):
    class Penalised(Unweighted):
        reduce = tf.reduce_mean

        def build_model(self):
            dense = keras.layers.Dense
            return keras.Sequential([keras.Input((5,)), dense(4), Penalty(type(self).reduce), dense(1)])

    class Summed(Penalised):
        reduce = tf.reduce_sum

    def trained(task, **options):
        result = fit(task, epochs=1, batch_size=20, eval_every="never", callbacks=quiet(), **options)
        return [variable.numpy() for variable in result.model.trainable_variables]

    mean = trained(Penalised())
    for options in ({"backend": create("mirrored", 3)}, {"accumulate": 2}):
        assert largest_difference(trained(Penalised(), **options), mean) <= 5e-6
        with pytest.raises(UsageError, match=r"a loss that the model adds .* is a sum over the examples"):
            trained(Summed(), **options)
    assert largest_difference(trained(Summed()), mean) > 1e-3  # nothing is shared out: it is what it is


def test_so_are_penalties_in_training_alone(quiet):
    @dataclass
    class Penalised(Unweighted):
        reduce: Callable = tf.reduce_mean

        def build_model(self):
            dense = keras.layers.Dense
            layers = [dense(4, kernel_regularizer="l2"), Penalty(self.reduce, always=False), dense(1)]
            return keras.Sequential([keras.Input((5,)), *layers])

    def train(reduce, **options):
        fit(Penalised(reduce=reduce), steps=1, batch_size=20, eval_every="never", callbacks=quiet(), **options)

    for options in ({"backend": create("mirrored", 2)}, {"accumulate": 2}):
        train(tf.reduce_mean, **options)
        with pytest.raises(UsageError, match=r"a loss that the model adds .* is a sum over the examples"):
            train(tf.reduce_sum, **options)
    train(tf.reduce_sum)


def test_keras_averages_that_nobody_would_take_are_refused(quiet):
    class Averaged(Plain):
        def build_optimizer(self):
            return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9)

    with pytest.raises(UsageError, match=r"returned SGD with use_ema=True.* use ema=0.9"):
        fit(Averaged(), callbacks=quiet())


def test_values_that_are_no_numbers_are_refused(quiet):
    class Text(Plain):
        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return values | {"word": tf.strings.as_string(values["loss"])}

    with pytest.raises(UsageError, match='returned "word" of string: return numbers'):
        fit(Text(), callbacks=quiet())


class Branching(Plain):
    """Python over tensors, as AutoGraph reads it: in `compute`, in a function that it calls, and in `train_step`."""

    def train_step(self, model, step):
        means = step.minimize(lambda batch: self.compute(model, batch, True))
        for _ in tf.range(2):
            if means["loss"] > 1e9:
                tf.print("far off")

    def compute(self, model, batch, training):
        inputs, labels = batch
        if tf.reduce_sum(inputs) > 0:
            labels = doubled(labels)
        return {"loss": tf.reduce_sum((model(inputs) - labels) ** 2, -1)}


def doubled(labels):
    while tf.reduce_max(tf.abs(labels)) < 1.0:
        labels = labels * 2
    return labels


class Selecting(Plain):
    """The same in operations of the graph."""

    def compute(self, model, batch, training):
        inputs, labels = batch
        times = tf.math.ceil(tf.maximum(tf.math.log(1 / tf.reduce_max(tf.abs(labels))) / tf.math.log(2.0), 0))
        times = tf.where(tf.reduce_sum(inputs) > 0, times, 0)
        return {"loss": tf.reduce_sum((model(inputs) - labels * 2**times) ** 2, -1)}


def test_python_over_tensors_in_a_task_becomes_operations(quiet):
    one, other = (fit(task(), epochs=1, batch_size=20, callbacks=quiet()) for task in (Branching, Selecting))
    assert one.weights_sha256 == other.weights_sha256


def test_an_error_in_a_task_shows_its_line(quiet):
    class Wrong(Plain):
        def compute(self, model, batch, training):
            if training:
                raise KeyError("nothing like it")
            return super().compute(model, batch, training)

    with pytest.raises(KeyError, match=r'(?s)in user code:.*test_step.py", line \d+, in compute.*nothing like it'):
        fit(Wrong(), callbacks=quiet())


def _program(task, **options):
    """The graph of a call of training."""
    engine = create("single")
    options = with_defaults(task, {"backend": "single", **options})
    data = open_data(task, options)
    step = TrainStep(task, build(task, engine, "float32", data.train.example), engine, data, options)
    handle, number = data.train.start(0, 0), tf.constant(0, tf.int64)
    return step._train.get_concrete_function(handle, number, number, number).graph.as_graph_def()


def test_only_the_counter_decides_on_another_step():
    """Else the graph has a circle through gradients, and TensorFlow's rewriters miss some of them."""
    program = _program(Plain())
    loops = [node for node in program.node if node.op in ("While", "StatelessWhile")]
    assert len(loops) == 1
    (condition,) = [each for each in program.library.function if each.signature.name == loops[0].attr["cond"].func.name]
    assert sorted({node.op for node in condition.node_def} - {"Identity", "Const", "NoOp"}) == ["Less"]


@pytest.mark.parametrize("kind", [Plain, Streamed])
def test_applying_gradients_is_no_waiting_for_data(kind):
    """The profile counted it as such: the totals of a step are there before its gradients are applied."""
    program = _program(kind(), profile="1:2")
    (loop,) = [node for node in program.node if node.op == "While"]
    (body,) = [each for each in program.library.function if each.signature.name == loop.attr["body"].func.name]
    inputs = {node.name: [name.lstrip("^").split(":")[0] for name in node.input] for node in body.node_def}
    # What the last mark of a step, where waiting begins, comes after.
    before = set()
    left = [[node.name for node in body.node_def if node.op == "Timestamp"][-1]]
    while left:
        name = left.pop()
        if name not in before:
            before.add(name)
            left += inputs.get(name, [])
    # The branch that applies the gradients, by the names that Keras gives its operations.
    optimizing = {each.signature.name for each in program.library.function if "/sgd" in str(each.node_def)}
    (applied,) = [
        node for node in body.node_def if node.op == "If" and node.attr["then_branch"].func.name in optimizing
    ]
    assert applied.name in before


class Pooled(Plain):
    """A pooling layer, whose gradient oneDNN has to see behind it."""

    def build_model(self):
        layers = [keras.layers.Dense(6), keras.layers.Reshape((6, 1)), keras.layers.MaxPooling1D(2)]
        return keras.Sequential([keras.Input((5,)), *layers, keras.layers.Flatten(), keras.layers.Dense(1)])

    def build_optimizer(self):
        return keras.optimizers.SGD(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 3])
def test_pooling_is_computed_in_a_graph_of_its_own(replicas, quiet, monkeypatch):
    backend = create("mirrored", replicas) if replicas > 1 else "single"
    options = {"epochs": 2, "batch_size": 20, "eval_every": "never", "backend": backend}
    apart = fit(Pooled(), callbacks=quiet(), **options)
    monkeypatch.setattr(ForwardPass, "_isolates", lambda *arguments: False)
    inline = fit(Pooled(), callbacks=quiet(), **options)
    assert apart.weights_sha256 == inline.weights_sha256


class PooledAndNormalized(Pooled):
    """Replicas exchange statistics within a forward pass that would be faster in a graph of its own."""

    def build_model(self):
        model = super().build_model()
        return keras.Sequential([*model.layers[:-1], keras.layers.BatchNormalization(), model.layers[-1]])


class PooledFirst(PooledAndNormalized):
    """Two passes: the first has the pooling alone, the second has collectives, too."""

    def build_optimizer(self):
        return {"first": keras.optimizers.SGD(0.01), "second": keras.optimizers.SGD(0.1)}

    def optimizer_variables(self, model, names):
        return {"first": model.trainable_variables[:2], "second": model.trainable_variables[2:]}

    def train_step(self, model, step):
        def pooled(batch):
            values = batch[0]
            for layer in model.layers[:3]:
                values = layer(values)
            return {"loss": tf.reduce_sum(values, [1, 2])}

        step.minimize(pooled, "first")
        step.minimize(lambda batch: self.compute(model, batch, True), "second")


@pytest.mark.parametrize("task", [PooledAndNormalized, PooledFirst])
def test_pooling_beside_collectives_where_each_replica_has_rows(task, quiet):
    """A graph of its own can't hold the collectives, and the strategy refused them there."""
    # 24 examples: no batch leaves a replica without rows.
    options = {"epochs": 2, "batch_size": 6, "eval_every": "never", "callbacks": quiet()}
    results = [fit(task(24), backend=backend, **options) for backend in ("single", create("mirrored", 3))]
    for one, three in zip(*(result.model.get_weights() for result in results), strict=True):
        np.testing.assert_allclose(one, three, rtol=0, atol=5e-6)


class Triangular(keras.layers.Dense):
    """Masks its kernel in each call, as masked autoencoders and PixelCNN do."""

    def call(self, inputs):
        self.kernel.assign(tf.linalg.band_part(self.kernel, 0, -1))
        return super().call(inputs)


class Masked(Unweighted):
    def build_model(self):
        width = self.train_data().arrays[0].shape[1]
        return keras.Sequential([keras.Input((width,)), Triangular(6, "tanh"), keras.layers.Dense(1)])


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"compile": "xla"}], ids=str)
def test_weights_that_a_layer_changes_are_the_same_on_a_replica_without_rows(options, quiet):
    """The last batch has one row, and no evaluation has each replica mask its kernel once more."""
    options = {"epochs": 2, "batch_size": 20, "eval_every": "never"} | options
    found = []
    for backend in ("single", create("mirrored", 3)):
        result = fit(Masked(examples=21), callbacks=quiet(), backend=backend, **options)
        found.append([variable.numpy() for variable in result.model.trainable_variables])
    assert largest_difference(*found) <= 5e-6


class Annealed(Unweighted):
    """A weight of the loss that grows with the step, as docs/faq.md has it."""

    def build_model(self):
        model = super().build_model()
        model.beta = model.add_weight(shape=(), initializer="zeros", trainable=False, name="beta")
        return model

    def train_step(self, model, step):
        super().train_step(model, step)
        model.beta.assign(tf.minimum(model.beta + 0.125, 1.0))

    def compute(self, model, batch, training):
        values = super().compute(model, batch, training)
        return {"loss": (1 + model.beta) * values["loss"], "beta": tf.ones_like(values["loss"]) * model.beta}


def test_a_weight_of_the_loss_that_changes_with_the_step(quiet, tmp_path):
    whole = fit(Annealed(), steps=6, batch_size=20, callbacks=quiet(), run_dir=tmp_path / "whole")
    assert whole.metrics["eval_beta"] == 6 * 0.125
    for steps in (4, 6):
        parts = fit(Annealed(), steps=steps, batch_size=20, callbacks=quiet(), run_dir=tmp_path / "parts")
    assert parts.weights_sha256 == whole.weights_sha256
    options = {"eval_every": "never", "backend": create("mirrored", 2)}
    two = fit(Annealed(), steps=6, batch_size=20, callbacks=quiet(), **options)
    for one, other in zip(whole.model.get_weights(), two.model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=5e-6)


def test_a_model_with_pooling_is_found_to_need_it():
    task, engine = Pooled(), create("single")
    options = with_defaults(task, {"backend": "single"})
    data = open_data(task, options)
    step = TrainStep(task, build(task, engine, "float32", data.train.example), engine, data, options)
    step.train(data.train.start(0, 0), 0, 0, 1)
    number = tf.constant(0, tf.int64)
    library = step._train.get_concrete_function(data.train.start(0, 0), number, number, number).graph.as_graph_def()
    holding = [each for each in library.library.function if any("MaxPoolGrad" in node.op for node in each.node_def)]
    assert holding
    assert all(each.attr["_noinline"].b for each in holding)
