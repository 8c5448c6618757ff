"""SamplePredictions: shows the predictions for a few examples during the training, as pictures or text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from callbacks import files
from callbacks.arguments import check, is_whole
from callbacks.base import Callback, Metrics, Run
from callbacks.formats import number
from callbacks.run_record import journal
from callbacks.types import Data, Tensors

if TYPE_CHECKING:
    import numpy as np

_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ-+.,:>/_%? "
# Three pixels wide, five high: each octal digit is a row. That is enough for labels.
_GLYPHS = (
    "75557 26227 71747 71717 55711 74717 74757 71244 75757 75717 25755 65656 34443 65556 74647 74644 34553 55755 72227 "
    "11152 55655 44447 57755 65555 25552 65644 25573 65655 34216 72222 55557 55552 55775 55255 55222 71247 00700 02720 "
    "00002 00024 02020 42124 11244 00007 51245 71202 00000"
)
_SCALE = 2  # pixels of the sheet for one of the font
_SMALLEST = 64  # the least width of a picture in the sheet
_BORDER = 4  # pixels between pictures
_RIGHT = (90, 200, 120)
_WRONG = (255, 110, 100)
_PLAIN = (220, 220, 220)


class SamplePredictions(Callback):
    """After each evaluation (without evaluations: after each epoch), shows the predictions for the same few examples.

    The task's method `sample` returns what is shown. Pictures become a grid, `samples/step-<8 digits>.png`; below each
    is the prediction, in green, or `label>prediction`, in red, if they differ. Anything else becomes the lines of a
    text, `samples/step-<8 digits>.txt`. Both become artifacts of the run in MLflow. With `ema`, predictions are those
    of the weights, not of their average.

    Args:
        examples: how many, from the start of the evaluation data (without it, of the training data); of a
            `tf.data.Dataset`, at most three.
    """

    def __init__(self, examples: int = 16) -> None:
        check(self, is_whole(examples, 1, 1024), "give a whole number from 1 to 1024", examples=examples)
        self.examples = examples
        self._batch: Tensors = None
        self._evaluates = False

    def on_data(self, run: Run, data: Data) -> Data:
        # A task may have evaluation data that this run never uses: then epochs are the moments to show predictions.
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

        shown = run.task.sample(run.model, self._batch)
        if isinstance(shown, Mapping):
            values = {name: np.asarray(value) for name, value in shown.items()}
            if "prediction" in values:
                values["prediction"] = _classes(values["prediction"], values.get("label"))
            pictures = []
            captions = {}
            for name, value in values.items():
                if value.ndim <= 2:
                    captions[name] = value
                elif value.ndim <= 4:
                    pictures.append(value)
            if pictures:  # the first ones alone: a sheet shows one picture for each example
                self._write(run, "png", grid(pictures[0], captions.get("label"), captions.get("prediction")))
                return
            shown = _lines(captions)
        self._write(run, "txt", ("\n".join(map(_text, shown)) + "\n").encode())

    def _write(self, run: Run, kind: str, content: bytes) -> None:
        path = run.directory / "samples" / f"step-{run.progress.step:08d}.{kind}"
        files.make_directory(path.parent)
        with files.replacing(path) as file:
            file.write(content)
        journal.artifact(run, path)


def _classes(predictions: np.ndarray, labels: np.ndarray | None) -> np.ndarray:
    """The predictions; if they are a value for each class, and labels are classes, the class of the greatest value."""
    has_classes = predictions.ndim == 2 and predictions.shape[1] > 1
    if has_classes and (labels is None or labels.ndim == 1):
        return predictions.argmax(-1)
    return predictions


def _lines(captions: Mapping[str, np.ndarray]) -> list[str]:
    """A line for each example: names and values."""
    lines = []
    for index in range(min(map(len, captions.values()), default=0)):
        lines.append("  ".join(f"{name} {_text(value[index])}" for name, value in captions.items()))
    return lines


def _text(value: object) -> str:
    """A value as it is shown."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list):
        return _text(value[0]) if len(value) == 1 else " ".join(map(_text, value))
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return number(value) if isinstance(value, float) else str(value)


