"""The loop: its events, its boundaries, and how it goes on."""

import inspect
import re
import signal
import sys
import textwrap
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grain
import numpy as np
import pytest
import tensorflow as tf

import callbacks
from callbacks import EVENTS, Callback, Checkpoint
from loop import ArrayData, IndexedData, TrainingError, UsageError, evaluate, fit
from loop.backends import create
from loop.errors import PeerError
from loop.run.pace import Pace
from tests.conftest import ROOT
from tests.tasks import Conv, Legacy, Plain, Streamed, Unweighted, Weighted, regression


class Recorder(Callback):
    """Writes down every event that it hears, and the step."""

    runs_on = "all"
    every = 4

    def __init__(self):
        self.heard = []


def hook(event):
    def on_event(self, run, *args):
        self.heard.append((event, run.progress.step))
        return args[0] if event == "data" else None

    return on_event


for name in EVENTS:
    setattr(Recorder, f"on_{name}", hook(name))


def test_events_of_a_small_run_exactly(quiet):
    recorder = Recorder()
    fit(
        Plain(),
        epochs=2,
        batch_size=20,
        callbacks=quiet(shard=None, journal=None, checkpoint=Checkpoint(background=False)) + [recorder],
    )
    epoch = [("epoch_start", 0), ("steps_end", 4), ("eval_end", 6), ("epoch_end", 6), ("checkpoint", 6)]
    second = [("epoch_start", 6), ("steps_end", 8), ("steps_end", 12), ("eval_end", 12), ("epoch_end", 12)]
    assert recorder.heard == [
        ("setup", 0),
        ("data", 0),
        ("restore", 0),
        ("fit_start", 0),
        ("phase_start", 0),
        *epoch,
        *second,
        ("checkpoint", 12),
        ("fit_end", 12),
    ]


def test_events_of_a_failing_run(quiet):
    class Failing(Callback):
        def on_epoch_end(self, run, metrics):
            raise KeyError("planted")

    recorder = Recorder()
    with pytest.raises(KeyError, match="planted"):
        fit(Plain(), epochs=2, callbacks=quiet() + [Failing(), recorder])
    assert [event for event, _ in recorder.heard][-2:] == ["exception", "fit_end"]


def test_the_loss_of_a_worker_is_a_peer_error_in_a_script_too(quiet, monkeypatch):
    """Only commands said so: under `horovodrun` or TF_CONFIG, a script ended with TensorFlow's own error."""
    lost = tf.errors.UnavailableError(None, None, "Connection reset by peer")

    def unavailable(task):
        raise lost

    monkeypatch.setattr(Plain, "train_data", unavailable)
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setenv("HOROVOD_SIZE", "2")
    with pytest.raises(PeerError, match=r"another worker is gone: .*UnavailableError here") as raised:
        fit(Plain(), backend="single", callbacks=quiet())
    assert raised.value.__cause__ is lost


def test_hooks_are_the_events_and_the_docstring_of_the_loop_names_them_in_order():
    hooks = [name.removeprefix("on_") for name in vars(Callback) if name.startswith("on_")]
    assert hooks == list(EVENTS)
    assert re.findall(r"on_(\w+)\n", fit.__doc__) == list(EVENTS)
    [shown] = re.findall(r"each part fires:\n\n(.*?)\n\n", fit.__doc__, re.DOTALL)
    assert textwrap.dedent(shown) in (ROOT / "docs" / "concepts.md").read_text()


def test_ten_thousand_steps_are_traced_once_and_call_the_host_seldom(quiet):
    class Clock(Callback):
        every = "call"
        calls = 0

        def on_steps_end(self, run, metrics):
            self.calls += 1
            self.step = run.step

    clock = Clock()
    started = time.monotonic()
    result = fit(Plain(examples=50_000), batch_size=5, callbacks=quiet(journal=None) + [clock])
    seconds = time.monotonic() - started
    assert result.steps == 10_000
    assert clock.step.traces == 1
    # The first few calls feel their way (1, 1, 16, 256 steps ...), then each takes about a quarter of a second.
    assert clock.calls <= 6 + 8 * seconds


def test_calls_that_end_early_ask_for_no_endless_number_of_steps():
    pace = Pace("auto")
    for _ in range(100):
        pace.record(pace.steps, 1e-9)
    assert 1 << 20 < pace.steps < 1 << 62


