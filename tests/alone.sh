#!/bin/sh
# Runs a test of ctest; where it fails, the last line says how to run it alone.
#   tests/alone.sh NAME BUILD_DIR COMMAND...
name=$1 build=$2
shift 2
"$@"
code=$?
[ $code = 0 ] || [ $code = 77 ] || echo "alone: ctest --test-dir $build --output-on-failure -R '^$name\$'"
exit $code
