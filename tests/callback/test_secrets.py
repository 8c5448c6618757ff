"""Secrets: no output may write, show or send them."""

import ast
import io
import json
import shlex
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from callbacks import LambdaCallback, Notify, notify
from callbacks.mlflow import delivery
from callbacks.run_record import comparison, journal, record, redaction, report
from callbacks.run_record import page as pages
from callbacks.run_record.story import Story
from loop import fit
from loop.commands import command_line, runs, sweep, terminal, trial, tune
from loop.commands.evaluate import evaluate
from loop.run.run_directory import differences, task_of
from tests.conftest import ROOT
from tests.connected import Connected

SECRETS = (
    "hf_token github_token private_key passphrase pwd db_pass dbPassword openaiApiKey signing_key ssh_key cookie "
    "bearer auth pat password passwd secret api_key apikey API_KEY AWS_SECRET_ACCESS_KEY access_token token APIKey "
    "client_secret credentials db_credentials dbpass user_passwd accessToken refreshTokens api_tokens github_pat "
    "basic_auth session_cookie webhook_url OPENAI_API_KEY wandb_key encryptionKey redis_pwd smtp_pass "
    "admin_password2 api_keys connection_string jwt_value gitlabToken sshKey MYSQL_PWD token_secret passWord"
)
PUBLIC = (
    "path pattern author authority token_count max_tokens num_tokens tokens batch_tokens tokenizer tokenization "
    "token_type token_dim pad_token mask_token eos_token image_token key keys key_dim query_key_dim attention_keys "
    "sort_key primary_key public_key keyframe monkey compat compass bypass passenger passes patience patch "
    "num_patches forward_pass low_pass pass_through password_file private_key_path secretary auth_type basic "
    "session hidden learning_rate accuracy"
)


@pytest.fixture(autouse=True)
def forgotten(monkeypatch):
    """Forgets the secrets of a test when it ends."""
    monkeypatch.setattr(redaction, "hidden", set())
    monkeypatch.setattr(redaction, "as_typed", [])


@pytest.mark.parametrize("name", SECRETS.split())
def test_names_of_secrets_are_known(name):
    assert redaction.redact({name: "x", "n": 3}) == {name: "***", "n": 3}
    assert redaction.mask(f"T({name}='x', n=3)") == f"T({name}=***, n=3)"


def test_names_that_only_look_so_are_left_alone():
    values = dict.fromkeys(PUBLIC.split(), "value") | {"token": 5, "pad_token_id": 0, "use_auth": True, "cookie": None}
    assert redaction.redact(values) == values
    assert redaction.redact({"pwd": 12, "db": {"password": 15}}) == {"pwd": "***", "db": {"password": "***"}}
    measured = {"metrics": {"pass": 0.5, "secret": "nan"}}
    assert redaction.redact(measured) == measured


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("http://user:p@ss@host/x", "http://***@host/x"),
        ("mysql+pymysql://u:pa/ss@h/db and more", "mysql+pymysql://***@h/db and more"),
        ("redis://:pw@h:6379/0", "redis://***@h:6379/0"),
        ("https://token@github.com/x", "https://***@github.com/x"),
        ("http://me@ex.com:pw@host/", "http://***@host/"),
        ("http://a/b,http://u:p@h/z", "http://a/b,http://***@h/z"),
        ("https://h/?password=abc&x=1&token=q#y", "https://h/?password=***&x=1&token=***"),
        ("https://h?x=1&api_key=zz", "https://h?x=1&api_key=***"),
        ("--set=db_password=abc --grid pwd=1", "--set=db_password=*** --grid pwd=***"),
        ('{"token": "a\\"b", "n": "c"}', '{"token": "***", "n": "c"}'),
        ("Authorization: Bearer abc.def", "Authorization: Bearer ***"),
        ("sqlite:////tmp/a@b/c.db", None),
        ("https://h:5000/x", None),
        ("https://h/x@v1", None),
        ("password=None token=True max_tokens=5", None),
        ("password: wrong for user", None),
    ],
)  # fmt: skip
def test_credentials_in_texts(text, masked):
    assert redaction.mask(text) == (masked or text)


