"""Checkpoints on disk: their files, the thread that writes them, and the lock of a run directory."""
