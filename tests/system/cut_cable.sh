#!/usr/bin/env bash
# Two ranks on two "hosts", network namespaces joined by a cable, which is cut while they work: both must end with 76 by
# their own clocks. Needs root and ip netns, else 77: skipped.     tests/system/cut_cable.sh BUILD_DIRECTORY
set -euo pipefail
tests=$(realpath "${1:-build}")/tests
skip() { echo "skipped: $*"; exit 77; }
[ "$(id -u)" = 0 ] || skip "network namespaces need root"
command -v ip >/dev/null || skip "there is no ip (iproute2)"

name=crossply$$ work=$(mktemp -d) ranks=()
end() {
  [ ${#ranks[@]} = 0 ] || kill -KILL "${ranks[@]}" 2>/dev/null || true
  ip netns del ${name}a 2>/dev/null || true
  ip netns del ${name}b 2>/dev/null || true
  rm -rf "$work"
}
trap end EXIT
{ ip netns add ${name}a && ip netns add ${name}b; } 2>/dev/null || skip "ip netns add is not allowed here"
ip -n ${name}a link add v0 type veth peer name v1 netns ${name}b 2>/dev/null || skip "there are no virtual cables here"
ip -n ${name}a addr add 10.97.0.1/24 dev v0
ip -n ${name}b addr add 10.97.0.2/24 dev v1
ip -n ${name}a link set v0 up
ip -n ${name}b link set v1 up

export MASTER_ADDR=10.97.0.1 MASTER_PORT=29411
unset TORCHELASTIC_RUN_ID
for rank in 0 1; do
  RANK=$rank ip netns exec $name$([ $rank = 0 ] && echo a || echo b) \
    "$tests" --no-skip --test-case='one end of a cable*' >"$work/$rank" 2>&1 &
  ranks+=($!)
done
for rank in 0 1; do
  timeout 30 bash -c "until grep -q joined $work/$rank; do sleep 0.05; done" ||
    { cat "$work"/*; echo "rank $rank has not joined"; exit 1; }
done
sleep 0.3
ip -n ${name}b link set v1 down
cut=$(date +%s%N)
for rank in 0 1; do
  code=0
  for ((i = 0; i < 300; ++i)); do kill -0 ${ranks[rank]} 2>/dev/null && sleep 0.05 || break; done
  took=$((($(date +%s%N) - cut) / 1000000))
  wait ${ranks[rank]} || code=$?
  echo "rank $rank ended with $code after $took ms: $(tail -n 1 "$work/$rank")"
  [ $code = 76 ] || exit 1
  [ $took -lt 5000 ] || exit 1  # --peer-timeout is 3 s there, and 2 s more
  grep -q "rank $((1 - rank)) is lost.*silent for 3 s" "$work/$rank" || exit 1
done
ranks=()
