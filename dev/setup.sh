#!/usr/bin/env bash
# Finds what building crossply needs and this machine lacks, and installs it with the system's package manager: as root,
# or through sudo where that asks no password. Where it may not, it prints the command to run and ends with exit code 1.
# `make run` and `make test` call it first. CXX chooses the compiler, as everywhere.
#   dev/setup.sh [--mpi]      --mpi: MPI as well, by which several processes train on CPUs; without it all else works
#   dev/setup.sh --check      installs nothing; one line and exit code 1 where something is missing
# Libraries may also lie in deps/: where nobody is root, this says how to fetch them.
set -euo pipefail

say() { echo "setup: $*"; }
deps=$(cd "$(dirname "$0")/.." && pwd)/deps

# Sets `compiler`: CXX, or the first C++ compiler there is.
find_compiler() {
  local candidate
  compiler=${CXX:-}
  for candidate in c++ g++ clang++; do
    if [ -z "$compiler" ] && command -v $candidate >/dev/null; then compiler=$candidate; fi
  done
  case ${compiler%% *} in
    "" | c++ | g++ | clang++) ;;  # a package brings these
    *) command -v "${compiler%% *}" >/dev/null || { say "there is no compiler $compiler (from CXX)"; exit 1; } ;;
  esac
}

# One word for each thing the compiler can see. A single run of the preprocessor answers everything.
ask_compiler() {
  local openmp=(-fopenmp) words given
  if [ "$(uname)" = Darwin ]; then openmp=(-Xpreprocessor -fopenmp "-I$(brew --prefix libomp 2>/dev/null)/include"); fi
  read -ra words <<<"$compiler"
  read -ra given <<<"${CPPFLAGS:-}"  # conda names its headers there
  "${words[@]}" -std=c++20 "${openmp[@]}" "${given[@]}" -isystem "$deps/usr/include" -E -P -x c++ - 2>/dev/null <<'EOF' || true
#include <version>
#if __cplusplus >= 202002L && defined(__cpp_lib_bit_cast) && defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector)
found_cxx20
#endif
#endif
#if defined(__clang__) && !defined(__apple_build_version__)
found_clang __clang_major__
#endif
#if defined(_OPENMP) && __has_include(<omp.h>)
found_openmp
#endif
#if __has_include(<doctest/doctest.h>)
found_doctest
#endif
#if __has_include(<nlohmann/json.hpp>)
found_json
#endif
#if __has_include(<CLI/CLI.hpp>)
found_cli11
#endif
#if __has_include(<pcre2.h>)
found_pcre2
#endif
#if __has_include(<zlib.h>)
found_zlib
#endif
#if __has_include(<zstd.h>)
found_zstd
#endif
EOF
}

cmake_is_new_enough() {  # 3.20 or later
  local version
  version=$(cmake --version 2>/dev/null) || return 1
  [[ $version =~ ([0-9]+)\.([0-9]+) ]] && [ $((BASH_REMATCH[1] * 1000 + BASH_REMATCH[2])) -ge 3020 ]
}

# Sets `missing`, a list of words, and `clang`, the version of clang, empty for another compiler.
look() {
  local need answers=""
  missing="" clang=""
  find_compiler
  if [ -n "$compiler" ]; then answers=$(ask_compiler); fi
  if [[ $answers =~ found_clang\ ([0-9]+) ]]; then clang=${BASH_REMATCH[1]}; fi
  for need in cxx20 openmp doctest json cli11 pcre2 zlib zstd; do
    [[ $answers == *found_$need* ]] || missing+=" $need"
  done
  command -v make >/dev/null || missing+=" make"
  cmake_is_new_enough || missing+=" cmake"
}

has_mpi() { mpicxx -E -include mpi.h -x c++ /dev/null && command -v mpirun; } >/dev/null 2>&1

find_manager() {
  for manager in apt-get dnf pacman brew none; do
    if command -v $manager >/dev/null; then break; fi
  done
  case $manager in
    apt-get) install="apt-get install -y --no-install-recommends" ;;
    dnf) install="dnf install -y" ;;
    pacman) install="pacman -S --needed --noconfirm" ;;
    brew) install="brew install" ;;
    none) say "missing:$missing; install them: no apt-get, dnf, pacman or brew is here to do it"; exit 1 ;;
  esac
}

