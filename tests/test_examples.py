"""The examples, small; and as people run them."""

import subprocess
import sys

import numpy as np
import pytest

import callbacks
from loop import UsageError, backends, fit
from loop.run.result import read_weights
from loop.target import task_loader
from tests.conftest import ROOT, needs_horovod, tfloop


def quietly():
    return callbacks.standard(mlflow=None, progress=None)


def test_charlm_learns_more_than_how_frequent_characters_are():
    task = task_loader.load("charlm", ["context=32", "width=32", "layers=1", "characters=100000"])
    result = fit(task, steps=60, callbacks=quietly())
    assert result.metrics["eval_loss"] < result.metrics["eval_unigram"] - 0.2
    # The unigram entropy is a property of the text: an independent count of it.
    frequency = np.bincount(task.windows.reshape(-1)) / task.windows.size
    entropy = -(frequency[frequency > 0] * np.log(frequency[frequency > 0])).sum()
    assert result.metrics["eval_unigram"] == pytest.approx(entropy, rel=0.03)


def test_bring_your_keras_model():
    path = task_loader.shipped_path("bring_your_keras_model")
    result = fit(task_loader.load(f"{path}:MyModel"), callbacks=quietly())
    assert result.history[-1]["eval_loss"] < result.history[0]["eval_loss"]
    assert result.metrics["eval_accuracy"] > 0.85


def test_keras_task_uses_names_functions_and_weights():
    import keras

    from loop import ArrayData, KerasTask

    inputs, labels = np.ones((12, 3), "float32"), np.arange(12, dtype="float32")[:, None]
    weights = (np.arange(12) < 6).astype("float32")

    def model_fn():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])

    losses = []
    for loss in ("mean_squared_error", keras.losses.MeanSquaredError(), keras.losses.mean_squared_error):
        data = ArrayData(inputs, labels, weights)
        task = KerasTask(model_fn, lambda: keras.optimizers.SGD(0.0), loss, data, data)
        losses.append(fit(task, callbacks=quietly()).metrics["eval_loss"])
    # The first six have weight 1, the others 0; Keras divides by the number of examples, not by that of weights.
    assert losses == [np.sum(np.arange(6.0) ** 2) / 12] * 3


@pytest.mark.parametrize("name", ["digits", "bring_your_keras_model"])
def test_examples_run_as_scripts(name, tmp_path):
    done = subprocess.run(
        [sys.executable, "-X", "warm", str(task_loader.shipped_path(name))], capture_output=True, text=True,
        timeout=240, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "'eval_accuracy': 0." in done.stdout
    assert (tmp_path / "runs" / "mlflow.db").exists()


def test_the_readmes_own_task_trains(tmp_path):
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "readme_task.py").write_text(code)
    result = fit(task_loader.load("readme_task.py:Digits", ["hidden=128"]), epochs=5, callbacks=quietly())
    assert result.metrics["accuracy"] > 0.9


class FirstSteps(callbacks.Callback):
    """What the metrics were over the first three steps."""

    every = (3,)

    def on_steps_end(self, run, metrics):
        self.metrics = metrics


@pytest.mark.parametrize(
    ("name", "fields", "steps", "learns"),
    [
        ("gan", ["hidden=64"], 200, lambda m: m["eval_loss"] < 3.0 and m["discriminator_right"] > 0.5),
        ("contrastive", ["width=8"], 30, lambda m: m["eval_loss"] < 5.0 and m["eval_neighbour"] > 0.5),
        ("tfrecords", ["width=8"], 60, lambda m: m["eval_accuracy"] > 0.6),
        ("tabular", [], 45, lambda m: m["eval_auc"] > 0.9 and m["eval_accuracy"] > 0.85),
        ("transfer", [], 60, lambda m: m["eval_accuracy"] > 0.5),
        ("keras2", ["width=8"], 90, lambda m: m["eval_accuracy"] > 0.7),
        ("module", [], 96, lambda m: m["eval_loss"] < 1.25 and m["eval_r2"] > 0.35),
        ("custom_callback", ["width=32"], 100, lambda m: m["eval_loss"] < 2.9),
        ("images", [], 46, lambda m: m["eval_accuracy"] > 0.7),
        ("text", ["longest=80"], 50, lambda m: m["eval_accuracy"] > 0.5),
        ("records", [], 46, lambda m: m["eval_accuracy"] > 0.8),
    ],
)
def test_example_learns_and_has_the_same_numbers_on_two_replicas(name, fields, steps, learns):
    first, task = FirstSteps(), task_loader.load(name, fields)
    result = fit(task, steps=steps, eval_every=steps, callbacks=quietly() + [first])
    assert learns(result.metrics), result.metrics
    two = fit(task, steps=3, eval_every="never", backend=backends.create("mirrored", 2), callbacks=quietly())
    assert two.replicas == 2
    assert two.metrics == pytest.approx(dict(first.metrics), rel=1e-3, abs=1e-5)


