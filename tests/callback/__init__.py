"""Tests of `callbacks/`. A folder of that very name would hide the package from tasks in `tests/`."""
