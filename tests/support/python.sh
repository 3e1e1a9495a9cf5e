#!/usr/bin/env bash
# Runs a Python script with $PYTHON, default python3. Exit code 77 (skipped) where there is no such program.
set -euo pipefail
python=${PYTHON:-python3}
command -v "$python" >/dev/null || { echo "skipped: $python is not here"; exit 77; }
exec "$python" "$@"
