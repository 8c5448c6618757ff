"""The callbacks, one by one, in real runs."""

import csv
import io
import json
import math
import shutil
from dataclasses import dataclass

import keras
import mlflow
import numpy as np
import pytest

import callbacks
from callbacks import Callback, Checkpoint, CSVLogger, EarlyStopping, LearningRateScaling, MLflowTracker, Schedule
from callbacks.files import UnsafeFileError
from callbacks.metric_direction import lower_is_better
from callbacks.progress import Display, Progress
from callbacks.run_record import journal as journal_module
from callbacks.run_record.redaction import redact
from loop import TrainingError, UsageError, fit
from loop.backends import create
from tests.tasks import Legacy, Plain, Streamed, Weighted


def lines(result):
    return [entry for entry, _ in journal_module.read(result.run_dir / "journal.jsonl")]


@pytest.mark.parametrize(
    ("every", "step", "now", "epoch_ended", "due"),
    [
        ("epoch", 7, 0.0, True, True),
        ("epoch", 7, 0.0, False, False),
        (5, 10, 0.0, False, True),
        (np.int64(5), 11, 0.0, True, False),
        ("10s", 1, 10.0, False, True),
        ("2m", 1, 119.0, False, False),
        ("call", 1, 0.0, False, True),
    ],
)
def test_schedule(every, step, now, epoch_ended, due):
    assert Schedule(every).due(step, now, epoch_ended) is due


@pytest.mark.parametrize("every", [0, -1, "0s", "0.0m", "-1s", "10", "s", True, "daily", (), ("a",), [1, 2]])
def test_schedule_refuses_nonsense(every):
    with pytest.raises(ValueError, match="isn't a schedule"):
        Schedule(every)


@dataclass
class Equal(Callback):
    """Two of them are equal."""


def test_standard_set_can_be_changed_dropped_and_added_to():
    kinds = [type(callback).__name__ for callback in callbacks.standard()]
    assert kinds == [
        "BroadcastVariables",
        "ShardData",
        "Sentinel",
        "Checkpoint",
        "SystemMetrics",
        "Journal",
        "Report",
        "MLflowTracker",
        "Progress",
    ]
    own = Checkpoint(every=3)
    assert own in callbacks.complete([own])
    assert callbacks.complete([EarlyStopping(), own])[3] is own  # in place of the standard one
    assert len(callbacks.complete([own])) == 9
    assert len(callbacks.complete([EarlyStopping()])) == 10
    equal = [Equal(), Equal()]
    assert [each for each in callbacks.complete([*equal, equal[0]]) if isinstance(each, Equal)] == equal
    assert len(callbacks.complete(callbacks.standard(mlflow=None) + [EarlyStopping()])) == 9
    with pytest.raises(TypeError, match="standard\\(\\) has no mlfow"):
        callbacks.standard(mlfow=None)


def test_chief_only_callbacks_are_not_registered_elsewhere(quiet):
    from loop.run.bus import Bus

    class Elsewhere:
        is_chief = False

    class Run:
        backend = Elsewhere()
        callbacks = {}

    run = Run()
    Bus(list(quiet()), run)
    assert list(run.callbacks) == ["BroadcastVariables", "ShardData", "Sentinel"]


def test_two_of_a_kind_have_states_of_their_own(quiet, tmp_path):
    def stopping():
        return [EarlyStopping("eval_loss", patience=99), EarlyStopping("loss", patience=99)]

    first = stopping()
    fit(Plain(), epochs=2, callbacks=quiet() + first, run_dir=tmp_path / "run")
    assert first[0].best != first[1].best
    second = stopping()
    fit(Plain(), epochs=2, callbacks=quiet() + second, run_dir=tmp_path / "run")
    assert [each.best for each in second] == [each.best for each in first]


def test_on_data_that_returns_something_else_is_refused(quiet):
    wrong = callbacks.LambdaCallback(data=lambda run, data: data.train)
    with pytest.raises(UsageError, match=r"LambdaCallback\.on_data returned an object of type ArraySource"):
        fit(Plain(), callbacks=quiet() + [wrong])


