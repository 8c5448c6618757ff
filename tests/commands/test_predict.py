"""Predictions: each example once, in order, the same bytes on any number of workers and after a kill."""

import copy
import json
import os
import shutil
import subprocess

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import loop
from loop import ArrayData, UsageError, fit
from loop.commands.cli.training import _prediction_lines
from loop.commands.predict import _described
from loop.commands.prediction_parts import blocks_in_part, owner
from tests.commands.test_verify import workers_of
from tests.conftest import TFLOOP, needs_horovod, tfloop, until
from tests.tasks import Legacy, Unweighted, Weighted, regression

EXAMPLES = 10_001
TASK = """
import os, signal
from dataclasses import dataclass
import keras, numpy as np, tensorflow as tf
from loop import ArrayData, TrainTask

@dataclass
class Mine(TrainTask):
    examples: int = 10_001
    kills_at: int = -1
    stops_at: int = -1

    def build_model(self):
        return keras.Sequential([keras.Input((300,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(3)])

    def build_optimizer(self):
        return keras.optimizers.SGD(0.01)

    def train_data(self):
        inputs = np.random.default_rng(0).normal(size=(self.examples, 300)).astype("float32")
        inputs[:, 0] = np.arange(self.examples)
        return ArrayData(inputs, np.arange(self.examples))

    eval_data = train_data

    def compute(self, model, batch, training):
        return {"loss": tf.reduce_sum(model(batch[0], training=training) ** 2, -1) * 1e-9}

    def predict(self, model, batch):
        def watched(ids):
            if self.kills_at in ids and not os.path.exists("killed"):
                open("killed", "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            if self.stops_at in ids and not os.path.exists("stopped"):
                open("stopped", "w").close()
                os.kill(int(os.environ.get("TFLOOP_LAUNCHER", os.getpid())), signal.SIGTERM)
            with open("seen", "a") as file:
                print(ids[0], file=file)
            return ids
        ids = tf.numpy_function(watched, [batch[1]], tf.int64)
        return {"logits": model(batch[0]), "id": tf.ensure_shape(ids, [None])}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory with a task and its run."""
    directory = tmp_path_factory.mktemp("trained")
    (directory / "mine.py").write_text(TASK)
    done = tfloop(
        "train", "mine.py:Mine", "--steps", 3, "--run-dir", "run", "--track", "off", "--eval-every", "never",
        cwd=directory,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return directory


def predicted(directory, out, *arguments):
    done = tfloop("predict", "run", "--out", out, "--batch-size", "64", *arguments, cwd=directory)
    assert done.returncode == 0, done.stderr
    assert not (directory / f"{out}.parts").exists()
    return (directory / out).read_bytes()


@pytest.fixture(scope="module")
def alone(trained):
    return predicted(trained, "alone.npz")


def test_each_example_once_in_order(trained, alone):
    with np.load(trained / "alone.npz") as arrays:
        assert arrays["id"].tolist() == list(range(EXAMPLES))
        assert arrays["logits"].shape == (EXAMPLES, 3)


@needs_horovod
@pytest.mark.parametrize(("workers", "backend"), [(2, "horovod"), (3, "horovod"), (2, "multiworker"), (2, "mirrored")])
def test_the_same_bytes_on_any_number_of_workers(trained, alone, workers, backend):
    out = f"{backend}-{workers}.npz"
    assert predicted(trained, out, "--workers", workers, "--backend", backend) == alone


@needs_horovod
def test_a_job_that_was_killed_goes_on_with_the_same_bytes(trained, alone):
    killed = tfloop(
        "predict", "run", "--out", "two.npz", "--batch-size", 64, "--workers", 2, "--set", "kills_at=7000", cwd=trained
    )
    assert killed.returncode == 1
    assert not (trained / "two.npz").exists()
    complete = {int(path.stem) for path in (trained / "two.npz.parts").glob("*.part")}
    assert complete

    other = tfloop("predict", "run", "--out", "two.npz", "--batch-size", 64, cwd=trained)
    assert other.returncode == 2
    assert "two.npz.parts has parts of another prediction (fields was" in other.stderr

    (trained / "seen").unlink()
    assert predicted(trained, "two.npz", "--workers", 3, "--set", "kills_at=7000") == alone
    seen = sorted(int(first) for first in (trained / "seen").read_text().split())
    assert seen == [block * 64 for block in range(157) if block // 2 not in complete]


@needs_horovod
@pytest.mark.parametrize("workers", [(), ("--workers", 2)])
def test_a_prediction_that_is_stopped_says_that_it_can_go_on(trained, alone, workers):
    typed = ["--set", "stops_at=7000", *workers]
    out = f"stopped{len(workers)}.npz"
    stopped = tfloop("predict", "run", "--out", out, "--batch-size", 64, *typed, cwd=trained)
    assert stopped.returncode == 75, stopped.stderr
    said = stopped.stderr.splitlines()[-1]
    assert said == "stopped: what is predicted is kept, and the same command goes on from there"
    assert predicted(trained, out, *typed) == alone
    (trained / "stopped").unlink()


@needs_horovod
def test_an_evaluation_by_workers_that_is_stopped_says_so(trained):
    command = [*TFLOOP, "evaluate", "run", "--workers", "2"]
    with subprocess.Popen(command, cwd=trained, stdout=-1, stderr=-1, text=True) as process:
        until(lambda: len(workers_of(process, "evaluate")) == 2)
        process.terminate()
        out, err = process.communicate(timeout=240)
    assert (process.returncode, out) == (75, "")
    assert err.endswith("stopped: nothing is left behind\n")


# In this process


class Plainly(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(tf.ones([5, 2]))

    def __call__(self, inputs, training=False):
        if tf.reduce_sum(inputs) > 1e9:
            inputs = inputs * 0
        return {"sum": inputs @ self.weight, "parts": [inputs[:, 0], tf.cast(inputs, tf.bfloat16)]}


class Modular(Unweighted):
    def build_model(self):
        return Plainly()

    def compute(self, model, batch, training):
        return {"loss": tf.reduce_sum(model(batch[0], training)["sum"] ** 2, -1) * 1e-6}


class Streamed(Unweighted):
    def eval_data(self):
        return tf.data.Dataset.from_tensor_slices(regression(self.examples)[:2])

    def predict(self, model, batch):
        return model(batch[0])[:, 0], loop.example_seed()[:, 1] // 65536


class Tokens(Unweighted):
    """Sentences of different lengths, in buckets while it is trained."""

    def build_model(self):
        return keras.Sequential(
            [keras.Input((None,)), keras.layers.Embedding(9, 4), keras.layers.GlobalAveragePooling1D(),
             keras.layers.Dense(1)]
        )  # fmt: skip

    def train_data(self):
        lengths = np.random.default_rng(1).integers(1, 9, self.examples)
        sentences = [np.full(length, length) for length in lengths]
        return ArrayData(sentences, lengths, padding=loop.Padding(bucket_by=True))

    eval_data = train_data

    def compute(self, model, batch, training):
        return {"loss": model(batch[0], training=training)[:, 0] ** 2}

    def predict(self, model, batch):
        return {"length": batch[1], "longest": tf.reduce_max(batch[0], -1)}


class Noisy(Unweighted):
    """Draws random numbers when it predicts."""

    def build_model(self):
        return keras.Sequential([keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])

    def predict(self, model, batch):
        return model(batch[0], training=True)


class Still(Noisy):
    predict = loop.TrainTask.predict


@pytest.fixture
def run_of(quiet, tmp_path):
    def run(task, **options):
        run_dir = tmp_path / f"run-{type(task).__name__}"
        options = {"steps": 2, "batch_size": 20, "eval_every": "never", **options}
        return fit(task, callbacks=quiet(), run_dir=run_dir, **options)

    return run


@pytest.mark.parametrize("kind", [Weighted, Legacy])
def test_by_default_the_model_is_called_as_compute_calls_it(kind, run_of, tmp_path):
    result = run_of(kind())
    expected = np.concatenate([result.model(regression(101)[0][at : at + 7]) for at in range(0, 101, 7)])
    np.testing.assert_allclose(loop.predict(kind(), result.run_dir, batch_size=7), expected, atol=1e-6)
    np.testing.assert_array_equal(
        loop.predict(kind(), result.run_dir, "train", batch_size=7), loop.predict(kind(), result.model, batch_size=7)
    )


def test_moving_averages_are_the_weights(run_of):
    result = run_of(Unweighted(), ema=0.5, steps=5)
    np.testing.assert_array_equal(
        loop.predict(Unweighted(), result.run_dir, batch_size=8),
        loop.predict(Unweighted(), result.model, batch_size=8),
    )


def test_outputs_of_a_module_have_the_names_of_its_structure(run_of):
    result = run_of(Modular())
    outputs = loop.predict(Modular(), result.run_dir, batch_size=10)
    shapes = {name: (array.dtype.name, array.shape) for name, array in outputs.items()}
    [first, second] = [name for name in shapes if name != "sum"]
    assert shapes == {"sum": ("float32", (101, 2)), first: ("float32", (101,)), second: ("float32", (101, 5))}
    np.testing.assert_array_equal(outputs[first], regression(101)[0][:, 0])


def test_streams_and_sentences_are_in_the_order_of_the_input(run_of):
    result = run_of(Streamed())
    outputs = loop.predict(Streamed(), result.run_dir, batch_size=10)
    expected = loop.predict(Unweighted(), result.model, batch_size=10)[:, 0]
    np.testing.assert_array_equal(outputs["output_0"], expected)
    assert outputs["output_1"].tolist() == list(range(101))

    result = run_of(Tokens())
    outputs = loop.predict(Tokens(), result.run_dir, batch_size=10)
    lengths = np.random.default_rng(1).integers(1, 9, 101)
    assert outputs["length"].tolist() == outputs["longest"].tolist() == lengths.tolist()


def test_random_numbers_of_a_block_do_not_depend_on_the_blocks_before(run_of, tmp_path):
    model = run_of(Noisy()).model
    whole = loop.predict(Noisy(), model, batch_size=10)
    np.testing.assert_array_equal(loop.predict(Noisy(), model, batch_size=10), whole)
    assert not np.array_equal(whole, loop.predict(Still(), model, batch_size=10))


def test_all_formats_hold_the_same(run_of, tmp_path):
    import pyarrow.parquet

    model = run_of(Modular()).model
    expected = loop.predict(Modular(), model, batch_size=10)
    for ending in ("npz", "parquet", "jsonl"):
        written = loop.predict(Modular(), model, out=tmp_path / f"p.{ending}", batch_size=10)
        assert written["rows"] == 101
        again = tmp_path / f"again.{ending}"
        loop.predict(Modular(), model, out=again, batch_size=10)
        assert again.read_bytes() == (tmp_path / f"p.{ending}").read_bytes()
    with np.load(tmp_path / "p.npz") as arrays:
        rows = pyarrow.parquet.read_table(tmp_path / "p.parquet").to_pydict()
        lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
        assert list(arrays) == list(rows) == list(lines[0]) == list(expected)
        for name, array in expected.items():
            np.testing.assert_array_equal(arrays[name], array)
            np.testing.assert_array_equal(np.array(rows[name], array.dtype), array)
            np.testing.assert_array_equal(np.array([line[name] for line in lines], array.dtype), array)

    model = run_of(Unweighted()).model
    loop.predict(Unweighted(), model, out="p.npy", batch_size=10)
    np.testing.assert_array_equal(np.load("p.npy"), loop.predict(Unweighted(), model, batch_size=10))


def test_inputs_from_files_and_arrays(run_of, tmp_path):
    import pyarrow
    import pyarrow.parquet

    task = Unweighted()
    model = run_of(task).model
    inputs = regression(101)[0]
    expected = loop.predict(task, model, batch_size=10)
    np.save("inputs.npy", inputs)
    np.savez("inputs.npz", anything=inputs.astype("float64"))
    column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(inputs.reshape(-1)), 5)
    pyarrow.parquet.write_table(pyarrow.table({"features": column}), "inputs.parquet")
    for data in ("inputs.npy", tmp_path / "inputs.npz", "inputs.parquet", inputs):
        np.testing.assert_array_equal(loop.predict(task, model, data, batch_size=10), expected)
    with pytest.raises(UsageError, match=r"can't be called with these inputs \(.* but received input with shape .*3\)"):
        loop.predict(task, model, inputs[:, :3], batch_size=10)


class Wrong(Unweighted):
    returns = "mean"

    def predict(self, model, batch):
        outputs = model(batch[0])
        return {
            "mean": tf.reduce_mean(outputs), "rows": outputs[:3], "text": tf.strings.as_string(outputs), "none": {},
            "nested": {"a": {"b": outputs}}, "two": (outputs, outputs), "object": {"a": object()},
        }[self.returns]  # fmt: skip


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ("mean", "predict\\(\\) returned a scalar for 'output': return one row per example"),
        ("rows", "predict\\(\\) returned 3 rows for 'output' of 10 examples: return one row per example"),
        ("text", "predict\\(\\) returned string for 'output': return real numbers or bool"),
        ("none", "predict\\(\\) returned no array"),
        ("nested", "predict\\(\\) returned dict for 'a'"),
        ("object", "predict\\(\\) returned object for 'a'"),
        ("two", "p.npy holds one array, but predict\\(\\) returned 2 \\(output_0, output_1\\)"),
    ],
)
def test_what_is_no_prediction_is_refused(returns, message, run_of, tmp_path):
    task = Wrong()
    task.returns = returns
    with pytest.raises(UsageError, match=message):
        loop.predict(task, run_of(Unweighted()).model, out=tmp_path / "p.npy", batch_size=10)
    assert not (tmp_path / "p.npy").exists()


