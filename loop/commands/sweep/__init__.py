"""`tfloop sweep`: trains a task with other values of its fields, several at once, and finds the best.

Each trial is `tfloop train` in a process of its own, with a run directory of its own below the sweep's. Optuna's
storage in the sweep's directory has what was decided, the run directories have what was trained, and MLflow shows what
the journals tell. So a kill at any moment loses nothing, and the same command goes on. Imports no TensorFlow.
"""

from loop.commands.sweep.directory import about_sweep
from loop.commands.sweep.plan import Plan, Range, arguments, assigned, direction, is_directory, reopened, space
from loop.commands.sweep.process import in_use
from loop.commands.sweep.report import Report, Row
from loop.commands.sweep.trials import sweep

__all__ = [
    "Plan", "Range", "Report", "Row", "about_sweep", "arguments", "assigned", "direction", "in_use", "is_directory",
    "reopened", "space", "sweep",
]  # fmt: skip
