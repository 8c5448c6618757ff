"""Tests of `loop/run/`."""
