"""The run's model as an MLflow model, with signature and input example: every MLflow can load it."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from pathlib import Path

from callbacks.base import Run

NAME = "model"
"""The directory in the run directory, and among the run's artifacts in MLflow."""


def write(run: Run) -> Path:
    """Writes the model into the run directory, whole. It is a SavedModel, which loads without the task's code.

    It has a loader of its own: MLflow's loader for SavedModels takes only one array, and the one for Keras files needs
    the user's classes, and pickle.
    """
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_UV_AUTO_DETECT", "false")  # the model's environment isn't that of this project
    import numpy as np
    import tensorflow as tf

    path = run.directory / NAME
    partial = run.directory / f".{NAME}.tmp"
    shutil.rmtree(partial, ignore_errors=True)
    inputs, outputs = run.export(partial / "saved_model")
    with warnings.catch_warnings(action="ignore"):  # MLflow warns of type hints in its own classes
        from mlflow import pyfunc
        from mlflow.models import infer_signature

        logging.getLogger("mlflow.pyfunc").setLevel(logging.WARNING)
        logging.getLogger("mlflow.utils.environment").setLevel(logging.ERROR)  # warns where there is no pip: with uv
        pyfunc.save_model(
            partial / NAME,
            loader_module="tfloop_loader",
            data_path=str(partial / "saved_model"),
            code_paths=[str(Path(__file__).with_name("tfloop_loader.py"))],
            pip_requirements=[f"tensorflow=={tf.__version__}", f"numpy=={np.__version__}"],
            signature=infer_signature(inputs, outputs),
            input_example=inputs,
        )
    # Whole or not there: what is written under another name is moved here when it is complete.
    shutil.rmtree(path, ignore_errors=True)
    (partial / NAME).replace(path)
    shutil.rmtree(partial)
    return path