@pytest.mark.parametrize(
    ("seconds", "steps"), [(1 / 1024, 256), (1 / 16, 8), (1 / 8, 8), (3 / 16, 5), (1 / 4, 4), (1.0, 1), (60.0, 1)]
)
def test_calls_are_short_but_a_few_steps_long(seconds, steps):
    pace = Pace("auto")
    for _ in range(10):
        pace.record(pace.steps, pace.steps * seconds)
    assert pace.steps == steps


@pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])
def test_length_of_calls_changes_no_bit(steps_per_call, quiet):
    results = [
        fit(Weighted(), epochs=2, batch_size=10, steps_per_call=calls, callbacks=quiet()).weights_sha256
        for calls in ("auto", steps_per_call)
    ]
    assert results[0] == results[1]


def test_metrics_of_a_hook_are_means_since_its_last_call(quiet):
    class Every(Callback):
        def __init__(self, every):
            self.every, self.seen = every, []

        def on_steps_end(self, run, metrics):
            self.seen.append((run.progress.step, metrics["loss"]))

    each, third = Every(1), Every(3)
    fit(Plain(examples=60), epochs=1, batch_size=10, callbacks=quiet() + [each, third])
    assert [step for step, _ in each.seen] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in third.seen] == [3, 6]
    losses = [loss for _, loss in each.seen]
    np.testing.assert_allclose([loss for _, loss in third.seen], [np.mean(losses[:3]), np.mean(losses[3:])], rtol=1e-12)


class Killed(BaseException):
    """Nothing in the loop catches this: the process might as well be gone."""


class KillAt(Callback):
    """Ends the run at a step, as a kill would: what wasn't saved is lost."""

    every = 1

    def __init__(self, step):
        self.step = step

    def on_steps_end(self, run, metrics):
        if run.progress.step == self.step:
            raise Killed


_SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kind", [pytest.param(Conv, marks=_SLOW), pytest.param(Legacy, marks=_SLOW), Plain, Streamed, Weighted]
)
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=_SLOW)])
def test_resume_is_exact_to_the_bit(kind, replicas, quiet, tmp_path):
    def run(directory, *more):
        backend = create("mirrored", replicas) if replicas > 1 else "single"
        saving = quiet(checkpoint=Checkpoint(every=4)) + list(more)
        return fit(kind(), epochs=3, batch_size=20, backend=backend, callbacks=saving, run_dir=tmp_path / directory)

    whole = run("whole")
    # Before the first checkpoint, in the middle of an epoch, in the last one: of arrays, and of a stream.
    for step in (3, 9, 14) if kind in (Streamed, Weighted) else (9,):
        with pytest.raises(Killed):
            run("killed", KillAt(step))
    resumed = run("killed")
    assert resumed.weights_sha256 == whole.weights_sha256
    assert (resumed.steps, resumed.examples, resumed.metrics) == (whole.steps, whole.examples, whole.metrics)
    assert resumed.history == whole.history


def test_resume_with_another_number_of_replicas_goes_on_in_the_same_order(quiet, tmp_path):
    one = fit(Weighted(), epochs=2, batch_size=20, callbacks=quiet(), run_dir=tmp_path / "a")
    with pytest.raises(Killed):
        fit(
            Weighted(),
            epochs=2,
            batch_size=20,
            run_dir=tmp_path / "b",
            callbacks=quiet(checkpoint=Checkpoint(every=4)) + [KillAt(9)],
        )
    other = fit(
        Weighted(), epochs=2, batch_size=20, backend=create("mirrored", 3), callbacks=quiet(), run_dir=tmp_path / "b"
    )
    for ours, theirs in zip(other.model.get_weights(), one.model.get_weights(), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-6 * np.abs(theirs).max(), rtol=0)


def test_resume_of_a_finished_run_does_nothing_and_more_epochs_go_on(quiet, tmp_path):
    def run(epochs):
        return fit(Plain(), epochs=epochs, batch_size=20, callbacks=quiet(), run_dir=tmp_path / "run")

    first, again = run(2), run(2)
    assert again.weights_sha256 == first.weights_sha256
    assert (again.status, again.steps, again.metrics) == ("finished", 12, first.metrics)
    longer, whole = run(4), fit(Plain(), epochs=4, batch_size=20, callbacks=quiet())
    assert longer.weights_sha256 == whole.weights_sha256
    assert longer.history == whole.history


