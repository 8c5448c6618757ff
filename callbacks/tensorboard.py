"""TensorBoard: writes event files with the run's metrics, the weights' histograms and the graph."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from callbacks.arguments import check, is_whole
from callbacks.base import Callback, Every, Metrics, Run, of_training
from callbacks.files import FileError, UnsafeFileError, is_plain
from callbacks.run_record.redaction import printable
from callbacks.types import Foreign, Tensors

if TYPE_CHECKING:
    import numpy as np

BUCKETS = 30
"""The buckets of a histogram: as many as TensorBoard's own histograms have."""


class TensorBoard(Callback):
    """Writes the files that `tensorboard --logdir DIR` shows, without needing TensorBoard.

    Metrics of an epoch and of an evaluation have their plain names, those within an epoch are named `step/...`, and
    histograms of the trained variables `weights/...`. A resumed run adds points of later steps than those in the files.

    Args:
        directory: where to write; a relative path is in the run directory.
        every: how often metrics within an epoch are written; see `Callback`.
        histograms: after how many epochs to write histograms; 0: none.
        graph: whether to write the graph of the compiled training, once.
    """

    def __init__(
        self, directory: str | Path = "tensorboard", every: Every = "1s", histograms: int = 0, graph: bool = True
    ) -> None:
        check(self, isinstance(directory, str | Path) and directory != "", "give a directory", directory=directory)
        check(self, is_whole(histograms, 0), "give a number of epochs, or 0 for none", histograms=histograms)
        self.directory = Path(directory)
        self.every = every
        self.histograms = histograms
        self.graph = graph
        self._writer: Foreign = None
        self._written: dict[str, int] = {}  # the last step of each tag
        self._graph_written = False
        self._last = 0  # the step at which `on_steps_end` was last called

    def on_setup(self, run: Run) -> None:
        directory = run.directory / self.directory
        try:
            str(directory).encode()
            directory.mkdir(parents=True, exist_ok=True)
        except UnicodeEncodeError:  # bytes that aren't UTF-8 stand in it
            text = "TensorFlow writes no event files to a path that isn't UTF-8: give TensorBoard another directory"
            raise FileError(errno.EILSEQ, text, printable(str(directory))) from None
        except FileExistsError:
            raise UnsafeFileError(directory, "it isn't a directory") from None

    def on_restore(self, run: Run, path: Path | None) -> None:
        import tensorflow as tf

        self._close()
        directory = run.directory / self.directory
        self._written, self._graph_written = _written(directory)
        self._writer = tf.summary.create_file_writer(str(directory))
        self._last = run.progress.step

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        self._write_graph(run)
        last = self._last
        self._last = run.progress.step
        if last >= run.progress.step - run.progress.step_in_epoch:  # else it is a mean over two epochs
            metrics = {**metrics, "examples_per_second": run.examples_per_second}
            self._write(run, "scalars", {f"step/{name}": value for name, value in metrics.items()})

    def on_eval_end(self, run: Run, metrics: Metrics) -> None:
        self._write(run, "scalars", metrics)

    def on_epoch_end(self, run: Run, metrics: Metrics) -> None:
        self._write_graph(run)
        self._write(run, "scalars", of_training(metrics))  # `on_eval_end` has written the others
        if self.histograms and (run.progress.epoch + 1) % self.histograms == 0:
            tables = {}
            for name, variable, is_trained in run.weights:
                if is_trained:
                    tables[f"weights/{name}"] = _histogram(run.backend.local_values(variable)[0])
            self._write(run, "histograms", tables)

    def on_fit_end(self, run: Run, status: str) -> None:
        self._close()

    def _write(self, run: Run, plugin: str, values: Mapping[str, Tensors]) -> None:
        """Writes the points that aren't in the files yet, and flushes them."""
        import tensorflow as tf

        # This is what `tf.summary.scalar` and `histogram` do, but these need TensorBoard to be installed.
        metadata = tf.compat.v1.SummaryMetadata(plugin_data={"plugin_name": plugin})
        step = run.progress.step
        with self._writer.as_default(step):
            for tag, value in values.items():
                if step > self._written.get(tag, -1):  # a resumed run makes steps again that the files have
                    self._written[tag] = step
                    # The types that `tf.summary.scalar` and `histogram` write.
                    dtype = tf.float32 if plugin == "scalars" else tf.float64
                    tf.summary.write(tag, tf.constant(value, dtype), metadata=metadata)
        self._writer.flush()

    def _write_graph(self, run: Run) -> None:
        if not self.graph or self._graph_written:
            return
        import tensorflow as tf

        self._graph_written = True
        if run.graph is not None:
            with self._writer.as_default(0):
                tf.summary.graph(run.graph)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._writer = None


def _written(directory: Path) -> tuple[dict[str, int], bool]:
    """The last step of each tag in the event files of a directory, and whether they hold a graph."""
    import tensorflow as tf

    last: dict[str, int] = {}
    graph = False
    for path in directory.glob("events.out.tfevents.*"):
        if not is_plain(path, shared=True):  # opening a pipe would never end
            continue
        with contextlib.suppress(tf.errors.DataLossError):  # a kill has torn the end of the file
            for record in tf.data.TFRecordDataset(str(path)).as_numpy_iterator():
                event = tf.compat.v1.Event.FromString(record)
                graph |= bool(event.graph_def)
                for value in event.summary.value:
                    last[value.tag] = max(last.get(value.tag, -1), event.step)
    return last, graph


def _histogram(values: np.ndarray) -> np.ndarray:
    """Buckets as TensorBoard reads them: left end, right end, count; float64 [BUCKETS, 3]."""
    import numpy as np

    values = values.astype(np.float64).ravel()
    counts, ends = np.histogram(values[np.isfinite(values)], BUCKETS)
    return np.stack([ends[:-1], ends[1:], counts], 1)
