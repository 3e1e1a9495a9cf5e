#!/usr/bin/env bash
# tests/lint.sh finds what it is for: a little tree with one breach of each rule.
set -euo pipefail
lint=$(cd "$(dirname "$0")" && pwd)/lint.sh
tree=$(mktemp -d)
trap 'rm -rf "$tree"' EXIT
cd "$tree"
mkdir -p engine cli docs/papers models kernels/block kernels/cuda ranks tests train
echo '#include "models/X.h"' >engine/upwards.h
printf '%s\n' '#include <algorithm>' '#include "kernels/block/X.h"' >engine/up.cu
echo '#include "kernels/block/X.h"' >models/raw.cpp
echo '#include <cuda_runtime.h>' >cli/gpu.cpp
for name in mpi nccl; do tee "ranks/comm_$name.cpp" >"ranks/$name.cpp" <<<"#include <$name.h>"; done
echo '#include <cstdint>' | tee models/X.h kernels/block/X.h kernels/block/X.cu >kernels/block/tested.h
touch kernels/block/tested.cpp kernels/block/tested.cu
printf '\n%.0s' {1..601} >train/long.cpp
printf '\n%.0s' {1..600} >train/fits.cpp
printf '\n%.0s' {1..901} >train/long_by_hand.cpp
printf '\n%.0s' {1..900} >train/fits_by_hand.cpp
printf '\n%.0s' {1..601} >tests/test_long_by_hand.cpp
printf '%s\n' '#include <vector>' '#include "train/X.h"' | tee train/X_by_hand.cpp >tests/test_X_by_hand.cpp
printf 'x%.0s' {1..121} >models/wide.cpp
printf 'x%.0s' {1..121} | tee README.md >docs/papers/wide.md
printf 'x%.0s' {1..120} >docs/walk.md
printf 'int a; \n' >cli/space.h
printf '\tint a;\n' >cli/tab.h
printf '// see engine/gone%s\n' .h >cli/comment.h
echo 'int least_rows, most_likely;' >models/words.h
echo 'int narrow_only, narrow_heads, of_lanes, planes;' >models/names.h
printf '%s\n' 'template <class T> struct Wide;' 'void write(bool acc_q, float acc);' 'int lanes, tick;' >engine/names.h
mkdir -p data/bpe eval train/settings
touch data/{1..6}.h data/bpe/{1..5}.h eval/{1..6}.h train/settings/{1..6}.h
printf '\n%.0s' {1..20} >eval/README.md
echo 'May include: engine.' >>eval/README.md
gone=gone.h dot_h=.h home=home tab=$'\t'
echo "// see /$home/someone/notes" >cli/path.h

output=$("$lint" "$tree") && { echo "lint found nothing"; exit 1; }
expected="README.md:1: a line of more than 120 characters
cli/comment.h:1: engine/${gone}: is named here, but is not there
cli/gpu.cpp:1:#include <cuda_runtime.h>: only .cu, .cuh and kernels/cuda/ may include CUDA
cli/path.h:1:// see /$home/someone/notes: a path of one machine
cli/space.h:1:int a; : trailing space
cli/tab.h:1:${tab}int a;: a tab
data/README.md: is missing, but data has more than five files
docs/papers/wide.md:1: a line of more than 120 characters
engine/names.h:1:Wide: write accumulation_type
engine/names.h:2:bool acc_q: write overwrite or accumulate
engine/names.h:3:tick: write time
engine/up.cu:2: engine may not include kernels/block
engine/upwards.h:1: engine may not include models
eval/README.md: it must say: May include: engine, engine/io, kernels, kernels/block, kernels/attention, kernels/optim, ranks, cli, data, models, models/disk, models/batch.
eval/README.md: more than 20 lines
kernels/block/X.h: kernels/block/X.cpp is missing
kernels/block/X.h: tests/kernels/test_X.cpp is missing
kernels/block/tested.h: tests/kernels/test_tested.cpp is missing
models/names.h:1:narrow_only: write bf16_copy or bf16_only
models/names.h:1:of_lanes: write replica
models/raw.cpp:1:#include \"kernels/block/X.h\": models/ may include a kernel's ops.h only
models/wide.cpp:1: a line of more than 120 characters
models/words.h:1:least_rows: write max_x or min_x
ranks/mpi.cpp:1:#include <mpi$dot_h>: only ranks/comm_mpi.cpp may include MPI
ranks/nccl.cpp:1:#include <nccl$dot_h>: only ranks/comm_nccl.cpp may include NCCL
tests/test_long_by_hand.cpp: 601 lines, more than 600
train/ holds 82 % of the code, more than 30
train/X_by_hand.cpp:2:#include \"train/X.h\": a by-hand file includes no header of the project: write what it needs into the file
train/long.cpp: 601 lines, more than 600
train/long_by_hand.cpp: 901 lines, more than 900
train/settings/README.md: is missing, but train/settings has more than five files"
found=$(sed -n 's/^lint: //p' <<<"$output" | grep -v ' breaches$' | LC_ALL=C sort)
[ "$found" = "$expected" ] || { diff <(echo "$expected") <(echo "$found"); exit 1; }
echo "lint finds each breach, and nothing else"
