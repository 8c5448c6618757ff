"""Tasks that a command line names: found, read without running them, loaded, and their fields set."""
