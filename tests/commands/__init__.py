"""Tests of `loop/commands/`."""
