#!/usr/bin/env bash
# An installation: every file has its place, the installed programs train and go on, another version replaces the first,
# and uninstalling leaves nothing but what was there before.
#   tests/system/test_install.sh BUILD
set -uo pipefail
tree=$(cd "$(dirname "$0")/../.." && pwd)
. "$(dirname "$0")/../support/expect.sh"
start_in_scratch "$1" 2
[ -x "$build/crossply" ] || { echo "skipped: $build/crossply is not built"; exit 77; }
prefix="$work/a prefix"
version=$(sed -nE 's/^project\(crossply VERSION ([0-9.]+) .*/\1/p' "$tree/CMakeLists.txt")
# The list of what is installed, which `cmake --install` writes, is the user's own.
keep=$build/install_manifest.txt
[ ! -e "$keep" ] || cp "$keep" manifest
trap 'if [ -e "$work/manifest" ]; then cp "$work/manifest" "$keep"; else rm -f "$keep"; fi; rm -rf "$work"' EXIT
put() { cmake --install "$build" --prefix "$1" >output 2>&1 || { fail "cmake --install failed"; exit 1; }; }
remove() { cmake -DPREFIX="$1" -P "$tree/dev/uninstall.cmake" >output 2>&1 || fail "uninstalling failed"; }

mkdir -p "$prefix/bin" "$prefix/share" && echo mine >"$prefix/bin/mine"
put "$prefix"
home="$prefix/libexec/crossply"
for file in bin/crossply libexec/crossply/{crossply,train_lime,compare,score,lm_eval_crossply.py,tasks/sums.yaml} \
  share/doc/crossply/{LICENSE,NOTICE} share/bash-completion/completions/crossply share/zsh/site-functions/_crossply; do
  [ -e "$prefix/$file" ] || fail "$file is not installed"
done
[ ! -e "$build/comm_mpi.so" ] || [ -e "$home/comm_mpi.so" ] || fail "comm_mpi.so is not installed"
[ "$(ls "$prefix/bin")" = $'crossply\nmine' ] || fail "bin has more than crossply: $(ls "$prefix/bin")"
if command -v help2man >/dev/null; then
  page="$prefix/share/man/man1/crossply-train_lime.1"
  grep -q "^\.TH CROSSPLY-TRAIN_LIME \"1\" .* \"crossply $version, " "$page" || fail "the man page has another name"
  grep -q '^crossply-train_lime \\- Trains lime: ' "$page" || fail "the man page says nothing of its program"
  grep -qF '\-\-weight\-decay' "$page" || fail "the man page lacks flags"
fi
# Where help2man is not, everything else is installed.
cmake -DCMAKE_INSTALL_PREFIX="$work/bare" -DHELP2MAN= -DPROGRAMS=train_lime -P "$tree/dev/install_last.cmake" >output 2>&1
grep -q 'No man pages: help2man is not here' output || fail "without help2man"
[ "$(cat bare/libexec/crossply/files.txt)" = libexec/crossply/files.txt ] || fail "files without help2man"
# Everything is named, but for the list of names.
(cd "$prefix" && find . ! -type d ! -path ./bin/mine | sed 's|^\./||' | sort) >found
sort "$home/files.txt" | diff - found >output || fail "files.txt is not what is installed"

crossply="$prefix/bin/crossply"
expect 0 "^crossply $version, commit " "$crossply" --version
expect 0 '^  analyze average compare ' "$crossply" --help
expect 0 "^crossply train_lime \(crossply\) $version, commit " "$crossply" train_lime --version
expect 0 '^Usage: crossply generate ' "$crossply" generate --help
expect 64 '^error: name a program$' "$crossply"
expect 64 "^error: there is no program 'trian'$" "$crossply" trian
expect 64 'unknown flag --stpes' "$crossply" train_lime --stpes 3
tiny=(--data arith:3 --train-samples 400 --test-samples 50 "${sizes[@]}" --answer-samples 4)
expect 0 'step 2: test loss' "$crossply" train_lime "${tiny[@]}" --steps 2 --out run
expect 0 'step 3: test loss' "$crossply" train_lime --resume --steps 3 --out run
expect 0 'perplexity' "$home/evaluate" --model run --data arith:3
expect 0 '^next: .*bin/crossply.* generate --model' "$crossply" compare --arch llama,lime "${tiny[@]}" --steps 1 --out both

# The completion asks the program that is on the command line.
complete_words() {
  crossply="$crossply" bash -c '. "$0/share/bash-completion/completions/crossply"
    COMP_WORDS=("$crossply" "${@}") COMP_CWORD=$#; _crossply; echo "${COMPREPLY[@]}"' "$prefix" "$@"
}
[ "$(complete_words train_lime_)" = 'train_lime_dynamic train_lime_static' ] || fail "programs: $(complete_words train_lime_)"
[[ " $(complete_words train_lime --st) " == *' --steps '* ]] || fail "flags: $(complete_words train_lime --st)"
if command -v zsh >/dev/null; then
  words=$(zsh -f -c 'compadd() { shift; print -r -- "$@"; }
    words=("$1" "${@[3,-1]}") CURRENT=$((# - 1)); . "$2"' zsh "$crossply" "$prefix/share/zsh/site-functions/_crossply" \
    train_lime --st)
  [[ " $words " == *' --steps '* && " $words " == *' --weight-decay '* ]] || fail "flags in zsh: $words"
fi

# A file of an older version goes; what is not ours stays.
ln -s crossply "$home/train_old" && echo libexec/crossply/train_old >>"$home/files.txt"
put "$prefix"
[ ! -L "$home/train_old" ] || fail "a program of the older version is still there"
mkdir "$home/tasks/__pycache__" && touch "$home/tasks/__pycache__/data.pyc"
remove "$prefix"
[ "$(find "$prefix" | sort)" = "$(printf '%s\n' "$prefix" "$prefix/bin" "$prefix/bin/mine")" ] ||
  fail "uninstalling left: $(find "$prefix")"
! cmake -DPREFIX="$prefix" -P "$tree/dev/uninstall.cmake" >output 2>&1 && grep -q 'not installed in' output ||
  fail "uninstalling twice"

# A prefix may be relative.
put relative
[ -e relative/bin/crossply ] && grep -qx bin/crossply relative/libexec/crossply/files.txt || fail "a relative prefix"
remove relative
[ "$(find relative)" = relative ] || fail "a relative prefix: uninstalling left $(find relative)"

export DESTDIR=$work/staged
put /usr
[ "$(ls staged) $(ls staged/usr/bin)" = "usr crossply" ] || fail "DESTDIR: $(find staged)"
remove /usr
[ "$(find staged)" = $'staged\nstaged/usr' ] || fail "DESTDIR: uninstalling left $(find staged)"
unset DESTDIR
expect 0 '^cmake -DPREFIX="a" ' env -C "$tree" make -n uninstall PREFIX=a
expect 0 '^cmake --install build-none --prefix "a"' env -C "$tree" make -n install BUILD=build-none PREFIX=a
conclude install
