"""TrainerStatus: progress and metrics in the status of a TrainJob, where Kubeflow Trainer takes them."""

from __future__ import annotations

import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from callbacks.base import Every, Metrics, Run, as_floats
from callbacks.notify import Posting
from callbacks.types import JsonObject

if TYPE_CHECKING:
    import ssl


URL = "KUBEFLOW_TRAINER_SERVER_URL"
"""Environment variable that Trainer sets, where its feature `TrainJobStatus` is on: where to post."""
CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
"""Environment variable beside it: the file with the certificate authority of that server."""
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # noqa: S105 - a name
"""Environment variable beside it: the file with this pod's token, which is renewed now and then."""
# Trainer refuses messages with more metrics or longer names.
_MOST_METRICS = 256
_LONGEST = 64


class TrainerStatus(Posting):
    """Posts percentage, remaining seconds and metrics, which `kubectl get trainjob -o yaml` then shows.

    A server that is slow, down or refuses a message is reported once on stderr, and neither delays the run nor fails
    it. The standard set has it in a TrainJob whose server takes a status, and nowhere else.

    Args:
        url: where to post.
        ca_file: the file with the server's certificate authority.
        token_file: the file with the token.
        every: how often; see `Callback`. A slow server gets fewer messages.
        timeout: seconds to wait for an answer.
    """

    def __init__(
        self, url: str, ca_file: str | Path, token_file: str | Path, every: Every = "10s", timeout: float = 10.0
    ) -> None:
        super().__init__(url, timeout, "Kubeflow Trainer")
        self.every = every
        self._ca_file = Path(ca_file)
        self._token_file = Path(token_file)
        self._metrics: dict[str, float] = {}
        self._sending = threading.Lock()  # one message at a time: an older one must not arrive last

    @classmethod
    def injected(cls) -> TrainerStatus | None:
        """The one that this process's environment asks for; None: it isn't in such a TrainJob."""
        if not {URL, CA_CERT, TOKEN} <= os.environ.keys():
            return None
        return cls(os.environ[URL], os.environ[CA_CERT], os.environ[TOKEN])

    def on_steps_end(self, run: Run, metrics: Metrics) -> None:
        # Kept even if nothing is sent now: each message has the last value of every metric.
        self._metrics |= as_floats(metrics)
        if not self._sending.locked():  # else the server is slow
            self._report(run)

    on_epoch_end = on_steps_end

    def on_fit_end(self, run: Run, status: str) -> None:
        self._report(run)

    def _report(self, run: Run) -> None:
        step, total = run.progress.step, run.total_steps
        values = {"step": str(step), "epoch": str(run.progress.epoch)}
        for name, value in self._metrics.items():
            values[name[:_LONGEST]] = f"{value:.6g}"
        listed = []
        for name, text in list(values.items())[:_MOST_METRICS]:
            listed.append({"name": name, "value": text})
        status: JsonObject = {"metrics": listed, "lastUpdatedTime": f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"}
        if total:
            status["progressPercentage"] = 100 * step // total
            if run.examples_per_second > 0:
                left = (total - step) * run.options["batch_size"] / run.examples_per_second
                status["estimatedRemainingSeconds"] = round(left)
        self._send({"trainerStatus": status})

    def _post(self, body: bytes) -> None:
        with self._sending:
            super()._post(body)

    def _all_headers(self) -> dict[str, str]:
        return {**self._headers, "Authorization": f"Bearer {self._token_file.read_text().strip()}"}

    def _tls(self) -> ssl.SSLContext:
        import ssl

        return ssl.create_default_context(cafile=self._ca_file)
