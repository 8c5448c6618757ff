"""Layers that are computed again on the way back: the same numbers, the same draws, statistics that move once."""

import warnings
from dataclasses import dataclass

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import loop
from loop import ArrayData, TrainTask, UsageError, fit
from loop.backends import create
from loop.step.recompute import Segment
from tests.exactness import regression
from tests.products import singles


@pytest.fixture
def segments(monkeypatch):
    """How many segments have been traced on the way back."""
    traced = []
    backward = Segment._backward
    monkeypatch.setattr(
        Segment, "_backward", lambda self, *args, **named: traced.append(self) or backward(self, *args, **named)
    )
    return traced


@keras.saving.register_keras_serializable("tests")
class Block(keras.layers.Layer):
    """Has layers of its own, and no argument `training`: Keras hands it on to them."""

    def __init__(self, size, **named):
        super().__init__(**named)
        self.norm = keras.layers.BatchNormalization(momentum=0.8)
        self.wide = keras.layers.Dense(2 * size, activation="gelu")
        self.dropout = keras.layers.Dropout(0.3)
        self.narrow = keras.layers.Dense(size)

    def build(self, shape):
        self.norm.build(shape)
        self.wide.build(shape)
        self.narrow.build((*shape[:-1], self.wide.units))

    def call(self, inputs):
        return inputs + self.narrow(self.dropout(self.wide(self.norm(inputs))))


class LegacyBlock(tf_keras.layers.Layer):
    def __init__(self, size, **named):
        super().__init__(**named)
        self.norm = tf_keras.layers.BatchNormalization(momentum=0.8)
        self.wide = tf_keras.layers.Dense(2 * size, activation="gelu")
        self.dropout = tf_keras.layers.Dropout(0.3)
        self.narrow = tf_keras.layers.Dense(size)

    def call(self, inputs):
        return inputs + self.narrow(self.dropout(self.wide(self.norm(inputs))))


class Stack(keras.Model):
    """A subclassed model."""

    def __init__(self, blocks):
        super().__init__()
        self.first = keras.layers.Dense(6)
        self.blocks = [Block(6, name=f"block_{number}") for number in range(blocks)]
        self.last = keras.layers.Dense(1)

    def call(self, inputs):
        outputs = self.first(inputs)
        for block in self.blocks:
            outputs = block(outputs)
        return self.last(outputs)


class LegacyStack(tf_keras.Model):
    def __init__(self, blocks):
        super().__init__()
        self.first = tf_keras.layers.Dense(6)
        self.blocks = [LegacyBlock(6, name=f"block_{number}") for number in range(blocks)]
        self.last = tf_keras.layers.Dense(1)

    def call(self, inputs):
        outputs = self.first(inputs)
        for block in self.blocks:
            outputs = block(outputs)
        return self.last(outputs)


class Module(tf.Module):
    """No Keras model, though it has layers of Keras."""

    def __init__(self, blocks):
        super().__init__()
        self.first = keras.layers.Dense(6)
        self.blocks = [Block(6) for _ in range(blocks)]
        draw = tf.random.stateless_normal([6, 1], [1, 2], dtype=keras.config.floatx())
        self.last = tf.Variable(draw, name="last")
        for layer in (self.first, *self.blocks):
            layer.build((None, 5 if layer is self.first else 6))

    def __call__(self, inputs, again):
        kept = loop.remat if again else lambda function: function
        outputs = kept(self.first)(inputs)
        for block in self.blocks:
            outputs = kept(lambda x, block=block: block(x, training=True))(outputs)
        return outputs @ self.last


def flat(layers, blocks, legacy):
    """A graph of single layers, with branches."""
    inputs = layers.Input((5,))
    outputs = layers.layers.Dense(6)(inputs)
    for number in range(blocks):
        inner = layers.layers.BatchNormalization(momentum=0.8)(outputs)
        inner = layers.layers.Dense(12, activation="gelu", name=f"block_{number}")(inner)
        inner = layers.layers.Dropout(0.3)(inner)
        outputs = layers.layers.Add()([outputs, layers.layers.Dense(6)(inner)])
    return layers.Model(inputs, layers.layers.Dense(1)(outputs))


def model_of(kind, blocks):
    legacy = kind.startswith("legacy")
    layers = tf_keras if legacy else keras
    layers.utils.set_random_seed(3)
    if kind.endswith("flat"):
        return flat(layers, blocks, legacy)
    if kind.endswith("sequential"):
        made = [(LegacyBlock if legacy else Block)(6, name=f"block_{number}") for number in range(blocks)]
        return layers.Sequential([layers.Input((5,)), layers.layers.Dense(6), *made, layers.layers.Dense(1)])
    if kind.endswith("nested"):
        inputs = layers.Input((5,))
        return layers.Model(inputs, layers.layers.Dense(1, name="head")(flat(layers, blocks, legacy)(inputs)))
    return {"module": Module, "stack": Stack, "legacy-stack": LegacyStack}[kind](blocks)


