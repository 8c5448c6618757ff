"""Damage of every kind: no bad checkpoint is ever loaded, no good one refused. `python -m tests.campaigns.damage`"""

import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from loop.checkpoint import checkpoint_files
from tests.campaigns.writer import find, write

STEPS = (1, 2, 3, 4)
FILES = (checkpoint_files.TENSORS, checkpoint_files.MANIFEST)


def truncate(draw, path, other):
    path.write_bytes(path.read_bytes()[: draw.randrange(max(1, path.stat().st_size))])


def flip(draw, path, other):
    content = bytearray(path.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def overwrite(draw, path, other):
    content = bytearray(path.read_bytes())
    start = draw.randrange(max(1, len(content)))
    content[start : start + 512] = bytes(len(content[start : start + 512]))
    path.write_bytes(content)


def append(draw, path, other):
    path.write_bytes(path.read_bytes() + draw.randbytes(draw.randint(1, 100)))


def empty(draw, path, other):
    path.write_bytes(b"")


def garbage(draw, path, other):
    path.write_bytes(draw.randbytes(draw.randint(1, 5000)))


def delete(draw, path, other):
    path.unlink()


def swap(draw, path, other):
    path.rename(aside := path.with_name("aside"))
    if other.exists():
        other.rename(path)
    aside.rename(other)


def swap_whole(draw, path, other):
    swap(draw, path.parent, other.parent)


def delete_whole(draw, path, other):
    shutil.rmtree(path.parent)


KINDS = (truncate, flip, overwrite, append, empty, garbage, delete, swap, swap_whole, delete_whole)


def main(rounds=1000, seed=0):
    draw, outcomes, kinds = random.Random(seed), Counter(), Counter()
    with tempfile.TemporaryDirectory() as temporary:
        whole, damaged = Path(temporary, "whole"), Path(temporary, "damaged")
        for step in STEPS:
            write(whole, step)
        original = {path.relative_to(whole): path.read_bytes() for path in whole.glob("*/*")}
        for number in range(rounds):
            shutil.rmtree(damaged, ignore_errors=True)
            shutil.copytree(whole, damaged)
            for step in draw.choices(STEPS, weights=(1, 1, 2, 4), k=draw.randint(1, 6)):
                file, other = draw.choice(FILES), draw.choice([each for each in STEPS if each != step])
                path, elsewhere = (damaged / f"step-{each:08d}" / file for each in (step, other))
                if path.exists() and elsewhere.parent.exists():
                    kind = draw.choice(KINDS)
                    kind(draw, path, elsewhere)
                    kinds[kind.__name__] += 1
            outcomes[judge(damaged, original, f"seed {seed}, round {number}")] += 1
    print(
        f"damage: {rounds} rounds, {sum(kinds.values())} damages ({', '.join(f'{n} {k}' for k, n in kinds.items())}): "
        f"{', '.join(f'{n} times {what}' for what, n in outcomes.items())}; nothing bad loaded, nothing good refused"
    )
    return outcomes


def judge(damaged, original, where):
    """What happened, if it is right; else an AssertionError."""
    present = [int(path.name[-8:]) for path in damaged.iterdir()]

    def untouched(step):
        names = [Path(f"step-{step:08d}", file) for file in FILES]
        return all((damaged / name).exists() and (damaged / name).read_bytes() == original[name] for name in names)

    good = max(filter(untouched, present), default=None)
    error = ""
    try:
        found = find(damaged)
    except checkpoint_files.CheckpointError as raised:
        error = str(raised)
    if error:
        assert good is None, f"{where}: {good} is good, but: {error}"
        assert "none of its" in error, f"{where}: {error}"
        return "an error, since none was good"
    if found != good:  # one space for another in a manifest: it still says the same, and `find` has compared the rest
        assert found is not None, where
        assert found > (good or 0), f"{where}: {found} was loaded, but {good} is good"
        return "one that still says the same"
    assert found is not None or not present, where
    return "the newest" if found == max(STEPS) else "an older one" if found else "a start, since all were gone"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