def test_broadcast_makes_all_replicas_equal_and_checks_it(quiet):
    class Drift(Callback):
        """Sets one replica's copy of one variable to something else."""

        runs_on = "all"

        def on_setup(self, run):
            copies = run.backend.strategy.experimental_local_results(run.variables[0])
            copies[1].assign(copies[1] + 1.0)

    message = r"step 0: the replicas have drifted apart: model/00000:.*kernel differs on replica 1 \(rank 0\)"
    with pytest.raises(TrainingError, match=message):
        fit(Weighted(), backend=create("mirrored", 2), callbacks=callbacks.StandardSet([Drift(), *quiet()]))


class Drift(Callback):
    """Changes a variable in replica 1 alone, at the end of the second epoch."""

    runs_on = "all"

    def on_epoch_end(self, run, metrics):
        if run.progress.epoch == 1:
            copies = run.backend.strategy.experimental_local_results(run.model.trainable_variables[2].value)
            copies[1].assign(copies[1] + 1e-7)


def test_sentinel_finds_replicas_that_have_drifted_apart_before_they_are_saved(quiet, tmp_path):
    message = r"step 12: the replicas have drifted apart: model/00002:.*dense.*kernel differs on replica 1 \(rank 0\)\."
    options = {"epochs": 3, "batch_size": 20, "backend": create("mirrored", 3), "run_dir": tmp_path / "run"}
    with pytest.raises(TrainingError, match=message):
        fit(Weighted(), callbacks=quiet(checkpoint=Checkpoint(every="epoch")) + [Drift()], **options)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000006"]
    assert fit(Weighted(), callbacks=quiet(), **options).steps == 18  # it goes on from the good one


def test_sentinel_looks_every_few_steps_too(quiet):
    options = {"epochs": 3, "batch_size": 20, "backend": create("mirrored", 2)}
    sentinel = callbacks.Sentinel(every=4)
    with pytest.raises(TrainingError, match="step 16: the replicas have drifted apart"):
        fit(Weighted(), callbacks=quiet(checkpoint=None, sentinel=sentinel) + [Drift()], **options)
    with pytest.raises(ValueError, match=r"Sentinel\(every='10s'\): give"):
        callbacks.Sentinel(every="10s")


def test_checkpoint_keeps_the_last_and_the_best(quiet):
    class Judge(Callback):
        """Makes the second epoch the best."""

        runs_on = "all"

        def on_eval_end(self, run, metrics):
            metrics["eval_loss"] = [3.0, 1.0, 2.0, math.nan, 2.0][run.progress.epoch]

    saving = Checkpoint(every="epoch", keep_last=2)
    result = fit(
        Plain(), epochs=5, batch_size=20, callbacks=callbacks.StandardSet([Judge(), *quiet(checkpoint=saving)])
    )
    kept = sorted(path.name for path in (result.run_dir / "checkpoints").iterdir())
    assert kept == ["step-00000012", "step-00000024", "step-00000030"]
    assert (saving.best_step, saving.best_value) == (12, 1.0)


def test_early_stopping(quiet):
    class Worse(Callback):
        runs_on = "all"

        def on_eval_end(self, run, metrics):
            metrics["eval_loss"] = [2.0, 1.0, 1.5, 1.2, 0.5][run.progress.epoch]

    result = fit(Plain(), epochs=9, callbacks=callbacks.StandardSet([Worse(), *quiet(), EarlyStopping(patience=2)]))
    assert (result.status, result.epochs) == ("stopped", 4)
    never = EarlyStopping(patience=1)
    never.waited = 2
    assert never.waited_for() == "eval_loss has not been finite for 2 measurements"


def test_early_stopping_names_the_metrics_that_there_are(quiet):
    with pytest.raises(ValueError, match=r"metric='eval_los'\): this run has no such metric; did you mean 'eval_loss'"):
        fit(Plain(), epochs=2, callbacks=quiet() + [EarlyStopping("eval_los", mode="min")])


@pytest.mark.parametrize("kind", [Plain, Legacy])
@pytest.mark.parametrize(("rule", "scale"), [("linear", 4.0), ("sqrt", 2.0)])
def test_learning_rate_scaling(kind, rule, scale, quiet):
    class Rates(Callback):
        every = 1

        def __init__(self):
            self.rates = []

        def on_steps_end(self, run, metrics):
            self.rates.append(float(run.optimizer._learning_rate(run.optimizer.iterations)))

    rates = Rates()
    base = float(kind().build_optimizer().learning_rate)
    scaling = LearningRateScaling(5, rule, warmup_epochs=1)
    fit(kind(), epochs=2, batch_size=20, callbacks=quiet() + [scaling, rates])
    steps = 6  # in an epoch
    expected = [base * (1 + (scale - 1) * min(step / steps, 1.0)) for step in range(1, 2 * steps + 1)]
    np.testing.assert_allclose(rates.rates, expected, rtol=1e-5)


