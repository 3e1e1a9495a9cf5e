#!/usr/bin/env bash
# compute-sanitizer over the tests of every kernel, a family at a time, so that a slow one loses itself only.
#   TOOLS=racecheck dev/gpu/long/sanitize.sh      one of memcheck, racecheck, initcheck, synccheck; without: all
. "$(dirname "${BASH_SOURCE[0]}")/../steps.sh"
command -v compute-sanitizer >/dev/null || { step "sanitizers" 5 compute-sanitizer; exit; }
declare -A limit=([memcheck]=45 [racecheck]=30 [initcheck]=20 [synccheck]=20)
for tool in ${TOOLS:-memcheck racecheck initcheck synccheck}; do
  for family in 'attention*' 'matmul*' 'cross_entropy: *' 'route*,select_heads*' 'rmsnorm*,layernorm*,softmax*' \
    'embedding*,rope*,swiglu*,gelu*,add:*,gate*' 'adamw*,gradient_norm*,convert*' 'depth_mix*,value_mix*' 'hyper*' \
    'multiway_mix*,head_mix*,head_scale*'; do
    sanitize "$tool" "$family" "${limit[$tool]:-60}" "-tc=$family"
  done
done
