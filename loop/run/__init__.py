"""One training run: its state, the workers' agreement, its checkpoints, its run directory, and the callbacks' bus."""