def test_resume_from_a_path_leaves_that_run_alone(quiet, tmp_path):
    first = fit(Plain(), epochs=1, callbacks=quiet(), run_dir=tmp_path / "a")
    before = sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir())
    second = fit(Plain(), epochs=2, callbacks=quiet(), run_dir=tmp_path / "b", resume=str(tmp_path / "a"))
    assert second.steps == 2 * first.steps
    assert sorted(path.name for path in (tmp_path / "a" / "checkpoints").iterdir()) == before
    assert second.weights_sha256 == fit(Plain(), epochs=2, callbacks=quiet()).weights_sha256


def test_steps_end_a_run_within_an_epoch_and_it_is_evaluated(quiet):
    result = fit(Plain(), steps=9, batch_size=20, callbacks=quiet())
    assert (result.steps, result.epochs, result.status) == (9, 1, "finished")
    assert [row["step"] for row in result.history] == [6, 9]
    assert "eval_loss" in result.metrics


@pytest.mark.parametrize(("every", "steps"), [("epoch", [6, 12]), (5, [5, 10, 12]), ("never", [])])
def test_evaluation_is_made_when_it_is_due(every, steps, quiet):
    recorder = Recorder()
    fit(Plain(), epochs=2, batch_size=20, eval_every=every, callbacks=quiet() + [recorder])
    assert [step for event, step in recorder.heard if event == "eval_end"] == steps


def test_stop_by_a_callback_saves_and_is_no_failure(quiet):
    class Enough(Callback):
        every = 5

        def on_steps_end(self, run, metrics):
            run.stop("enough")

    result = fit(Plain(), epochs=9, batch_size=20, callbacks=quiet() + [Enough()])
    assert (result.status, result.steps) == ("stopped", 5)
    assert (result.run_dir / "checkpoints" / "step-00000005").is_dir()


def test_signal_saves_and_preempts(quiet, tmp_path):
    class Interrupt(Callback):
        every = 5

        def on_steps_end(self, run, metrics):
            signal.raise_signal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    result = fit(Plain(), epochs=9, batch_size=20, callbacks=quiet() + [Interrupt()], run_dir=tmp_path / "run")
    assert (result.status, result.steps) == ("preempted", 5)
    assert signal.getsignal(signal.SIGTERM) is before
    resumed = fit(Plain(), epochs=9, batch_size=20, callbacks=quiet(), run_dir=tmp_path / "run")
    assert resumed.weights_sha256 == fit(Plain(), epochs=9, batch_size=20, callbacks=quiet()).weights_sha256


def test_defaults_of_the_task_give_way_to_what_is_passed(quiet):
    class Own(Plain):
        defaults = {"batch_size": 50, "epochs": 2}

    assert fit(Own(), callbacks=quiet()).steps == 6
    assert fit(Own(), epochs=1, callbacks=quiet()).steps == 3
    assert fit(Own(), batch_size=101, callbacks=quiet()).steps == 2


def test_drop_remainder_and_no_shuffle(quiet):
    class Log(Unweighted):
        def train_data(self):
            inputs, labels, _ = regression(101)
            return ArrayData(inputs, labels)

    assert fit(Log(), batch_size=20, drop_remainder=True, callbacks=quiet()).examples == 100
    first = fit(Log(), batch_size=20, shuffle=False, seed=1, callbacks=quiet())
    assert first.examples == 101


def test_endless_stream_needs_a_number_of_steps(quiet):
    class Endless(Plain):
        def train_data(self):
            return tf.data.Dataset.from_tensor_slices(regression(101)[:2]).repeat()

    with pytest.raises(UsageError, match="endless: say how many steps"):
        fit(Endless(), callbacks=quiet())
    assert fit(Endless(), steps=30, batch_size=20, callbacks=quiet()).examples == 600


def test_a_repeated_data_set_of_grain_is_endless(quiet):
    """Its length is the largest that there is, and the first epoch had no end."""

    class Endless(Plain):
        def train_data(self):
            return IndexedData(grain.MapDataset.source(list(zip(*regression(101)[:2], strict=True))).repeat())

    with pytest.raises(UsageError, match="endless: say how many steps"):
        fit(Endless(), callbacks=quiet())
    assert fit(Endless(), steps=30, batch_size=20, callbacks=quiet()).examples == 600


class Broken(Plain):
    """A task in which one thing is replaced by something wrong."""

    def __init__(self, **methods):
        super().__init__()
        for name, value in methods.items():
            setattr(self, name, value)


def mean_loss(model, batch, training):
    return {"loss": tf.reduce_mean((model(batch[0]) - batch[1]) ** 2)}