@dataclass
class Deep(TrainTask):
    kind: str = "flat"
    blocks: int = 4
    again: bool = False
    dtype: str = "float32"

    def build_model(self):
        return model_of(self.kind, self.blocks)

    def build_optimizer(self):
        layers = tf_keras if self.kind.startswith("legacy") else keras
        return layers.optimizers.Adam(0.01)

    def train_data(self):
        return ArrayData(*regression(23, dtype=self.dtype)[:2])

    def compute(self, model, batch, training):
        inputs, labels = batch
        outputs = model(inputs, self.again) if self.kind == "module" else model(inputs, training=training)
        return {"loss": tf.reduce_sum((tf.cast(outputs, labels.dtype) - labels) ** 2, -1)}


def variables(task, quiet, **options):
    """All variables after some steps: weights, statistics, and the states of random numbers."""
    named = {"epochs": 2, "batch_size": 10, "callbacks": quiet(), "precision": task.dtype, **options}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fit(task, **named)
    return [variable.numpy() for variable in loop.model.variables.model_variables(result.model)]


KINDS = ("flat", "sequential", "nested", "stack", "legacy-flat", "legacy-sequential", "legacy-nested", "legacy-stack")


def close(some, others):
    """In float64, all but the order of sums would make a larger difference; counters of random numbers are equal."""
    for a, b in zip(some, others, strict=True):
        if a.dtype.kind == "f":
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(np.abs(b).max(), 1))
        else:
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_same_numbers_in_full(kind, quiet, segments):
    task = Deep(kind, blocks=2 if kind.endswith(("flat", "nested")) else 1, dtype="float64")  # of several segments
    plain = variables(task, quiet)
    assert not segments
    close(variables(task, quiet, remat="full"), plain)
    assert len(segments) >= 2


@pytest.mark.parametrize("kind", ["flat", "legacy-stack"])
def test_same_numbers_with_replicas_and_micro_batches(kind, quiet, segments):
    """Statistics are gathered over replicas within segments, and each replica draws for its own rows."""
    task = Deep(kind, blocks=1, dtype="float64")
    plain, again = (
        variables(task, quiet, epochs=1, accumulate=2, backend=create("mirrored", 2), remat=remat)
        for remat in (None, "full")
    )
    close(again, plain)
    assert len(segments) >= 2


@pytest.mark.parametrize("kind", ["stack", "legacy-stack"])
def test_masks_of_dropout_are_drawn_once(kind, quiet, monkeypatch):
    """The second computation has no operation that draws."""
    draws = {"_forward": 0, "_backward": 0}

    def counting(name):
        original = getattr(Segment, name)

        def counted(self, *args, **named):
            graph = tf.compat.v1.get_default_graph()
            before = {id(operation) for operation in graph.get_operations()}
            results = original(self, *args, **named)
            added = [operation for operation in graph.get_operations() if id(operation) not in before]
            draws[name] += sum("StatelessRandomUniform" in operation.type for operation in added)
            return results

        monkeypatch.setattr(Segment, name, counted)

    for name in draws:
        counting(name)
    variables(Deep(kind, 2), quiet, epochs=1, remat="block_*")
    assert draws["_forward"] >= 2
    assert draws["_backward"] == 0


def test_same_numbers_with_xla(quiet, segments):
    """In blocks of many steps, and in the last step of the epoch, which has a smaller batch."""
    task = Deep("stack", blocks=1, dtype="float64")
    close(variables(task, quiet, compile="xla", remat="full"), variables(task, quiet, compile="xla"))
    assert len(segments) >= 2


@pytest.mark.parametrize(("kind", "precision"), singles(["flat", "legacy-flat"], ["bfloat16", "mixed_float16"]))
def test_mixed_precision(kind, precision, quiet, segments):
    plain, again = (variables(Deep(kind, 1), quiet, precision=precision, remat=remat) for remat in (None, "full"))
    for a, b in zip(again, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=0.02)  # a number of bfloat16 has 8 bits
    assert len(segments) >= 1


def test_parts_of_a_module(quiet, segments):
    """`loop.remat` around layers of Keras and around functions of a model that isn't Keras's."""
    plain, again = (variables(Deep("module", 1, again, "float64"), quiet) for again in (False, True))
    close(again, plain)
    assert len(segments) >= 2


