"""Where the numbers of a run come from: code, commit, changes that were not committed, lock file, command, host.

The facts are recorded in `run.json` under `provenance`. The texts are kept below `source/` in the run directory: the
task's file, and the changes since the commit. They are shown (`tfloop runs diff`), and never imported.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from callbacks import files
from callbacks.run_record.redaction import HIDDEN, is_secret, mask
from callbacks.run_record.values import as_dict

FOLDER = "source"
"""The folder of a run directory with the texts."""
LOCKS = ("uv.lock", "poetry.lock", "pdm.lock", "requirements.lock", "requirements.txt")
"""The names of files that fix the versions of packages, the most exact first."""
IMAGES = ("TFLOOP_IMAGE", "CONTAINER_IMAGE", "SINGULARITY_CONTAINER", "APPTAINER_CONTAINER")
"""Environment variables that name the container image, in this order."""

_ASSIGNED = re.compile(r"\b([A-Za-z_]\w*)(\s*(?::[^=\n]*)?=\s*)([\"'])[^\"'\n]*\3")
_LONGEST = 1 << 20  # bytes of a text that is kept
_SECONDS = 5.0  # for git, which may have to read a slow disk

# A repository can name programs that git runs while it compares files. None of them is run.
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
_DIFF = ("diff", "--no-ext-diff", "--no-textconv", "HEAD")


def collect(run_dir: Path, task_file: Path | None) -> dict[str, object]:
    """Collects where a run comes from, and keeps its texts.

    What can't be found out is left out: a run never fails for it.

    Args:
        run_dir: the run directory.
        task_file: the file of the task's class; None: it has none, as in a notebook.

    Returns:
        JSON values: `command`, `host`, and where there are any `image`, `task_file`, `task_sha256`, `task_copy`,
        `lock_file`, `lock_sha256`, `commit`, `branch`, `changed` (the number of changed files), `diff_sha256`,
        `diff_copy`. Copies are paths in the run directory.
    """
    facts: dict[str, object] = {"command": mask(" ".join(sys.argv)), "host": platform.node()}
    for name in IMAGES:
        if image := os.environ.get(name):
            facts["image"] = mask(image)
            break
    if task_file is None:
        return facts

    # The hash is that of the file itself, also where the copy has its secrets hidden, or is too long to be kept.
    content = _content(task_file)
    if content is not None:
        facts |= {"task_file": str(task_file), **_kept(run_dir, "task", task_file.suffix, content)}
    lock = _lock_file(task_file.parent)
    if lock is not None:
        facts |= {"lock_file": str(lock), "lock_sha256": _digest(lock.read_bytes())}
    return facts | _commit(run_dir, task_file.parent)


def text(run_dir: Path, provenance: dict[str, object], what: str) -> str | None:
    """A text that a run has kept, `task` or `diff`; None if there is none.

    The facts are those of its `run.json`, which may be damaged or a stranger's.
    """
    name = provenance.get(f"{what}_copy")
    # A name alone: with a path, a stranger's `run.json` could show any file of this machine.
    if not isinstance(name, str) or Path(name).name != name:
        return None
    try:
        return files.read(run_dir / FOLDER / name, _LONGEST).decode(errors="replace")
    except OSError:
        return None


def changes(before: object, now: dict[str, object]) -> list[str]:
    """How the code of two attempts differs, a short text for each difference that both record.

    The facts of the attempt before come from its `run.json`, which may be damaged or a stranger's.
    """
    before = as_dict(before)
    names = {"task_sha256": "the task's file", "lock_sha256": "the lock file", "commit": "commit"}
    compared = {name: label for name, label in names.items() if name in before and name in now}
    if "commit" in compared:  # without changes, there is no hash of them
        compared["diff_sha256"] = "the diff since the commit"
    texts = []
    for name, label in compared.items():
        was = before.get(name)
        is_ = now.get(name)
        if was != is_:
            texts.append(f"{label} was {_short(was)}, now {_short(is_)}")
    return texts


def changes_of_data(before: object, now: dict[str, dict[str, object]]) -> list[str]:
    """How the data of two attempts differ, a short text for each set that both have; as `changes`."""
    texts = []
    for name, about in now.items():
        was = as_dict(as_dict(before).get(name))
        # A stream, whose size isn't known, may be shuffled: its first examples may be others each time.
        if not was or about["examples"] is None:
            continue
        if was.get("examples") != about["examples"] or was.get("sha256") != about["sha256"]:
            texts.append(f"{name} data was {_data_text(was)}, now {_data_text(about)}")
    return texts


def _data_text(facts: dict[str, object]) -> str:
    return f"{_short(facts.get('examples'))} examples ({_short(facts.get('sha256'))})"


def _short(value: object) -> str:
    """The beginning of a hash, or a number; `repr` shows what could change a terminal."""
    return "none" if value is None else repr(value)[:13].strip("'")


def _commit(run_dir: Path, folder: Path) -> dict[str, object]:
    """The commit of the folder's repository, and what was changed since."""
    status = _git(folder, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if status is None:
        return {}
    # Lines that begin with # are about the branch; each of the others is a changed file.
    facts: dict[str, object] = {}
    changed = 0
    for line in status.decode(errors="replace").splitlines():
        if line.startswith("# branch.oid "):
            facts["commit"] = line.split()[2]
        elif line.startswith("# branch.head "):
            facts["branch"] = line.split(maxsplit=2)[2]
        elif not line.startswith("#"):
            changed += 1
    facts["changed"] = changed
    diff = _git(folder, *_DIFF) if changed else None
    if diff:
        facts |= _kept(run_dir, "diff", ".diff", diff)
    return facts


def _git(folder: Path, *arguments: str) -> bytes | None:
    """What git prints about a folder; None if there is no git or no repository, or if it takes too long."""
    # Git must not write to the user's repository: `status` would update its index, under a lock.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            [*_GIT, "-C", str(folder), *arguments],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SECONDS, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _kept(run_dir: Path, what: str, suffix: str, content: bytes) -> dict[str, object]:
    """Keeps a text in the run directory, with its hash in the name: a later attempt writes over no other text."""
    digest = _digest(content)
    facts: dict[str, object] = {f"{what}_sha256": digest}
    if len(content) > _LONGEST:
        return facts
    name = f"{what}-{digest[:12]}{suffix}"
    try:
        folder = files.make_directory(run_dir / FOLDER)
        if not files.is_plain(folder / name):  # by its hash: a file that is there has the same text
            files.write_text(folder / name, _masked(content.decode(errors="replace")))
    except OSError:
        return facts
    return facts | {f"{what}_copy": name}


def _masked(code: str) -> str:
    """Code without secrets, also those that it assigns to a name: `API_TOKEN = "..."`."""

    def hide(assigned: re.Match[str]) -> str:
        name, sign, quote = assigned.groups()
        return f"{name}{sign}{quote}{HIDDEN}{quote}" if is_secret(name) else assigned[0]

    return mask(_ASSIGNED.sub(hide, code))


def _lock_file(folder: Path) -> Path | None:
    """The lock file of the nearest folder, from this one upward, that has one."""
    for parent in (folder, *folder.parents):
        for name in LOCKS:
            if (parent / name).is_file():
                return parent / name
        if (parent / ".git").exists():  # a lock file above the repository is of another project
            break
    return None


def digest(path: Path) -> str:
    """The SHA-256 of a file, as hexadecimal digits; "" if it can't be read."""
    content = _content(path)
    return "" if content is None else _digest(content)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