def test_learning_rate_scaling_multiplies_a_schedule_and_is_restored(quiet, tmp_path):
    class Scheduled(Plain):
        def build_optimizer(self):
            return keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5))

    def run(epochs, directory):
        scaling = LearningRateScaling(10, warmup_steps=3)
        return fit(Scheduled(), epochs=epochs, callbacks=quiet() + [scaling], run_dir=tmp_path / directory)

    run(1, "a")
    assert run(2, "a").weights_sha256 == run(2, "b").weights_sha256
    assert float(run(2, "b").model.w.numpy()[0, 0]) != float(
        fit(Scheduled(), epochs=2, callbacks=quiet()).model.w.numpy()[0, 0]
    )


def test_learning_rate_scaling_needs_steps_for_a_stream(quiet):
    with pytest.raises(ValueError, match="give warmup_steps"):
        fit(Streamed(), callbacks=quiet() + [LearningRateScaling(10)])


def test_csv_logger_has_each_epoch_once_also_after_a_resume(quiet, tmp_path):
    for epochs in (2, 3):
        fit(Plain(), epochs=epochs, callbacks=quiet() + [CSVLogger("tables/metrics.csv")], run_dir=tmp_path / "run")
    with (tmp_path / "run" / "tables" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert set(rows[0]) == {"epoch", "step", "examples", "loss", "eval_loss"}


def test_csv_logger_refuses_a_directory_before_the_training(quiet, tmp_path):
    (tmp_path / "run" / "metrics.csv").mkdir(parents=True)
    with pytest.raises(UnsafeFileError, match=r"metrics.csv: it is a directory"):
        fit(Plain(), callbacks=quiet() + [CSVLogger()], run_dir=tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize("path", ["checkpoints", "source/", "tables/../run.json", "./journal.jsonl", "model"])
def test_csv_logger_refuses_the_names_of_what_a_run_has_itself(path):
    """A table named `checkpoints` was written at the end of the first epoch, and no checkpoint could be."""
    with pytest.raises(ValueError, match="the run has a file or directory of that name"):
        CSVLogger(path)


def test_journal_has_every_event(quiet):
    result = fit(Plain(), epochs=2, batch_size=20, callbacks=quiet(journal=callbacks.Journal(every=3)))
    events = [(entry["event"], entry["step"]) for entry in lines(result)]
    assert events[:3] == [("restore", 0), ("fit_start", 0), ("epoch_start", 0)]
    assert events.count(("system", 12)) == 1  # one at the end, however short the run is
    assert [step for event, step in events if event == "steps_end"] == [3, 6, 9, 12]
    assert events[-1] == ("fit_end", 12)
    ends = [entry["metrics"] for entry in lines(result) if entry["event"] == "epoch_end"]
    assert ends == [{name: row[name] for name in ("loss", "eval_loss")} for row in result.history]


def test_journal_leaves_out_means_over_two_epochs(quiet):
    result = fit(Plain(), epochs=2, batch_size=20, callbacks=quiet(journal=callbacks.Journal(every=4)))
    assert [entry["step"] for entry in lines(result) if entry["event"] == "steps_end"] == [4, 12]


def test_journal_bears_a_torn_last_line(tmp_path):
    path = tmp_path / "journal.jsonl"
    path.write_text('{"event": "a"}\nnonsense\n{"event": "b"}\n{"event": "c')
    assert [entry["event"] for entry, _ in journal_module.read(path)] == ["a", "b"]
    [(entry, offset)] = list(journal_module.read(path, 24))
    assert (entry["event"], path.read_bytes()[offset:]) == ("b", b'{"event": "c')


def test_journal_goes_on_after_a_torn_line(quiet, tmp_path):
    first = fit(Plain(), callbacks=quiet(), run_dir=tmp_path / "run")
    before = len(lines(first))
    with (first.run_dir / "journal.jsonl").open("a") as file:
        file.write('{"event": "torn')
    second = fit(Plain(), epochs=2, callbacks=quiet(), run_dir=tmp_path / "run")
    assert lines(second)[before]["event"] == "restore"


def test_values_that_json_has_no_number_for(quiet):
    class Odd(Plain):
        def compute(self, model, batch, training):
            values = super().compute(model, batch, training)
            return values | {"odd": values["loss"] * math.nan}

    result = fit(Odd(), callbacks=quiet())
    [entry] = [entry for entry in lines(result) if entry["event"] == "epoch_end"]
    assert entry["metrics"]["odd"] == "nan"
    assert math.isnan(result.metrics["odd"])


@pytest.fixture
def store(empty_store, tmp_path):
    (tmp_path / "runs").mkdir()
    return f"sqlite:///{shutil.copy(empty_store, tmp_path / 'runs' / 'mlflow.db')}"


def runs_of(uri, experiment):
    client = mlflow.MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    return client, client.search_runs([found.experiment_id])


def test_mlflow_has_everything_in_a_real_store(quiet, store, tmp_path):
    tracker = MLflowTracker()  # the default store: runs/mlflow.db
    result = fit(
        Plain(), epochs=3, batch_size=20, run_dir=tmp_path / "mine", callbacks=quiet(mlflow=tracker) + [CSVLogger()]
    )
    client, [run] = runs_of(store, "Plain")
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "mine"  # no field differs from its default
    starts = [entry["time"] for entry in lines(result) if entry["event"] == "fit_start"]
    assert abs(run.info.start_time / 1000 - starts[0]) < 1
    assert run.info.start_time <= client.get_metric_history(run.info.run_id, "loss")[0].timestamp <= run.info.end_time
    assert run.data.params["hidden"] == "4"
    assert run.data.params["option.batch_size"] == "20"
    assert (run.data.tags["backend"], run.data.tags["replicas"]) == ("single", "1")
    assert run.data.tags["version.tensorflow"].startswith("2.")
    for name in ("loss", "eval_loss"):
        history = client.get_metric_history(run.info.run_id, name)
        assert [(point.step, point.value) for point in history] == [(row["step"], row[name]) for row in result.history]
    assert {file.path for file in client.list_artifacts(run.info.run_id)} == {
        "run.json",
        "journal.jsonl",
        "metrics.csv",
        "report.html",
    }


def test_mlflow_run_goes_on_with_the_resumed_one_without_a_point_twice(quiet, store, tmp_path):
    for epochs in (2, 4):
        fit(Plain(), epochs=epochs, run_dir=tmp_path / "run", callbacks=quiet(mlflow=MLflowTracker(store)))
    client, [run] = runs_of(store, "Plain")
    points = client.get_metric_history(run.info.run_id, "loss")
    assert [point.step for point in points] == [4, 8, 12, 16]


def test_mlflow_status_of_a_failed_run(quiet, store):
    class Failing(Callback):
        def on_epoch_end(self, run, metrics):
            raise KeyError("planted")

    with pytest.raises(KeyError):
        fit(Plain(), callbacks=quiet(mlflow=MLflowTracker(store)) + [Failing()])
    _, [run] = runs_of(store, "Plain")
    assert run.info.status == "FAILED"


def test_mlflow_server_that_is_not_there_is_told_and_costs_nothing_but_the_wait(quiet, capsys):
    result = fit(Plain(), callbacks=quiet(mlflow=MLflowTracker("http://127.0.0.1:9", wait=1)))
    assert result.status == "finished"
    error = capsys.readouterr().err
    assert "MLflow at http://127.0.0.1:9 did not take everything" in error
    assert f"`tfloop sync {result.run_dir}` delivers the rest" in error
    assert any(entry["event"] == "epoch_end" for entry in lines(result))


def test_secrets_are_not_written_down(quiet, tmp_path):
    from dataclasses import dataclass

    @dataclass
    class Secretive(Plain):
        api_key: str = "hunter2"
        url: str = "https://me:hunter2@example.org/x"
        token_dim: int = 8

    result = fit(Secretive(), callbacks=quiet(), run_dir=tmp_path / "run")
    written = "".join(path.read_text() for path in result.run_dir.rglob("*.json*"))
    assert "hunter2" not in written
    assert '"api_key": "***"' in written
    assert redact({"password": "x", "depth": 3, "uris": ["sqlite://u:p@h/d"]}) == {
        "password": "***",
        "depth": 3,
        "uris": ["sqlite://***@h/d"],
    }


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show(stream, quiet, **options):
    progress = Progress(every=1)
    progress._show = Display(stream).update
    return fit(Plain(), callbacks=quiet(progress=progress), **options)


def test_progress_in_a_log_is_plain_lines(quiet):
    stream = io.StringIO()
    show(stream, quiet, epochs=2, batch_size=20)
    text = stream.getvalue()
    assert "\r" not in text
    assert "\x1b" not in text
    first, _, one, two, last = text.splitlines()
    assert first == "Plain: 6 parameters, single, 1 replica, global batch 20"
    assert one.startswith("epoch 1/2  step 6   loss ")
    assert two.startswith("epoch 2/2  step 12  loss ")
    assert last.startswith("finished at step 12, ")


def test_progress_on_a_terminal_is_a_bar(quiet):
    stream = Terminal()
    show(stream, quiet, epochs=2, batch_size=20)
    bar = stream.getvalue().replace("\r", "\n")
    assert "100%" in bar
    assert "12/12" in bar
    assert "examples/s" in bar


def test_progress_that_nobody_reads_stops_nothing(quiet):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    show(Gone(), quiet, epochs=2, batch_size=20)


BAD = [
    ("Checkpoint", "keep_last", [0, "3", None, 1.5]),
    ("Checkpoint", "best", ["", 3]),
    ("Checkpoint", "mode", ["best", None]),
    ("Checkpoint", "on_error", ["x", None]),
    ("Checkpoint", "keep_best", [0, "3", None, True]),
    ("Checkpoint", "keep_every", [0, "3", 1.5]),
    ("Checkpoint", "keep_hourly", [1, None, "yes"]),
    ("Checkpoint", "max_bytes", [0, "1GB", math.nan]),
    ("EarlyStopping", "metric", ["", None]),
    ("EarlyStopping", "patience", [0, "3", None, math.nan]),
    ("EarlyStopping", "min_delta", [-1, "x", math.nan]),
    ("ReduceOnPlateau", "factor", [0, 1, "x"]),
    ("ReduceOnPlateau", "patience", [0, None]),
    ("ReduceOnPlateau", "cooldown", [-1, 1.5, "x"]),
    ("ReduceOnPlateau", "min_lr", [-1, "x"]),
    ("CSVLogger", "path", ["", None, 3, "run.json", "./journal.jsonl"]),
    ("EMA", "decay", [0, 1, "x", None, math.nan]),
    ("LearningRateScaling", "reference_batch_size", [0, "x", 1.5]),
    ("LearningRateScaling", "rule", ["cubic", None]),
    ("LearningRateScaling", "warmup_steps", [-1, 1.5]),
    ("LearningRateScaling", "warmup_epochs", [-1, "x", math.inf]),
    ("ModelSummary", "stream", ["x", 3, []]),
    (
        "MLflowTracker",
        "uri",
        ["", 3, "of", "htp://x", "http://", "http://[::1", "http://a:b", "https://:1", "http://a b", "sqlite:x.db"],
    ),
    ("MLflowTracker", "wait", [-1, "x", math.nan]),
    ("MLflowTracker", "register", ["a/b", 3]),
    ("MLflowTracker", "tags", ["x", {"": 1}, {1: 2}]),
    ("Notify", "url", ["", None, "ftp://x"]),
    ("Notify", "on", ["x", [], None]),
    ("Notify", "timeout", [0, "x", math.inf]),
    ("Profiler", "first", [0, "x", 1.5]),
    ("Profiler", "last", [1, None, math.nan]),
    ("Progress", "log_seconds", [-1, "x", math.nan]),
    ("SamplePredictions", "examples", [0, "x", 1.5]),
    ("Sentinel", "every", [0, "x", True]),
    ("ShardData", "policy", ["auto-ish", None, 3]),
    ("SystemMetrics", "interval", [0, "x", math.inf]),
    ("SystemMetrics", "runs_on", ["workers", 0, None]),
    ("TensorBoard", "directory", ["", None, 3]),
    ("TensorBoard", "histograms", [-1, "x", 1.5]),
    ("Timer", "max_duration", ["", None, 3]),
    ("LambdaCallback", "runs_on", ["x", None]),
    ("LambdaCallback", "every", [0, "x", None]),
    ("LambdaCallback", "epoch_end", [3, None]),
    ("LambdaCallback", "epochs_end", [print]),
]
NEEDED = {
    "LearningRateScaling": {"reference_batch_size": 8}, "Notify": {"url": "http://x/y"},
    "Profiler": {"first": 2, "last": 5}, "Timer": {"max_duration": "1h"}, "LambdaCallback": {"fit_end": print},
}  # fmt: skip


@pytest.mark.parametrize(("name", "argument", "values"), BAD)
def test_bad_arguments_are_refused_by_name(name, argument, values):
    kind, needed = getattr(callbacks, name), NEEDED.get(name, {})
    kind(**needed)
    for value in values:
        with pytest.raises(ValueError, match=rf"{name}.*{argument}"):
            kind(**{**needed, argument: value})


@pytest.mark.parametrize("kind", [Checkpoint, callbacks.Journal, callbacks.TensorBoard])
def test_a_schedule_that_is_none_names_its_callback(kind, quiet):
    with pytest.raises(UsageError, match=rf"{kind.__name__}: every='often' isn't a schedule"):
        fit(Plain(), callbacks=callbacks.StandardSet(callbacks.complete(quiet(), [kind(every="often")])))


def test_the_name_of_a_metric_says_what_is_better_or_it_is_asked_for():
    less = """loss step/loss eval_loss error mae eval_MAE mse rmse perplexity ppl nll wer cer fid eval_fid_score kid
        log_loss categorical_crossentropy mean_squared_error kl_divergence brier_score dice_loss false_positives"""
    more = """accuracy acc top5_accuracy auc roc_auc f1 eval_F1_score bleu4 rougeL r2 mean_io_u miou dice precision
        recall@5 mAP map50 ndcg psnr cosine_similarity log_likelihood reward"""
    neither = "learning_rate skipped_steps custom discriminator"
    assert [lower_is_better(name) for name in less.split()] == [True] * len(less.split())
    assert [lower_is_better(name) for name in more.split()] == [False] * len(more.split())
    assert [lower_is_better(name) for name in neither.split()] == [None] * 4
    assert [EarlyStopping("eval_mae").sign, EarlyStopping("eval_f1").sign] == [1, -1]
    assert EarlyStopping("eval_custom", mode="max").sign == -1
    assert Checkpoint(best="eval_mae").sign == 1
    for make in (lambda: EarlyStopping("eval_custom"), lambda: Checkpoint(best="eval_custom")):
        with pytest.raises(ValueError, match=r"'eval_custom'\): the name doesn't say what is better: check it, or"):
            make()


def test_a_state_that_is_no_json_and_a_key_twice_are_refused(quiet):
    class Named(Callback):
        key = ""

        def __init__(self, key):
            self.key = key

    with pytest.raises(UsageError, match="two callbacks have the key 'a'"):
        fit(Plain(), callbacks=quiet() + [Named("a"), Named("a")])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: [Checkpoint(), Checkpoint()], "two Checkpoints, and each would remove what the other keeps: give one"),
        (
            lambda: [EarlyStopping(restore_best=True) for _ in range(2)],
            "two EarlyStopping.* only one says .* leave restore",
        ),
        (
            lambda: [callbacks.LambdaCallback(setup=lambda run: run.total_steps)],
            "asks in on_setup .* the run's total_steps, .*: ask in on_restore, or later",
        ),
    ],
)
def test_what_would_go_wrong_without_a_word_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        fit(Plain(), callbacks=callbacks.standard(checkpoint=None, mlflow=None, progress=None) + given())


def test_a_set_that_was_made_a_list_is_refused(quiet):
    """What it goes without would come back."""
    with pytest.raises(UsageError, match="a list of the standard set without MLflowTracker, Progress, and a list is"):
        fit(Plain(), callbacks=[*quiet(), Callback()])


def test_an_empty_reason_stops_and_saves(quiet):
    class Ends(Callback):
        every = 1

        def on_steps_end(self, run, metrics):
            run.save("")
            run.stop("")

    result = fit(Plain(), epochs=9, batch_size=20, callbacks=quiet() + [Ends()])
    assert (result.status, result.steps) == ("stopped", 1)
    assert [entry["reason"] for entry in lines(result) if entry["event"] == "checkpoint"] == ["callback"]


def test_journal_lines_are_json_that_any_reader_takes(quiet):
    result = fit(Plain(), callbacks=quiet())
    for line in (result.run_dir / "journal.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} isn't JSON"))
