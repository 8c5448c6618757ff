"""Several optimizers, steps of one's own, moving averages, schedules; and Keras's own fit as a witness."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from callbacks import Callback
from loop import ArrayData, UsageError, evaluate, fit
from loop.backends import create
from loop.commands.export import export
from tests.exactness import largest_difference, weights_of
from tests.tasks import Plain, TwoRates, Unweighted, Weighted, regression


def engine(replicas):
    return create("mirrored", replicas) if replicas > 1 else "single"


def weights(result):
    return [variable.numpy() for variable in weights_of(result.model)]


def test_two_optimizers_are_one_step(quiet, tmp_path):
    options = {"epochs": 2, "batch_size": 20, "eval_every": "never"}
    one, three = (fit(TwoRates(), backend=engine(n), callbacks=quiet(), **options) for n in (1, 3))
    assert largest_difference(weights(three), weights(one)) <= 5e-6
    # By hand: the same gradients, each half to its own optimizer.
    keras.utils.set_random_seed(0)
    task = TwoRates()
    model, optimizers = task.build_model(), task.build_optimizer()
    arrays = task.train_data().arrays
    for epoch in range(2):
        order = tf.random.experimental.index_shuffle(
            tf.range(101, dtype=tf.int64), seed=tf.constant([0, epoch], tf.int64), max_index=100
        ).numpy()
        for start in range(0, 101, 20):
            inputs, labels = (array[order[start : start + 20]] for array in arrays)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.reduce_sum((model(inputs) - labels) ** 2, -1))
            gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
            optimizers["body"].apply(gradients[:2], model.trainable_variables[:2])
            optimizers["head"].apply(gradients[2:], model.trainable_variables[2:])
    assert largest_difference(weights(one), [variable.numpy() for variable in model.trainable_variables]) <= 5e-6

    for epochs in (1, 2):
        options["epochs"] = epochs
        resumed = fit(TwoRates(), callbacks=quiet(), run_dir=tmp_path / "run", **options)
    assert resumed.weights_sha256 == one.weights_sha256


class Pair(tf.Module):
    """Two networks that work against each other."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(5)])
        self.discriminator = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])


class Adversarial(Plain):
    """A small GAN: two losses, two optimizers, two steps."""

    def build_model(self):
        return Pair()

    def build_optimizer(self):
        return {"generator": keras.optimizers.SGD(0.05), "discriminator": keras.optimizers.SGD(0.02)}

    def train_data(self):
        inputs = regression(101)[0]
        return ArrayData(inputs, np.random.default_rng(2).normal(size=[101, 3]).astype("float32"))

    eval_data = train_data

    def judged(self, model, batch):
        real, noise = batch
        ones = tf.ones([tf.shape(real)[0], 1])
        good = keras.losses.binary_crossentropy(ones, model.discriminator(real), from_logits=True)
        bad = keras.losses.binary_crossentropy(0 * ones, model.discriminator(model.generator(noise)), from_logits=True)
        return {"loss": good + bad, "real": good}

    def forged(self, model, batch):
        judged = model.discriminator(model.generator(batch[1]))
        return {"loss": keras.losses.binary_crossentropy(tf.ones_like(judged), judged, from_logits=True)}

    def train_step(self, model, step):
        step.minimize(lambda batch: self.judged(model, batch), "discriminator")
        step.minimize(lambda batch: self.forged(model, batch), "generator")

    def compute(self, model, batch, training):
        return {"loss": self.judged(model, batch)["loss"]}


@pytest.mark.parametrize("options", [{}, {"accumulate": 3}, {"clip_norm": 0.1}, {"precision": "bfloat16"}], ids=str)
def test_gan_is_the_same_on_any_number_of_replicas(options, quiet):
    # The options change the training alone.
    evaluated = "never" if options else "epoch"
    one, many = (
        fit(Adversarial(), epochs=2, batch_size=20, eval_every=evaluated, backend=engine(n), callbacks=quiet(),
            **options)
        for n in (1, 2 if options else 3)
    )  # fmt: skip
    bound = 5e-6 if "precision" not in options else 5e-2  # bfloat16 has 8 bits
    first, second = (
        [variable.numpy() for variable in result.model.trainable_variables or layers(result.model)]
        for result in (one, many)
    )
    assert largest_difference(second, first) <= bound
    evaluations = [] if options else ["eval_loss"]
    assert list(one.metrics) == ["discriminator_loss", "discriminator_real", "generator_loss", *evaluations]


def layers(pair):
    return [*pair.generator.trainable_variables, *pair.discriminator.trainable_variables]