def grid(pictures: np.ndarray, labels: np.ndarray | None = None, predictions: np.ndarray | None = None) -> bytes:
    """A PNG with all pictures in rows, and a caption below each.

    Args:
        pictures: [n, height, width] or [n, height, width, channels]; uint8, numbers from 0 to 1, or any numbers.
        labels: the true values, [n], or None.
        predictions: the model's predictions, [n], or None.
    """
    import numpy as np
    import tensorflow as tf

    # Small pictures are enlarged by whole pixels, so that their captions fit and nothing is smoothed. -(-a // b) is
    # a / b, rounded up.
    tiles = _as_rgb(pictures)
    factor = max(1, -(-_SMALLEST // tiles.shape[2]))
    tiles = tiles.repeat(factor, 1).repeat(factor, 2)

    # A dark sheet, about as many columns as rows.
    count, height, width, _ = tiles.shape
    caption_height = (5 + 3) * _SCALE
    row_height = height + caption_height + _BORDER
    column_width = width + _BORDER
    columns = max(1, round(count**0.5))
    rows = -(-count // columns)
    sheet = np.full((rows * row_height, columns * column_width, 3), 24, np.uint8)

    for index, tile in enumerate(tiles):
        row, column = divmod(index, columns)
        top = row * row_height + 2
        left = column * column_width + 2
        sheet[top : top + height, left : left + width] = tile
        text, color = _caption(labels, predictions, index)
        letters = _letters(text)[:, :width]  # a longer caption is cut
        below = top + height + 3
        # A view of the sheet: what is written to it is written to the sheet.
        area = sheet[below : below + len(letters), left : left + letters.shape[1]]
        area[letters] = color
    return bytes(tf.io.encode_png(sheet).numpy())


def _as_rgb(pictures: np.ndarray) -> np.ndarray:
    """Pictures of any kind as uint8 with three channels."""
    import numpy as np

    tiles = pictures[..., None] if pictures.ndim == 3 else pictures
    # With one or two channels, the first is the brightness; with more than three, the first three are the colors.
    tiles = np.repeat(tiles[..., :1], 3, -1) if tiles.shape[-1] < 3 else tiles[..., :3]
    if tiles.dtype == np.uint8:
        return tiles
    tiles = np.nan_to_num(tiles.astype("float32"))
    is_unit = tiles.min() >= 0 and 0.5 < tiles.max() <= 1  # numbers from 0 to 1 keep their brightness
    low, high = (0.0, 1.0) if is_unit else (tiles.min(), tiles.max())
    return ((tiles - low) / max(high - low, 1e-12) * 255).round().astype("uint8")


def _caption(labels: np.ndarray | None, predictions: np.ndarray | None, index: int) -> tuple[str, tuple[int, int, int]]:
    """The text below a picture, and its color."""
    label = _text_at(labels, index)
    prediction = _text_at(predictions, index)
    if label is None or prediction is None:
        return label or prediction or "", _PLAIN
    return (prediction, _RIGHT) if label == prediction else (f"{label}>{prediction}", _WRONG)


def _text_at(values: np.ndarray | None, index: int) -> str | None:
    return None if values is None or not len(values) else _text(values[index])


def _letters(text: str) -> np.ndarray:
    """A line of text as pixels: [height, width], bool."""
    import numpy as np

    font = dict(zip(_LETTERS, _GLYPHS.split(), strict=True))
    glyphs = [_pixels(font.get(letter, font["?"])) for letter in text.upper() or " "]
    return np.concatenate(np.array(glyphs, bool), 1).repeat(_SCALE, 0).repeat(_SCALE, 1)


def _pixels(glyph: str) -> list[list[int]]:
    """A letter as rows of pixels. The last pixel of each row is the gap to the next letter."""
    return [list(map(int, f"{int(row):03b}0")) for row in glyph]
