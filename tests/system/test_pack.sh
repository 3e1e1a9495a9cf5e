#!/usr/bin/env bash
# The programs on a machine that has nothing but glibc: no compiler, no repository, no CUDA, not even /proc. In an empty
# root they train, resume, evaluate and generate on the CPU, and say that there is no GPU.
#   tests/system/test_pack.sh BUILD      of the package, where `make pack` has made one there, else of the programs as built
set -uo pipefail
build=$(cd "$1" && pwd)
PATH=$PATH:/usr/sbin:/sbin  # of chroot
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
failures=0
skip() {
  echo "$*: skipped"
  exit 77
}
[ "$(uname)" = Linux ] || skip "an empty root needs Linux"
# Which looks for leaks by way of /proc, and reads there that it need not.
! grep -q '^CROSSPLY_SANITIZE:BOOL=ON' "$build/CMakeCache.txt" || skip "AddressSanitizer does not work in an empty root"
# Becoming root in a namespace of one's own is what allows a user to change the root.
alone=(unshare --user --map-root-user --mount)
"${alone[@]}" chroot / true 2>/dev/null || alone=(unshare --mount)
"${alone[@]}" chroot / true 2>/dev/null || skip "no right to change the root here"

mkdir -p "$root"/{crossply,tmp,dev,proc}
package=$(compgen -G "$build/crossply-*.tar.xz")
if [ -n "$package" ]; then
  tar -C "$root/crossply" --strip-components=1 -xf "$package" || exit 1
else
  mkdir "$root/crossply/bin"
  cp "$build"/{train_lime,compare,evaluate,generate,lime_by_hand} "$root/crossply/bin" || exit 1
fi
# What the loader loads, and the loader.
find "$root/crossply/bin" -type f -exec ldd {} + | grep -oE '/[^ ]+\.so[^ ]*' | sort -u >"$work/libraries"
while read -r library; do
  mkdir -p "$root${library%/*}"
  cp -L "$library" "$root$library"
done <"$work/libraries"
if [ -n "$package" ] && others=$(grep -vE '/(ld-linux[^/]*|lib(c|m|dl|rt|pthread)\.so\.[0-9])$' "$work/libraries"); then
  failures=$((failures + 1))
  echo "FAIL: the package needs more than glibc: $others"
fi

# expect CODE PATTERN PROGRAM ARGUMENT...: in the empty root.
enter=("${alone[@]}" chroot "$root")
expect() {
  local code=$1 pattern=$2 program=$3 got
  shift 3
  env -i PATH="$PATH" OMP_NUM_THREADS=2 "${enter[@]}" "/crossply/bin/$program" "$@" >"$work/output" 2>&1 </dev/null
  got=$?
  if [ $got != "$code" ] || ! grep -qE -- "$pattern" "$work/output"; then
    failures=$((failures + 1))
    echo "FAIL: exit code $got, want $code and a line that matches '$pattern': $program $*"
    sed 's/^/  | /' "$work/output" | tail -20
  fi
}
tiny=(--data arith:3 --train-samples 400 --test-samples 50 --width 16 --ffn 24 --layers 2 --heads 2 --batch 8
  --eval-samples 16 --answer-samples 4 --out /tmp/run)
expect 0 'step 4: test loss' train_lime "${tiny[@]}" --steps 4 --device cpu
expect 0 'step 8: test loss' train_lime --resume --steps 8 --out /tmp/run
expect 0 'perplexity' evaluate --model /tmp/run --data arith:3
expect 0 '= .+' generate --model /tmp/run --prompt '3 + 4 * 2 - 1 =' --max-new 8
expect 0 '^lime ' compare --arch llama,lime "${tiny[@]}" --steps 2 --out /tmp/compared
expect 71 'error: (no usable GPU|this build has no CUDA)' train_lime "${tiny[@]}" --device cuda --out /tmp/none
expect 64 'usage: ' lime_by_hand --help

if [ -n "$package" ]; then
  # The page names the glibc that a package built on Debian 12 needs; other systems' compilers ask for others.
  glibc=$(find "$root/crossply/bin" -type f -exec objdump -T {} + | grep -oE 'GLIBC_[0-9.]+' | sed 's/GLIBC_//' | sort -Vu | tail -1)
  page=$(grep -oE 'Debian 12 it needs glibc [0-9.]+' <(tr '\n' ' ' <docs/getting-started.md) | grep -oE '[0-9.]+$')
  if [ "$(. /etc/os-release && echo "$ID $VERSION_ID")" = 'debian 12' ] && [ "$glibc" != "$page" ]; then
    failures=$((failures + 1))
    echo "FAIL: the package needs glibc $glibc; docs/getting-started.md says ${page:-nothing}"
  fi
  commit=$(basename "$package" | cut -d- -f2)
  expect 0 "commit $commit" train_lime --version
  expect 64 '^  analyze average bench compare ' crossply
  expect 0 'perplexity' crossply evaluate --model /tmp/run --data arith:3
  expect 0 'rmsnorm' bench ops --rounds 1
  if [[ $package = *-cuda* ]]; then
    # The tests open files of the system's.
    # shellcheck disable=SC2016
    enter=("${alone[@]}" bash -c
      'mount --rbind /dev "$0/dev" && mount --rbind /proc "$0/proc" && exec chroot "$0" "$@"' "$root")
    expect 0 'Status: SUCCESS' tests
  fi
fi

[ "$failures" = 0 ] || exit 1
echo "all of it ran, with $(grep -c . "$work/libraries") libraries: $(sed 's|.*/||' "$work/libraries" | tr '\n' ' ')"
