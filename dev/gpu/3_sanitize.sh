#!/usr/bin/env bash
# compute-sanitizer over the tests of every kernel, a family at a time, so that a slow one loses itself only.
#   TOOLS=racecheck dev/gpu/3_sanitize.sh      one of memcheck, racecheck, initcheck, synccheck again
. "$(dirname "${BASH_SOURCE[0]}")/common.sh"
build tests
export CROSSPLY_TEST_ZONE=0  # no room beside the arrays, so that memcheck sees what is written there
command -v compute-sanitizer >/dev/null || { step "sanitizers" 5 compute-sanitizer; finish; }
declare -A limit=([memcheck]=45 [racecheck]=30 [initcheck]=20 [synccheck]=20)
for tool in ${TOOLS:-memcheck racecheck initcheck synccheck}; do
  for family in 'attention*' 'matmul*' 'cross_entropy: *' 'route*,select_heads*' 'rmsnorm*,layernorm*,softmax*' \
    'embedding*,rope*,swiglu*,gelu*,add:*,gate*' 'adamw*,gradient_norm*,convert*' 'depth_mix*,value_mix*' 'hyper*' \
    'multiway_mix*,head_mix*,head_scale*'; do
    step "$tool: $family" "${limit[$tool]:-60}" compute-sanitizer --tool "$tool" --error-exitcode 99 \
      "$BIN/tests" -d "-tc=$family"
  done
done
finish
