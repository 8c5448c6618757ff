"""Tests mirror the tree: what `loop/step/` does is tested in `tests/step/`; what goes through all of it, here."""
