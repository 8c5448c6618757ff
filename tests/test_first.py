"""The first minutes: `new`, `--dry-run`, `--overfit`, completion, the version; and docs/start.md as it is typed."""

import json
import re
import tempfile
import tomllib

import numpy as np
import pytest
import typer.main

import cli
import loop
from callbacks import standard
from loop import ArrayData, backends, fit
from loop.commands import completion
from loop.commands.new import class_name, fitting, new
from loop.errors import UsageError
from tests.conftest import ROOT, needs_horovod, tfloop
from tests.tasks import Plain, Streamed, Weighted, regression
from tests.test_reliability import files_no_longer_than

START = (ROOT / "docs" / "start.md").read_text()


# tfloop new


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mytask", "MyTask"),
        ("my_task", "MyTask"),
        ("MyTask", "MyTask"),
        ("task", "Task"),
        ("speech_2", "Speech2"),
        ("größe", "Größe"),
        ("array_data", "ArrayDataTask"),
        ("train_task", "TrainTaskTask"),
        ("true", "TrueTask"),
    ],
)
def test_new_writes_a_class_named_after_the_file(name, kind, tmp_path):
    assert new(name) == f"{name}.py:{kind}"
    made = (tmp_path / f"{name}.py").read_text()
    assert re.findall(r"^class (\w+)\(TrainTask\)", made, re.M) == [kind]
    assert "template" not in made.lower()
    assert set(re.findall(r"\S+\.py\S*", made)) == {f"{name}.py:{kind}"}  # the commands at its top train this file
    compile(made, name, "exec")


@pytest.mark.parametrize(
    ("name", "better"),
    [
        *(
            (name, f"{name}_task")
            for name in ("loop", "callbacks", "cli", "keras", "tensorflow", "numpy", "json", "class")
        ),
        ("my-task", "my_task"),
        ("my task", "my_task"),
        ("mytask.py", "mytask"),
        ("../else/where", "where"),
        ("2fast", "task_2fast"),
        ("__main__", "main"),
        ("", "task"),
        ("-", "task"),
        ("ﬁne", "fine"),
        ("x" * 300, "x" * 100),
    ],
)
def test_new_refuses_what_hides_a_module_or_is_no_name(name, better, command, tmp_path):
    code, out, err = command("new", "--", name)
    assert (code, out) == (2, "")
    assert err.endswith(f"how about {better!r}?\n")
    assert fitting(better) == better
    assert not [*tmp_path.iterdir()]


def test_a_full_disk_leaves_no_half_of_a_new_file(command):
    with files_no_longer_than(100):
        code, _, err = command("new", "mine")
    assert (code, err) == (2, "tfloop: error: mine.py can't be written: File too large\n")
    assert command("new", "mine")[0] == 0


def test_new_writes_over_nothing(command, tmp_path):
    (tmp_path / "mine.py").write_text("precious")
    (tmp_path / "link.py").symlink_to("nowhere")
    for name in ("mine", "link"):
        code, _, err = command("new", name)
        assert (code, err) == (2, f"tfloop: error: {name}.py is there already: give another name\n")
    assert (tmp_path / "mine.py").read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_class_names_are_made_of_words():
    assert [class_name(name, set()) for name in ("multitask", "a__b", "nlp", "x_Y")] == ["MultiTask", "AB", "Nlp", "XY"]


# docs/start.md


