#!/usr/bin/env bash
# Trains a d = 512 Internal-Taper (+aux) model for a few hundred steps, folds it, and runs the whole decoding benchmark
# on this machine's GPU, into the folder of the first argument. Needs this package with its extra `lab`;
# no network, no Snakemake.
#   benchmarks/gpu.sh results/gpu
#   benchmarks/gpu.sh /tmp/try --device cpu --width 64 --steps 20 --rounds 2 --modes eager     # the same on a CPU
set -euo pipefail
out=$(realpath -m "${1:?usage: benchmarks/gpu.sh FOLDER [options; --help lists them]}")
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
exec "${PYTHON:-python3}" -m benchmarks.gpu --out "$out" "$@"
