#!/usr/bin/env bash
# crossply on an H100 or H200 that can be had for half an hour at most, in three calls of some minutes each. README.md
# says how; steps.sh has what can be set.
#   quarter.sh first      does it run, is it right, how fast: the most valuable first
#   quarter.sh second     RETEST='attention*,matmul*' again; gradients and blocks at real sizes; 1B beside PyTorch
#   quarter.sh third      LLaMA and LIMe of 124M on the same text for as long as there is time, as a figure
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
phase=${1:-first}
case $phase in first | second | third) ;; *) sed -n '4,6s/^# *//p' "$0" && exit 64 ;; esac
. "$here/steps.sh"
say "crossply, $phase, $(date -u '+%F %T UTC'), $(timeout 10 "$BIN/generate" --version)"

# -----------------------------------------------------------------------------------------------------------------
# What the package needs. Anything else costs minutes and says less.

# One cuBLAS for both sides: PyTorch's, where there is one.
cublas=$(timeout 10 "$PYTHON" -c '
import glob, importlib.util, os
spec = importlib.util.find_spec("nvidia")
for place in spec.submodule_search_locations if spec else []:
  for file in glob.glob(place + "/cu13/lib/libcublasLt.so.13"): print(os.path.dirname(file))' 2>/dev/null | head -1)
[ -z "$cublas" ] || export LD_LIBRARY_PATH=$cublas${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
facts() {
  nvidia-smi
  nvidia-smi --format=csv --query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm,power.limit,temperature.gpu,ecc.mode.current,mig.mode.current,compute_mode
  uname -r
  lscpu | grep -E 'Model name|^CPU\(s\)|MHz'
  free -g | sed -n 2p
  ldd --version | head -1
  command -v "$PYTHON" nvcc ncu compute-sanitizer
  "$PYTHON" -c 'import importlib.metadata as m; print("PyTorch", m.version("torch"))'
  echo "cuBLAS: ${cublas:-not in a package}; $(ls -d /usr/local/cuda/lib64/libcublasLt* 2>/dev/null | tr '\n' ' ')"
}
export -f facts
export cublas
cannot() { say "            CANNOT run here: $1" && exit; }
suits() {
  local capability driver why
  capability=$(timeout 10 nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>&1 | head -1)
  [[ $capability =~ ^[0-9]+\.[0-9]+$ ]] || cannot "no GPU: nvidia-smi says: ${capability:-nothing}"
  [ "$capability" = 9.0 ] || cannot "the GPU's compute capability is $capability; the package is for 9.0"
  driver=$(grep -aoE 'CUDA [A-Z ]*Version: *[0-9]+' "$last_log" | grep -oE '[0-9]+$' | head -1)
  [ "${driver:-13}" -ge 13 ] || cannot "the driver is for CUDA $driver; the package needs one for CUDA 13"
  # It also finds, or names, libcublasLt.so.13. A wrong number here is no reason to stop.
  step "the GPU works" 60 "$BIN/tests" -d '-tc=convert*,matmul: biases*' && return
  why=$(grep -aoE 'Tests of the GPU are skipped: .*|cannot open .*|[a-z./A-Z]*libcublasLt.* is of version .*|.* has no function .*|.*GLIBC.*|cudaError(InsufficientDriver|SystemDriverMismatch|SystemNotReady|DevicesUnavailable|NoKernelImage|UnsupportedPtx|InvalidDeviceFunction).*' "$last_log" |
    head -1 | cut -c1-300)
  case $verdict in
    FAILED*) [ -z "$why" ] || cannot "$why" ;;
    *) cannot "${why:-$verdict}" ;;
  esac
}
step "facts" 20 bash -c facts
show 'NVIDIA H'
[ -n "$DRY" ] || suits
for program in ncu compute-sanitizer; do
  command -v $program >/dev/null || say "            $program is not here: its steps are left out"
done

# -----------------------------------------------------------------------------------------------------------------
# Both sides of the timings: programs that answer numbers of steps.

own=("$BIN/bench" serve --device "$device" --dtype bf16)
torch=("$PYTHON" "$BIN/../dev/bench_torch.py" --gpu --bf16 --threads 8 --compile)
[ -z "$DRY" ] || torch=(bash -c 'echo ready; while read -r n; do sleep 0.2; echo "0.2 100"; done' torch)

