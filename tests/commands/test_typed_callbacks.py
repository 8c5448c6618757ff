"""Callbacks that are typed: `--callback`."""

import re
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import callbacks
from loop.commands import command_line, tracking, typed_callbacks
from loop.errors import UsageError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("EarlyStoping", "tfloop has no callback of this name; did you mean 'EarlyStopping'?"),
        ("os.system('id')", "it isn't a callback"),
        ("@os:system=id", "os:system isn't a callback: the form with @ is for commands"),
        ("@nothing.here:Class", "@nothing.here:Class: nothing.here:Class isn't a callback"),
        ("@callbacks.attached:Attached=text", "Attached=text: Expecting value"),
        ("@callbacks.attached:Attached=3", "Attached=3: give a JSON object"),
        ("EarlyStopping(__import__('os').system('id'))", "isn't a literal"),
        ("EarlyStopping(**{})", "** can't be typed"),
        ("EarlyStopping('loss', patience=-1)", "EarlyStopping(patience=-1)"),
        ("Timer(hours=3)", "--callback Timer(hours=3): missing a required argument: 'max_duration': give Timer(max_"),
        ("SamplePredictions(n=1)", "unexpected keyword argument 'n': give SamplePredictions(examples=16)"),
        ("Notify('https://example.org/secret')", "a command line can be read by others"),
        ("LambdaCallback()", "return it from the task's build_callbacks()"),
        ("Callback", "tfloop has no callback of this name"),
        ("Early Stopping", "it can't be read"),
        ("mine.py:Printer", "--callback mine.py:Printer: tfloop's own callbacks can be typed, and no others: "),
        ("string:Formatter", "return it from the task's build_callbacks()"),
        ("(" * 3000, "it can't be read"),
        ("EarlyStopping(" + "-" * 1500 + "1)", "--callback EarlyStopping("),
    ],
)
def test_what_is_no_callback_is_one_line(text, message):
    with pytest.raises(UsageError, match=re.escape(message)) as refused:
        typed_callbacks.make([text])
    assert "\n" not in str(refused.value)


@given(st.text(max_size=60))
def test_any_text_is_a_callback_or_refused(text):
    try:
        [made] = typed_callbacks.make([text])
    except UsageError:
        return
    except (ImportError, AttributeError, ValueError):  # the form by which commands add their own
        assert typed_callbacks.of_commands([text])
        return
    assert isinstance(made, callbacks.Callback)


def test_callbacks_are_made_with_their_arguments():
    text = "EarlyStopping(metric='eval_loss', patience=3, restore_best=True)"
    stopping, board, shown = typed_callbacks.make([text, "Checkpoint(every=7)", "SamplePredictions(examples=8)"])
    assert isinstance(stopping, callbacks.EarlyStopping)
    assert stopping.patience == 3
    assert board.every == 7
    assert shown.examples == 8


def test_a_typed_callback_works_in_a_run_alone_and_from_a_file(command, tmp_path):
    arguments = ["train", "digits", "--epochs", 9, "--track", "off"]
    stopping = "EarlyStopping('loss', patience=1, min_delta=100.0)"
    code, _, said = command(*arguments, "--run-dir", tmp_path / "a", "--callback", stopping, "--callback", "CSVLogger")
    assert code == 0, said
    assert "epoch 2/9" in said
    assert "epoch 3/9" not in said
    assert list((tmp_path / "a").glob("*.csv"))

    config = tmp_path / "options.toml"
    config.write_text(f'callback = ["{stopping}", "CSVLogger"]\n')
    code, _, said = command(*arguments, "--run-dir", tmp_path / "b", "--config", config)
    assert code == 0, said
    assert "epoch 3/9" not in said
    assert list((tmp_path / "b").glob("*.csv"))

    code, _, said = command(*arguments, "--callback", "Tensorbord")
    assert (code, "did you mean 'TensorBoard'?" in said) == (2, True)


def typed_set(*texts, **typed):
    """The callbacks of `tfloop train` with these options."""
    options = {"checkpoint_every": None, "track": None, "track_wait": None, "eval_beside": None, **typed}
    checkpoint = callbacks.Checkpoint(options["checkpoint_every"] or "auto")
    tracker = tracking.tracker(options["track"], options["track_wait"], options.pop("tag", []))
    beside = command_line.evaluates_beside(options["eval_beside"], None)
    chosen = callbacks.standard(checkpoint=checkpoint, mlflow=tracker) + beside
    return typed_callbacks.TypedSet(chosen, texts, SimpleNamespace(**options))


def of_task():
    """The callbacks of a task, whose settings differ from the standard ones."""
    tracker = callbacks.MLflowTracker("http://127.0.0.1:9", experiment="mine", wait=3, tags={"team": "a"})
    return [callbacks.Checkpoint("epoch", keep_last=9), tracker, callbacks.EvaluateBeside("cpu")]


def only(kind, among):
    [found] = [callback for callback in among if isinstance(callback, kind)]
    return found


def test_what_is_typed_changes_that_alone_of_the_callbacks_of_the_task():
    own = of_task()
    made = callbacks.complete(typed_set(), own)
    checkpoint, tracker = only(callbacks.Checkpoint, made), only(callbacks.MLflowTracker, made)
    assert (checkpoint, tracker) == tuple(own[:2])
    assert (checkpoint.every, checkpoint.pause, tracker.uri, tracker.wait) == ("epoch", 0.0, "http://127.0.0.1:9", 3)

    typed = {"checkpoint_every": 5, "track": "http://127.0.0.1:8", "tag": ["size=1"], "track_wait": 60.0}
    made = callbacks.complete(typed_set(**typed), of_task())
    checkpoint, tracker = only(callbacks.Checkpoint, made), only(callbacks.MLflowTracker, made)
    assert (checkpoint.every, checkpoint.pause, checkpoint.policy.last) == (5, callbacks.checkpoint.PAUSE, 9)
    assert (tracker.uri, tracker.experiment, tracker.wait) == ("http://127.0.0.1:8", "mine", 60.0)
    assert tracker.tags == {"team": "a", "size": "1"}


def test_what_is_typed_replaces_the_callback_of_the_task():
    made = callbacks.complete(typed_set("Checkpoint(every=7)", track="off", eval_beside="gpu:0"), of_task())
    assert only(callbacks.Checkpoint, made).every == 7
    assert only(callbacks.EvaluateBeside, made)._device == "gpu:0"
    assert not any(isinstance(callback, callbacks.MLflowTracker) for callback in made)


def test_what_standard_is_given_wins_over_the_callback_of_the_task():
    chosen = callbacks.standard(checkpoint=callbacks.Checkpoint(every=5), mlflow=None) + [callbacks.CSVLogger()]
    made = callbacks.complete(chosen, of_task())
    assert only(callbacks.Checkpoint, made).every == 5
    assert not any(isinstance(callback, callbacks.MLflowTracker) for callback in made)
