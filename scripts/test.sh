#!/usr/bin/env bash
# Makes .venv with the test tools, then runs the tests (plain; those whose programs run again from
# their text; on 2 ranks and on 4 ranks) and, for 60 s each, random programs on one device and on
# simulated ranks.
#
#   bash scripts/test.sh                everything, in about 30 minutes on 2 cores
#   bash scripts/test.sh -k sharding    arguments go to every pytest and leave out the random programs
#   bash scripts/test.sh --fast         one step, in under 3 minutes: the tests that are not slow;
#                                       further arguments go to pytest
#
# Needs Python >= 3.11, a C++ compiler and a package index. Safe to run again. pytest-xdist's -n goes
# to the steps on one rank alone, as its processes would inherit a rank's connection. Where $JUNIT_DIR
# names a folder, these steps leave the times of their tests there, for scripts/slow_tests.py.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

setup_venv test
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" # ranks share the cores

status=0
selection=$#
chosen=0 # steps in which a test was selected
log="$(mktemp)"
trap 'rm -f "$log"' EXIT
# step NAME SECONDS COMMAND...: a failing step is noted and the next one still runs.
step() {
  local name="$1" limit_s="$2" rc=0
  shift 2
  say "$name"
  timeout --kill-after=10 "$limit_s" "$@" </dev/null 2>&1 | tee "$log" || rc=$?
  case "$rc" in
    0) # mpirun returns 0 when a rank leaves with exit code 0 in the middle and takes the job along
      grep -Eq ' in [0-9.]+s' "$log" || { say "$name: ended without its closing line" && status=1; }
      chosen=$((chosen + 1)) ;;
    5) # fine for a selection like -k, not for the whole suite
      say "$name: no test was selected"
      [ "$selection" -gt 0 ] || status=1 ;;
    124 | 137) say "$name: stopped after $limit_s s" && status=1 && chosen=$((chosen + 1)) ;;
    *) say "$name: failed (exit code $rc)" && status=1 && chosen=$((chosen + 1)) ;;
  esac
}

ranks() {
  step "tests on $1 ranks" 900 "$MPIRUN" -np "$1" "$PY" -m pytest \
    -p tests.support.mpi_abort --with-mpi --only-mpi --color=no -q "${@:2}" -n0
}

# plain NAME SECONDS ARGUMENTS...: a step of pytest in a process per core.
plain() { step "$1" "$2" "$PY" -m pytest -q -n auto --dist worksteal "${@:3}"; }

if [ "${1:-}" = --fast ]; then
  selection=$(($# - 1))
  plain "tests that are not slow" 600 -m "not slow" "${@:2}"
  say "took $SECONDS s"
  exit "$status"
fi
unmarked=() times=() times_from_text=()
[ "$selection" -gt 0 ] || unmarked=(-m "not from_text") # each test runs in one step
if [ -n "${JUNIT_DIR:-}" ]; then
  times=("--junitxml=$JUNIT_DIR/plain.xml")
  times_from_text=("--junitxml=$JUNIT_DIR/from_text.xml" -o junit_duration_report=call)
fi
plain "plain tests" 3600 ${unmarked[@]+"${unmarked[@]}"} ${times[@]+"${times[@]}"} "$@"
plain "programs again from their text" 1800 --from-text=marked \
  ${times_from_text[@]+"${times_from_text[@]}"} "$@"
ranks 2 "$@"
ranks 4 "$@"
if [ "$selection" -eq 0 ]; then
  # Fixed seeds: a change must not fail for what was there before it. The last number is how many of
  # 100 may be refused: attention, scans, lookups and groups are in the steps of streams.
  for run in "single 450 1" "sharded 300 5" "streams 100 20"; do
    read -r kind cases refusals <<<"$run"
    step "random programs ($kind)" 400 "$PY" scripts/fuzz.py "$kind" --seed 0 --cases "$cases" \
      --seconds 60 --processes 2 --refusals "$refusals"
  done
fi
if [ "$chosen" -eq 0 ]; then
  say "no step has selected a test: $*"
  status=1
fi
exit "$status"
