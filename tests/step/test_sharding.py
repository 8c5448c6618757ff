"""A sharded optimizer: the same bits as without it, in the same checkpoints, with a part of the memory."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import callbacks
from callbacks import Callback, Checkpoint
from loop import UsageError, evaluate, fit
from loop.backends import create
from loop.checkpoint import checkpoint_files
from loop.commands.export import export
from loop.model.variables import as_tf, optimizer_variables
from loop.step.sharding import Slicing
from tests import sharded
from tests.exactness import largest_difference
from tests.run.test_best import Scores
from tests.sharded import CASES, OPTIMIZERS, Chosen, ChosenLegacy, differences
from tests.tasks import Alarm, Plain, TwoRates


def mirrored(replicas):
    return create("mirrored", replicas) if replicas > 1 else "single"


# The mathematics


@settings(max_examples=60, deadline=None, derandomize=True, phases=[Phase.generate])
@given(shape=st.lists(st.integers(1, 6), max_size=3), replicas=st.integers(1, 5))
def test_slices_are_all_of_a_variable(shape, replicas):
    whole = np.random.default_rng(0).normal(size=shape)
    slicing = Slicing(tf.Variable(whole), replicas)
    slices = np.stack([slicing.cut_on_host(whole, replica) for replica in range(replicas)])
    in_graph = np.stack([slicing.cut(tf.constant(whole), tf.constant(replica)).numpy() for replica in range(replicas)])
    np.testing.assert_array_equal(slices, in_graph)
    np.testing.assert_array_equal(slicing.joined_on_host(slices), whole)
    np.testing.assert_array_equal(slicing.joined(tf.constant(slices)), whole)
    assert slices.shape == (replicas, -(-whole.size // replicas))


@settings(max_examples=30, deadline=None, derandomize=True, phases=[Phase.generate])
@given(rows=st.integers(1, 7), width=st.integers(1, 4), lookups=st.integers(0, 9), replicas=st.integers(1, 4))
def test_slices_of_a_sparse_gradient_keep_rows_that_come_twice(rows, width, lookups, replicas):
    random = np.random.default_rng(0)
    values = tf.constant(random.normal(size=(lookups, width)))
    gradient = tf.IndexedSlices(values, tf.constant(random.integers(0, rows, lookups)), tf.constant([rows, width]))
    slicing = Slicing(tf.Variable(np.zeros((rows, width))), replicas)
    for act in (tf.identity, tf.square):
        raised = tf.IndexedSlices(act(gradient.values), gradient.indices, gradient.dense_shape)
        expected = tf.math.unsorted_segment_sum(raised.values, raised.indices, rows).numpy()
        for replica in range(replicas):
            own = slicing.cut(gradient, tf.constant(replica))
            found = tf.math.unsorted_segment_sum(act(own.values), own.indices, slicing.length).numpy()
            np.testing.assert_array_equal(found, slicing.cut_on_host(expected, replica))


@pytest.mark.parametrize(("replicas", "case"), [(3 if case == "all" else 2, case) for case in CASES if case != "adam"])
def test_same_bits_in_one_process(replicas, case):
    assert differences(create("mirrored", replicas), *CASES[case]) == []


@pytest.mark.parametrize(
    ("optimizer", "family"),
    [(name, family) for name in OPTIMIZERS for family in (keras, tf_keras) if hasattr(family.optimizers, name)],
)
def test_each_optimizer_comes_to_the_same_on_slices(optimizer, family):
    """To rounding: a square root of the last elements, which fill no vector of the processor, may have another bit."""
    random = np.random.default_rng(0)
    variables = [tf.Variable(random.normal(size=(7, 3)).astype("float32"), name="whole")]
    slicing = Slicing(variables[0], 3)
    for replica in range(3):
        variables.append(tf.Variable(slicing.cut_on_host(variables[0].numpy(), replica), name=f"part_{replica}"))
    optimizers = []
    for variable in variables:
        variable.path = variable.name
        optimizers.append(getattr(family.optimizers, optimizer)(0.01, **OPTIMIZERS[optimizer]))
        optimizers[-1].build([variable])
    for _ in range(5):
        gradient = tf.constant(random.normal(size=(7, 3)).astype("float32"))
        gradients = [gradient, *(slicing.cut(gradient, replica) for replica in range(3))]
        for one, own, variable in zip(optimizers, gradients, variables, strict=True):
            one.apply_gradients([(own, variable)])
    found = slicing.joined_on_host(np.stack([part.numpy() for part in variables[1:]]))
    np.testing.assert_allclose(found, variables[0].numpy(), rtol=0, atol=5e-6)


def test_the_same_to_rounding_with_other_roots():
    engine = create("mirrored", 2)
    weights = []
    for on in (True, False):
        result = sharded.trained(engine, lambda: Chosen(optimizer="RMSprop"), {"epochs": 1}, on)
        weights.append([variable.numpy() for variable in result.model.variables])
    assert largest_difference(*weights) <= 5e-6


class Elementwise(keras.optimizers.Adam):
    """An optimizer of one's own that says what it is."""

    elementwise = True


