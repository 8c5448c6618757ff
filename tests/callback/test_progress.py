"""What a run shows: the bar, the lines of epochs, and how wide and how many they are."""

import fcntl
import io
import os
import pty
import re
import struct
import termios

import pytest

from callbacks import Callback, Progress
from callbacks.epoch_lines import EpochLines, by_importance
from callbacks.progress import Display
from loop import fit
from tests.tasks import Plain


@pytest.fixture
def terminal():
    """Makes a real terminal of a given width: a stream to write on, and a function that gives what it has shown."""
    opened = []

    def make(columns):
        reader, writer = pty.openpty()
        fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        os.set_blocking(reader, False)
        stream = os.fdopen(writer, "w")
        opened.append((stream, reader))

        def shown():
            stream.flush()
            text = b""
            while True:
                try:
                    text += os.read(reader, 1 << 16)
                except BlockingIOError:
                    return [line for line in re.split(r"[\r\n]+", text.decode().replace("\x1b[A", "")) if line.strip()]

        return stream, shown

    yield make
    for stream, reader in opened:
        stream.close()
        os.close(reader)


def trained(display, quiet, *callbacks, **options):
    progress = Progress(every="1h")  # no refresh comes between the ends of epochs, as in a fast run
    progress._show = display.update
    return fit(Plain(), callbacks=quiet(progress=progress) + list(callbacks), batch_size=20, **options)


def told(number, epochs=6, **metrics):
    return {
        "kind": "epoch", "step": 10 * number, "total": epochs and 10 * epochs, "epoch": number, "epochs": epochs,
        "metrics": metrics, "speed": 75746.4,
    }  # fmt: skip


def test_the_last_refresh_of_the_bar_shows_the_last_epoch_and_its_numbers(quiet, terminal):
    stream, shown = terminal(80)
    result = trained(Display(stream), quiet, epochs=6)
    bar, ending = shown()[-2:]
    assert bar.startswith("epoch 6/6 100%|")
    assert f"loss {result.metrics['loss']:.4g}" in bar
    assert ending.startswith("finished at step 36, ")


def test_a_bar_that_ends_within_an_epoch_names_that_epoch(quiet, terminal):
    class Stop(Callback):
        every = (9,)  # in the second epoch, of six steps

        def on_steps_end(self, run, metrics):
            run.stop("enough")

    stream, shown = terminal(80)
    assert trained(Display(stream), quiet, Stop(), epochs=6).epochs == 1
    bar, ending = shown()[-2:]
    assert bar.startswith("epoch 2/6  25%|")
    assert ending.startswith("stopped at step 9 (enough)")


def test_what_is_shown_fits_a_terminal_of_80_columns(quiet, terminal):
    class Wordy(Callback):
        def on_setup(self, run):
            for number in range(9):
                run.gauges[f"quite_long_name_{number}"] = lambda: 1e-5 / 3

    stream, shown = terminal(80)
    trained(Display(stream), quiet, Wordy(), epochs=6)
    _, _, *lines = shown()
    assert max(map(len, lines)) <= 80
    [third] = [line for line in lines if re.fullmatch(r"epoch 3/6  loss [\d.]+ .*  \+\d+ more", line)]
    assert "quite_long_name_0 3.333e-06 " in third


def test_columns_of_a_log_are_aligned_and_nothing_is_left_out():
    lines = EpochLines()
    texts = [
        lines.text(told(number, 12, loss=loss, accuracy=0.5, eval_loss=1.5, eval_accuracy=0.25))
        for number, loss in ((1, 1.25), (9, 0.1), (12, 0.0001234))
    ]
    assert texts == [
        "epoch 1/12   step 10   loss 1.25    eval_loss 1.5     eval_accuracy 0.25    accuracy 0.5",
        "epoch 9/12   step 90   loss 0.1     eval_loss 1.5     eval_accuracy 0.25    accuracy 0.5",
        "epoch 12/12  step 120  loss 0.0001234  eval_loss 1.5     eval_accuracy 0.25    accuracy 0.5",
    ]


def test_a_line_has_whole_words_and_the_most_important_ones():
    state = told(3, loss=0.25, accuracy=0.5, learning_rate=1e-3, eval_loss=1.5, eval_accuracy=0.25)
    cells = ["loss 0.25", "eval_loss 1.5", "eval_accuracy 0.25", "accuracy 0.5", "learning_rate 0.001"]
    for columns in range(20, 120):
        text = EpochLines().text(state, columns)
        assert len(text) <= columns
        place, *shown = re.split("  +", text.replace("  step 30", ""))
        assert place == "epoch 3/6"
        left = int(shown.pop()[1:].removesuffix(" more")) if text.endswith(" more") else 0
        assert shown == cells[: len(cells) - left]
        assert left == 0 or columns < 105


def test_losses_come_first_and_what_is_evaluated_before_what_is_trained():
    gan = ["judge_loss", "judge_right", "forge_loss", "learning_rate", "eval_loss", "eval_far"]
    ordered = ["judge_loss", "forge_loss", "eval_loss", "judge_right", "learning_rate", "eval_far"]
    assert list(by_importance(dict.fromkeys(gan, 0.0))) == ordered
    many = {f"metric_{number}": 0.0 for number in range(100_000)}
    assert len(by_importance(many)) == 100_000


def test_many_epochs_have_a_line_every_few_seconds_and_the_last_one_always():
    lines = EpochLines(seconds=300)
    due = [number for number in range(1, 3001) if lines.take(told(number, 3000), now=number)]
    assert due == [1, *range(301, 3000, 300), 3000]
    few = EpochLines(seconds=3.0)
    assert all(few.take(told(number, 20), now=0.0) for number in range(1, 21))


def test_a_line_that_was_held_back_is_shown_at_the_end(quiet):
    class Stop(Callback):
        def on_epoch_end(self, run, metrics):
            if run.progress.epoch == 7:
                run.stop("enough")

    stream = io.StringIO()
    trained(Display(stream, epoch_seconds=1e9), quiet, Stop(), epochs=3000)
    _, _, first, last, ending = stream.getvalue().splitlines()
    assert first.startswith("epoch 1/3000  ")
    assert last.startswith("epoch 8/3000  ")
    assert ending.startswith("stopped at step 48 (enough)")
