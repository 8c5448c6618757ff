"""TrainerStatus: what a TrainJob's status endpoint gets; a real server with TLS on loopback."""

import ipaddress
import json
import ssl
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

import callbacks
from callbacks import notify
from callbacks.trainer_status import CA_CERT, TOKEN, URL, TrainerStatus
from loop import fit
from tests.tasks import Plain


def write_certificate(directory):
    """A certificate for 127.0.0.1 that is its own authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "trainer")])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(datetime.now(UTC) - timedelta(days=1))
    made = made.not_valid_after(datetime.now(UTC) + timedelta(days=1))
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = made.add_extension(x509.SubjectAlternativeName([address]), critical=False)
    made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
    pem = serialization.Encoding.PEM
    (directory / "ca.crt").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (directory / "key").write_bytes(private)


@pytest.fixture
def trainer(tmp_path, monkeypatch):
    """The endpoint, with what Trainer sets in a pod."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    write_certificate(tmp_path)
    about = SimpleNamespace(got=[], status=200)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            about.got.append((self.path, self.headers["Authorization"], body))
            (tmp_path / "token").write_text(f"token-{len(about.got)}\n")  # as it is renewed in a pod
            self.send_response(about.status)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "ca.crt", tmp_path / "key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        serving.socket = context.wrap_socket(serving.socket, server_side=True)
        serving.daemon_threads = True
        (tmp_path / "token").write_text("token-0\n")
        monkeypatch.setenv(URL, f"https://127.0.0.1:{serving.server_port}/namespaces/a/trainjobs/digits/status")
        monkeypatch.setenv(CA_CERT, str(tmp_path / "ca.crt"))
        monkeypatch.setenv(TOKEN, str(tmp_path / "token"))
        thread = threading.Thread(target=serving.serve_forever, args=(0.02,))
        thread.start()
        yield about
        serving.shutdown()
        thread.join()


def all_told():
    for thread in list(notify._under_way):
        thread.join(60)
        assert not thread.is_alive()


def test_a_trainjob_gets_progress_and_metrics(trainer, quiet, capsys):
    result = fit(Plain(), epochs=2, callbacks=quiet())
    all_told()
    assert "warning" not in capsys.readouterr().err
    paths, tokens, bodies = zip(*trainer.got)
    assert set(paths) == {"/namespaces/a/trainjobs/digits/status"}
    assert list(tokens) == [f"Bearer token-{index}" for index in range(len(tokens))]  # read anew for each message
    last = bodies[-1]["trainerStatus"]
    values = {metric["name"]: metric["value"] for metric in last["metrics"]}
    assert last["progressPercentage"] == 100
    assert last["estimatedRemainingSeconds"] == 0
    assert values["step"] == str(result.steps)
    assert float(values["loss"]) == pytest.approx(result.metrics["loss"], rel=1e-5)
    import kubeflow_trainer_api.models as models

    for body in bodies:
        told = models.TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body).to_dict()
        assert told["trainerStatus"].keys() == body["trainerStatus"].keys()
        assert told["trainerStatus"]["metrics"] == body["trainerStatus"]["metrics"]


def test_a_server_that_refuses_is_told_once_and_the_run_goes_on(trainer, quiet, capsys):
    trainer.status = 403
    assert fit(Plain(), epochs=3, callbacks=quiet()).status == "finished"
    all_told()
    err = capsys.readouterr().err
    assert err.count("warning: Kubeflow Trainer at https://127.0.0.1:") == 1
    assert "was not told (it answered 403)" in err


def test_a_server_with_another_certificate_gets_no_token(trainer, quiet, tmp_path, capsys):
    write_certificate(tmp_path)  # of another authority: the server goes on with its own
    assert fit(Plain(), epochs=1, callbacks=quiet()).status == "finished"
    all_told()
    assert trainer.got == []
    assert capsys.readouterr().err.count("was not told") == 1


def test_only_what_trainer_has_injected_is_used(monkeypatch):
    assert TrainerStatus.injected() is None
    assert not [each for each in callbacks.standard() if isinstance(each, TrainerStatus)]
    monkeypatch.setenv(URL, "https://trainer.kubeflow.svc:10443/status")
    assert TrainerStatus.injected() is None  # with no token
