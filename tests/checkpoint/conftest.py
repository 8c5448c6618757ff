"""A real S3 server, and a proxy before it."""

import pytest

from loop.checkpoint.store import mirror
from tests import s3


@pytest.fixture(scope="module")
def server():
    server = s3.Server()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def store(server, monkeypatch, tmp_path):
    """A proxy, as the endpoint of `s3://`, and a machine of its own."""
    proxy = s3.Proxy(server)
    for name, value in {**s3.ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.endpoint, "AWS_ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "machine"))
    monkeypatch.setenv(mirror.WAIT, "2")
    yield proxy
    proxy.close()


@pytest.fixture
def url(tmp_path):
    return f"s3://{s3.BUCKET}/{tmp_path.name}/run"
