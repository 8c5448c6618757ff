#!/bin/bash
# One worker on each of two hosts, over ssh: `examples/cluster/two-hosts.sh h1 h2`. Started again, it goes on where it was.
set -euo pipefail
hosts="${1:?give two hosts, such as h1 h2}:1,${2:?give a second host, such as h2}:1"

# Options behind the hosts are handed on: --epochs 60, --backend multiworker, --elastic 1:2. It may be typed on any machine
# from which ssh reaches both without a password; what they need besides is compared before anything starts.
tfloop train digits --hosts "$hosts" --run-dir runs/digits-two-hosts "${@:3}"
