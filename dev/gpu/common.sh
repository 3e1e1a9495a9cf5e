# shellcheck shell=bash
# What the scripts here share. They run from a checkout, which they build first, or from a packed build.
#   BIN      where the programs are          RESULTS  where output goes (runs/gpu)      PYTHON  one with PyTorch
#   BUILD    where a checkout is built (build)
#   ARCHITECTURES   to build for, instead of this GPU's: 90 leaves the kernels for sm_90 (90a) out, should they fail
#   DEVICE   cpu or emulator: for trying, with SMALL=1 for sizes that a laptop can do
#   BUDGET   seconds after which nothing goes on, so that the summary is written before a limit of 600 (560)
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
while [ ! -e CMakeLists.txt ] && [ ! -d bin ] && [ "$PWD" != / ]; do cd .. || exit 1; done
builds=
if [ -z "${BIN:-}" ]; then
  if [ -e CMakeLists.txt ]; then BIN=${BUILD:-build} builds=1; else BIN=bin; fi
fi
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export BIN DEVICE=${DEVICE:-cuda} SMALL=${SMALL:-} PYTHON=${PYTHON:-python3}
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}  # as cli/spin.h, which starts programs anew for it: tools might lose them
RESULTS=${RESULTS:-runs/gpu}
mkdir -p "$RESULTS"
log=$RESULTS/$(basename "$0" .sh).log
: >"$log"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
summary=()

say() { printf '%s\n' "$*" | tee -a "$log"; }

# What numbers are worth nothing without.
describe() {
  say "=== $(date -u '+%F %T UTC'), $("$BIN/generate" --version 2>&1 | tail -1)"
  [ "$DEVICE" != cuda ] || timeout 20 nvidia-smi --format=csv \
    --query-gpu=name,driver_version,clocks.sm,power.draw,temperature.gpu 2>&1 | tee -a "$log"
}

# step NAME SECONDS COMMAND...: runs it for at most so long, with its output here and in the log as it comes. Whatever
# becomes of it is a line of the summary, and the next one follows. Returns 1 unless it passed. What succeeds without
# having done anything has not passed.
step() {
  local name=$1 limit=$2 start=$SECONDS left=$((${BUDGET:-560} - 10 - SECONDS)) code verdict before nothing
  shift 2
  [ "$limit" -le "$left" ] || limit=$left
  say "=== $name (at most $limit s): $*"
  before=$(wc -c <"$log")
  if [ "$limit" -le 0 ]; then
    verdict="FAILED: no time was left"
  elif command -v "$1" >/dev/null; then
    run_step "$limit" "$@"
    code=$(cat "$work/code")
    case $code in
      0) verdict=passed ;;
      124 | 137) verdict="FAILED: not done after $limit s" ;;
      127) verdict="MISSING: a program, see above" ;;
      *) verdict="FAILED: exit code $code" ;;
    esac
    nothing=$(tail -c "+$((before + 1))" "$log" | grep -aoEm1 'No kernels were profiled|Tests of (the GPU|NCCL) are skipped')
    case $verdict,$DEVICE,$nothing in passed,cuda,?*) verdict="FAILED: $nothing" ;; esac
  else
    verdict="MISSING: $1"
  fi
  summary+=("$(printf '%4d s  %-44s %s' $((SECONDS - start)) "$name" "$verdict")")
  say "=== ${summary[-1]}"
  [ -z "$stopped" ] || finish
  [ "$verdict" = passed ]
}

# Behind the shell's back, so that Ctrl-C ends what runs, the step and, with its summary, the script.
run_step() {
  local limit=$1 output
  shift
  {
    timeout -k 10 "$limit" "$@" </dev/null &
    echo $! >"$work/pid"
    wait $!
    echo $? >"$work/code"
  } 2>&1 | tee -a "$log" &
  output=$!
  while kill -0 $output 2>/dev/null; do wait $output; done
}
stopped=
trap 'stopped=1; kill -TERM "$(cat "$work/pid" 2>/dev/null)" 2>/dev/null' INT TERM

# build TARGETS...: from a checkout; for the GPU that is here, with the lines that the tools name.
build() {
  [ -n "$builds" ] && [ "$DEVICE" = cuda ] || return 0
  command -v make >/dev/null || export CMAKE_GENERATOR=Ninja
  step "configure" 60 cmake -S . -B "$BIN" -DCROSSPLY_CUDA=ON -DCMAKE_CUDA_FLAGS=-lineinfo \
    ${ARCHITECTURES:+-DCMAKE_CUDA_ARCHITECTURES="$ARCHITECTURES"}
  step "build" 420 cmake --build "$BIN" -j "$(nproc)" --target "$@"
}

# tokens VOCAB: a shard of random tokens below VOCAB, which is less than 2^16.
tokens() {
  local file=$work/$1.bin
  [ -e "$file" ] || "$PYTHON" "$tools/random_tokens.py" "$file" "${COUNT:-65536}" "$1"
  echo "$file"
}

# The last line of every script: 1 if a step failed, or what it needs is missing.
finish() {
  describe
  say "--- $(basename "$0"): $SECONDS s; all of it is in $log"
  local line failed=0
  for line in "${summary[@]}"; do
    say "$line"
    if [[ $line == *FAILED* || $line == *MISSING* ]]; then failed=1; fi
  done
  exit $failed
}
describe
