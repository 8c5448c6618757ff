"""Tests of `loop/data/`."""
