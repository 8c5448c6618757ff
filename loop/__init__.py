"""tfloop: trains TensorFlow models with a small, exact loop. `TrainTask`, `ArrayData`, `fit` are all that most need."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from loop.backends.devices import device
    from loop.commands.compare import compare
    from loop.commands.evaluate import evaluate
    from loop.commands.predict import predict
    from loop.data import ArrayData, IndexedData, Padding, StreamData, mix, records, sequences
    from loop.errors import PeerError, TrainingError, UsageError
    from loop.fit import fit
    from loop.keras_task import KerasTask
    from loop.options import Phase
    from loop.run.result import FitResult
    from loop.run.run import Run
    from loop.step.metric_sums import Perplexity
    from loop.step.remat import remat
    from loop.step.replica import all_gather, example_seed, first_row
    from loop.step.values import unweighted
    from loop.task import TrainTask

    __version__: str

__all__ = [
    "ArrayData",
    "FitResult",
    "IndexedData",
    "KerasTask",
    "Padding",
    "PeerError",
    "Perplexity",
    "Phase",
    "Run",
    "StreamData",
    "TrainTask",
    "TrainingError",
    "UsageError",
    "__version__",
    "all_gather",
    "compare",
    "device",
    "evaluate",
    "example_seed",
    "first_row",
    "fit",
    "mix",
    "predict",
    "records",
    "remat",
    "sequences",
    "unweighted",
]

# The module of each public name, which is imported when the name is first used.
_HOMES = {
    "ArrayData": "data",
    "FitResult": "run.result",
    "IndexedData": "data",
    "KerasTask": "keras_task",
    "Padding": "data",
    "PeerError": "errors",
    "Perplexity": "step.metric_sums",
    "Phase": "options",
    "Run": "run.run",
    "StreamData": "data",
    "TrainTask": "task",
    "TrainingError": "errors",
    "UsageError": "errors",
    "all_gather": "step.replica",
    "compare": "commands.compare",
    "device": "backends.devices",
    "evaluate": "commands.evaluate",
    "example_seed": "step.replica",
    "first_row": "step.replica",
    "fit": "fit",
    "mix": "data",
    "predict": "commands.predict",
    "records": "data",
    "remat": "step.remat",
    "sequences": "data",
    "unweighted": "step.values",
}

# A user's own `callbacks.py` beside his task would be imported in place of ours: better said than an odd error later.
_callbacks = importlib.util.find_spec("callbacks")
if _callbacks is None or Path(_callbacks.origin or "").parent.parent != Path(__file__).parent.parent:
    raise ImportError(f"{_callbacks and _callbacks.origin} hides tfloop's own package 'callbacks': rename it")


def __getattr__(name: str) -> Any:
    """Loads a public name when it is used: `tfloop --help` needs no TensorFlow."""
    if name == "__version__":
        return importlib.metadata.version("tfloop")
    if name not in _HOMES:
        raise AttributeError(f"module 'loop' has no attribute {name!r}")
    if "IPython" in sys.modules and "tensorflow" not in sys.modules:
        _load_tensorflow()
    value = getattr(importlib.import_module(f"loop.{_HOMES[name]}"), name)
    globals()[name] = value  # from now on, Python finds it without this function
    return value


def _load_tensorflow() -> None:
    """In a notebook, loads TensorFlow without the messages of its start, which would stand below the cell."""
    # Not at the top of the file: `import loop` is to load as little as possible.
    from callbacks import notebook
    from loop.launch import stderr

    if not notebook.active():
        return
    with stderr.quiet_start(says=False):
        # Looking for GPUs has messages of its own, which would come at the first `fit`.
        importlib.import_module("tensorflow").config.list_physical_devices()


class _Package(ModuleType):
    """Keeps `loop.fit` the function: importing the module `loop.fit` would bind that over it."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