def test_gan_by_hand(quiet):
    result = fit(Adversarial(), epochs=1, batch_size=20, callbacks=quiet(), shuffle=False)
    keras.utils.set_random_seed(0)
    task = Adversarial()
    model, optimizers = task.build_model(), task.build_optimizer()
    arrays = task.train_data().arrays
    for start in range(0, 101, 20):
        batch = tuple(array[start : start + 20] for array in arrays)
        for name, values in (("discriminator", task.judged), ("generator", task.forged)):
            own = getattr(model, name).trainable_variables
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(values(model, batch)["loss"])
            optimizers[name].apply(tape.gradient(loss, [variable.value for variable in own]), own)
    found, expected = ([variable.numpy() for variable in layers(each)] for each in (result.model, model))
    assert largest_difference(found, expected) <= 5e-6


def test_a_step_may_minimise_twice_and_use_what_it_got(quiet):
    class Twice(Plain):
        def train_step(self, model, step):
            means = step.minimize(lambda batch: self.compute(model, batch, True))
            assert set(means) == {"loss"}
            assert means["loss"].shape == []
            step.minimize(lambda batch: self.compute(model, batch, True))

    result = fit(Twice(), epochs=1, batch_size=20, callbacks=quiet())
    assert (result.steps, result.examples) == (6, 101)  # each example once, however often it is looked at
    assert result.metrics["loss"] > 0


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_a_loss_may_be_multiplied_by_a_mean_of_the_step(precision, quiet):
    class Guided(Weighted):
        def train_step(self, model, step):
            means = step.minimize(lambda batch: self.compute(model, batch, True))

            def guided(batch):
                values = self.compute(model, batch, True)
                assert means["loss"].dtype == values["loss"].dtype == precision
                return values | {"loss": values["loss"] * means["loss"]}

            step.minimize(guided)

    assert fit(Guided(), steps=2, batch_size=20, precision=precision, callbacks=quiet()).metrics["loss"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"build_optimizer": lambda self: {"tail": keras.optimizers.SGD()}}, "no attribute or layer of that name"),
        ({"build_optimizer": lambda self: {"body": keras.optimizers.SGD()}}, "no optimizer trains .*head/kernel"),
        ({"build_optimizer": lambda self: {}}, "an empty dict"),
        (
            {"optimizer_variables": lambda self, model, names: dict.fromkeys(names, model.trainable_variables)},
            "belongs to two optimizers, 'body' and 'head'",
        ),
        ({"train_step": lambda self, model, step: None}, r"never called step.minimize"),
        ({"train_step": lambda self, model, step: step.minimize({"loss": 1})}, r"minimize\(dict\): give a function"),
        (
            {"train_step": lambda self, model, step: step.minimize(lambda batch: {"loss": 1}, "tail")},
            r"build_optimizer\(\) has no such optimizer \(body, head\)",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(change, message, quiet):
    wrong = type("Wrong", (TwoRates,), change)
    with pytest.raises(UsageError, match=message):
        fit(wrong(), callbacks=quiet())


def test_an_optimizer_that_divides_by_a_loss_scale_is_refused(quiet):
    """Only Keras's fit multiplies the loss by it: here steps of plain SGD were smaller by that factor."""

    class Dividing(Plain):
        def build_optimizer(self):
            return keras.optimizers.SGD(0.1, loss_scale_factor=4.0)

    with pytest.raises(UsageError, match=r"SGD with loss_scale_factor=4\.0, .*: leave it out; precision="):
        fit(Dividing(), epochs=1, batch_size=20, callbacks=quiet())


@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 2}, {"use_ema": True, "ema_overwrite_frequency": 3}], ids=str
)
def test_what_keras_cannot_do_with_replicas_is_refused(options, quiet):
    class Deciding(Plain):
        def build_optimizer(self):
            return keras.optimizers.SGD(0.1, **options)

    assert fit(Deciding(), epochs=1, batch_size=20, callbacks=quiet()).steps == 6
    with pytest.raises(UsageError, match=r"SGD decides at each step .*, or tf.cond in its code\).* backend='mirrored'"):
        fit(Deciding(), epochs=1, batch_size=20, callbacks=quiet(), backend=engine(2))


class Wrapping(keras.optimizers.Optimizer):
    """Leaves its work to another optimizer, as Lookahead does."""

    def __init__(self, base, in_dict=False):
        super().__init__(learning_rate=0.1)
        self.held = {"base": base} if in_dict else base

    @property
    def base(self):
        return self.held["base"] if isinstance(self.held, dict) else self.held

    def build(self, variables):
        super().build(variables)
        self.base.build(variables)

    def apply(self, grads, trainable_variables=None):
        self.base.apply(grads, trainable_variables)
        self.iterations.assign_add(1)


