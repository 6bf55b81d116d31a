#!/usr/bin/env bash
# Makes .venv, installs the package, and runs the tensor-parallel sentence encoder on 2 ranks.
#
# Needs Python >= 3.11, a C++ compiler and a package index. Safe to run again; arguments go to
# scripts/encode.py (default: --text examples/sentences.txt).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

setup_venv run
[ $# -gt 0 ] || set -- --text examples/sentences.txt
say "mpirun -np 2 python scripts/encode.py $*"
timeout --kill-after=10 "${JOB_TIMEOUT_S:-300}" "$MPIRUN" -np 2 "$PY" scripts/encode.py "$@"
