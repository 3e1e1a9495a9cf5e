# shellcheck shell=bash
# What the scripts here share. They run from a checkout, which they build first, or from a packed build.
#   BIN      where the programs are          RESULTS  where output goes (runs/gpu)      PYTHON  one with PyTorch
#   DEVICE   cpu or emulator: for trying, with SMALL=1 for sizes that a laptop can do
#   BUDGET   seconds after which no step goes on, so that the summary is always written (590)
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
while [ ! -e CMakeLists.txt ] && [ ! -d bin ] && [ "$PWD" != / ]; do cd .. || exit 1; done
if [ -z "${BIN:-}" ]; then
  if [ -e CMakeLists.txt ]; then BIN=build; else BIN=bin; fi
fi
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export BIN DEVICE=${DEVICE:-cuda} SMALL=${SMALL:-} PYTHON=${PYTHON:-python3}
RESULTS=${RESULTS:-runs/gpu}
mkdir -p "$RESULTS"
log=$RESULTS/$(basename "$0" .sh).log
: >"$log"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
summary=()

say() { printf '%s\n' "$*" | tee -a "$log"; }

# step NAME SECONDS COMMAND...: runs it for at most so long, with its output here and in the log as it comes. Whatever
# becomes of it is a line of the summary, and the next one follows.
step() {
  local name=$1 limit=$2 start=$SECONDS left=$((${BUDGET:-590} - SECONDS)) code verdict
  shift 2
  [ "$limit" -le "$left" ] || limit=$left
  say "=== $name (at most $limit s): $*"
  if [ "$limit" -le 0 ]; then
    verdict="FAILED: no time was left"
  elif command -v "$1" >/dev/null; then
    timeout -k 10 "$limit" "$@" </dev/null 2>&1 | tee -a "$log"
    code=${PIPESTATUS[0]}
    case $code in
      0) verdict=passed ;;
      124 | 137) verdict="FAILED: not done after $limit s" ;;
      *) verdict="FAILED: exit code $code" ;;
    esac
  else
    verdict="MISSING: $1"
  fi
  summary+=("$(printf '%4d s  %-44s %s' $((SECONDS - start)) "$name" "$verdict")")
  say "=== ${summary[-1]}"
}

# build TARGETS...: from a checkout; for the GPU that is here, with the lines that the tools name.
build() {
  [ "$BIN" = build ] && [ "$DEVICE" = cuda ] || return 0
  step "configure" 60 make configure CUDA=1 CMAKE_FLAGS=-DCMAKE_CUDA_FLAGS=-lineinfo
  step "build" 420 cmake --build build -j "$(nproc)" --target "$@"
}

# The last line of every script: 1 if a step failed, or what it needs is missing.
finish() {
  say "--- $(basename "$0"): $SECONDS s; all of it is in $log"
  local line failed=0
  for line in "${summary[@]}"; do
    say "$line"
    if [[ $line == *FAILED* || $line == *MISSING* ]]; then failed=1; fi
  done
  exit $failed
}