@needs_horovod
def test_start_as_it_is_typed(command, tmp_path):
    (new_, train, runs, ui), dry, [overfit] = (each.splitlines() for each in re.findall(r"```\n(.*?)```", START, re.S))
    assert command(*words(new_))[0] == 0
    done = tfloop(*words(train), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    known = typer.main.get_group(cli.app).commands
    assert words(ui) == ["ui"]  # lasts until Ctrl-C
    if words(runs)[0] in known:
        assert command(*words(runs))[0] == 0

    code, _, err = command(*words(overfit))
    assert code == 0
    assert re.search(r"eval_accuracy 1\s", err)

    before = {*tmp_path.rglob("*")}
    done = tfloop(*words(dry[0].removeprefix("$ ")), cwd=tmp_path)
    varies = re.compile(r"peak .*|after step 2.*")
    found = [varies.sub("", text) for text in (done.stderr + done.stdout).splitlines()]
    assert found == [varies.sub("", text) for text in dry[1:]]
    assert {*tmp_path.rglob("*")} == before


def words(line):
    """The arguments of a command line as it stands in the text."""
    name, *arguments = line.split()
    assert name == "tfloop"
    return arguments


# --dry-run

TASKS = """
import os, callbacks, keras, tensorflow as tf
from loop import TrainTask
from tests.tasks import *

class Batched(Weighted):
    defaults = {"epochs": 7, "ema": 0.9}

    def build_optimizer(self):
        return keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.25, 100, 0.5))

class Dicts(Unweighted):
    def train_data(self):
        inputs, labels = regression(self.examples)[:2]
        return tf.data.Dataset.from_tensor_slices({"in": {"x": inputs}, "out": labels})

    eval_data = lambda self: None

    def build_model(self):
        inner = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *inner])
        model.one, model.two = model.layers[0], model.layers[-1]
        return model

    def build_optimizer(self):
        return {"one": keras.optimizers.SGD(0.5), "two": keras.optimizers.SGD(0.125, momentum=0.9)}

    def optimizer_variables(self, model, names):
        return {"one": model.trainable_variables[:-2], "two": model.trainable_variables[-2:]}

    def compute(self, model, batch, training):
        return {"loss": (tf.cast(model(batch["in"]["x"], training=training), "float32") - batch["out"])[:, 0] ** 2}

class Tracked(Weighted):
    def build_callbacks(self):
        return [callbacks.MLflowTracker(os.environ["STORE"]), callbacks.Checkpoint(every=1)]

class Pair(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs, training=False):
        return self.dense(inputs), None, {"rows": tf.RaggedTensor.from_row_splits(inputs, [0, tf.shape(inputs)[0]])}

class Pairs(Unweighted):
    def build_model(self):
        model = Pair()
        model(tf.zeros([1, 5]))
        return model

    def compute(self, model, batch, training):
        return {"loss": (model(batch[0], training=training)[0] - batch[1])[:, 0] ** 2}
"""


@pytest.fixture
def dry(command, tmp_path, monkeypatch):
    """A dry run; gives what it tells, after a look at what it has left behind."""
    (tmp_path / "mine.py").write_text(TASKS)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    def run(*arguments):
        code, out, err = command("train", *arguments, "--dry-run", "--json")
        assert code == 0, err
        left = [path.name for path in tmp_path.rglob("*") if not re.search("__pycache__|__autograph", str(path))]
        assert sorted(left) == ["mine.py", "tmp"]
        return json.loads(out)

    return run


def test_a_dry_run_tells_what_would_be_trained(dry):
    arguments = ["mine.py:Batched", "--backend", "mirrored", "--workers", 2, "--batch-size", 25, "--accumulate", 3]
    found = dry(*arguments, "--run-dir", "run", "--eval-every", 99)
    peak = found["memory"].pop("peak")
    assert len(peak) == 1
    assert 1e8 < peak[0] < 1e11
    metrics = found.pop("metrics")
    assert {"loss", "error", "eval_loss", "eval_error"} == set(metrics)
    assert found == {
        "task": "Batched",
        "batch": [
            {"name": "", "dtype": "float32", "shape": [25, 5]},
            {"name": "", "dtype": "float32", "shape": [25, 1]},
            {"name": "", "dtype": "float32", "shape": [25]},
        ],
        "outputs": [{"name": "", "dtype": "float32", "shape": [25, 1]}],
        "parameters": {"trained": 29, "all": 29},
        "memory": {"parameters": 116, "gradients": 116, "optimizer": 8 + 2 * 116 + 116, "gpu_peak": [0]},
        "learning_rates": [{"name": "", "optimizer": "Adam", "rate": 0.25, "schedule": "ExponentialDecay"}],
        "batch_size": {
            "global": 25, "replica": 13, "micro_batches": 3, "micro_batch": 9, "micro_batch_replica": 5,
        },
        "steps_per_epoch": 5,
        "total_steps": 35,
        "precision": "float32",
        "backend": "mirrored",
        "workers": 1,
        "replicas": 2,
        "status": "stopped",
        "steps": 2,
        "why": "asked for",
    }  # fmt: skip


def test_a_dry_run_of_a_stream_of_dicts_with_two_optimizers(dry):
    found = dry("mine.py:Dicts", "--steps", 1, "--precision", "bfloat16", "--profile", "1:2")
    assert [(each["name"], each["shape"]) for each in found["batch"]] == [("in/x", [32, 5]), ("out", [32, 1])]
    assert found["outputs"] == [{"name": "", "dtype": "bfloat16", "shape": [32, 1]}]
    assert found["parameters"] == {"trained": 18 + 6 + 4, "all": 18 + 12 + 4}
    assert [(each["name"], each["rate"]) for each in found["learning_rates"]] == [("one", 0.5), ("two", 0.125)]
    assert (found["steps_per_epoch"], found["total_steps"], found["steps"]) == (None, 1, 1)
    assert set(found["metrics"]) == {"loss"}


def test_a_dry_run_of_a_model_whose_outputs_are_not_all_tensors(dry):
    assert dry("mine.py:Pairs")["outputs"] == [
        {"name": "", "dtype": "float32", "shape": [32, 1]},
        {"name": "rows", "dtype": "float32", "shape": [1, None, 5]},
    ]


def test_a_dry_run_goes_without_the_checkpoints_and_the_tracker_of_the_task(dry, tmp_path, monkeypatch):
    monkeypatch.setenv("STORE", f"sqlite:///{tmp_path / 'store.db'}")
    assert dry("mine.py:Tracked")["steps"] == 2


def test_a_dry_run_promises_nothing_that_it_removes(command, tmp_path):
    code, _, err = command("train", "tests.tasks:Unweighted", "--set", "rate=nan", "--dry-run")
    assert code == 1
    assert "step 2 (epoch 1): not finite" in err
    assert "replay" not in err


# overfit


def quiet():
    return standard(checkpoint=None, mlflow=None, progress=None)


class Head(Weighted):
    """Trains and evaluates on the first 40 examples of `Weighted`, in their order."""

    def train_data(self):
        return ArrayData(*(array[:40] for array in regression(self.examples, seed=self.seed)))

    eval_data = train_data


@pytest.mark.parametrize("replicas", [1, 3])
def test_overfit_is_training_on_the_first_batches_alone(replicas):
    options = {"batch_size": 20, "epochs": 3, "callbacks": quiet()}

    def engine():
        return backends.create("mirrored", replicas) if replicas > 1 else "single"

    found = fit(Weighted(), **options, backend=engine(), overfit=2)
    expected = fit(Head(), **options, backend=engine(), shuffle=False)
    assert (found.weights_sha256, found.history) == (expected.weights_sha256, expected.history)
    assert (found.steps, found.examples) == (6, 120)
    about = json.loads((found.run_dir / "run.json").read_text())["options"]
    assert (about["overfit"], about["shuffle"]) == (2, False)
    alone = fit(Weighted(), **options, backend="single", overfit=2)
    for one, other in zip(found.model.variables, alone.model.variables, strict=True):
        np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=5e-6, atol=1e-7)


