"""Checkpoints on disk: their files, the thread that writes them, and the lock of a run directory.

- `checkpoint_files` writes, finds, verifies and reads checkpoints; all that open one start there.
- `array_files` writes and reads the arrays in them.
- `manifest.verify` also checks what a checkpoint says about its run; a resume calls it.
- `writer.Writer` writes and removes checkpoints in the background; `run` hands it `Snapshot`s.
- `kept.Kept` is a checkpoint in memory, for elastic jobs.
- `lock.locked` holds the lock of a run directory.
- `store.copies.mirrored` holds the lease of a run in object storage, and has its files delivered.
"""
