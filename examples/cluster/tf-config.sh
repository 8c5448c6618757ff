#!/bin/bash
# Two hosts without ssh: `tf-config.sh 0 h1:2222 h2:2222` on the first, and `tf-config.sh 1 h1:2222 h2:2222` on the second.
set -euo pipefail
index="${1:?give 0 on the first host, 1 on the second}"
first="${2:?give the address of the first host, such as h1:2222}" second="${3:?give that of the second, such as h2:2222}"

# Whatever can set a variable can start the workers: they meet as those of the engine `multiworker`, and whoever does not
# come is named after two minutes. Worker 0 alone reads and writes the run directory.
export TF_CONFIG='{"cluster": {"worker": ["'"$first"'", "'"$second"'"]}, "task": {"type": "worker", "index": '"$index"'}}'
tfloop train digits --backend multiworker --run-dir runs/digits-tf-config "${@:4}"
