"""Callbacks that are typed: `--callback`."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import callbacks
from loop.commands import typed_callbacks
from loop.errors import UsageError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("EarlyStoping", "tfloop has no callback of this name; did you mean 'EarlyStopping'?"),
        ("os.system('id')", "it is no callback"),
        ("EarlyStopping(__import__('os').system('id'))", "is no literal"),
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