def flat_weight(model, batch, training):
    return {"loss": (model(batch[0]) - batch[1]) ** 2, "weight": tf.ones([tf.shape(batch[0])[0]])}


def flat_value(model, batch, training):
    loss = (model(batch[0]) - batch[1]) ** 2
    return {"loss": loss, "weight": tf.ones_like(loss), "dice": loss[:, 0]}


def old_adam():
    import tf_keras

    return tf_keras.optimizers.legacy.Adam()


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (Broken(compute=mean_loss), {}, "never a mean"),
        (Broken(compute=flat_weight), {}, r'"weight" of shape \[3\] beside "loss" of shape \[3, 1\]'),
        (Broken(compute=flat_value), {}, r'can.t weigh: .* plain mean, give "dice": loop.unweighted'),
        (Broken(compute=lambda *a, **k: {"los": 1}), {}, 'a dict of los: return a dict with a per-example "loss"'),
        (Broken(build_model=lambda: 3), {}, r"build_model\(\) returned int"),
        (Broken(build_model=lambda: None), {}, r"build_model\(\) returned NoneType"),
        (Broken(build_optimizer=lambda: "adam"), {}, r"build_optimizer\(\) returned str"),
        (Broken(build_optimizer=old_adam), {}, r"returned Adam, of optimizers.legacy: return tf_keras.optimizers.Adam"),
        (Broken(train_data=lambda: ArrayData(np.zeros((0, 5)), np.zeros((0, 1)))), {}, "no examples"),
        (Plain(), {"batch_size": 0}, "batch_size=0: the global batch must hold at least 1"),
        (Plain(), {"epochs": 0}, "epochs=0: give a whole number"),
        (Plain(), {"backend": "nccl"}, "backend='nccl': give one of auto, single"),
        (Plain(), {"precision": "float8"}, "precision='float8': give float32"),
        (Plain(), {"resume": "/no/such/run"}, "/no/such/run: no checkpoint there"),
        (Plain(), {"run_dir": "/proc/run"}, "the run directory /proc/run can't be written"),
        (Plain(), {"callbacks": [3]}, "callbacks has 3 of type int"),
        (Plain(), {"clip_norm": -1.0}, "clip_norm=-1.0: give a number > 0"),
        (Plain(), {"backend": "multiworker"}, "without TF_CONFIG"),
    ],
)
def test_bad_input_is_refused_before_any_training(task, options, message):
    with pytest.raises(UsageError, match=message):
        fit(task, **{"callbacks": callbacks.standard(mlflow=None, progress=None), **options})


def test_model_and_optimizer_must_be_of_one_family(quiet):
    with pytest.raises(UsageError, match="the model is of tf_keras, but its optimizer of keras"):
        fit(Broken(build_model=Legacy().build_model), callbacks=quiet())


def test_run_directory_of_another_task_or_other_settings_is_refused(quiet, tmp_path):
    fit(Plain(), callbacks=quiet(), run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match="belongs to the task 'Plain', not 'Streamed'"):
        fit(Streamed(), callbacks=quiet(), run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match=r"batch_size was 32, now 16; the field hidden was 4, now 5"):
        fit(Plain(hidden=5), batch_size=16, callbacks=quiet(), run_dir=tmp_path / "run")
    with pytest.raises(UsageError, match="would write over them"):
        fit(Plain(), resume="never", callbacks=quiet(), run_dir=tmp_path / "run")


def test_another_model_in_the_same_run_names_the_variable(quiet, tmp_path):
    class Grown(Weighted):
        def build_model(self):
            return type(self)._model(self)

        _model = Weighted.build_model

    fit(Grown(), callbacks=quiet(), run_dir=tmp_path / "run")
    Grown._model = lambda self: Weighted(hidden=6).build_model()
    with pytest.raises(UsageError, match=r"model/00000:.*kernel is float32\[5, 6\], but .* is float32\[5, 4\]"):
        fit(Grown(), callbacks=quiet(), run_dir=tmp_path / "run", epochs=2)
    with pytest.raises(UsageError, match=r"is float64\[5, 4\], but .* or the run has another precision"):
        evaluate(Weighted(), tmp_path / "run", precision="float64")


