"""The wheel alone, in an empty environment: pip installs it, and it trains digits. `python -m tests.campaigns.wheel`

Without Horovod, and without this checkout: what an import needs must be in the wheel, or be named by it. Takes some
2 minutes, and 2 GB of disk meanwhile; needs a package index.
"""

import json
import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "UV_"))}


def run(*command, cwd):
    """Runs it away from the checkout; gives what it prints on stdout."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd, env=ELSEWHERE, check=False)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def main():
    with tempfile.TemporaryDirectory(prefix="tfloop-wheel-") as directory:
        place = Path(directory)
        subprocess.run(["uv", "build", "--quiet", "--out-dir", place / "dist"], cwd=ROOT, check=True)
        [wheel], [_] = place.glob("dist/*.whl"), place.glob("dist/*.tar.gz")
        run(sys.executable, "-m", "venv", place / "venv", cwd=place)
        python, tfloop = place / "venv" / "bin" / "python", place / "venv" / "bin" / "tfloop"
        print(f"pip install {wheel.name} ({wheel.stat().st_size:,} bytes) in an empty environment", flush=True)
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel, cwd=place)
        run(python, "-m", "pip", "check", cwd=place)

        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        assert run(tfloop, "--version", cwd=place) == f"tfloop {version}\n"
        where = "import importlib.util, loop, callbacks, pathlib\nassert importlib.util.find_spec('horovod') is None\n"
        where += f"assert loop.__version__ == {version!r}\nprint(loop.__file__, callbacks.__file__)"
        for file in run(python, "-c", where, cwd=place).split():
            assert Path(file).is_relative_to(place / "venv"), file
            assert Path(file).with_name("py.typed").exists(), file

        print("tfloop train digits", flush=True)
        result = json.loads(run(tfloop, "train", "digits", "--json", cwd=place).splitlines()[-1])
        assert result["status"] == "finished"
        assert result["metrics"]["eval_accuracy"] > 0.9
        print("tfloop new mytask; tfloop train mytask.py:MyTask --workers 2", flush=True)
        run(tfloop, "new", "mytask", cwd=place)
        two = json.loads(run(tfloop, "train", "mytask.py:MyTask", "--workers", 2, "--json", cwd=place).splitlines()[-1])
        assert (two["backend"], two["replicas"], two["status"]) == ("multiworker", 2, "finished")
        accuracy = result["metrics"]["eval_accuracy"]
        print(f"the wheel alone trains digits, to an accuracy of {accuracy:.3f}, and a new task on 2 workers")


if __name__ == "__main__":
    main()
