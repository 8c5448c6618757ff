"""Tests of `loop/step/`."""