def test_stream_that_runs_dry_is_told(quiet):
    class Dry(Plain):
        def train_data(self):
            left = [0]

            def examples():
                left[0] += 1
                if left[0] < 3:  # once to look at it, once to train
                    yield from zip(*regression(40)[:2], strict=True)

            spec = (tf.TensorSpec([5], tf.float32), tf.TensorSpec([1], tf.float32))
            return tf.data.Dataset.from_generator(examples, output_signature=spec)

    with pytest.raises(TrainingError, match="epoch 2 had no examples"):
        fit(Dry(), epochs=3, callbacks=quiet())


def test_fields_named_like_options_are_compared_too(quiet, tmp_path):
    @dataclass
    class Named(Plain):
        batch_size: int = 1
        token_dim: int = 64

    fit(Named(), batch_size=20, callbacks=quiet(), run_dir=tmp_path / "run")
    with pytest.raises(
        UsageError, match=r"batch_size was 20, now 30; the field batch_size was 1, now 2; .*token_dim was 64"
    ):
        fit(Named(batch_size=2, token_dim=65), batch_size=30, callbacks=quiet(), run_dir=tmp_path / "run")


def test_objects_as_fields_are_no_other_run(quiet, tmp_path):
    @dataclass
    class Fancy(Plain):
        activation: object = field(default_factory=object)

    for epochs in (1, 2):
        fit(Fancy(), epochs=epochs, callbacks=quiet(), run_dir=tmp_path / "run")


def test_learning_rate_set_by_a_callback_is_restored(quiet, tmp_path):
    class Drop(Callback):
        runs_on = "all"

        def on_epoch_end(self, run, metrics):
            if run.progress.epoch == 0:
                run.optimizer.learning_rate.assign(0.5)

    for kind in (Legacy, Plain):
        for epochs in (1, 2):
            result = fit(kind(), epochs=epochs, callbacks=quiet() + [Drop()], run_dir=tmp_path / kind.__name__)
        whole = fit(kind(), epochs=2, callbacks=quiet() + [Drop()])
        assert result.weights_sha256 == whole.weights_sha256


def test_resume_does_not_evaluate_again(quiet, tmp_path):
    heard = []
    for epochs in (1, 2):
        recorder = Recorder()
        fit(
            Streamed(),
            epochs=epochs,
            batch_size=20,
            eval_every=6,
            callbacks=quiet() + [recorder],
            run_dir=tmp_path / "run",
        )
        heard += [step for event, step in recorder.heard if event == "eval_end"]
    assert heard == [6, 12]


def test_callbacks_may_serve_again(quiet):
    stopping = callbacks.EarlyStopping("loss", patience=1, min_delta=100.0)
    epochs = [fit(Plain(), epochs=9, callbacks=quiet() + [stopping]).epochs for _ in range(2)]
    assert epochs == [2, 2]


def test_early_stopping_waits_for_a_rare_evaluation(quiet):
    result = fit(Plain(), epochs=4, batch_size=20, eval_every=10, callbacks=quiet() + [callbacks.EarlyStopping()])
    assert result.status == "finished"


def test_last_hooks_are_called_whatever_else_fails(quiet, tmp_path):
    class Spoil(Callback):
        def on_epoch_end(self, run, metrics):
            (run.directory / "run.json.tmp").mkdir()

    recorder = Recorder()
    with pytest.raises(IsADirectoryError):
        fit(Plain(), callbacks=quiet() + [Spoil(), recorder])
    assert recorder.heard[-1][0] == "fit_end"


def test_state_that_is_no_json_names_the_callback(quiet):
    class Odd(Callback):
        runs_on = "all"

        def state_dict(self):
            return {"value": np.float32(1.0)}

    with pytest.raises(TypeError, match=r"Odd.state_dict\(\) must return JSON values"):
        fit(Plain(), callbacks=quiet() + [Odd()])


def test_the_loop_fits_on_a_screen():
    source = inspect.getsource(sys.modules["loop.fit"].train)
    assert len([line for line in source.splitlines() if line.strip()]) <= 50


def test_two_threads_that_train_at_once_are_said(quiet):
    """They seed the same generators: initial weights depended on which thread came first, without a word."""

    class Second(Callback):
        def on_fit_start(self, run):
            with ThreadPoolExecutor(1) as pool:
                pool.submit(fit, Plain(), steps=1, callbacks=quiet()).result()

    with pytest.warns(UserWarning, match="^another thread of this process trains, too: .* workers=1"):
        fit(Plain(), steps=1, callbacks=quiet() + [Second()])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "another thread")
        fit(Plain(), steps=1, callbacks=quiet())