class Uncalled(Unweighted):
    def compute(self, model, batch, training):
        return {"loss": tf.reduce_sum(model.layers[-1](model.layers[0](batch[0])) ** 2, -1)}


def test_data_that_is_not_there_is_refused(run_of, tmp_path):
    model = run_of(Unweighted()).model
    np.save("scalar.npy", 3.0)
    np.savez("scalar.npz", it=3.0)
    (tmp_path / "text.npy").write_text("no array")
    np.savez("whole.npz", it=np.zeros([5, 5], "float32"))
    whole = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "damaged.npz").write_bytes(whole.replace(bytes(100), b"\1" * 100))
    (tmp_path / "cut.npz").write_bytes(whole[:200])
    (tmp_path / "empty.npz").touch()
    (tmp_path / "empty.npy").touch()
    shutil.copy("scalar.npy", "one.npz")
    for data, message in (
        ("damaged.npz", "^DATA damaged.npz: it can't be read as .npz \\(Bad CRC-32"),
        ("cut.npz", "^DATA cut.npz: it can't be read as .npz \\(it isn't a zip file"),
        ("empty.npz", "^DATA empty.npz: it can't be read as .npz \\(it isn't a zip file"),
        ("one.npz", "^DATA one.npz: it can't be read as .npz \\(it isn't a zip file"),
        ("test", "Unweighted.test_data\\(\\) returned None, or isn't defined"),
        (np.zeros([0, 5]), "has no examples"),
        ("there.npy", "DATA 'there.npy': there is no such file"),
        ("scalar.npy", "^DATA scalar.npy: a scalar has no examples: give an array of shape"),
        ("scalar.npz", "^DATA scalar.npz: a scalar has no examples: give arrays of shape"),
        ("text.npy", "^DATA text.npy: it can't be read as an .npy file"),
        ("empty.npy", "^DATA empty.npy: it can't be read as an .npy file \\(No data left in file"),
        ("tset", "DATA 'tset': give eval, train, test, or a file"),
    ):
        with pytest.raises(UsageError, match=message):
            loop.predict(Unweighted(), model, data)
    with pytest.raises(UsageError, match="compute\\(\\) of Uncalled never calls the model"):
        loop.predict(Uncalled(), model)


