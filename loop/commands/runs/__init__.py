"""`tfloop runs` and `tail`: finds, lists, shows, compares, removes and follows runs by their directories.

Imports no TensorFlow.
"""

from loop.commands.runs.comparison import compare
from loop.commands.runs.details import show, shown_as_json
from loop.commands.runs.differences import diff
from loop.commands.runs.directories import ROOT, checkpointed, locate, named, reader, refuse_sweep
from loop.commands.runs.events import event_line, tail
from loop.commands.runs.fields import FIELDS
from loop.commands.runs.listing import as_json, listed, table
from loop.commands.runs.pages import page_of, several
from loop.commands.runs.removal import check_removable, remove, size, to_remove

__all__ = [
    "FIELDS", "ROOT", "as_json", "check_removable", "checkpointed", "compare", "diff", "event_line", "listed",
    "locate", "named", "page_of", "reader", "refuse_sweep", "remove", "several", "show", "shown_as_json", "size",
    "table", "tail", "to_remove",
]  # fmt: skip