@pytest.mark.parametrize("in_dict", [False, True])
def test_gradients_are_added_up_once_for_an_optimizer_within_another_one(in_dict, quiet):
    """The inner one added up the gradients of the replicas once more."""

    class Wrapped(Plain):
        def build_optimizer(self):
            return Wrapping(keras.optimizers.SGD(0.1), in_dict)

    found = []
    for backend in ("single", engine(2)):
        result = fit(Wrapped(), epochs=1, batch_size=20, callbacks=quiet(), backend=backend)
        found.append([variable.numpy() for variable in result.model.variables])
    assert largest_difference(*found) <= 1e-5


def test_slots_of_an_optimizer_within_another_one_are_saved(quiet, tmp_path):
    class Wrapped(Plain):
        def build_optimizer(self):
            return Wrapping(keras.optimizers.Adam(0.1))

    whole = fit(Wrapped(), steps=8, batch_size=20, callbacks=quiet(), run_dir=tmp_path / "whole")
    for steps in (5, 8):
        result = fit(Wrapped(), steps=steps, batch_size=20, callbacks=quiet(), run_dir=tmp_path / "parts")
    assert result.weights_sha256 == whole.weights_sha256


def test_moving_average_is_evaluated_saved_exported_and_returned(quiet, tmp_path):
    def run(epochs, directory, **more):
        return fit(
            Unweighted(), epochs=epochs, batch_size=20, ema=0.9, callbacks=quiet(), run_dir=tmp_path / directory, **more
        )

    result = run(2, "a")

    # By hand, from the weights after each step.
    class Follow(Callback):
        every = 1
        average = None

        def on_fit_start(self, run):
            self.average = [variable.numpy() for variable in run.model.trainable_variables]

        def on_steps_end(self, run, metrics):
            for i, variable in enumerate(run.model.trainable_variables):
                self.average[i] = 0.9 * self.average[i] + 0.1 * variable.numpy()

    follow = Follow()
    plain = fit(Unweighted(), epochs=2, batch_size=20, eval_every="never", callbacks=quiet() + [follow])
    assert largest_difference(weights(result), follow.average) <= 1e-5
    assert largest_difference(weights(plain), follow.average) > 1e-2
    inputs, labels = Unweighted().eval_data().arrays
    error = (result.model(inputs).numpy() - labels) ** 2
    assert result.metrics["eval_loss"] == pytest.approx(error.mean(), rel=1e-5)
    assert evaluate(Unweighted(), tmp_path / "a")["eval_loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-6)
    export(None, tmp_path / "a", tmp_path / "w.npz")
    with np.load(tmp_path / "w.npz") as stored:
        assert [stored[name].tobytes() for name in stored.files] == [w.tobytes() for w in result.model.get_weights()]
    # What is trained on is the weights, not their average: a resume is exact.
    run(1, "b")
    assert run(2, "b").weights_sha256 == result.weights_sha256
    three = run(2, "c", backend=engine(3), eval_every="never")
    assert largest_difference(weights(three), weights(result)) <= 5e-6


class Words(Plain):
    """A large table of which each batch needs a few rows, many of them more than once."""

    optimizer = keras.optimizers.SGD

    def build_model(self):
        layers = keras.layers
        return keras.Sequential([keras.Input((16,), dtype="int32"), layers.Embedding(5000, 32), layers.Flatten(),
                                 layers.Dense(10)])  # fmt: skip

    def build_optimizer(self):
        return type(self).optimizer(0.3)

    def train_data(self):
        random = np.random.default_rng(0)
        return ArrayData(random.integers(0, 60, (101, 16)) ** 2, random.integers(0, 10, 101))

    def eval_data(self):
        return None

    def compute(self, model, batch, training):
        logits = model(batch[0], training=training)
        return {"loss": keras.losses.sparse_categorical_crossentropy(batch[1], logits, from_logits=True)}


class WholeTable(Words):
    class optimizer(keras.optimizers.SGD):
        """Of which it is not known whether it leaves rows alone."""


class Operations(Callback):
    def on_fit_end(self, run, status):
        graph = run.graph.as_graph_def()
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        self.kinds = {node.op for node in nodes}


@pytest.mark.parametrize(
    ("options", "by_rows"),
    [({}, True), ({"ema": 0.9, "on_nonfinite": "skip"}, True), ({"precision": "bfloat16"}, True),
     ({"clip_norm": 0.1}, False), ({"accumulate": 2}, False), ({"compile": "xla"}, False)],
    ids=str,
)  # fmt: skip
def test_an_embedding_is_updated_by_rows_to_the_same_bits(options, by_rows, quiet):
    found = {}
    for task in (Words(), WholeTable()):
        seen = Operations()
        result = fit(task, epochs=2, batch_size=20, callbacks=quiet() + [seen], **options)
        found[type(task)] = result.weights_sha256, "ResourceScatterSub" in seen.kinds
    assert found[Words] == (found[WholeTable][0], by_rows)
    assert not found[WholeTable][1]


def test_weight_decay_is_not_scaled_by_the_weight_of_the_loss(quiet):
    class Decayed(Weighted):
        factor = 1.0

        def build_optimizer(self):
            return keras.optimizers.SGD(0.05, weight_decay=0.1)

        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return values | {"weight": values["weight"] * self.factor}

    class Heavier(Decayed):
        factor = 8.0  # a power of 2 changes no bit

    one, eight = (fit(task(), epochs=1, batch_size=20, callbacks=quiet()) for task in (Decayed, Heavier))
    assert one.weights_sha256 == eight.weights_sha256


@pytest.mark.parametrize("options", [{}, {"accumulate": 4}, {"on_nonfinite": "skip"}], ids=str)
def test_schedules_count_optimizer_steps(options, quiet):
    seen = []

    class Scheduled(Unweighted):
        def build_optimizer(self):
            return keras.optimizers.SGD(keras.optimizers.schedules.PiecewiseConstantDecay([3], [0.1, 0.0]))

    class Look(Callback):
        every = 1

        def on_steps_end(self, run, metrics):
            seen.append((int(run.optimizer.iterations.numpy()), run.model.get_weights()[0].tobytes()))

    fit(Scheduled(), epochs=1, batch_size=20, callbacks=quiet() + [Look()], **options)
    assert [iterations for iterations, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert seen[3][1] == seen[4][1] == seen[5][1] != seen[2][1]  # steps 0 to 3 have a rate, those after have none


class Centralizing(keras.optimizers.SGD):
    """Changes the gradients of matrices alone."""

    def apply(self, grads, trainable_variables=None):
        changed = []
        for gradient in grads:
            is_matrix = gradient.shape.rank > 1
            changed.append(gradient - tf.reduce_mean(gradient, 0, keepdims=True) if is_matrix else gradient)
        super().apply(changed, trainable_variables)


class Centralized(Unweighted):
    def build_optimizer(self):
        return Centralizing(0.1)


@pytest.mark.parametrize("task_class", [Unweighted, Centralized])
def test_keras_fit_on_the_same_order_comes_to_the_same_weights(task_class, quiet):
    """An outside witness: where Keras is exact (equal batches, one device, no weights), we agree with it."""
    task = task_class(examples=100)
    result = fit(task, epochs=3, batch_size=20, seed=4, callbacks=quiet())
    keras.utils.set_random_seed(4)
    model = task.build_model()
    model.compile(optimizer=task.build_optimizer(), loss="mse")
    inputs, labels = task.train_data().arrays
    for epoch in range(3):
        order = tf.random.experimental.index_shuffle(
            tf.range(100, dtype=tf.int64), seed=tf.constant([4, epoch], tf.int64), max_index=99
        ).numpy()
        model.fit(inputs[order], labels[order], batch_size=20, shuffle=False, verbose=0)
    assert largest_difference(weights(result), [variable.numpy() for variable in model.trainable_variables]) <= 1e-6


def test_minimize_within_a_branch_is_refused(quiet):
    class Branched(Plain):
        def train_step(self, model, step):
            means = step.minimize(lambda batch: self.compute(model, batch, True))
            if means["loss"] > 0.5:
                step.minimize(lambda batch: self.compute(model, batch, True))

    with pytest.raises(UsageError, match=r"step.minimize\(\) within tf.cond"):
        fit(Branched(), callbacks=quiet())


def test_parts_that_only_the_step_builds_are_trained(quiet):
    class Late(Adversarial):
        def build_model(self):
            pair = Pair()
            pair.discriminator = keras.Sequential([keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
            return pair

        def compute(self, model, batch, training):
            return {"loss": tf.reduce_sum(model.generator(batch[1]) ** 2, -1)}

    result = fit(Late(), epochs=1, batch_size=20, callbacks=quiet())
    assert result.metrics["discriminator_loss"] > 0
    assert all(variable.numpy().any() for variable in result.model.discriminator.trainable_variables)


def test_keras_variable_of_a_module_is_trained(quiet):
    class Loose(tf.Module):
        def __init__(self):
            super().__init__()
            self.w = keras.Variable(np.zeros([5, 1], "float32"), name="w")

        def __call__(self, inputs, training=False):
            return inputs @ tf.convert_to_tensor(self.w)

    class Task(Plain):
        def build_model(self):
            return Loose()

    assert fit(Task(), epochs=1, callbacks=quiet()).model.w.numpy().any()