def test_an_optimizer_of_ones_own_may_declare_itself():
    class Own(Plain):
        def build_optimizer(self):
            return Elementwise(0.01)

    assert differences(create("mirrored", 2), Own, {}) == []


def test_a_single_replica_owns_all_of_it():
    assert differences("single", *CASES["all"]) == []
    assert differences("single", lambda: Named(optimizer="Lamb"), {}) == []


def test_a_bad_step_changes_nothing_and_can_be_replayed(quiet, tmp_path):
    from loop.commands.replay import replay

    options = {"epochs": 1, "batch_size": 20, "shuffle": False, "on_nonfinite": "skip", "ema": 0.9}
    plain, sliced = (
        fit(Alarm(), backend=create("mirrored", 2), callbacks=quiet(), run_dir=tmp_path / str(on), shard_optimizer=on,
            **options)
        for on in (False, True)
    )  # fmt: skip
    assert sliced.metrics["skipped_steps"] == 1
    assert sliced.weights_sha256 == plain.weights_sha256
    assert replay(Alarm(), tmp_path / "True").names == replay(Alarm(), tmp_path / "False").names


# Memory


class Look(Callback):
    """Looks at the optimizer's slots, and at the averages."""

    every = 1

    def on_steps_end(self, run, metrics):
        self.averages = [sizes_held(variable) for variable in run.step.averages.variables]

    def on_fit_end(self, run, status):
        self.slots = [variable for variable in optimizer_variables(run.optimizer) if variable.shape.rank]
        self.parts = [part for shards in [run.built.shards] if shards for part in shards.parts]


def sizes_held(variable):
    """The bytes of a variable's present value on each replica: its static shape may be another."""
    values = as_tf([variable])[0].values
    return [
        value.dtype.size * int(tf.size(tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype)))
        for value in values
    ]


def test_each_replica_holds_its_part_alone(quiet):
    looks = [Look(), Look()]
    options = {"steps": 2, "eval_every": "never", "ema": 0.9, "backend": create("mirrored", 3)}
    for look, on in zip(looks, (False, True), strict=True):
        fit(Chosen(), callbacks=quiet() + [look], shard_optimizer=on, **options)
    whole, sliced = ([sizes_held(slot) for slot in look.slots] for look in looks)
    assert whole == [3 * [4 * elements] for elements in (20, 20, 4, 4, 4, 4, 1, 1)]
    assert sliced == [3 * [4 * elements] for elements in (7, 7, 2, 2, 2, 2, 1, 1)]
    assert looks[0].averages == [3 * [4 * elements] for elements in (20, 4, 4, 1)]
    assert looks[1].averages == [3 * [4 * elements] for elements in (7, 2, 2, 1)]
    # Between two steps a part holds nothing.
    for part in looks[1].parts:
        for own in part.values:
            assert tf.raw_ops.VariableShape(input=own.handle).numpy().tolist() == [0]


# Checkpoints


def checkpoint(directory):
    path = checkpoint_files.complete(directory / "checkpoints")[-1]
    return checkpoint_files.read(path, checkpoint_files.verify(path))


