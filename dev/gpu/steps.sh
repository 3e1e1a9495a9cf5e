# shellcheck shell=bash
# What quarter.sh and the scripts in long/ share, for a machine that is there for minutes only: steps with limits and a
# summary, tests that are run again where they fail, and programs that answer lines. Nothing is compiled here.
#
#   BIN      the programs: else of the crossply-*.tar.xz that stage.sh has put beside this script, else bin/ of a package
#            of which this is a part, else build/ of the checkout
#   OUT      where results go: summary.txt, failed_cases.txt, all.log and more (runs/gpu/NAME)
#   BUDGET   seconds that all of it may take (480)
#   SKIP     steps to leave out, an extended regular expression on their names: "torch|ncu"
#   DRY      1: to try it without a GPU: tiny sizes, and what runs on a GPU runs on the CPU
#   PYTHON   one with PyTorch, for what is compared with it (python3)
# A script ends with exit code 1 if a step failed or nothing was left of the time for it.
set -u
tools=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
script=$(basename "$0" .sh)
OUT=${OUT:-runs/gpu/$script} BUDGET=${BUDGET:-480} SKIP=${SKIP:-} DRY=${DRY:-}
mkdir -p "$OUT" || exit 1
OUT=$(cd "$OUT" && pwd)
W=$(mktemp -d)
mkdir "$W/log"
export OUT W TMPDIR=$W PYTHON=${PYTHON:-python3} GOMP_SPINCOUNT=1000 PYTHONUNBUFFERED=1
PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin # for ncu and compute-sanitizer
if [ -z "${BIN:-}" ]; then
  package=$(find "$tools" -maxdepth 1 -name 'crossply-*.tar.xz' | head -1)
  BIN=$tools/../../bin
  [ -d "$BIN" ] || BIN=$tools/../../${BUILD:-build}
  if [ -n "$package" ]; then # a small system has no xz, but Python has
    tar -C "$W" -xf "$package" 2>"$W/log/unpack.log" || "$PYTHON" -m tarfile -e "$package" "$W" || { rm -rf "$W" && exit 74; }
    BIN=$(echo "$W"/crossply-*/bin)
  fi
fi
export BIN
[ -x "$BIN/tests" ] || { echo "$BIN has no programs: dev/gpu/stage.sh, or make pack CUDA=1" && rm -rf "$W" && exit 66; }
device=${DEVICE:-cuda}
[ -z "$DRY" ] || device=cpu
: >"$OUT/summary.txt"
rm -f "$OUT/failed_cases.txt"

lane=main lanes_end=0
say() { printf '%s\n' "$*" | tee -a "$OUT/summary.txt"; }
left() { # seconds for a step: the end needs some, and that of the lanes comes before
  local end=$((BUDGET - 4))
  if [ "$lane" != main ]; then end=$((BUDGET - 10 < lanes_end ? BUDGET - 10 : lanes_end)); fi
  echo $((end - SECONDS))
}
skipped() { [ -n "$SKIP" ] && grep -qE -- "$SKIP" <<<"$1"; }

