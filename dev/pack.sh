#!/usr/bin/env bash
# Packs what a build with CROSSPLY_PACK made into BUILD/crossply-COMMIT-MACHINE.tar.xz, with all that its programs need.
#   dev/pack.sh BUILD MACHINE PROGRAM...      `make pack` calls it; the programs become links to BUILD/crossply
set -euo pipefail
cd "$(dirname "$0")/.."
build=$1 machine=$2
shift 2

for tool in objdump xz; do
  command -v $tool >/dev/null || { echo "pack: $tool is not here: install it (binutils, xz-utils)"; exit 1; }
done
stage=$build/stage
rm -rf "$stage" "$build"/crossply-*.tar.xz
mkdir -p "$stage/bin"
binaries=(crossply lime_by_hand)
[[ $machine != *-cuda* ]] || binaries+=(tests)
for binary in "${binaries[@]}"; do cp "$build/$binary" "$stage/bin"; done
binaries=("${binaries[@]/#/$stage/bin/}")
for program in "$@"; do ln -s crossply "$stage/bin/$program"; done
commit=$("$stage/bin/generate" --version)
name=crossply-${commit##* }-$machine

# Of the machine that it was built on nothing may stay: no path, no library but glibc's.
if grep -aqF "$PWD" "${binaries[@]}"; then
  grep -alF "$PWD" "${binaries[@]}" | sed "s|.*/|pack: the path $PWD is in |"
  exit 1
fi
needed=$(objdump -p "${binaries[@]}" | awk '/NEEDED/ {print $2}' | sort -u)
if grep -vE '^(ld-linux.*|lib(c|m|dl|rt|pthread)\.so\..*)$' <<<"$needed" | sed 's/^/pack: needs more than glibc: /' | grep .; then
  exit 1
fi
glibc=$(objdump -T "${binaries[@]}" | grep -oE 'GLIBC_[0-9.]+' | sed 's/GLIBC_//' | sort -Vu | tail -1)

mkdir -p "$stage/dev"
cp -r README.md docs LICENSE dev/NOTICE "$stage"
cp dev/bench_torch*.py dev/bench_llmc.* "$stage/dev"
[ ! -d dev/gpu ] || cp -r dev/gpu dev/ranks.sh "$stage/dev"
cuda=
case $machine in
  *-cuda*)
    cuda="
With a GPU: a driver for CUDA ${machine##*-cuda}, and its cuBLAS (libcublasLt.so.${machine##*-cuda}), which is looked for where the loader
looks (LD_LIBRARY_PATH), in lib/ here, in CUDA_HOME, in /usr/local/cuda, and where pip puts it for a Python of PATH. With
several GPUs: NCCL (libnccl.so.2), from the same places.

    bin/tests && bin/bench gpu           # every kernel and model against the CPU's, then their speed
    bin/train_lime --device cuda ..."
    ;;
esac
cat >"$stage/START.md" <<EOF
$name: needs nothing but Linux with glibc $glibc or newer$([[ $machine != *x86_64* ]] || echo ', and a CPU with AVX2').

    bin/compare --out runs/compare       # trains LLaMA and LIMe for two minutes, ends with a table and a picture
    bin/train_lime --help                # README.md and docs/ say more; where they say build/, here it is bin/
$cuda
EOF

tar -C "$build" --sort=name --owner=0 --group=0 --numeric-owner --transform="s|^stage|$name|" -c stage | xz -9 >"$build/package.part"
mv "$build/package.part" "$build/$name.tar.xz"
echo "$build/$name.tar.xz: $(($(stat -c %s "$build/$name.tar.xz") / 1000)) kB, glibc $glibc or newer"
