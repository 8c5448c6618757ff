"""The task that a command line names: its TARGET, and the values of its fields.

- `task_loader` checks a TARGET, imports it, and makes the task; commands, `run_directory` and host agents use it.
- `task_file` reads what a Python file says about its tasks without running it; so do shells that complete a name.
- `fields` turns texts such as `--set hidden=128` into values of the fields' types; sweeps use it, too.
"""
