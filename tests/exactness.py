"""Trains small tasks on any engine, and by hand on one device: the two must come to the same weights."""

import itertools
import json
import os
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf

import callbacks
import loop
from loop import ArrayData, TrainTask, backends, fit
from loop.backends import devices
from loop.model.precision import keras_precision
from tests import products


def regression(examples, features=5, seed=0, dtype="float32"):
    """Inputs [n, features], labels [n, 1] and weights [n], some of which are 0."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(examples, features))
    labels = np.tanh(inputs @ random.normal(size=(features, 1))) + 0.1
    return inputs.astype(dtype), labels.astype(dtype), random.integers(0, 4, examples).astype(dtype)


class Hashed(keras.layers.Layer):
    """Makes indices of inputs."""

    def call(self, inputs):
        return tf.cast(tf.abs(inputs) * 20, tf.int32)

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, "int32")


@dataclass
class Prime(TrainTask):
    """A prime number of examples, weights with zeros, L2, momentum; and what a case adds to it.

    Of 101 examples in batches of 20, the last batch of an epoch has one: all replicas but one have nothing.
    """

    examples: int = 101
    dtype: str = "float32"
    batch_norm: bool = False
    contrastive: bool = False
    judged: bool = False
    table: bool = False
    momentum: float = 0.9
    split: bool = False
    dropout: float = 0.0
    seed: int = 0
    bad: int | None = None
    log: list = field(default_factory=list, repr=False)

    def build_model(self):
        hidden = keras.layers.Dense(4, activation="tanh", kernel_regularizer=keras.regularizers.L2(1e-2))
        if self.split:
            with tf.device(loop.device(1)):
                hidden.build((None, 5))
        layers = [keras.Input((5,)), *self.looked_up(), hidden]
        if self.batch_norm:
            layers += [keras.layers.BatchNormalization(momentum=0.8)]
        if self.dropout:
            layers += [keras.layers.Dropout(self.dropout)]
        return keras.Sequential([*layers, keras.layers.Dense(3 if self.contrastive else 1)])

    def looked_up(self):
        """Layers that look up rows of a large table, some of them several times."""
        if not self.table:
            return []
        return [Hashed(), keras.layers.Embedding(2048, 32), keras.layers.GlobalAveragePooling1D()]

    def build_optimizer(self):
        return keras.optimizers.SGD(0.05, momentum=self.momentum)

    def train_data(self):
        inputs, labels, weights = regression(self.examples, seed=self.seed, dtype=self.dtype)
        if self.bad is not None:
            inputs[self.bad], weights[self.bad] = np.inf, 1
        return ArrayData(inputs, labels, weights)

    def eval_data(self):
        return ArrayData(*regression(23, seed=5, dtype=self.dtype)) if self.judged else None

    def build_metrics(self):
        return {"auc": keras.metrics.AUC(thresholds=[-0.005 + 0.01 * i for i in range(1, 101)])} if self.judged else {}

    def compute(self, model, batch, training):
        inputs, labels, weight = batch
        outputs = model(inputs, training=training)
        if self.contrastive:
            logits = tf.matmul(outputs, loop.all_gather(outputs), transpose_b=True)
            own = loop.first_row() + tf.range(tf.shape(outputs)[0], dtype=tf.int64)
            loss = tf.nn.sparse_softmax_cross_entropy_with_logits(own, logits)
        else:
            loss = tf.reduce_sum((outputs - labels) ** 2, -1)
        if self.judged:
            return {"loss": loss, "weight": weight, "auc": self.judgement(batch), "input": inputs[:, 0]}
        return {"loss": loss, "weight": weight}

    @staticmethod
    def judgement(batch):
        """Truth, and scores in hundredths, for which the AUC of Keras, which counts by thresholds, is exact."""
        inputs, labels, _ = batch
        return labels[:, 0] > 0, tf.round(100 * tf.sigmoid(inputs[:, 0] + labels[:, 0])) / 100

    def loss_by_hand(self, outputs, labels):
        """The loss of each example of a whole batch, without anything of tfloop."""
        if self.contrastive:
            logits = tf.matmul(outputs, outputs, transpose_b=True)
            return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.range(tf.shape(outputs)[0]), logits)
        return tf.reduce_sum((outputs - labels) ** 2, -1)


CASES = {
    "plain": ({}, {}),
    "clip": ({"split": True}, {"clip_norm": 0.02, "groups": 3}),
    "accumulate": ({}, {"accumulate": 3, "groups": 2, "remat": "full"}),
    "all_gather": ({"contrastive": True}, {}),
    "batch_norm": ({"batch_norm": True}, {}),
    "judged": ({"judged": True}, {}),
    "table": ({"table": True}, {"shard_optimizer": True}),
    "rows": ({"table": True, "momentum": 0.0}, {}),  # the optimizer changes the rows alone that were looked up
}
"""Fields of the task, and options of `fit`.

