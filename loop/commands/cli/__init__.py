"""What can be typed: one function a command, with its signature and help, which `cli.py` registers."""
