"""Tests of `loop/backends/`."""