# -----------------------------------------------------------------------------------------------------------------
# The first call.

# What the kernels of sm_90 take for granted, each in a process; if one does not hold, all else goes on without them.
hopper() {
  local part good=1 parts=('hopper: barriers' 'hopper: a box' 'hopper: products' 'hopper: a pipeline')
  begin_lanes 25
  for part in "${parts[@]}"; do in_lane "hopper_${part//[: ]/}" step "$part" 20 "$BIN/tests" -d "-tc=$part*"; done
  wait_lanes
  for part in "${parts[@]}"; do grep -qE "passed +$part\$" "$OUT/summary.txt" || good=; done
  if [ -n "$good" ]; then
    family "attention by warpgroups" 40 '-tc=attention: the warpgroup products*' && return
  else
    step "hopper: a single one" 30 "$BIN/tests" -d '-tc=hopper: a single one*' # which element lies elsewhere
    for part in "${parts[@]}"; do
      grep -qE "passed +$part\$" "$OUT/summary.txt" || sanitize memcheck "$part" 30 "-tc=$part*"
    done
  fi
  export CROSSPLY_NO_HOPPER=1
  say "            from here on without the kernels of sm_90 (CROSSPLY_NO_HOPPER=1)"
}

# Every kernel against the reference, and whole models, at small sizes. Cases of the CPU alone are left out.
lane_products() {
  family "matmul" 60 '-sf=*test_matmul.cpp' '-tce=matmul: every height*,matmul: fast CPU*,matmul: * neighbours are one*'
  family "neighbouring products" 30 '-tc=matmul: * neighbours are one*'
  family "cross entropy, distill" 60 '-sf=*test_cross_entropy.cpp,*test_distill.cpp'
  family "eight bits" 60 '-sf=*test_quantize.cpp,*test_eight_bits.cpp'
  family "algorithms, resuming" 60 '-sf=*test_arithmetic.cpp'
}
lane_attention() {
  family "attention" 90 '-sf=*test_attention.cpp,*test_attention_masks.cpp' '-tce=attention: narrow heads*,attention: fast CPU*,attention: reference*,attention: the gradients do not depend*'
  family "rope, positions, embedding" 40 '-sf=*test_rope.cpp,*test_positions.cpp,*test_embedding.cpp'
  family "norms, softmax" 50 '-sf=*test_rmsnorm.cpp,*test_layernorm.cpp,*test_softmax.cpp,*test_top_k.cpp'
  family "elementwise" 40 '-sf=*test_swiglu.cpp,*test_gelu.cpp,*test_add.cpp,*test_bias.cpp,*test_squared_error.cpp'
  family "optimizer" 40 '-sf=*test_adamw.cpp,*test_gradient_norm.cpp,*test_convert.cpp,*test_clip.cpp,*test_sum_slices.cpp'
}
lane_depth() {
  family "route" 60 '-sf=*test_route.cpp'
  family "depth, value, query mixes" 60 '-sf=*test_depth_mix.cpp,*test_value_mix.cpp,*test_query_mix.cpp'
  family "heads" 60 '-sf=*test_head_mix.cpp,*test_head_scale.cpp,*test_select_heads.cpp,*test_gate.cpp,*test_channel_gate.cpp,*test_engram_gate.cpp'
  family "multiway" 60 '-sf=*test_multiway_mix.cpp'
}
lane_hyper() {
  family "hyper" 60 '-sf=*test_hyper.cpp,*test_hyper_write.cpp'
  family "mhc, gated streams" 60 '-sf=*test_mhc.cpp,*test_gated_streams.cpp'
}
lane_models() {
  family "recorded steps" 60 '-tc=models: a step from a GPU*,train: a recorded step*,train: no step waits*,train: a GPU?s losses*'
  family "models in f32" 60 '-tc=models: the fast kernels*,models: the first micro-step*'
  family "models in bf16" 80 '-sf=*test_models_bf16.cpp'
}
lane_real() {
  THREADS=6 family "real sizes: attention" 100 '-tc=real sizes: attention'
  THREADS=6 family "real sizes: matmul, cross entropy" 60 '-tc=real sizes: matmul,real sizes: cross_entropy*'
  THREADS=6 family "real sizes: the same bits" 80 '-tc=real sizes: training steps have the same bits*'
}
lane_memcheck() {
  sanitize memcheck "attention" 60 '-tc=attention: the warpgroup*,attention: gradients are set*'
  sanitize memcheck "embedding, loss, norms" 50 '-tc=embedding*,cross_entropy: the fast*,rmsnorm: *equal*'
}
# The first losses beside the CPU's of stage.sh. A difference that grows from step to step is an error, or chaos; the
# first one is neither.
lane_losses() {
  local dtype from=$here
  if [ -n "$DRY" ]; then
    from=$W
    for dtype in fp32 bf16; do "$here/losses.sh" cpu $dtype "$here/losses_text.txt" >"$W/losses_cpu_$dtype.txt" 2>/dev/null; done
  fi
  for dtype in fp32 bf16; do
    # shellcheck disable=SC2016
    step "20 losses of 124M, $dtype" 60 bash -c '"$0" "$@" >"$W/losses_$2.txt"' "$here/losses.sh" "$device" $dtype "$here/losses_text.txt"
  done
  say "$(paste -d' ' "$from/losses_cpu_fp32.txt" "$W/losses_fp32.txt" "$from/losses_cpu_bf16.txt" "$W/losses_bf16.txt" |
    awk 'BEGIN {print "            step  CPU fp32      here        CPU bf16      here"}
      {printf "            %4d  %9.6f  %9.6f     %9.6f  %9.6f\n", $1, $2, $4, $6, $8
       d = $4 - $2; e = $8 - $2; c = $6 - $2; d *= d < 0 ? -1 : 1; e *= e < 0 ? -1 : 1; c *= c < 0 ? -1 : 1
       if (d > D) D = d; if (e > E) E = e; if (c > C) C = c; n += $1 == $3 && $1 == $5 && $1 == $7}
      END {printf "            farthest from the CPU in fp32: here in fp32 %.1e, in bf16 %.1e; the CPU in bf16 %.1e%s", D, E, C, n == 20 ? "" : "; CANNOT be compared: not 20 lines each"}')"
}

