#!/usr/bin/env bash
# Runs our checks against packages as a user installs them today, or as they were with an older transformers.
#   dev/newest.sh                        the newest transformers, tokenizers, lm-eval, peft, trl and tensorboard: all checks
#   dev/newest.sh TRANSFORMERS_VERSION   that version (4.57 takes the newest 4.57.x), with the tokenizers and peft of its
#                                        day: our own checks of models and tokenizers
#
# A check is a dev/check_NAME.py. The script prints the versions, and one line for each check: ok, FAILED or skipped, the
# seconds, and the last line that the check printed. What a check printed is in ENVIRONMENTS/VERSION/NAME.log.
#
# BUILD           the directory with the programs, default build
# ENVIRONMENTS    where a Python environment for each version is made, and made anew each time; default build/newest
# PYTHON          makes the environments, default python3. Its PyTorch is used if it has one; else PyTorch is installed.
#
# Exit 0: all checks hold. 1: one does not, or one was skipped, or a part of one, against the newest packages, where
#   nothing is missing.
# 64: wrong usage. 66: no programs. 69: the packages cannot be installed.
set -uo pipefail
version=${1:-newest}
if [ $# -gt 1 ] || ! [[ $version =~ ^(newest|[0-9]+(\.[0-9]+){1,2})$ ]]; then
  echo "error: dev/newest.sh [TRANSFORMERS_VERSION]; a version is 4.57 or 4.57.6" >&2
  exit 64
fi
root=$(cd "$(dirname "$0")/.." && pwd)
build=$(cd "${BUILD:-$root/build}" 2>/dev/null && pwd) && [ -x "$build/gradients" ] ||
  { echo "error: ${BUILD:-$root/build} has no programs: make them first, or name another directory by BUILD" >&2; exit 66; }
environments=${ENVIRONMENTS:-$root/build/newest}
mkdir -p "$environments" && here=$(cd "$environments" && pwd)/$version || exit 69
outer=$(command -v "${PYTHON:-python3}") || { echo "error: there is no ${PYTHON:-python3}" >&2; exit 64; }
outer=$(cd "$(dirname "$outer")" && pwd)/$(basename "$outer")
cd "$root"  # Python looks for modules there first
unset PYTHONPATH
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

failed() { echo "error: $*; see $here/install.log" >&2; exit 69; }
# Only what this script has made is removed.
if [ -e "$here" ]; then
  [ -e "$here/install.log" ] || { echo "error: $here is not an environment of this script" >&2; exit 64; }
  rm -rf "$here"
fi
mkdir "$here" && "$outer" -m venv "$here/env" >"$here/install.log" 2>&1 || failed "$outer -m venv failed"
python=$here/env/bin/python
install() { "$python" -m pip install --upgrade "$@" >>"$here/install.log" 2>&1 || failed "pip install $* failed"; }

# The folder of a PyTorch that is there goes behind the environment's own packages.
torch=$("$outer" -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null)
[ -z "$torch" ] || echo "$torch" >"$(echo "$here"/env/lib/python3*/site-packages)/torch.pth"
install pip
[ -n "$torch" ] || install torch
if [ "$version" = newest ]; then
  # An older one may be all that the others take: it would be checked in silence.
  release() { "$python" -c 'import importlib.metadata as packages; print(packages.version("transformers"))'; }
  install transformers
  first=$(release) || failed "transformers cannot be found"
  install tokenizers accelerate lm-eval peft trl tensorboard
  last=$(release) || failed "transformers cannot be found"
  [ "$first" = "$last" ] || failed "transformers $first became $last: lm-eval, peft or trl does not take the newest yet"
  checks=("$root"/dev/check_*.py)
else
  # The day of a release is that of the newest file in its wheel.
  [[ $version = *.*.* ]] && wanted=$version || wanted=$version.*
  "$python" -m pip download --no-deps --dest "$here/wheel" "transformers==$wanted" >>"$here/install.log" 2>&1 ||
    failed "there is no transformers $version"
  day=$("$python" -c 'import datetime, sys, zipfile
newest = max(file.date_time for file in zipfile.ZipFile(sys.argv[1]).infolist())
print((datetime.datetime(*newest) + datetime.timedelta(days=2)).date())' "$here"/wheel/*.whl)
  install --uploaded-prior-to "$day" "$here"/wheel/*.whl tokenizers psutil
  install --uploaded-prior-to "$day" --no-deps accelerate peft  # which would exchange PyTorch for one of that day
  checks=()
  for check in "$root"/dev/check_*.py; do
    case $check in *lm_eval* | *tensorboard* | *adapters*) ;; *) checks+=("$check") ;; esac
  done
fi
"$python" - <<'PYTHON'
import importlib.metadata as packages
found = {package.metadata["Name"].lower(): package.version for package in reversed(list(packages.distributions()))}
names = "torch transformers tokenizers accelerate peft trl lm-eval lm_eval tensorboard".split()
print(", ".join(f"{name} {found[name]}" for name in names if name in found))
PYTHON

bad=0
for check in "${checks[@]}"; do
  name=$(basename "$check" .py)
  start=$SECONDS code=0
  "$python" "$check" "$build" >"$here/$name.log" 2>&1 </dev/null || code=$?
  case $code in 0) word=ok ;; 77) word=skipped ;; *) word=FAILED ;; esac
  # A part may be skipped where a package of an older day is missing.
  if [ "$word $version" = "ok newest" ] && grep -q '^skipped:' "$here/$name.log"; then word=skipped; fi
  if [ $word = FAILED ] || [ "$word $version" = "skipped newest" ]; then bad=$((bad + 1)); fi
  printf '%-8s %-20s %4d s  %s\n' $word "${name#check_}" $((SECONDS - start)) "$(tail -n 1 "$here/$name.log" | cut -c 1-200)"
done
echo "transformers $version: ${#checks[@]} checks, $bad bad"
[ $bad = 0 ]
