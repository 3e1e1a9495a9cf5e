#!/usr/bin/env bash
# Runs dev/setup.sh on a pretended Debian: the compiler, the package manager, sudo and the user's id are stand-ins, first in
# PATH. Nothing is installed. Exit 77: skipped, not a Linux machine.
set -euo pipefail
cd "$(dirname "$0")/.."
[ "$(uname)" = Linux ] || { echo "skipped: the stand-ins pretend to be Linux"; exit 77; }

box=$(mktemp -d)
trap 'rm -rf "$box"' EXIT
real_cxx=$(command -v "${CXX:-c++}")
unset CXX
stand_in() { cat >"$box/$1" && chmod +x "$box/$1"; }
stand_in c++ <<EOF
#!/bin/sh
if [ -e "$box/hidden" ]; then sed 's|<doctest/doctest.h>|<doctest/hidden.h>|'; else cat; fi | $real_cxx "\$@"
EOF
stand_in mpicxx <<EOF
#!/bin/sh
[ ! -e "$box/no_mpi" ]
EOF
ln -s mpicxx "$box/mpirun"
stand_in apt-get <<EOF
#!/bin/sh
echo "apt-get \$*" >>"$box/log"
case \$1 in
  update) touch "$box/updated" ;;
  install) if [ ! -e "$box/stale" ] || [ -e "$box/updated" ]; then rm -f "$box/hidden" "$box/no_mpi"; else exit 100; fi ;;
esac
if [ -e "$box/useless" ]; then touch "$box/hidden"; fi
if [ -e "$box/without" ]; then touch "$box/no_mpi"; exit 100; fi
EOF
stand_in id <<EOF
#!/bin/sh
if [ -e "$box/user" ]; then echo 1000; else echo 0; fi
EOF
stand_in sudo <<EOF
#!/bin/sh
if [ -e "$box/sudo_asks" ]; then exit 1; fi
echo "sudo \$*" >>"$box/log"
shift; exec "\$@"
EOF

failures=0
# expect NAME EXIT_CODE "STATE FILES" "LINES OF LOG, joined by ;" "WORDS IN THE OUTPUT" [FLAG]
expect() {
  local code=0 output log
  rm -f "$box"/{log,hidden,no_mpi,stale,updated,useless,without,user,sudo_asks}
  touch "$box/log"
  for state in $3; do touch "$box/$state"; done
  output=$(PATH="$box:$PATH" dev/setup.sh ${6:+"$6"} 2>&1) || code=$?
  log=$(paste -sd';' "$box/log")
  if [ $code != "$2" ] || [ "$log" != "$4" ] || [[ $output != *"$5"* ]]; then
    failures=$((failures + 1))
    printf 'FAILED: %s: exit code %s, calls "%s", output:\n%s\n' "$1" "$code" "$log" "$output"
  fi
}

install="apt-get install -y --no-install-recommends doctest-dev"
environment="env DEBIAN_FRONTEND=noninteractive"
expect "nothing missing" 0 "" "" "nothing is missing"
expect "root installs, without an update" 0 "hidden" "$install" "missing: doctest. Running: $install"
expect "stale lists" 0 "hidden stale" "$install;apt-get update;$install" "nothing is missing"
expect "sudo without a password" 0 "hidden user" "sudo -n true;sudo -n $environment $install;$install" "sudo -n $install"
expect "no rights" 1 "hidden user sudo_asks" "" "  $install"
expect "no rights, without root" 1 "hidden user sudo_asks" "" "(cd deps && apt-get download doctest-dev)"
expect "a check" 0 "" "" "" --check
expect "a check installs nothing" 1 "hidden" "" "setup: missing: doctest; \`make setup\` installs it" --check
expect "a package that does not help" 1 "hidden useless" "$install" "still missing: doctest"

absent="MPI is absent: on CPUs one process trains"
mpi="apt-get install -y --no-install-recommends libopenmpi-dev openmpi-bin"
expect "MPI is there" 0 "" "" "MPI is here: $box/mpicxx" --mpi
expect "MPI is not asked for" 0 "no_mpi" "" "$absent"
expect "root installs MPI" 0 "no_mpi" "$mpi" "MPI is here: $box/mpicxx" --mpi
expect "no rights for MPI" 0 "no_mpi user sudo_asks" "" "$absent" --mpi
expect "MPI cannot be installed" 0 "no_mpi without" "$mpi;apt-get update" "$absent" --mpi
expect "what is needed comes first" 1 "hidden no_mpi user sudo_asks" "" "  $install" --mpi

# A compiler that is too old: one line, before make compiles anything.
stand_in old-g++ <<<'#!/bin/sh'
said=$(CXX=$box/old-g++ make BUILD="$box/build" 2>&1) || true
if ! grep -q '^setup: .*/old-g++ is too old: .*g++ 12' <<<"$said" || [ "$(wc -l <<<"$said")" -gt 4 ]; then
  failures=$((failures + 1))
  printf 'FAILED: make with an old compiler: %s\n' "$said"
fi

# An mpicxx without headers, as Debian's openmpi-bin has it: the build goes on without MPI.
touch "$box/no_mpi"
said=$(PATH="$box:$PATH" make configure BUILD="$box/build-mpi" CXX="$real_cxx" 2>&1) || said="exit code $?: $said"
if [[ $said != *"one process, for $box/mpicxx has no mpi.h: make setup installs it"* ]]; then
  failures=$((failures + 1))
  printf 'FAILED: make where mpicxx has no mpi.h: %s\n' "$said"
fi

echo "setup: $failures of 17 cases failed"
[ $failures = 0 ]