@pytest.mark.parametrize(
    ("kind", "remat"), singles(["flat", "stack"], ["block_*", ["block_0", "block_2"], "block_1,block_2"])
)
def test_named_layers(kind, remat, quiet, segments):
    variables(Deep(kind, 3), quiet, epochs=1, remat=remat)
    names = {segment._layer.name for segment in segments}
    expected = {"block_*": {0, 1, 2}, "block_1,block_2": {1, 2}}.get(str(remat), {0, 2})
    assert names == {f"block_{number}" for number in expected}


def test_layers_from_a_size_on(quiet, segments):
    """Of batches of 10, wide layers return 480 bytes."""
    variables(Deep("flat", 1), quiet, epochs=1, remat="0.4kB")
    assert {segment._layer.units for segment in segments if hasattr(segment._layer, "units")} == {12}
    segments.clear()
    variables(Deep("flat", 1), quiet, epochs=1, remat="1GB")
    assert not segments


class Drawing(keras.layers.Layer):
    """Draws other numbers each time."""

    def call(self, inputs):
        return inputs * tf.random.uniform(tf.shape(inputs))


class Normalised(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.inner = keras.layers.SpectralNormalization(keras.layers.Dense(6))

    def call(self, inputs):
        return self.inner(inputs, training=True)


class Penalised(keras.layers.Layer):
    def call(self, inputs):
        self.add_loss(tf.reduce_mean(inputs**2))
        return inputs


class Odd(Deep):
    """A model with one layer that can't be computed twice."""

    layer: type = keras.layers.Layer

    def build_model(self):
        inputs = keras.Input((5,))
        outputs = keras.layers.Dense(6, activation="gelu")(inputs)
        outputs = self.layer(name="odd")(outputs) if self.layer is not Normalised else Normalised()(outputs)
        for _ in range(3):
            outputs = keras.layers.Dense(6, activation="gelu")(outputs)
        return keras.Model(inputs, keras.layers.Dense(1)(outputs))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (Drawing, " changes a variable, or draws without a seed (RandomUniform): remembered"),
        (Penalised, "odd adds a loss: remembered"),
        (Normalised, "changes a variable, or draws without a seed (a weight): remembered"),
    ],
)
def test_layers_that_can_not_be_computed_twice_are_remembered(layer, reason, quiet, segments):
    keras.utils.set_random_seed(1)
    task = Odd()
    task.layer = layer
    with pytest.warns(UserWarning, match=".") as warned:
        fit(task, epochs=1, batch_size=10, callbacks=quiet(), remat="full")
    assert reason in " ".join(str(one.message) for one in warned)
    assert segments


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"remat": "blok_1"}, "remat='blok_1': the model has no layer of that name; did you mean"),
        ({"remat": ""}, "remat='': give"),
        ({"remat": []}, "remat=[]: give"),
        ({"remat": 3}, "remat=3: give"),
        ({"remat": ["block_0", 3]}, "give"),
    ],
)
def test_refusals(options, message, quiet):
    with pytest.raises(UsageError) as refused:
        fit(Deep("flat"), epochs=1, callbacks=quiet(), **options)
    assert message in str(refused.value)


def test_a_module_is_told_of_the_function(quiet):
    with pytest.raises(UsageError, match=r"remat='full': Module isn't a Keras model.*loop.remat\(part\)\(x\)"):
        fit(Deep("module"), epochs=1, callbacks=quiet(), remat="full")


def test_functions_that_can_not_be_computed_twice(quiet):
    class Task(Deep):
        def compute(self, model, batch, training):
            inputs, labels = batch
            shift = model.layers[1](inputs)
            other = loop.remat(lambda x: model(x, training=training) + shift[:, :1])(inputs)
            return {"loss": tf.reduce_sum((other - labels) ** 2, -1)}

    with pytest.raises(UsageError, match=r"loop.remat\(<lambda>\): it uses a tensor that isn't its argument"):
        fit(Task("flat", 1), epochs=1, callbacks=quiet())

    class Adding(Odd):
        layer = Penalised

        def compute(self, model, batch, training):
            return {"loss": loop.remat(lambda x: model(x, training=training))(batch[0])[:, 0] ** 2}

    with pytest.raises(UsageError, match=r"loop.remat\(<lambda>\): it adds a loss: call it without loop.remat"):
        fit(Adding(), epochs=1, callbacks=quiet())
    with pytest.raises(UsageError, match=r"loop.remat\(3\): give a function"):
        loop.remat(3)


def test_without_remat_a_model_is_as_before(quiet, segments):
    """A model that was trained with it can be trained without, saved, and called."""
    kept = []

    class Task(Deep):
        def build_model(self):
            kept[:] = kept or [super().build_model()]
            return kept[0]

    variables(Task("flat", 2), quiet, epochs=1, remat="full")
    traced = len(segments)
    assert traced
    variables(Task("flat", 2), quiet, epochs=1)
    assert len(segments) == traced
    assert "call" not in vars(kept[0])