def test_a_wrong_command_is_one_line_and_exit_code_2(command, run_of, tmp_path):
    run_of(Unweighted())
    (tmp_path / "there.npy").touch()
    for arguments, message in (
        (["--out", "p.csv"], "--out p.csv: there is no such format: give a name that ends in .parquet, .npy"),
        (["--out", "there.npy"], "--out there.npy exists already: remove it, or give another name"),
        (["--out", "no/p.npy"], "--out no/p.npy: there is no directory no"),
        (["--out", "p.npy", "--threads", "0"], "--threads 0: give a whole number >= 1"),
        (["none.npy", "--out", "p.npy"], "DATA 'none.npy': there is no such file"),
        (["--out", "p.npy", "--batch-size", "0"], "batch_size=0: the global batch must hold at least 1"),
    ):
        code, out, err = command("predict", "run-Unweighted", *arguments)
        assert (code, out) == (2, "")
        [line] = err.splitlines()
        assert line.startswith(f"tfloop: error: {message}")


def test_what_was_written_is_told_in_a_line(run_of):
    done = loop.predict(Unweighted(), run_of(Unweighted()).model, regression(1)[0], out="p.npy")
    assert _prediction_lines(done) == ["wrote p.npy: 1 row of output float32[1]"]


def test_the_directory_of_a_stranger_runs_no_code(trained, tmp_path):
    shutil.copytree(trained / "run", tmp_path / "moved")
    done = tfloop("predict", "moved", "--out", "p.npy", cwd=tmp_path)
    assert done.returncode == 2
    assert "you haven't trained there on this machine" in done.stderr
    assert "--trust" in done.stderr
    assert os.listdir(tmp_path) == ["moved"]