class Endless(Streamed):
    """A pipeline that shuffles anew each time and never ends; and a model that stays as it is."""

    def train_data(self):
        return super().train_data().repeat()

    def build_optimizer(self):
        import keras

        return keras.optimizers.SGD(0.0)


def test_overfit_takes_the_same_examples_of_a_stream_each_time():
    results = [
        fit(Endless(), batch_size=10, epochs=3, overfit=2, callbacks=quiet(), backend=backend)
        for backend in ("single", backends.create("mirrored", 2))
    ]
    losses = [row[name] for found in results for row in found.history for name in ("loss", "eval_loss")]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    assert [found.examples for found in results] == [60, 60]
    assert losses[0] != pytest.approx(fit(Streamed(), callbacks=quiet()).history[0]["eval_loss"], rel=1e-3)


def test_overfit_of_more_than_there_is_takes_all_and_shuffles_when_told_to():
    options = {"batch_size": 20, "epochs": 2, "callbacks": quiet()}
    found, plain = (fit(Plain(), **options, **more) for more in ({"overfit": 99, "shuffle": True}, {}))
    assert found.weights_sha256 == plain.weights_sha256


def test_a_run_that_overfits_goes_on_so_or_not_at_all(tmp_path):
    fit(Plain(), overfit=1, run_dir="run", callbacks=standard(mlflow=None, progress=None))
    with pytest.raises(UsageError, match="overfit was 1, now None"):
        fit(Plain(), run_dir="run", epochs=2, callbacks=standard(mlflow=None, progress=None))
    for bad in (0, -1, 1.5, True, "all"):
        with pytest.raises(UsageError, match=f"overfit={bad!r}: give a whole number >= 1 of global batches"):
            fit(Plain(), overfit=bad)
    evaluated = loop.evaluate(Plain(), "run")
    assert evaluated == loop.evaluate(type("Lazy", (Plain,), {"defaults": {"overfit": 1}})(), "run")


# Completion, and the version

CLASSES = ("Batched", "Dicts", "Tracked", "Pairs")
"""Those in the file of the tasks: completion reads it without running it, and leaves out what is certainly no task."""


@pytest.mark.cold
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("tfloop ", {"train", "new", "evaluate"}),
        ("tfloop train di", {"digits"}),
        ("tfloop train mi", {f"mine.py:{name}" for name in CLASSES}),
        ("tfloop train mine.py", {f"mine.py:{name}" for name in CLASSES}),
        ("tfloop train mine.py:D", {"mine.py:Dicts"}),
        ("tfloop train ./mi", {f"./mine.py:{name}" for name in CLASSES}),
        ("tfloop tail o", {"one"}),
        ("tfloop export la", {"latest"}),
        ("tfloop train digits --backend m", {"mirrored", "multiworker"}),
        ("tfloop train digits --overf", {"--overfit"}),
        ("tfloop evaluate ", {"runs/one", "here"}),
        ("tfloop evaluate h", {"here"}),
    ],
)
def test_completion(line, expected, command, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(TASKS)
    (tmp_path / "bad.py").symlink_to("nowhere")
    for name in ("runs/one", "here", "runs/none"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / ("run.json" if name != "runs/none" else "else")).touch()
    monkeypatch.setenv("_TFLOOP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
    _, out, err = command()
    assert err == ""
    assert expected <= set(out.split())
    assert line.endswith(" ") or set(out.split()) == expected
    assert completion.runs("") == ["latest", "one", "runs/one", "here"]
    assert completion.runs("on") == ["one"]
    assert completion.runs("./h") == ["./here"]
    assert completion.runs("./runs/") == ["./runs/one"]


def test_the_version_comes_from_one_place(command):
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert loop.__version__ == version
    assert command("--version") == (0, f"tfloop {version}\n", "")
