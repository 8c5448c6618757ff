"""Tests of `loop/checkpoint/`."""
