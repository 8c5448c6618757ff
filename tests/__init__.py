"""Tests mirror the tree: `loop/step/train_step.py` is tested in `test_step.py`."""
