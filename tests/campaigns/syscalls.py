"""A kill before every system call of a checkpoint write, and a full disk at each that can meet one. Needs strace.

`python -m tests.campaigns.syscalls`. A process is forked for each write, and says by two calls that nobody else makes
where the write begins and ends. A first run counts the calls in between; then each of them is the last of a life.
"""

import errno
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from loop.checkpoint import checkpoint_files
from tests.campaigns.writer import find, tensors, write

WAITS, BEGINS, ENDS = "getsid(0)", "/tfloop-write-begins", "/tfloop-write-ends"
CALL = r"(?!brk|mmap|munmap|mremap|madvise|futex)\w+\("  # memory is asked for now and then, and says nothing of files
STEP = 3
SCENES = {  # what is there before step 3 is written
    "the first": lambda directory: None,
    "with older ones": lambda directory: [write(directory, step) for step in (1, 2)],
    "over a damaged one": lambda directory: [
        write(directory, 2),
        (write(directory, STEP) / checkpoint_files.TENSORS).write_bytes(b"garbage"),
    ],
    "over a good one": lambda directory: [write(directory, step) for step in (2, STEP)],
    "over one with less to tell": lambda directory: [write(directory, 2), write(directory, STEP, told="less")],
    "with litter": lambda directory: [
        write(directory, 2),
        write(directory, STEP, told="less"),
        shutil.copytree(write(directory, STEP + 1), directory / f"step-{STEP:08d}.tmp"),
        shutil.rmtree(directory / f"step-{STEP + 1:08d}"),
        (directory / f"step-{STEP:08d}").rename(directory / f"step-{STEP:08d}.old.tmp"),
    ],
}


def life(directory, log, *inject):
    """One write in a process of its own, under strace. How it ended, and its calls from the mark on."""
    go, gone = os.pipe()
    child = os.fork()
    if not child:
        while not select.select([go], [], [], 0.001)[0]:  # calls that a write doesn't make, until strace is seen to see
            os.getsid(0)
        os.access(BEGINS, os.F_OK)
        code = 0
        try:
            write(directory, STEP)
        except OSError as error:
            code = error.errno
        os.access(ENDS, os.F_OK)
        os._exit(code)
    log.unlink(missing_ok=True)
    tracer = subprocess.Popen(["strace", "-qq", "-o", log, *inject, "-p", str(child)])
    while not log.exists() or WAITS not in log.read_text(errors="replace"):
        assert tracer.poll() is None, "strace can't attach"
        time.sleep(0.001)
    os.write(gone, b"!")
    _, status = os.waitpid(child, 0)
    tracer.wait()
    os.close(go)
    os.close(gone)
    calls = [line for line in log.read_text(errors="replace").splitlines() if re.match(CALL, line)]
    begin = next(place for place, call in enumerate(calls) if BEGINS in call)

    return os.waitstatus_to_exitcode(status), calls[begin:]


def main(every=1):
    tensors(STEP)  # loads all that is loaded late
    lives = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        log, directory, copy = (Path(temporary, name) for name in ("log", "checkpoints", "copy"))
        for scene, prepare in SCENES.items():

            def fresh(prepare=prepare):
                shutil.rmtree(directory, ignore_errors=True)
                prepare(directory)
                shutil.rmtree(copy, ignore_errors=True)
                if not directory.exists():
                    return None
                shutil.copytree(directory, copy)
                return resumed(copy)

            fresh()
            _, usual = life(directory, log)
            end = next(place for place, call in enumerate(usual) if ENDS in call)
            assert find(directory) == STEP
            for place in range(1, end + 1, every):
                name = usual[place].partition("(")[0]
                nth = sum(call.startswith(f"{name}(") for call in usual[: place + 1])
                where = f"{scene}, call {place}: {usual[place][:120]}"

                before = fresh()
                ended, calls = life(directory, log, f"--inject={name}:signal=SIGKILL:when={nth}")
                assert (ended, len(calls)) == (-9, place + 1), (
                    f"{where}: ended with {ended} at call {len(calls) - 1}: {calls[-1]}"
                )
                judge(directory, before, calls, where)
                lives["kills"] += 1

                if name in ("write", "fsync", "mkdir", "rename") or "O_CREAT" in usual[place]:
                    before = fresh()
                    ended, calls = life(directory, log, f"--inject={name}:error=ENOSPC:when={nth}")
                    assert ended == errno.ENOSPC, f"{where}: ended with {ended}"
                    if scene != "with litter":  # what was there before, the next write removes
                        assert not (directory / f"step-{STEP:08d}.tmp").exists(), f"{where}: litter"
                    judge(directory, before, calls, where)
                    lives["full disks"] += 1
    print(
        f"system calls: {lives['kills']} kills and {lives['full disks']} full disks in {len(SCENES)} scenes "
        f"({', '.join(SCENES)}): the newest complete one was found each time, and the next write left no litter"
    )
    return lives


def resumed(directory):
    """The step that a run goes on from."""
    if directory.exists():
        checkpoint_files.mend(directory)
    return find(directory)


def judge(directory, before, calls, where):
    """Which one is found, to the bit, and whether the next write succeeds."""
    renamed = [call for call in calls if re.match(rf'rename\(".*step-{STEP:08d}\.tmp", .*\) += 0', call)]
    expected = STEP if renamed else before
    found = resumed(directory)
    assert found == expected, f"{where}: found {found}, not {expected}"
    write(directory, STEP + 1)
    assert find(directory) == STEP + 1, where
    assert not list(directory.glob("*.tmp")), f"{where}: litter"


def missing():
    """Why it can't be done here, or None."""
    if shutil.which("strace") is None:
        return "strace isn't installed"
    tried = subprocess.run(["strace", "-qq", "-o", os.devnull, "true"], capture_output=True, check=False)
    return "strace may not trace here" if tried.returncode else None


if __name__ == "__main__":
    if reason := missing():
        sys.exit(f"system calls: not done: {reason}")
    main(*map(int, sys.argv[1:]))
