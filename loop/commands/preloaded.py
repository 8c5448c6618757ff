"""What the server of warm starts imports (`loop/launch/warm_start.py`): all that a training needs."""

from loop.launch import stderr

with stderr.quiet_start(says=False):
    import sklearn.datasets  # noqa: F401

    import loop.backends.strategy
    import loop.commands.cli.training
    import loop.commands.train
    import loop.fit  # noqa: F401
