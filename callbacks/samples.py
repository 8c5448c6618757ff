"""SamplePredictions: what the model makes of a few examples, as pictures or text, as the training goes on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from callbacks import files
from callbacks.arguments import check, is_whole
from callbacks.base import Callback, Metrics, Run
from callbacks.run_record import journal

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ-+.,:>/_%? "
# Three pixels wide, five high: a row is an octal digit. Enough for labels.
_GLYPHS = (
    "75557 26227 71747 71717 55711 74717 74757 71244 75757 75717 25755 65656 34443 65556 74647 74644 34553 55755 72227 "
    "11152 55655 44447 57755 65555 25552 65644 25573 65655 34216 72222 55557 55552 55775 55255 55222 71247 00700 02720 "
    "00002 00024 02020 42124 11244 00007 51245 71202 00000"
)
_SCALE, _SMALLEST = 2, 64  # pixels of a picture for one of the font's; so wide is a tile at least
_RIGHT, _WRONG, _PLAIN = (90, 200, 120), (255, 110, 100), (220, 220, 220)


class SamplePredictions(Callback):
    """After each evaluation (of a run without any: each epoch), shows what the model makes of the same few examples.

    What is shown says the task's method `sample`. Pictures become a grid, `samples/step-<8 digits>.png`, with the
    prediction below each, green; or `label>prediction`, red, where they differ. All else becomes lines of a text,
    `samples/step-<8 digits>.txt`. Both are among the run's artifacts in MLflow, too. With `ema`, they are of the
    weights and not of their averages.

    Args:
        examples: how many, from the start of the evaluation data (else of the training data); of a `tf.data.Dataset`,
            three at most.
    """

    def __init__(self, examples: int = 16) -> None:
        check(self, is_whole(examples, 1, 1024), "give a whole number from 1 to 1024", examples=examples)
        self.examples = examples
        self._batch: Any = None
        self._evaluates = False

    def on_data(self, run: Run, data: Any) -> Any:
        self._evaluates = data.eval is not None and run.options["eval_every"] != "never"
        self._batch = (data.eval or data.train).head(self.examples)
        return data

    def on_eval_end(self, run: Run, metrics: Metrics) -> None:
        self._show(run)

    def on_epoch_end(self, run: Run, metrics: Metrics) -> None:
        if not self._evaluates:
            self._show(run)

    def _show(self, run: Run) -> None:
        import numpy as np

        found = run.task.sample(run.model, self._batch)
        if isinstance(found, Mapping):
            values = {name: np.asarray(value) for name, value in found.items()}
            values["prediction"] = _classes(values)
            pictures = [name for name, value in values.items() if value.ndim == 4 or (value.ndim == 3)]
            captions = {name: value for name, value in values.items() if name not in pictures and value.ndim <= 2}
            if pictures:
                self._write(run, "png", grid(values[pictures[0]], captions.get("label"), captions.get("prediction")))
                return
            count = min(map(len, captions.values()), default=0)
            found = ["  ".join(f"{name} {_text(value[i])}" for name, value in captions.items()) for i in range(count)]
        self._write(run, "txt", ("\n".join(map(_text, found)) + "\n").encode())

    def _write(self, run: Run, kind: str, content: bytes) -> None:
        path = run.directory / "samples" / f"step-{run.progress.step:08d}.{kind}"
        files.make_directory(path.parent)
        with files.replacing(path) as file:
            file.write(content)
        journal.artifact(run, path)


def _classes(values: Mapping[str, Any]) -> Any:
    """The predictions; where they are a value for each class, and labels are classes, the greatest one's class."""
    predictions, labels = values.get("prediction"), values.get("label")
    if predictions is None:
        return ()
    several = predictions.ndim == 2 and predictions.shape[1] > 1
    return predictions.argmax(-1) if several and (labels is None or labels.ndim == 1) else predictions


def _text(value: Any) -> str:
    """A value as it is shown."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return _text(value[0]) if len(value) == 1 else " ".join(map(_text, value))
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def grid(pictures: Any, labels: Any = None, predictions: Any = None) -> bytes:
    """A PNG with all pictures in rows, and what was found below each.

    Args:
        pictures: [n, height, width] or [n, height, width, channels]; uint8, or numbers from 0 to 1, or any.
        labels: what they are, [n], or None.
        predictions: what the model takes them for, [n], or None.
    """
    import numpy as np
    import tensorflow as tf

    shown = pictures[..., None] if pictures.ndim == 3 else pictures
    shown = np.repeat(shown[..., :1], 3, -1) if shown.shape[-1] < 3 else shown[..., :3]
    if shown.dtype != np.uint8:
        shown = np.nan_to_num(shown.astype("float32"))
        low, high = (0.0, 1.0) if shown.min() >= 0 and 0.5 < shown.max() <= 1 else (shown.min(), shown.max())
        shown = ((shown - low) / max(high - low, 1e-12) * 255).round().astype("uint8")
    factor = max(1, -(-_SMALLEST // shown.shape[2]))
    shown = shown.repeat(factor, 1).repeat(factor, 2)
    count, height, width, _ = shown.shape
    line, columns = (5 + 3) * _SCALE, max(1, round(count**0.5))
    rows = -(-count // columns)
    sheet = np.full((rows * (height + line + 4), columns * (width + 4), 3), 24, np.uint8)
    for i, picture in enumerate(shown):
        top, left = i // columns * (height + line + 4) + 2, i % columns * (width + 4) + 2
        sheet[top : top + height, left : left + width] = picture
        text, colour = _caption(labels, predictions, i)
        letters = _letters(text)[:, :width]
        below = sheet[top + height + 3 : top + height + 3 + len(letters), left : left + letters.shape[1]]
        below[letters] = colour
    return bytes(tf.io.encode_png(sheet).numpy())


def _caption(labels: Any, predictions: Any, i: int) -> tuple[str, tuple[int, int, int]]:
    label, prediction = (
        None if values is None or not len(values) else _text(values[i]) for values in (labels, predictions)
    )
    if label is None or prediction is None:
        return label or prediction or "", _PLAIN
    return (prediction, _RIGHT) if label == prediction else (f"{label}>{prediction}", _WRONG)


def _letters(text: str) -> Any:
    """A line of text as pixels: [height, width], bool."""
    import numpy as np

    font = dict(zip(_LETTERS, _GLYPHS.split(), strict=True))
    glyphs = [font.get(letter, font["?"]) for letter in text.upper() or " "]
    bits = [[[int(row) >> (2 - x) & 1 if x < 3 else 0 for x in range(4)] for row in glyph] for glyph in glyphs]
    return np.concatenate(np.array(bits, bool), 1).repeat(_SCALE, 0).repeat(_SCALE, 1)
