#!/usr/bin/env bash
# Launches a compiler, and keeps what it says beside the object, in OBJECT.log.
#   tests/support/keep_output.sh COMPILER ... -o OBJECT
for ((i = 1; i < $#; ++i)); do
  if [ "${!i}" = -o ]; then object=${*:i+1:1}; fi
done
"$@" 2>&1 | tee "${object:?no -o}.log"
exit "${PIPESTATUS[0]}"
