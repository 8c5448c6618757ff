"""Tests mirror the tree: `loop/step.py` is tested in `test_step.py`."""