So each engine also trains with parts that are computed again (`accumulate`), with a sharded optimizer (`table`), and
with a model over two devices (`clip`): where the engine can; the others train these cases without.
"""

SETTINGS = {"epochs": 2, "batch_size": 20, "seed": 3}
SPLITTING = ("single", "horovod")
"""The engines on which a model may be over several devices."""


def trained(backend, fields, options, **settings):
    """The result of `fit`."""
    quiet = callbacks.standard(mlflow=None, progress=None, checkpoint=None, journal=None)
    precision = fields.get("dtype", "float32")
    settings = {**SETTINGS, "callbacks": quiet, "precision": precision, **settings, **options}
    name = backend if isinstance(backend, str) else backend.name
    if name == "central":  # it stores variables once
        settings.pop("shard_optimizer", None)
    if not (fields.get("split") and name in SPLITTING):
        return fit(Prime(**fields), backend=backend, **settings)
    backend = backends.create(backend) if isinstance(backend, str) else backend
    devices.own_several(name, 2)  # not before: a new engine owns one
    try:
        result = fit(Prime(**fields), backend=backend, **settings)
    finally:
        devices.own_several(name, None)
    places = [variable.value.device[-5:] for variable in result.model.variables]
    assert places == ["CPU:1", "CPU:1", "CPU:0", "CPU:0"]
    return result


LOCAL_STEPS = 4


def order_of(examples, seed, epoch):
    """The examples of an epoch, in order."""
    places = tf.range(examples, dtype=tf.int64)
    seed = tf.constant([seed, epoch], tf.int64)
    return tf.random.experimental.index_shuffle(places, seed=seed, max_index=examples - 1).numpy()


def local_by_hand(workers, dtype="float64", *, epochs, batch_size, seed):
    """Local SGD: each replica makes steps with its own mean; weights and momentum are averaged at each fourth step of
    an epoch, and at its end. The final weights."""
    task, replicas = Prime(dtype=dtype), []
    for _ in range(workers):
        keras.utils.set_random_seed(seed)
        with keras_precision(dtype):
            replicas.append((task.build_model(), task.build_optimizer()))
    for model, optimizer in replicas:
        optimizer.build(model.trainable_variables)
    arrays = task.train_data().arrays
    for epoch in range(epochs):
        order = order_of(task.examples, seed, epoch)
        batches = np.split(order, range(batch_size, task.examples, batch_size))
        for number, batch in enumerate(batches):
            for index, (model, optimizer) in enumerate(replicas):
                own = batch[index * len(batch) // workers : (index + 1) * len(batch) // workers]
                inputs, labels, weight = (array[own] for array in arrays)
                if not weight.sum():
                    continue
                with tf.GradientTape() as tape:
                    loss = task.loss_by_hand(model(inputs, training=True), labels)
                    mean = tf.reduce_sum(loss * weight) / weight.sum() + sum(model.losses)
                gradients = tape.gradient(mean, [variable.value for variable in model.trainable_variables])
                optimizer.apply(gradients, model.trainable_variables)
            if (number + 1) % LOCAL_STEPS == 0 or number + 1 == len(batches):
                for same in zip(
                    *(weights_of(model) + weights_of(optimizer) for model, optimizer in replicas), strict=True
                ):
                    average = np.mean([variable.numpy() for variable in same], 0)
                    for variable in same:
                        variable.assign(average)
    return [variable.numpy() for variable in weights_of(replicas[0][0])]


def by_hand(fields, options, *, epochs, batch_size, seed):
    """What a careful person would write for one device: the final variables, and the last epoch's mean loss."""
    task = Prime(**fields)
    keras.utils.set_random_seed(seed)
    with keras_precision(task.dtype):
        model, optimizer = task.build_model(), task.build_optimizer()
    arrays, clipped = task.train_data().arrays, 0
    for epoch in range(epochs):
        order = order_of(task.examples, seed, epoch)
        sums = np.zeros(2)
        for start in range(0, task.examples, batch_size):
            inputs, labels, weight = (array[order[start : start + batch_size]] for array in arrays)
            with tf.GradientTape() as tape:
                loss = task.loss_by_hand(model(inputs, training=True), labels)
                mean = tf.reduce_sum(loss * weight) / max(weight.sum(), 1.0) + sum(model.losses)
            sums += [float(tf.reduce_sum(loss * weight)), weight.sum()]
            gradients = tape.gradient(mean, [variable.value for variable in model.trainable_variables])
            if "clip_norm" in options:
                gradients, norm = tf.clip_by_global_norm(gradients, options["clip_norm"])
                clipped += int(norm > options["clip_norm"])
            if weight.sum():
                optimizer.apply(gradients, model.trainable_variables)
    assert clipped == ("clip_norm" in options) * epochs * -(-task.examples // batch_size)  # it bites at every step
    return [variable.numpy() for variable in weights_of(model)], sums[0] / sums[1]


def weights_of(model):
    """All floating-point variables: weights and statistics; no seeds."""
    return [variable for variable in model.variables if "float" in variable.dtype]


def largest_difference(found, expected):
    """Relative to the largest element of each variable."""
    assert len(found) == len(expected)
    return max(np.abs(a - b).max() / np.abs(b).max() for a, b in zip(found, expected, strict=True))


def in_turn(dtypes):
    """Each case, and the type in which it is trained; each case in each type in `tests.campaigns.products`."""
    if products.ALL in os.environ:
        return [*itertools.product(CASES, dtypes)]
    return [(name, dtypes[place % len(dtypes)]) for place, name in enumerate(CASES)]


def train_all(made, out, dtypes):
    """Trains all cases, and with local steps, on an engine; the chief writes what has come of it."""
    for name, dtype in in_turn(dtypes):
        fields, options = CASES[name]
        result = trained(made, {**fields, "dtype": dtype}, options)
        if made.is_chief:
            weights = [variable.numpy() for variable in weights_of(result.model)]
            np.savez(out / f"{name}-{dtype}.npz", *weights)
            (out / f"{name}-{dtype}.json").write_text(json.dumps(result.metrics))
    local = {"local_steps": LOCAL_STEPS}
    weights = [variable.numpy() for variable in weights_of(trained(made, {"dtype": "float64"}, local).model)]
    try:
        trained(made, {"bad": 60}, local)
        said = ""
    except loop.TrainingError as error:
        said = f"{type(error).__name__}: {error}"
    all_said = made.gather_json(said)
    if made.is_chief:
        np.savez(out / "local.npz", *weights)
        (out / "bad.json").write_text(json.dumps(all_said))
