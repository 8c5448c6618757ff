"""CMake for Horovod's build that does nothing, and says so, on a machine without a C++ compiler or make.

Horovod's Python files are then installed without its native library. `tfloop` sees that, trains on `tf.distribute`
instead, and `tfloop doctor` names what to install to get Horovod.
"""

import os
import shutil
import subprocess
import sys


def main() -> int:
    """Runs CMake with our arguments, or nothing."""
    compiler = next((c for c in (os.environ.get("CXX"), "c++", "g++", "clang++") if c and shutil.which(c)), None)
    missing = [what for what, there in (("a C++ compiler", compiler), ("make", shutil.which("make"))) if not there]
    if missing:
        print(f"Horovod is installed without its native library: {' and '.join(missing)} not found", file=sys.stderr)
        return 0
    import cmake

    return subprocess.call([f"{cmake.CMAKE_BIN_DIR}/cmake", *sys.argv[1:]])
