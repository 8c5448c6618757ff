"""Tests of `callbacks/`."""