# Prints the package that meets a need; nothing where another package brings it along.
package() {
  local kind=gcc
  if [[ $compiler == *clang* || -n $clang ]]; then kind=clang; fi
  case "$manager $kind $1" in
    brew*cxx20 | apt*gcc\ openmp | dnf*gcc\ openmp | pacman*gcc\ openmp) ;;  # Xcode's; with the compiler
    *clang\ cxx20) echo clang ;;
    apt*cxx20) echo g++ ;;
    dnf*cxx20) echo gcc-c++ ;;
    pacman*cxx20) echo gcc ;;
    apt*openmp) echo "libomp${clang:+-$clang}-dev" ;;
    dnf*openmp) echo libomp-devel ;;
    pacman*openmp) echo openmp ;;
    brew*openmp) echo libomp ;;
    apt*doctest) echo doctest-dev ;;
    apt*json) echo nlohmann-json3-dev ;;
    apt*cli11) echo libcli11-dev ;;
    apt*pcre2) echo libpcre2-dev ;;
    apt*zlib) echo zlib1g-dev ;;
    apt*zstd) echo libzstd-dev ;;
    dnf*pcre2) echo pcre2-devel ;;
    dnf*zlib) echo zlib-devel ;;
    dnf*zstd) echo libzstd-devel ;;
    apt*mpi) echo libopenmpi-dev openmpi-bin ;;
    dnf*mpi) echo openmpi-devel ;;
    pacman*mpi) echo openmpi ;;
    brew*mpi) echo open-mpi ;;
    dnf*doctest) echo doctest-devel ;;
    dnf*json) echo json-devel ;;
    dnf*cli11) echo cli11-devel ;;
    *json) echo nlohmann-json ;;
    *) echo "$1" ;;
  esac
}

# Libraries need no root, where apt-get is here. A compiler does.
say_without_root() {
  if [ "$manager" != apt-get ] || [[ " $missing " =~ \ (cxx20|openmp|make|cmake|mpi)\  ]]; then return; fi
  say "Or, without root, into deps/, where the build looks for them:"
  echo "  mkdir -p deps && (cd deps && apt-get download $*)"
  echo "  for file in deps/*.deb; do dpkg -x \$file deps; done"
}

# shellcheck disable=SC2086 # the words of a command are meant to split
install_missing() {
  local need packages="" root=""
  find_manager
  for need in $missing; do
    need=$(package "$need")
    packages+=${need:+ $need}
  done
  install+=$packages
  if [ $manager != brew ] && [ "$(id -u)" != 0 ]; then
    if ! sudo -n true 2>/dev/null; then
      say "missing:$missing. This needs to be run as root:"
      echo "  $install"
      say_without_root $packages
      exit 1
    fi
    root="sudo -n"
  fi
  say "missing:$missing. Running:${root:+ $root} $install"
  $root env DEBIAN_FRONTEND=noninteractive $install && return
  [ $manager = apt-get ] || return
  say "that failed; once more with fresh package lists"
  $root apt-get update && $root env DEBIAN_FRONTEND=noninteractive $install
}

old_compiler="the compiler must know C++20 and __builtin_shufflevector: g++ 12, clang++ 14 or later, by CXX=g++-12"
look
if [ "${1:-}" = --check ]; then
  if [ -z "$missing" ]; then exit 0; fi
  if [[ $missing == *cxx20* ]] && [ -n "$compiler" ]; then say "$compiler is too old: $old_compiler"; exit 1; fi
  say "missing:$missing; \`make setup\` installs it, or says how to go on without root"
  exit 1
fi
if [ -n "$missing" ]; then
  install_missing || say "the installation failed"
  look
fi
if [ -n "$missing" ]; then
  say "still missing:$missing (compiler: ${compiler:-none})"
  if [[ $missing == *cxx20* ]]; then say "$old_compiler"; fi
  exit 1
fi
say "nothing is missing (compiler: $compiler)"
if [ "${1:-}" = --mpi ] && ! has_mpi; then (missing=" mpi" && install_missing) || say "going on without MPI"; fi
if has_mpi; then say "MPI is here: $(command -v mpicxx)"; else say "MPI is absent: on CPUs one process trains (make setup)"; fi