def test_what_is_too_short_is_hidden_behind_its_name_alone():
    redaction.remember({"password": "relu", "secret": "1234567", "passphrase": "123456789012", "pwd": "default"})
    text = "relu 1234567 123456789012 0.123456789012 default"
    assert redaction.mask(text) == "relu 1234567 *** 0.123456789012 default"
    assert redaction.mask("password=relu") == "password=***"


def test_hostile_texts_take_no_long_time():
    """Masking takes linear time: quadratic time would be hours here."""
    for part in ("a://", "a=", '"a":', "?a=", "://a@", '"a":"', "'", "authorization:", "?a%", "[", "a"):
        redaction.mask(part * (400_000 // len(part)) + "=@:")


# All outputs


@dataclass
class Fields:
    """Replaces a task, of which only the fields are used."""

    db_password: str = ""
    x: float = 0.0


def ways_out(secret):
    """The texts of all outputs that could show a secret, by the name of the output."""
    told = f"no answer to {secret} from mysql://me:{secret}@host/?password={quote(secret)}"
    error = KeyError(told, {"cause": [secret]})
    run = SimpleNamespace(
        info={"task": "T", "hyperparameters": {"db_password": secret}},
        progress=SimpleNamespace(step=1, epoch=0), history=[{"loss": 1.0, f"loss {secret}": 1.0}],
        directory=Path("run") / secret.replace("/", "").replace("\0", "")[:50], stop_reason=told, phase=None,
    )  # fmt: skip
    stream, buffer = io.StringIO(), io.BytesIO()
    redaction.tell(f"{error}\n{error!r}\n{told}", stream)
    masked = redaction.Masked(buffer, "utf-8", "backslashreplace")
    print(told, error, repr(error), json.dumps(told), shlex.join([secret]), file=masked, flush=True)
    entry = journal._line(run, "exception", {"error": repr(error), "metrics": {f"loss {secret}": 1.0}})
    story = Story(True, {})
    story.fault(told)
    posted = []
    hook = Notify("http://127.0.0.1:9/x", on="failure")
    hook._post = lambda body: posted.append(body) or notify._under_way.pop(threading.current_thread())
    hook.on_exception(run, error)
    for thread in list(notify._under_way):
        thread.join(60)
    plan = sweep.Plan(
        target="f.py:T", grid={"db_password": f"{json.dumps(secret)},b"}, random={}, metric="loss",
        direction="minimize", sampler="tpe", pruner="none", seed=0, arguments=[f"--set=api_key={secret}"], place="/",
    )  # fmt: skip
    row = tune.Row({}, problem=trial.reason(1, f"tfloop: error: {redaction.mask(told)}"))
    return {
        "stream": stream.getvalue(), "stdout": buffer.getvalue().decode(), "journal": entry.decode(),
        "structure": json.dumps(
            redaction.redact({"a": [told, {"db_password": secret}], secret: 1}), ensure_ascii=False
        ),
        "fault": story.faults[0].text, "webhook": posted[0].decode(), "MLflow's trouble": delivery.reason(error),
        "report": pages._printed(told), "sweep": json.dumps(sweep.about_sweep(plan, Fields, 2)), "tune": row.problem,
        "tail": runs.event_line({"event": "exception", "step": 1, "time": 1.0, "error": told}),
    }  # fmt: skip


@given(secret=st.text(st.characters(codec="utf-8"), min_size=redaction.LEAST, max_size=60))
@example("hunter2hunter2")
@example("p@ss/w:rd?&=#%")
@example('it\'s "quoted" \\ and\ttabbed')
@example("-----BEGIN KEY-----\nMIIEvgIBADAN\nBgkqhkiG9w0B\n-----END KEY-----")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_way_out_tells_a_secret(secret):
    redaction.hidden.clear()
    redaction.remember({"db_password": secret})
    pattern = redaction._pattern()
    if pattern is None or not pattern.fullmatch(secret):
        return  # a number, a common word or white space: see the test of short ones
    told = ways_out(secret)
    redaction.hidden.clear()
    redaction.remember({"db_password": "another one"})
    assume(not any(secret in text for text in ways_out("another one").values()))  # it is a word of our own
    for where, text in told.items():
        assert "***" in text, where
        for form in (secret, json.dumps(secret)[1:-1], repr(secret)[1:-1]):
            assert form not in text, where


def test_one_function_prints_all_that_is_told():
    """All output on stderr goes through `redaction.tell`, except a worker's messages, and a fixed text."""
    found = []
    files = {*(ROOT / "loop").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")} - {
        ROOT / "callbacks" / "run_record" / "redaction.py"
    }
    for path in sorted(files):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and "sys.stderr" in ast.unparse(node).split("print(")[-1]:
                name = ast.unparse(node.func)
                if name in ("print", "sys.stderr.write", "traceback.print_exc"):
                    found.append((path.name, ast.unparse(node.args[0]).split(" ")[0]))
    assert found == [("progress.py", "MARK"), ("stop_requests.py", "f'{start}{text}'")]


# Runs


GONE = ("tr0ub4dor", "abcdefghijklmnop", "0123456789abcdef", "w0rd9", "qwertyuiop")


def all_bytes(directory):
    return b"".join(path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file())


def test_no_file_of_a_run_tells_a_secret_and_it_goes_on_with_another(quiet, tmp_path, capsys):
    def fail(run, metrics):
        task = run.task
        raise KeyError(f"no answer from {task.url} to {task.db_password}, {task}")

    task = Connected()
    given = quiet() + [LambdaCallback(epoch_end=fail)]
    with pytest.raises(KeyError, match="tr0ub4dor"):  # Python code sees the value
        fit(task, callbacks=given, run_dir=tmp_path / "run", epochs=1)
    other = Connected(db_password="c0rrecthorse", hf_token="hf_other_other_other")
    result = fit(other, epochs=2, callbacks=quiet(), run_dir=tmp_path / "run")
    assert result.epochs == 2
    assert (tmp_path / "run" / "report.html").exists()
    of = record.read(tmp_path / "run")
    texts = [
        *map(terminal.as_text, runs.show(of)),
        *runs.tail(tmp_path / "run", 99, follow=False),
        runs.shown_as_json(of),
        *capsys.readouterr(),
    ]
    written = all_bytes(tmp_path / "run").decode(errors="replace") + "\n".join(texts)
    for secret in (*GONE, "c0rrecthorse", "other_other"):
        assert secret not in written
    assert of.hyperparameters["db_password"] == of.hyperparameters["hf_token"] == "***"
    assert any("no answer from mysql+pymysql://***@host" in fault.text for fault in of.faults)


def test_what_is_hidden_can_not_differ():
    """A value may be hidden in only one attempt: because it contains a secret that only this attempt knows."""
    pairs = {"a": ("***", "relu"), "b": (["x", "u:***@h"], ["x", "y"]), "c": ("relu", "tanh"), "d": (1, 1)}
    assert differences(pairs) == ["c was 'relu', now 'tanh'"]


def test_a_run_of_an_older_version_shows_no_secret_and_goes_on(quiet, tmp_path):
    """Its manifest and journal have `hf_token` unhidden."""
    result = fit(Connected(), epochs=1, callbacks=quiet(), run_dir=tmp_path / "run")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    about["hyperparameters"]["hf_token"] = "hf_abcdefghijklmnop"
    (tmp_path / "run" / "run.json").write_text(json.dumps(about))
    with (tmp_path / "run" / "journal.jsonl").open("a") as file:
        line = {
            "time": 1e9,
            "event": "exception",
            "step": 1,
            "epoch": 0,
            "error": "no login with https://u:p@h/?pwd=x1y2z3",
        }
        file.write(json.dumps(line) + "\n")
    redaction.hidden.clear()
    of = record.read(tmp_path / "run")
    shown = "\n".join(
        [
            *map(terminal.as_text, runs.show(of)),
            *runs.tail(tmp_path / "run", 99, follow=False),
            report.html(of),
            comparison.html([of, of]),
        ]
    )
    assert "abcdefghijklmnop" not in shown
    assert "u:p" not in shown
    assert "x1y2z3" not in shown
    assert fit(Connected(), epochs=2, callbacks=quiet(), run_dir=result.run_dir).epochs == 2


def test_a_command_that_reads_a_run_says_which_fields_are_not_recorded(quiet, tmp_path, capsys, monkeypatch):
    result = fit(Connected(), epochs=1, callbacks=quiet(), run_dir=tmp_path / "run")
    monkeypatch.setattr(sys, "path", list(sys.path))
    task, *_ = task_of(result.run_dir, "tests.connected:Connected")
    assert task.db_password == "tr0ub4dor&3"
    said = (
        "note: db_password, hf_token, openaiApiKey, url: a run does not record secrets, so the task's default is taken"
    )
    assert said in capsys.readouterr().err
    assert evaluate(task, result.run_dir)


def test_a_sweep_over_a_secret_trains_with_it_and_tells_its_number(monkeypatch):
    monkeypatch.setattr("loop.commands.sweep.trials.COMMAND", [sys.executable, "-P", "-m", "tests.campaigns.trial"])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    plan = sweep.Plan(
        target="f.py:Fields", grid={"db_password": "first-secret,second-secret"}, random={}, metric="eval_loss",
        direction="minimize", sampler="tpe", pruner="none", seed=0, place="/",
        arguments=["--track=off", "--epochs=1", "--set=x=0.3"],
    )  # fmt: skip
    shown = io.StringIO()
    found = sweep.sweep(plan, Fields, 2, 2, Path("swept"), shown)
    given = [json.loads(path.read_text()) for path in sorted(Path("swept").glob("*/lives"))]
    assert [dict(fields)["db_password"] for _, fields in given] == ["first-secret", "second-secret"]
    for path in Path("swept").glob("*/lives"):  # written by the trainer that replaces ours
        path.unlink()
    written = all_bytes(Path("swept")).decode(errors="replace")
    told = shown.getvalue() + json.dumps(found.as_json()) + "\n".join(found.lines())
    assert "-secret" not in written + told
    assert [row.params["db_password"] for row in found.rows] == ["***1", "***2"]
    assert "***2" in shown.getvalue()
    assert len(sweep.sweep(plan, Fields, 2, 2, Path("swept"), io.StringIO()).rows) == 2  # it goes on


def test_an_error_of_a_command_tells_no_secret(capsys, monkeypatch):
    monkeypatch.delenv("TFLOOP_DEBUG", raising=False)
    redaction.remember({"pwd": "hunter2hunter2"})
    assert command_line.report_error(RuntimeError("hunter2hunter2\x1b[31m")) == 1
    assert "RuntimeError: ***" in (line := capsys.readouterr().err)
    assert "hunter2" not in line
    assert line.strip().isprintable()
    monkeypatch.setenv("TFLOOP_DEBUG", "1")
    assert command_line.report_error(RuntimeError("hunter2hunter2\x1b[31m")) == 1
    assert capsys.readouterr().err.endswith("RuntimeError: ***\\x1b[31m\n")


# Notify


@contextmanager
def listening(answer):
    """A real server on loopback, and the requests that it got; `answer` returns status and headers."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            got.append((self.command, self.path, self.headers.get("Authorization")))
            status, headers = answer()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        serving.daemon_threads = True
        thread = threading.Thread(target=serving.serve_forever, args=(0.02,))
        thread.start()
        yield f"127.0.0.1:{serving.server_port}", got
        serving.shutdown()
        thread.join()


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_notify_never_follows_a_redirect(status, monkeypatch, capsys):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    run = SimpleNamespace(
        info={"task": "T"}, progress=SimpleNamespace(step=3, epoch=1), history=[], directory="d", stop_reason=""
    )
    with (
        listening(lambda: (200, {})) as (other, stolen),
        listening(lambda: (status, {"Location": f"http://{other}/collect"})) as (place, got),
    ):
        Notify(f"http://me:tOpSeCrEt@{place}/hook", on="end").on_fit_end(run, "finished")
        for thread in list(notify._under_way):
            thread.join(60)
    assert [method for method, _, _ in got] == ["POST"]
    assert got[0][2]
    assert stolen == []
    expected = f"warning: the webhook at http://{place} was not told (it answered {status}, a redirect, which is never "
    assert capsys.readouterr().err == expected + "followed)\n"