@needs_horovod
@pytest.mark.parametrize(
    ("name", "fields", "engine"),
    [
        ("images", ["readers=1"], "multiworker"),
        ("text", ["width=16", "longest=50"], "horovod"),
        ("records", [], "horovod"),
    ],
)
def test_two_workers_that_read_by_index_make_the_same_model(name, fields, engine, tmp_path):
    settings = [f"--set={field}" for field in fields]
    done = tfloop(
        "train", name, *settings, "--backend", engine, "--workers", "2", "--steps", "36", "--run-dir", "two",
        "--track", "off", "--eval-every", "never",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    alone = {"backend": "single", "callbacks": quietly(), "run_dir": tmp_path / "one"}
    fit(task_loader.load(name, fields), steps=36, eval_every="never", **alone)
    (ours, _), (theirs, _) = (read_weights(tmp_path / run) for run in ("two", "one"))
    # Numbered: Keras counts the layers of a process, and so names them otherwise.
    for (mine, found), (_, expected) in zip(sorted(ours.items()), sorted(theirs.items()), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=5e-6, err_msg=mine)


def test_workers_read_files_of_their_own_which_are_written_once(tmp_path):
    from loop.data import shard_files

    task = task_loader.load("tfrecords")
    shares = [[image.tobytes() for image, _ in shard_files(task.read("train-*"), 2, rank).as_numpy_iterator()]
              for rank in (0, 1)]  # fmt: skip
    everything = [image.tobytes() for image, _ in task.read("train-*").as_numpy_iterator()]
    assert sorted(shares[0] + shares[1]) == sorted(everything)
    assert len(everything) == 1437
    assert {len(share) for share in shares} == {718, 719}
    [shard] = [
        each for each in callbacks.complete(quietly(), task.build_callbacks()) if isinstance(each, callbacks.ShardData)
    ]
    assert shard.policy == "file"
    # Another worker that comes late finds them, and leaves nothing behind; one that can't write says so.
    records = tmp_path / "runs" / "digits-tfrecords"
    before = {path: path.stat().st_mtime_ns for path in records.iterdir()}
    task_loader.load("tfrecords").train_data()
    assert {path: path.stat().st_mtime_ns for path in records.iterdir()} == before
    assert [path.name for path in records.parent.iterdir()] == [records.name]


def test_callback_of_ones_own_goes_on_where_it_was(tmp_path):
    def lines(steps, run_dir):
        fit(task_loader.load("custom_callback", ["width=16", "every=5"]), steps=steps, eval_every="never",
            run_dir=run_dir, callbacks=quietly())  # fmt: skip
        return (run_dir / "names.txt").read_text().splitlines()

    begun = lines(10, tmp_path / "cut")
    assert [line.split(",")[0] for line in begun] == ["step 5", "step 10"]
    assert lines(15, tmp_path / "cut") == lines(15, tmp_path / "whole")


def test_task_s_own_callbacks_take_the_place_of_standard_ones_and_what_is_handed_in_wins():
    own, other = callbacks.ShardData("file"), callbacks.ShardData("none")

    def shards(given):
        return [each for each in callbacks.complete(given, [own]) if isinstance(each, callbacks.ShardData)]

    assert shards(None) == shards([]) == shards(quietly()) == [own]
    assert shards([other]) == [other]


def test_example_whose_package_is_missing_says_which(monkeypatch):
    monkeypatch.setitem(sys.modules, "tf_keras", None)
    with pytest.raises(UsageError, match="'keras2' needs tf-keras: install it, with pip install tf-keras"):
        task_loader.load("keras2")


def test_each_shipped_example_is_listed_with_its_command():
    listed = (ROOT / "examples" / "README.md").read_text()
    for name in task_loader.SHIPPED:
        assert f"]({name}.py)" in listed
        assert f"`tfloop train {name}" in listed
    for path in (ROOT / "examples" / "cluster").iterdir():
        assert f"({path.name})" in (path.parent / "README.md").read_text() or path.name == "README.md"


def mnist_file(path, train=96, test=32):
    """A file in the format of MNIST: each digit is a bar at a place of its own."""
    arrays = {}
    for name, count in (("train", train), ("test", test)):
        labels = (np.arange(count) % 10).astype("uint8")
        images = np.zeros((count, 28, 28), "uint8")
        for image, label in zip(images, labels, strict=True):
            image[2 * label + 2 : 2 * label + 5] = 255
        arrays |= {f"x_{name}": images, f"y_{name}": labels}
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)


def test_mnist_trains_from_a_file_in_its_format_and_goes_on(tmp_path, monkeypatch, command):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    mnist_file(tmp_path / "keras" / "datasets" / "mnist.npz")
    run = [
        "train",
        "mnist",
        "--track",
        "off",
        "--run-dir",
        tmp_path / "run",
        "--set",
        "width=4",
        "--set",
        "dropout=0.0",
    ]
    run += ["--batch-size", 16, "--set", "learning_rate=0.02"]
    code, _, said = command(*run, "--epochs", 2)
    assert code == 0, said
    code, _, said = command(*run, "--epochs", 6, "--accept-changes")
    assert code == 0, said
    assert "going on from step 12" in said
    checkpoints = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert len(checkpoints) >= 3
    assert list((tmp_path / "run").rglob("events.out.tfevents.*"))


def test_mnist_without_a_file_and_a_network_is_one_line(tmp_path, monkeypatch, command):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # where nothing listens
    code, _, said = command("train", "mnist", "--track", "off", "--set", f"file={tmp_path / 'none.npz'}")
    assert (code, "none.npz isn't a file of MNIST" in said) == (2, True), said
    code, _, said = command("train", "mnist", "--track", "off")
    assert code == 2, said
    assert f"MNIST isn't at {tmp_path / 'datasets' / 'mnist.npz'}, and can't be downloaded" in said
