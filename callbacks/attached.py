"""Attached: marks a training that another process has started and watches, so that it ends with that process."""

from callbacks.base import Callback


class Attached(Callback):
    """Does nothing itself: a training with a callback of another command ends when that command is gone."""
