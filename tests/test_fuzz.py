"""2,000 random command lines and config files: an exit code that is one of ours, and never a traceback.

The grammar is that of the commands themselves: a new command, or option, is tried without a line here. Nothing trains:
no target is a task, and no process can be started.
"""

import functools
import json
import os
import re
import subprocess
import sys
from unittest import mock

import pytest
import typer.main
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cli
from loop.commands.cli.training import train_options
from loop.errors import BAD_INPUT, FAILED, PREEMPTED, UsageError
from loop.target.task_loader import SHIPPED

LONG = settings(
    max_examples=1000, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)

TARGETS = ["digist", "nowhere.py:Task", "no.such.module:Task", "wrong.py:Other", "wrong.py:Nobody", ":", "wrong.py:"]
PATHS = [
    "garbled", "garbled/checkpoints/step-00000003", "half", "empty", "file", "nowhere", ".", "/", "/dev/null",
    "/proc/self/mem", "../" * 50, "file/below", "bad.toml", "bad.yaml", "a" * 300, "~",
]  # fmt: skip
NUMBERS = ["0", "1", "2", "-1", "3.5", "1e400", "-inf", "nan", "1_0", "+7", "0x10", "2147483648", "9" * 5000]
JUNK = [
    "",
    " ",
    "-",
    "--",
    "=",
    "a=b",
    "hidden=3",
    "2:1",
    "h1:2,h2",
    "\0",
    "\n",
    "é💥",
    "\udcff",
    "%s{}$(x)`",
    "x" * 9999,
]


def commands(group, path=()):
    """Each command, by the words that name it, and its parameters; those of groups within groups, too."""
    for name, command in group.commands.items():
        yield (*path, name), [each for each in command.params if not getattr(each, "hidden", False)]
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


GRAMMAR = list(commands(typer.main.get_group(cli.app)))


def values(parameter):
    """What may be typed for a parameter: what its help mentions, and what it doesn't."""
    mentioned = [word for word in re.findall(r"[\w:.]+", parameter.help or "") if word not in SHIPPED]
    pools = [TARGETS if parameter.param_type_name == "argument" else NUMBERS, mentioned or JUNK, PATHS, JUNK, NUMBERS]
    return st.one_of(*map(st.sampled_from, pools), st.text(max_size=8))


@st.composite
def option(draw, parameters):
    """An option of a command as it is typed, or something like it."""
    options = [each for each in parameters if each.param_type_name == "option"]
    if not options or draw(st.integers(0, 9)) == 0:
        return [draw(st.sampled_from([*JUNK, "--hlep", "--help", "--version", "--batch-sise=3"]))]
    chosen = draw(st.sampled_from(options))
    name = draw(st.sampled_from([*chosen.opts, *chosen.secondary_opts]))
    if chosen.is_flag:
        return [name]
    value = draw(values(chosen))
    return draw(st.sampled_from([[name, value], [f"{name}={value}"]]))


@st.composite
def command_lines(draw):
    """A command line: a command with arguments and options in any order, or something like it."""
    words, parameters = draw(st.sampled_from([((), []), *GRAMMAR]))
    parts = draw(st.lists(option(parameters), max_size=4))
    arguments = [each for each in parameters if each.param_type_name == "argument"]
    for each in arguments if draw(st.integers(0, 9)) else arguments[1:]:
        parts.insert(draw(st.integers(0, len(parts))), [draw(values(each))])
    return [*words, *(word for part in parts for word in part)]


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """Runs a command line in this process, beside files that are bad in all ways."""
    (tmp_path / "wrong.py").write_text("class Other:\n    pass\n")
    (tmp_path / "bad.toml").write_text("epochs = 0x" + "f" * 5000)
    (tmp_path / "bad.yaml").write_text("[" * 5000)
    (tmp_path / "file").write_bytes(bytes(range(256)))
    (tmp_path / "empty").mkdir()
    garbled = tmp_path / "garbled" / "checkpoints" / "step-00000003"
    garbled.mkdir(parents=True)
    (garbled / "manifest.json").write_text('{"files": [1], "step": "x"}')
    (tmp_path / "garbled" / "run.json").write_bytes(b'\xff{"task": 3')
    (tmp_path / "garbled" / "journal.jsonl").write_bytes(b'\0\0\xff\n{"event": []}\n[]\n')
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "run.json").write_text('{"status": 7, "progress": [], "options": null}')
    (tmp_path / "half" / "journal.jsonl").write_text('{"event": "fit_start", "about": 1}\n{"event": "steps_e')
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def refuse(*arguments, **more):
        raise UsageError("no process is started here")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(os, "execv", refuse)
    # Typer makes all commands anew for each line: by far the most of the time.
    monkeypatch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))

    def run(*arguments):
        started = mock.patch.multiple(sys, argv=["tfloop", *arguments], path=list(sys.path))
        with mock.patch.dict(os.environ), started, pytest.raises(SystemExit) as ended:
            cli.main()
        output = capfd.readouterr()
        return ended.value.code or 0, output.out, output.err

    return run


@given(line=command_lines())
@LONG
def test_any_command_line_ends_with_one_of_our_exit_codes_and_no_traceback(command, line):
    code, out, err = command(*line)
    assert code in (0, FAILED, BAD_INPUT, PREEMPTED)
    assert "Traceback" not in out + err
    assert code or not err or "usage" not in err.lower()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["auto", "epoch", "xla", "off", 10**20, 3, 0.5]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=3,
)
KEYS = st.sampled_from(["set", *sorted(train_options())]) | st.text(max_size=5)
BITS = st.sampled_from(
    [
        "epochs", "batch-size", "set", ":", "=", ".", "[", "]", "{", "}", "- ", "\n", "  ", "\t", "&a ", "*a", "<<: ",
        "!!", "? ", "---\n", "'", '"', '"""', "0x" + "f" * 5000, "1", "1e999", "2001-99-99", "null", "true",
        "#", "|\n", "\0", "é",
    ]
)  # fmt: skip
FILES = (
    st.dictionaries(KEYS, VALUES, max_size=3)
    | st.dictionaries(KEYS, VALUES, max_size=3)
    | st.lists(BITS, max_size=12).map("".join)
    | st.text()
    | st.binary()
)


@given(content=FILES, suffix=st.sampled_from(["toml", "yaml"]))
@LONG
def test_any_file_is_options_or_one_line(command, tmp_path, content, suffix):
    if isinstance(content, dict):
        equals = " = " if suffix == "toml" else ": "
        lines = [f"{json.dumps(key)}{equals}{json.dumps(value)}" for key, value in content.items()]
        content = "\n".join(lines)
    path = tmp_path / f"any.{suffix}"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = command("train", "nowhere.py:Task", f"--config={path}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("tfloop: error: ")
