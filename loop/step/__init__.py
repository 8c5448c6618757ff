"""The compiled mathematics: one training step, its loops, the evaluation, and what they are built from."""
