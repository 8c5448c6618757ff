"""Tests of `loop/target/`."""