attention_of_torch() { # NAME: nothing, where it is not PyTorch
  grep -ah "^PyTorch's attention" "$W/log/serve.$1.err.log" | sed 's/^/            /' | tee -a "$OUT/summary.txt"
}
measure_1b() { # NAME LIMIT: of a program that serve has started; it may take so many seconds until it is ready
  if await "$1" "$2"; then
    attention_of_torch "$1"
    ask "$1" 3 30 $t1b $f1b
    ask "$1" 8 30 $t1b $f1b
  fi
  stop "$1"
}
counters() { # KERNELS LIMIT COMMAND...
  local kernels=$1 limit=$2
  shift 2
  command -v ncu >/dev/null || return
  # shellcheck disable=SC2016
  step "ncu: $kernels" "$limit" bash -c 'echo 1 | ncu --clock-control none --section SpeedOfLight --section ComputeWorkloadAnalysis --section WarpStateStats --section Occupancy -k "regex:$0" -c 8 "$@"' \
    "$kernels" "$@"
  grep -aE '^ {2}[a-z_A-Z].*\(|Duration|Compute \(SM\) Throughput|Memory Throughput|DRAM Throughput|SM Busy|Achieved Occ|No Eligible|Registers Per' "$last_log" | cut -c1-140 >>"$OUT/ncu.txt"
}

