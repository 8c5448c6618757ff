"""The directory that TensorFlow Serving reads, `NAME/VERSION/`, and a Dockerfile that serves it."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

VERSION = "1"
"""The version of the model: Serving takes the largest number that it finds, and newer ones as they appear."""

DOCKERFILE = """\
# Serves the model `{name}` with TensorFlow Serving: gRPC on port 8500, REST on port 8501.
#   docker build -t {name} .
#   docker run --rm -p 127.0.0.1:8501:8501 {name}
# The signature `serving_default` takes the inputs by name; its status: http://127.0.0.1:8501/v1/models/{name}
ARG SERVING=latest
FROM tensorflow/serving:${{SERVING}}
ENV MODEL_NAME={name}
COPY {name} /models/{name}
"""


def write(directory: Path, task: str) -> Path:
    """Makes the directory with its Dockerfile.

    Args:
        directory: is made; holds all that `docker build` reads.
        task: the class of the task, after which the model is named: `DigitTask` is served as `digit_task`.

    Returns:
        Where the SavedModel belongs.
    """
    name = model_name(task)
    (directory / name).mkdir(parents=True)
    (directory / "Dockerfile").write_text(DOCKERFILE.format(name=name))
    return directory / name / VERSION


def model_name(task: str) -> str:
    """A name that Docker, an address and a shell take as it is: small letters, digits and underscores."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", task).lower()
    # An image's name takes no two underscores at an end, and none at the beginning.
    return re.sub(r"[^a-z0-9]+", "_", words).strip("_") or "model"


def how_to_start(out: Path) -> str:
    """What to type next."""
    [name] = [path.name for path in out.iterdir() if path.is_dir()]
    return f"serve it: docker build -t {name} {shlex.quote(str(out))} && docker run --rm -p 127.0.0.1:8501:8501 {name}"
