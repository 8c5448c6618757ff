"""Tests of `loop/monitor/`."""