first() {
  local l
  step "the GPU copies" 30 "$BIN/bench" gpu --device "$device" --only machine --no-torch --json "$OUT/machine.json"
  show 'GB/s read and written|within the L2'
  serve torch124 "${torch[@]}" "${m124[@]}" # compiles while the tests run
  [ -n "$DRY" ] || hopper
  begin_lanes 130
  if [ -n "$DRY" ]; then
    in_lane losses lane_losses
    in_lane models family "a few" 100 '-tc=models: a step from a GPU*,matmul: on a GPU*'
  else
    for l in products losses attention depth hyper models real memcheck; do in_lane $l lane_$l; done
  fi
  wait_lanes
  # From here on nothing else runs.
  serve own124 "${own[@]}" "${m124[@]}"
  if await own124 40; then
    ask own124 10 30 $t124 $f124
    [ -n "$DRY" ] || say "            $(timeout 5 nvidia-smi --query-gpu=clocks.sm,power.draw,temperature.gpu --format=csv,noheader)"
    ask own124 20 30 $t124 $f124
  fi
  if await torch124 25; then
    attention_of_torch torch124
    ask torch124 10 30 $t124 $f124
    ask torch124 20 30 $t124 $f124
    ask own124 20 30 $t124 $f124
  fi
  stop own124
  stop torch124
  step "attention by shape" 75 "$BIN/bench" gpu --device "$device" --only attention --json "$OUT/attention.json"
  show '^ *(64|96|128) x '
  serve own1b "${own[@]}" "${m1b[@]}"
  measure_1b own1b 45
  [ -n "$DRY${CROSSPLY_NO_HOPPER:-}" ] || step "hopper: rates" 20 "$BIN/tests" -d '-tc=hopper: rates*'
  step "products by shape" 75 "$BIN/bench" gpu --device "$device" --only products --json "$OUT/products.json"
  show '^ *[0-9]+ x [0-9]+ x '
  random_tokens "$W/tokens.bin" 300000 $vocab
  step "profile by op, 124M" 40 "$BIN/train_llama" --device "$device" --dtype bf16 --data "$W/tokens.bin" --eval-samples 4 \
    "${m124[@]}" --steps 5 --warmup 1 --profile --out "$W/profiled"
  tail -n 40 "$last_log" | cut -c1-140 >"$OUT/profile.txt"
  [ -n "$DRY" ] || counters 'attention_.*kernel|loss_kernel' 60 "$BIN/bench" serve --device cuda --dtype bf16 "${wide[@]}"
}

# -----------------------------------------------------------------------------------------------------------------
# The second call.

lane_gradients() {
  export OMP_NUM_THREADS=5
  if [ -n "$DRY" ]; then
    gradients "tiny" lime 2 32 256 --width 32 --layers 2 --heads 4 --kv-heads 2 --ffn 48
    return
  fi
  gradients "C=768, T=1024" lime 4 1024 50257 --width 768 --layers 4 --heads 12 --kv-heads 4 --ffn 2048
  gradients "several chunks of logits" llama 12 1024 50257 --width 64 --layers 1 --heads 1 --ffn 128
}
lane_wide() {
  OMP_NUM_THREADS=5 gradients "rows of 1B, T=2048" llama 1 2048 50257 --width 2048 --layers 1 --heads 32 --kv-heads 8 --ffn 8192
}
lane_resume() {
  export OMP_NUM_THREADS=2
  local dtype sizes=(--width 768 --layers 4 --heads 12 --kv-heads 4 --ffn 2048 --seq 512 --batch 4 --vocab 8192)
  [ -z "$DRY" ] || sizes=(--width 32 --layers 2 --heads 4 --kv-heads 2 --ffn 48 --seq 32 --batch 2 --vocab 256)
  random_tokens "$W/r.bin" 65536 "${sizes[-1]}"
  for dtype in bf16 fp32; do
    step "resuming, $dtype: the same bits" 60 "$here/resume.sh" "$BIN/train_lime" --device "$device" --dtype $dtype --data "$W/r.bin" "${sizes[@]}"
  done
  [ -n "$DRY" ] || step "fp8: trains" 40 "$BIN/train_llama" --device "$device" --dtype bf16 --matmul fp8 --data "$W/r.bin" "${sizes[@]}" \
    --steps 30 --warmup 5 --out "$W/fp8"
}
lane_block() { THREADS=4 family "real sizes of blocks" 100 '-tc=real sizes: norms*,real sizes: rope*,real sizes: embedding*,real sizes: adamw*,real sizes: add*,real sizes: bias*'; }
lane_deep() { THREADS=4 family "real sizes of depth" 100 '-tc=real sizes: depth*,real sizes: route*,real sizes: multiway*,real sizes: hyper*,real sizes: head_mix*,real sizes: values*'; }
lane_turns() { THREADS=2 family "real sizes: models take turns" 60 '-tc=real sizes: models take turns*'; }
lane_race() {
  sanitize racecheck "attention" 60 '-tc=attention: gradients are set*'
  sanitize synccheck "attention" 40 '-tc=attention: the warpgroup*'
}
second() {
  local l f filters
  serve torch1b "${torch[@]}" "${m1b[@]}"
  if [ -n "${RETEST:-}" ]; then
    IFS=, read -ra filters <<<"$RETEST"
    begin_lanes 100
    for f in "${filters[@]}"; do
      in_lane "retest_${f//[^a-zA-Z0-9]/}" family "again: $f" 60 "-tc=$f"
      [ -n "$DRY" ] || in_lane "memcheck_${f//[^a-zA-Z0-9]/}" sanitize memcheck "again: $f" 60 "-tc=$f"
    done
    wait_lanes
  fi
  begin_lanes 115
  if [ -n "$DRY" ]; then
    for l in gradients resume; do in_lane $l lane_$l; done
  else
    for l in gradients wide resume block deep turns race; do in_lane $l lane_$l; done
  fi
  wait_lanes
  measure_1b torch1b 60
  serve own1b "${own[@]}" "${m1b[@]}"
  measure_1b own1b 45
  if [ -z "$DRY" ]; then
    serve own1b8 "${own[@]}" "${m1b[@]}" --matmul fp8
    measure_1b own1b8 45
  fi
  step "architectures" 80 "$BIN/bench" gpu --device "$device" --rounds 3 --only architectures --no-torch --json "$OUT/architectures.json"
  tail -n 45 "$last_log" | cut -c1-150 >"$OUT/architectures.txt"
  step "ops" 45 "$BIN/bench" gpu --device "$device" --rounds 1 --only ops --no-torch --json "$OUT/ops.json"
  # 13 GB, so when PyTorch's are free.
  [ -n "$DRY" ] || family "more elements than an int counts" 90 '-tc=more elements than an int counts: *'
}

