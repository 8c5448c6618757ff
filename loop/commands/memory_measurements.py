"""The measurements of `tfloop memory`: trainings on small batches, each in a process of its own.

Imports no TensorFlow.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from callbacks.files import read_json
from loop.commands import command_line, trial
from loop.commands.memory_probe import MemoryProbe
from loop.commands.tune import available

STAGES = 8
"""The usual number of measurements."""

_ALWAYS = ["--track=off", "--keep=last", "--eval-every=never", "--accumulate=1"]
_SMALLEST = 8  # examples: the first batch that is measured
_CLEAR = 64e6  # bytes: two batches whose peaks differ by so much give a slope; less may be chance
_FAINT = 16e6  # bytes: if they differ by less, the next batch is much larger
_FURTHEST = 0.25  # of the largest measured peak: the most that the line may add, if memory lets more be measured


class Curve:
    """The peak memory over the size of the batch, from measurements.

    Args:
        reports: what `MemoryProbe` wrote, by the size of the batch; at least one.

    Attributes:
        about: what it wrote beside the peak.
        on_gpu: whether peaks are those of a GPU.
        peaks: in bytes, by the size of the batch.
        growth: by how much the two largest batches differ; 0 if there is one.
        slope: how many bytes an example adds.
        fixed: the peak without any example, in bytes.
    """

    def __init__(self, reports: Mapping[int, Mapping[str, Any]]) -> None:
        sizes = sorted(reports)
        self.about = reports[sizes[-1]]
        self.on_gpu = bool(self.about["gpu_memory"])
        field = "gpu_memory" if self.on_gpu else "memory"
        self.peaks: dict[int, int] = {examples: reports[examples][field] for examples in sizes}
        # The largest batches alone: with a small one, the peak may be where the optimizer works, without activations.
        last = sizes[-1]
        before = sizes[-2] if len(sizes) > 1 else last
        self.growth = self.peaks[last] - self.peaks[before]
        self.slope = max(0.0, self.growth / (last - before)) if last > before else 0.0
        self.fixed = self.peaks[last] - self.slope * last


class Prober:
    """The measurements of a task, one after the other."""

    def __init__(
        self,
        arguments: Sequence[str],
        workers: int,
        batch_size: int | None,
        directory: Path,
        progress: Callable[[str], None],
    ) -> None:
        self._arguments = list(arguments)
        self._workers = workers
        self._batch_size = batch_size
        self._directory = directory
        self._progress = progress

    def curve(self, remat: bool) -> Curve:
        """Measures larger and larger batches, until the peak grows clearly, or the batch of a replica is reached."""
        reports: dict[int, dict[str, Any]] = {}
        for examples in self._sizes(reports):
            settings = ["--backend=single"]
            if remat:
                settings.append("--remat=full")
            name = f"{'remat' if remat else 'plain'}, a batch of"
            reports[examples] = self._measured(name, examples, settings)
        return Curve(reports)

    def worker_extra(self, curve: Curve, shard: bool) -> float | None:
        """What each of several workers takes beyond a process that is alone, in bytes: measured with two workers.

        It is what sends and gets tensors, the tensors on their way, and a larger graph.

        Args:
            curve: of a process that is alone.
            shard: whether the optimizer's state is sharded; what that saves isn't counted here.

        Returns:
            None: there is one worker, or two can't be tried here.
        """
        # The smallest batch: what workers send doesn't depend on it, and memory must do for two processes.
        examples = min(curve.peaks)
        alone = curve.peaks[examples]
        if self._workers == 1 or curve.on_gpu or 3 * alone > available():
            return None
        name = f"2 workers{', sharded' if shard else ''}, a batch of"
        both = self._measured(name, 2 * examples, ["--workers=2", *["--shard-optimizer"] * shard])
        state = curve.about["optimizer"] + curve.about["averages"]
        saved = state - math.ceil(state / 2) if shard else 0
        return max(0.0, both["memory"] + saved - alone)

    def _sizes(self, reports: Mapping[int, Mapping[str, Any]]) -> Iterator[int]:
        """The batches to measure; `reports` has what was measured so far."""
        examples = _SMALLEST
        if self._batch_size is not None:  # half of what is trained, so that a second batch can be larger
            examples = max(1, min(_SMALLEST, self._rows(self._batch_size) // 2))
        yield examples

        # It has been measured by now: its report has the batch size of the task.
        batch_size = reports[examples]["own"]["batch_size"] if self._batch_size is None else self._batch_size
        largest = max(self._rows(batch_size), 2)
        curve = Curve(reports)
        too_much = not curve.on_gpu and 4 * curve.peaks[examples] > available()
        if examples >= largest or too_much:  # then the second point of the line is below the first one
            yield max(1, min(examples, largest) // 2)
            return
        while examples < largest and (curve.growth < _CLEAR or self._is_far(curve, examples, largest)):
            # A batch that grows by little may be much larger, and still be small in memory.
            factor = 4 if curve.growth >= _FAINT or len(reports) == 1 else 16
            examples = min(factor * examples, largest)
            yield examples
            curve = Curve(reports)

    def _is_far(self, curve: Curve, examples: int, largest: int) -> bool:
        """Whether the largest batch is too far for the line, and a batch between can be measured here.

        An allocator takes memory in blocks: a slope from small batches may be that of one block.
        """
        next_peak = curve.fixed + curve.slope * min(4 * examples, largest)
        fits = not curve.on_gpu and 2 * next_peak <= available()
        return fits and curve.slope * (largest - examples) > _FURTHEST * curve.peaks[examples]

    def _rows(self, batch_size: int) -> int:
        return math.ceil(batch_size / self._workers)

    def _measured(self, name: str, examples: int, settings: Sequence[str]) -> dict[str, Any]:
        """Makes a few steps with a global batch of so many examples, in a process or a job of its own."""
        self._progress(f"{name} {examples:,}")
        directory = Path(tempfile.mkdtemp(dir=self._directory))
        own = [command_line.callback_option(MemoryProbe), f"--run-dir={directory / 'run'}"]
        code = trial.run([*self._arguments, *settings, f"--batch-size={examples}", *_ALWAYS, *own], directory)
        reports = [read_json(path) for path in directory.glob("run/memory-*.json")]
        if code != 0 or not reports:
            raise trial.failure(code, trial.problem(code, directory))
        return max(reports, key=lambda report: report["memory"])
