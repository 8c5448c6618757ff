"""Commands: one a file, each called by `cli.py` with what was typed."""