def saving(directory, replicas, on, epochs, task=Chosen, **options):
    chosen = callbacks.standard(mlflow=None, progress=None, report=None, checkpoint=Checkpoint(every="epoch"))
    options = {"batch_size": 20, "ema": 0.9, "eval_every": "never", **options}
    return fit(
        task(), epochs=epochs, backend=mirrored(replicas), callbacks=chosen, run_dir=directory, shard_optimizer=on,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("task", "attempts"),
    [
        (Chosen, [(2, True), (3, True), (1, True), (2, False), (3, True)]),
        (TwoRates, [(2, True), (3, True)]),
        (ChosenLegacy, [(3, True)]),
    ],
)
def test_a_run_goes_on_with_any_number_of_replicas_sharded_or_not(task, attempts, tmp_path):
    """At each change the results and the checkpoints are those of an unsharded run."""
    for epochs, (replicas, on) in enumerate(attempts, 1):
        results = []
        for directory, sharded_now in (("plain", False), ("sharded", on)):
            keras.utils.clear_session(free_memory=False)  # names count on within a process
            tf_keras.backend.clear_session()
            results.append(saving(tmp_path / directory, replicas, sharded_now, epochs, task))
        plain, found = results
        assert found.weights_sha256 == plain.weights_sha256, epochs
        assert found.metrics == plain.metrics
        saved, expected = (checkpoint(tmp_path / directory) for directory in ("sharded", "plain"))
        assert list(saved) == list(expected)
        for name, value in expected.items():
            np.testing.assert_array_equal(saved[name], value, err_msg=name)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory):
    """A sharded run of two epochs, and its directory."""
    directory = tmp_path_factory.mktemp("sharded") / "run"
    return saving(directory, 3, True, 2, eval_every="epoch"), directory


def test_a_run_that_is_cut_off_comes_to_the_same_bits(whole_run, tmp_path):
    whole, _ = whole_run
    for epochs in (1, 2):
        found = saving(tmp_path / "parts", 3, True, epochs, eval_every="epoch")
    assert (found.weights_sha256, found.history) == (whole.weights_sha256, whole.history)


def test_evaluate_and_export_read_its_checkpoints(whole_run, tmp_path):
    result, directory = whole_run
    metrics = evaluate(Chosen(), directory)
    assert metrics["eval_loss"] == pytest.approx(result.metrics["eval_loss"], rel=1e-6)
    export(Chosen(), directory, tmp_path / "weights.npz")
    with np.load(tmp_path / "weights.npz") as stored:
        for name, variable in zip(stored.files, result.model.variables, strict=True):
            np.testing.assert_array_equal(stored[name], variable.numpy())


@pytest.mark.parametrize("on", [False, True])
def test_the_best_weights_are_taken(on, tmp_path):
    chosen = callbacks.standard(mlflow=None, progress=None, report=None, checkpoint=Checkpoint(every="epoch"))
    options = {"batch_size": 50, "ema": 0.9, "keep": "best", "epochs": 5, "run_dir": tmp_path / "run"}
    result = fit(
        Plain(),
        backend=create("mirrored", 2),
        callbacks=callbacks.StandardSet([Scores(5, 4, 1, 2, 3), *chosen]),
        shard_optimizer=on,
        **options,
    )
    assert result.best_step == 9
    stored = checkpoint_files.read(
        tmp_path / "run" / "checkpoints" / "step-00000009",
        checkpoint_files.verify(tmp_path / "run" / "checkpoints" / "step-00000009"),
    )
    averages = [value for name, value in stored.items() if name.startswith("average/")]
    for average, variable in zip(averages, result.model.variables, strict=True):
        np.testing.assert_array_equal(average, variable.numpy())


class Exports(Callback):
    """Exports the model, in the middle of the training or at its end."""

    def __init__(self, out, at_end):
        self.out = out
        if at_end:
            self.on_fit_end = self.act
        else:
            self.on_epoch_end = self.act

    def act(self, run, _):
        self.outputs = run.export(self.out)[1]


def test_the_last_events_see_the_averages(quiet, tmp_path):
    options = {"epochs": 1, "batch_size": 20, "ema": 0.9, "eval_every": "never", "backend": create("mirrored", 2)}
    outputs = []
    for on in (False, True):
        last = Exports(tmp_path / str(on), at_end=True)
        fit(Plain(), callbacks=quiet() + [last], shard_optimizer=on, **options)
        outputs.append(last.outputs)
    np.testing.assert_array_equal(outputs[1], outputs[0])
    with pytest.raises(UsageError, match="each worker has a part of the averages; call it in on_fit_end"):
        fit(Plain(), callbacks=quiet() + [Exports(tmp_path / "x", at_end=False)], shard_optimizer=True, **options)