# -----------------------------------------------------------------------------------------------------------------
# The third call: the same batches and as many steps for both, on text that is read four times at most.

third() {
  local arch rate seconds=0 steps tokens text=$here/text run of_step=$t124
  [ -e "$text/manifest.json" ] || { say "            CANNOT: there is no text/ beside this script: dev/gpu/stage.sh third" && exit; }
  run=(--device "$device" --dtype bf16 --data "$text" --lr 6e-4 --clip 1 --width 768 --layers 12 --heads 12 --ffn 2048 --seq 1024 --batch 32)
  [ -z "$DRY" ] || { run=(--device cpu --data "$text" --width 32 --layers 2 --heads 2 --ffn 48 --seq 32 --batch 2); }
  for arch in llama lime; do
    step "$arch: how fast" 60 "$BIN/train_$arch" "${run[@]}" --steps 30 --warmup 2 --eval-every 30 --eval-samples 8 --save-every 30 --out "$W/speed_$arch" || exit
    rate=$(grep -oE '"tokens_per_s":[0-9.e+]+' "$W/speed_$arch/metrics.jsonl" | cut -d: -f2 | tail -9 | sort -g | sed -n 5p)
    [ -n "$rate" ] || { say "            CANNOT: no rate in metrics.jsonl of $arch" && exit; }
    seconds=$(awk -v s="$seconds" -v t="$of_step" -v r="$rate" 'BEGIN {print s + t / r}') # a step of both
    rm -rf "$W/speed_$arch"
  done
  tokens=$(grep -oE '[0-9,]+ training tokens' "$last_log" | head -1 | tr -dc 0-9)
  steps=$(awk -v left="$(left)" -v s="$seconds" -v n="$tokens" -v t="$of_step" -v dry="$DRY" 'BEGIN {
    most = int(4 * n / t); steps = int((left - 60) / (1.15 * s)); if (steps > most) steps = most
    if (dry != "" && steps > 20) steps = 20
    print steps}')
  say "            $steps steps, $(awk -v n="$steps" -v t="$of_step" -v all="$tokens" 'BEGIN {printf "%.2f epochs", n * t / all}'), $seconds s for one of both"
  [ "$steps" -ge 20 ] || { say "            CANNOT: too little time" && exit; }
  for arch in llama lime; do
    step "$arch: $steps steps" $(($(left) - 15)) "$BIN/train_$arch" "${run[@]}" --steps "$steps" --warmup $((steps / 20 + 1)) --eval-every $((steps / 20)) \
      --save-every "$steps" --out "$W/$arch"
    cp "$W/$arch/metrics.jsonl" "$OUT/$arch.metrics.jsonl"
  done
  step "a figure" 30 "$BIN/curves" llama="$W/llama" lime="$W/lime" --out "$OUT/curves.svg"
}

$phase