# step NAME LIMIT COMMAND...: runs it for at most so many seconds, with its output in a log of its own, and adds a line
# to the summary; nothing that fails ends the script. 0: it passed; 3: it was left out. What succeeds without having
# done anything has not passed. $verdict says how it ended, $last_log is the log.
number=0 verdict='' last_log=/dev/null
nothing_ran='Tests of (the GPU|NCCL) are skipped|Nothing of sm_90 is tested|No kernels were profiled'
step() {
  local name=$1 limit=$2 begin=$SECONDS code
  shift 2
  number=$((number + 1))
  last_log=$W/log/$lane.$(printf '%02d' $number).log verdict='left out'
  : >"$last_log"
  ! skipped "$name" || return 3
  [ "$limit" -le "$(left)" ] || limit=$(left)
  if [ "$limit" -lt 3 ]; then
    verdict='NO TIME'
    say "$(printf '%4d s       %s: %s' "$begin" "$verdict" "$name")"
    return 3
  fi
  echo "=== $name: $*" >"$last_log"
  timeout -k 5 "$limit" "$@" </dev/null >>"$last_log" 2>&1 &
  wait $! # and not in the foreground, where a signal would wait for it
  code=$?
  case $code in
    0) verdict=passed ;;
    124 | 137) verdict="NOT DONE after $limit s" ;;
    127) verdict="MISSING: $1" ;;
    *) verdict="FAILED ($code)" ;;
  esac
  if [ -z "$DRY" ] && grep -qaE "$nothing_ran" "$last_log"; then verdict='NOTHING RAN'; fi
  say "$(printf '%4d s %3d s %-9s %s' "$begin" $((SECONDS - begin)) "$verdict" "$name")"
  [ "$verdict" != passed ] || return 0
  # The first words of what went wrong.
  grep -aE 'cuda[A-Z][A-Za-z]+[,:]|CUBLAS_|[Ee]rror:|misaligned|illegal' "$last_log" | sort | uniq -c | sort -rn | head -2 |
    cut -c1-300 | sed 's/^/            | /' | tee -a "$OUT/summary.txt"
  return 1
}
# show PATTERN: lines of the last step's log that belong into the summary.
show() { [ -n "$DRY" ] || grep -aE -- "$1" "$last_log" | sed 's/^/            /' | cut -c1-150 | tee -a "$OUT/summary.txt"; }

# All logs in one file, as they are so far: what is there even if somebody else ends the script.
collect() {
  local log
  for log in "$W"/log/*.log; do
    [ -e "$log" ] || continue
    printf '\n##### %s\n' "${log##*/}"
    if [ "$(stat -c %s "$log")" -gt 150000 ]; then
      head -c 50000 "$log" && printf '\n...\n' && tail -c 100000 "$log"
    else
      cat "$log"
    fi
  done >"$W/all.$BASHPID"
  mv "$W/all.$BASHPID" "$OUT/all.log"
}
(while sleep 4; do collect; done) &
collector=$!
disown # so that bash does not announce its end

# Of the programs that answer lines, below.
declare -A asks answers pids

# SIGNAL PID: a process that this script started, so that it starts no more, and then what it has started. By /proc,
# because a small system has no pgrep.
kill_tree() {
  local child children
  children=$(cat /proc/[0-9]*/stat 2>/dev/null | awk -v p="$2" '{pid = $1; sub(/.*\) /, ""); if ($2 == p) print pid}')
  kill "-$1" "$2" 2>/dev/null
  for child in $children; do kill_tree "$1" "$child"; done
}
finish() {
  trap '' INT TERM
  trap - EXIT
  local pid failed
  for pid in "$collector" "${pids[@]}" $(jobs -p); do kill_tree KILL "$pid"; done
  failed=$(grep -cE ' s (FAILED|NOT DONE|NOTHING RAN|MISSING)| (NO TIME|ENDED|NOT READY|CANNOT)' "$OUT/summary.txt")
  say "--- $script ${phase:-}: $SECONDS s of $BUDGET s; failed or not done: $failed"
  collect
  rm -rf "$W"
  exit $((failed != 0)) # a plain exit would give what came before the trap
}
trap finish EXIT
trap 'say "            ENDED by a signal"; exit' INT TERM

# -----------------------------------------------------------------------------------------------------------------
# Tests, a family in a process of its own, because after an error of a kernel a GPU does no more in that process. What
# fails is run again alone and blocking, then under memcheck, so that the log names the kernel and the access.

