"""Kept models: MLflow's list of models has one for each checkpoint of a run, with the metrics of its step.

Metadata alone: where the checkpoint is, and how good the model was. No file is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from callbacks.mlflow.description import best_values
from callbacks.mlflow.points import Point, key, points, utf8
from callbacks.run_record import journal
from callbacks.run_record.record import Checkpoint, Record
from callbacks.run_record.redaction import mask
from callbacks.types import Foreign

CHECKPOINT = "tfloop.checkpoint"
"""The tag of such a model with the path of its checkpoint."""


def update(client: Foreign, run: Foreign, of: Record, params: Mapping[str, str]) -> None:
    """Gives each checkpoint that a run has kept its model, and removes the models of checkpoints that are gone."""
    present = {}  # by the checkpoint's name
    for model in _models(client, run):
        if CHECKPOINT in model.tags:  # the others are the user's
            name = model.tags[CHECKPOINT].rpartition("/")[2]
            present[name] = model
    kept_names = {saved.name for saved in of.checkpoints}
    for name in sorted(present.keys() - kept_names):
        client.delete_logged_model(present[name].model_id)

    # A checkpoint never changes, so one that has its model needs nothing more.
    new = [saved for saved in of.checkpoints if saved.name not in present]
    measured = _measured(of, {saved.step for saved in new})
    for saved in new:
        _create(client, run, of, saved, params, measured[saved.step])


def _models(client: Foreign, run: Foreign) -> list[Foreign]:
    """The models of a run."""
    condition = f"source_run_id = '{run.info.run_id}'"
    models: list[Foreign] = []
    token = None
    while True:
        page = client.search_logged_models([run.info.experiment_id], condition, page_token=token)
        models += page
        token = page.token  # of the next page; none after the last one
        if not token:
            return models


def _measured(of: Record, steps: Collection[int]) -> dict[int, dict[str, Point]]:
    """The metrics of these steps by name, as the run has them, with the same times."""
    measured: dict[int, dict[str, Point]] = {step: {} for step in steps}
    for entry, _ in journal.read(of.path / journal.NAME, events=("eval_end", "epoch_end")):
        if entry.get("step") not in measured:
            continue
        for point in points(entry):
            name, _, _, step = point
            # The first one counts, as in `Delivery`: a resumed run has made some steps again.
            measured[step].setdefault(name, point)
    return measured


def _create(
    client: Foreign,
    run: Foreign,
    of: Record,
    saved: Checkpoint,
    params: Mapping[str, str],
    measured: Mapping[str, Point],
) -> None:
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric

    bests = [metric for metric, (step, _) in best_values(of).items() if step == saved.step]
    tags = {
        CHECKPOINT: utf8(mask(f"{of.path}/checkpoints/{saved.name}")),
        "tfloop.step": str(saved.step),
        "tfloop.saved_for": saved.reason,
        "tfloop.best": " ".join(bests),
    }
    tags = {name: value for name, value in tags.items() if value}
    model = client.create_logged_model(
        run.info.experiment_id,
        name=saved.name,
        source_run_id=run.info.run_id,
        tags=tags,
        params=dict(params),
        model_type="tfloop checkpoint",
    )
    # The same points as those of the run, which an SQL store keeps once.
    metrics = []
    for name, value, time, step in measured.values():
        metrics.append(Metric(key(name), value, time, step, model_id=model.model_id))
    if metrics:
        client.log_batch(run.info.run_id, metrics=metrics)
    client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    client.log_outputs(run.info.run_id, [LoggedModelOutput(model.model_id, saved.step)])
