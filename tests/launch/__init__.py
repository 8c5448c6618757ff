"""Tests of `loop/launch/`."""