failed_cases() { grep -aoP '^TEST CASE:\s+\K.*' "$1" | sort -u | head -"$2"; }
hung_case() { # LOG FILTERS...: the first of the list that has no duration in the log
  "$BIN/tests" -ltc "${@:2}" 2>/dev/null | grep -av '^\[doctest\]\|^===' |
    while IFS= read -r name; do grep -qaF " s: $name" "$1" || { echo "$name" && break; }; done
}
family() { # NAME LIMIT FILTERS...
  local name=$1 limit=$2 log case_name
  shift 2
  step "tests: $name" "$limit" env OMP_NUM_THREADS="${THREADS:-3}" "$BIN/tests" -d "$@" && return 0
  log=$last_log
  case $verdict in
    FAILED*)
      failed_cases "$log" 2 >"$W/$lane.failed"
      while IFS= read -r case_name; do localise "$case_name"; done <"$W/$lane.failed"
      ;;
    NOT\ DONE*)
      case_name=$(hung_case "$log" "$@")
      [ -n "$case_name" ] || return 1
      echo "hung: $case_name" >>"$OUT/failed_cases.txt"
      CUDA_LAUNCH_BLOCKING=1 step "  alone: $case_name" 15 "$BIN/tests" -d "-tc=${case_name//,/\\,}"
      ;;
  esac
  return 1
}
sanitize() { # TOOL NAME LIMIT FILTERS...; no room beside arrays, so that the tool sees what is written there
  local tool=$1 name=$2 limit=$3
  shift 3
  command -v compute-sanitizer >/dev/null || return 3
  CROSSPLY_TEST_ZONE=0 step "$tool: $name" "$limit" compute-sanitizer --tool "$tool" --error-exitcode 99 "$BIN/tests" -d "$@"
}
localise() { # NAME: of a test case; without one doctest would run all
  local filter=${1//,/\\,}
  [ -n "$1" ] || return
  echo "$1" >>"$OUT/failed_cases.txt"
  CUDA_LAUNCH_BLOCKING=1 step "  alone, blocking: $1" 30 "$BIN/tests" -d "-tc=$filter" ||
    sanitize memcheck "  $1" 45 "-tc=$filter"
}

# -----------------------------------------------------------------------------------------------------------------
# Models: 124M and 1B with grouped heads, and two blocks of the width of 1B; t: tokens of a step; f: FLOP of a token,
# 3 times 2 for each multiply-add of the products and of the causal half of attention.

m124=(--width 768 --layers 12 --heads 12 --kv-heads 12 --ffn 2048 --vocab 50304 --seq 1024 --batch 32)
m1b=(--width 2048 --layers 16 --heads 32 --kv-heads 8 --ffn 8192 --vocab 50304 --seq 2048 --batch 8)
wide=(--width 2048 --layers 2 --heads 32 --kv-heads 8 --ffn 8192 --vocab 50304 --seq 2048 --batch 8)
t124=32768 t1b=16384 f124=798.0e6 f1b=6859.3e6 vocab=50304
[ -z "$DRY" ] || {
  m124=(--width 64 --layers 2 --heads 2 --kv-heads 1 --ffn 128 --vocab 99 --seq 32 --batch 2) m1b=("${m124[@]}") wide=("${m124[@]}")
  t124=64 t1b=64 f124=1e6 f1b=1e6 vocab=99
}
random_tokens() { "$PYTHON" "$tools/random_tokens.py" "$@"; } # FILE COUNT VOCAB

# gradients NAME ARCH BATCH SEQ VOCAB FLAGS...: of a new model, on both devices, in both types.
gradients() {
  local name=$1 arch=$2 batch=$3 seq=$4 vocab=$5 m=$W/$lane.model
  shift 5
  random_tokens "$W/$lane.bin" 65536 "$vocab"
  rm -rf "$m"
  step "$name: a model" 40 "$BIN/train_$arch" --data "$W/$lane.bin" --vocab "$vocab" --seq "$seq" "$@" --steps 0 --out "$m" &&
    DEVICE=$device step "$name: gradients" 100 "$tools/compare_devices.sh" "$m" "$W/$lane.bin" "$batch" "$seq"
}

# begin_lanes SECONDS: how long the lanes have from now on; in_lane NAME FUNCTION...: in the background, with logs of its
# own; wait_lanes: for all of them. What has not ended in time says so itself, unless it hangs beyond that.
lanes=()
begin_lanes() { lanes_end=$((SECONDS + $1)); }
in_lane() {
  (
    trap - EXIT INT TERM
    lane=$1
    shift
    "$@"
  ) &
  lanes+=($!)
}
wait_lanes() {
  local pid
  for pid in "${lanes[@]}"; do
    while kill -0 "$pid" 2>/dev/null && [ "$SECONDS" -lt $((lanes_end + 7)) ] && [ "$(left)" -gt 2 ]; do sleep 0.5; done
    kill -0 "$pid" 2>/dev/null || continue
    say "$(printf '%4d s       NOT READY: a lane is killed' "$SECONDS")"
    kill_tree KILL "$pid"
  done
  lanes=()
}

# -----------------------------------------------------------------------------------------------------------------
# Programs that answer lines: `bench serve` and bench_torch.py print "ready", then "SECONDS MIB" for every number of
# steps.

serve() { # NAME COMMAND...
  local name=$1 fd
  shift
  ! skipped "serve $name" || return 0
  [ "$(left)" -ge 10 ] || { say "$(printf '%4d s       NO TIME: serve %s' "$SECONDS" "$name")" && return 0; }
  mkfifo "$W/$name.in"
  : >"$W/log/serve.$name.out.log"
  exec {fd}<>"$W/$name.in"
  asks[$name]=$fd answers[$name]=0
  # Without the end that this script writes to: where it is killed, the program's input ends.
  "$@" <"$W/$name.in" >"$W/log/serve.$name.out.log" 2>"$W/log/serve.$name.err.log" {fd}>&- &
  pids[$name]=$!
  disown
}
await() { # NAME LIMIT: for one more line, which is $line then
  local out=$W/log/serve.$1.out.log end_at=$((SECONDS + $2))
  [ -n "${pids[$1]:-}" ] || return 1
  while [ "$(grep -c . "$out")" -le "${answers[$1]}" ]; do
    kill -0 "${pids[$1]}" 2>/dev/null ||
      { say "$(printf '%4d s       ENDED: %s: %s' "$SECONDS" "$1" "$(tail -1 "$W/log/serve.$1.err.log" | cut -c1-200)")" && return 1; }
    if [ "$SECONDS" -ge "$end_at" ] || [ "$(left)" -le 2 ]; then
      say "$(printf '%4d s       NOT READY: %s' "$SECONDS" "$1")"
      return 1
    fi
    sleep 0.2
  done
  answers[$1]=$((${answers[$1]} + 1))
  line=$(sed -n "${answers[$1]}p" "$out")
}
# ask NAME STEPS LIMIT TOKENS FLOP: of a step's tokens, and FLOP for each; a line with tokens/s, and MFU of the dense
# 989 TFLOP/s of an H100 or H200 in bf16.
ask() {
  [ -n "${pids[$1]:-}" ] || return 1
  echo "$2" >&"${asks[$1]}"
  await "$1" "$3" || return 1
  say "$(awk -v l="$line" -v n="$2" -v t="$4" -v f="$5" -v name="$1" -v s="$SECONDS" 'BEGIN {
    split(l, a, " "); rate = n * t / a[1]
    printf "%4d s       %-12s %8.1f ms/step %9d tokens/s  MFU %4.1f %%  %6d MiB", s, name, 1000 * a[1] / n, rate, 100 * rate * f / 989e12, a[2]}')"
}
stop() { # NAME: its memory is the next one's
  [ -n "${pids[$1]:-}" ] || return 0
  local i
  kill_tree KILL "${pids[$1]}"
  for ((i = 0; i < 20; ++i)); do kill -0 "${pids[$1]}" 2>/dev/null && sleep 0.1 || break; done
  unset "pids[$1]"
}