# How blocks are shared out


@given(st.integers(0, 300), st.sets(st.integers(0, 300)), st.integers(1, 9))
def test_each_missing_part_has_one_owner_and_shares_are_even(parts, done, workers):
    missing = [part for part in range(parts) if part not in done]
    owners = [owner(part, sorted(done), workers) for part in missing]
    assert owners == [place % workers for place in range(len(missing))]


@given(st.integers(1, 10**9), st.integers(1, 10**6))
def test_parts_are_neither_few_nor_endlessly_many(blocks, block_rows):
    size = blocks_in_part(blocks, block_rows)
    parts = -(-blocks // size)
    assert min(blocks, 64) <= parts <= 8192 or size * block_rows <= 4096


class Broken(Weighted):
    def compute(self, model, batch, training):
        raise TypeError("wrong in compute")


def test_an_error_of_the_task_is_not_blamed_on_the_run(quiet, tmp_path):
    """Its manifest was refused as if it weren't that of a run."""
    fit(Weighted(), steps=1, batch_size=8, callbacks=quiet(), run_dir=tmp_path / "run", backend="single")
    for compute in (loop.predict, loop.evaluate):
        with pytest.raises(TypeError, match="wrong in compute"):
            compute(Broken(), tmp_path / "run")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([[0.0], [1.0]], [[2.0], [1.0]]),
        (np.array(["a", "b"], object), np.array(["c", "d"], object)),
        (np.zeros(2), np.ones(2)),
        (ArrayData([[1, 2], [3]], padding=0), ArrayData([[1], [2, 3]], padding=0)),
        (loop.IndexedData(np.arange(100.0)), loop.IndexedData(np.arange(100.0)[::-1])),
        (loop.IndexedData([{"a": "x"}, {"a": "y"}]), loop.IndexedData([{"a": "x"}, {"a": "z"}])),
    ],
    ids=["list", "strings", "array", "different lengths", "indexed", "indexed strings"],
)
def test_other_inputs_are_told_from_those_that_parts_were_made_of(one, other):
    assert _described(one) == _described(copy.deepcopy(one)) != _described(other)


def test_no_stream_is_known_to_be_that_of_parts():
    stream = tf.data.Dataset.range(3)
    assert _described(loop.StreamData(stream)) != _described(loop.StreamData(stream))