def test_phases(tmp_path):
    from tests.run.test_phases import FineTune

    results = [saving(tmp_path / str(on), 2, on, None, FineTune) for on in (False, True)]
    assert results[0].weights_sha256 == results[1].weights_sha256


# What it can't go with


class Own(keras.optimizers.Adam):
    """Nothing says that it computes each element by itself."""


def excluding():
    optimizer = keras.optimizers.AdamW(0.1)
    optimizer.exclude_from_weight_decay(var_list=[tf.Variable(0.0)])
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda: keras.optimizers.Lamb(0.1), "with Lamb: it looks at whole variables.*use SGD, Adam"),
        (lambda: keras.optimizers.Adafactor(0.1), "with Adafactor: it looks at whole variables"),
        (lambda: keras.optimizers.Muon(0.1), "with Muon: it looks at whole variables"),
        (lambda: keras.optimizers.Adam(0.1, clipnorm=1.0), r"its clipnorm needs whole gradients: .*clip_norm=\.\.\."),
        (lambda: keras.optimizers.Adam(0.1, global_clipnorm=1.0), r"its global_clipnorm needs .*--clip-norm"),
        (lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2), "larger batch_size with accumulate"),
        (lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=2), r"use ema \(--ema\)"),
        (excluding, r"use exclude_from_weight_decay\(var_names=\.\.\.\)"),
        (lambda: Own(0.1), "give the class the attribute `elementwise = True`"),
    ],
)
def test_optimizers_that_need_whole_variables_are_refused(optimizer, message, quiet):
    class Refused(Plain):
        def build_optimizer(self):
            return optimizer()

    options = {"steps": 2, "callbacks": quiet(), "shard_optimizer": True}
    with pytest.raises(UsageError, match=f"shard_optimizer=True.*{message}"):
        fit(Refused(), backend=create("mirrored", 2), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 4}, "shard_optimizer=True and local_steps=4: give one of the two"),
        ({"reduction": "adasum"}, "shard_optimizer=True and reduction='adasum': give one of the two"),
        ({"backend": "central"}, "shard_optimizer=True with backend='central': variables are stored once.*mirrored"),
        ({"shard_optimizer": 1}, "shard_optimizer=1: give True or False"),
    ],
)
def test_options_that_it_cannot_go_with_are_refused(options, message, quiet):
    options = {"backend": "mirrored", "shard_optimizer": True, **options}
    with pytest.raises(UsageError, match=message):
        fit(Plain(), callbacks=quiet(), **options | {"backend": create(options["backend"], 2)})


@pytest.mark.parametrize(
    "arguments",
    [
        ["--local-steps", 2], ["--reduction", "adasum"], ["--backend", "central"], ["--set", "optimizer=Lamb"],
    ],
    ids=str,
)  # fmt: skip
def test_refusals_on_the_command_line_are_a_line(arguments, command):
    with open("mine.py", "w") as file:
        file.write("from tests.step.test_sharding import Named\n\n\nclass Mine(Named):\n    pass\n")
    backend = [] if "--backend" in arguments else ["--backend", "mirrored"]
    code, _, said = command(
        "train", "mine.py:Mine", *backend, "--workers", 2, "--shard-optimizer", "--track", "off", *arguments
    )
    assert code == 2
    assert "shard_optimizer=True" in said
    assert "Traceback" not in said


class Named(Chosen):
    """The optimizer is chosen on the command line."""

    def build_optimizer(self):
        return getattr(keras.optimizers, self.optimizer)(0.01)


def test_the_command_line_trains_with_it(command):
    with open("mine.py", "w") as file:
        file.write("from tests.step.test_sharding import Named\n\n\nclass Mine(Named):\n    pass\n")
    found = []
    for more in ([], ["--shard-optimizer"]):
        code, out, said = command(
            "train", "mine.py:Mine", "--backend", "mirrored", "--workers", 2, "--steps", 3, "--track", "off", "--json",
            *more,
        )  # fmt: skip
        assert code == 0, said
        found.append(json.loads(out)["weights_sha256"])
    assert found[0] == found[1]
