#!/usr/bin/env bash
# dev/newest.sh without a network: what it installs, runs and says, with a Python that only pretends.   tests/test_newest.sh
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/tests/support/expect.sh"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
mkdir build && touch build/gradients && chmod +x build/gradients
# As `python -m venv` it copies itself; as pip it writes down what it is asked for; a check ends as RESULTS says.
cat >python <<'PYTHON'
#!/usr/bin/env bash
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" "$3/lib/python3.11/site-packages" && cp "$0" "$3/bin/python" ;;
  "-m pip download "*) [ -z "${NO_SUCH_VERSION-}" ] || exit 1; mkdir -p "$5" && touch "$5/transformers.whl"; echo "$@" >>"$INSTALLED" ;;
  "-m pip "*) echo "$@" >>"$INSTALLED" ;;
  *"import os, torch"*) echo "${TORCH-}" ;;
  *zipfile*) echo 2025-02-19 ;;
  *'version("transformers")'*) grep -q lm-eval "$INSTALLED" && echo "${HELD_BACK:-1.2.3}" || echo 1.2.3 ;;
  -) echo "transformers 1.2.3" ;;
  *.py*) name=$(basename "$1" .py); [ "$name" != "${PARTLY-}" ] || echo "skipped: a part"; echo "$name says so"; exit "$(sed -n "s/^$name //p" "$RESULTS" | grep . || echo 0)" ;;
esac
PYTHON
chmod +x python
export PYTHON=$work/python BUILD=$work/build ENVIRONMENTS=$work/environments INSTALLED=$work/installed RESULTS=$work/results
export TORCH=$work/torch
: >results
newest() { rm -f installed && "$root/dev/newest.sh" "$@"; }

expect 0 '^transformers newest: [0-9]+ checks, 0 bad$' newest
grep -q '^transformers 1[.]2[.]3$' output || fail "the versions are missing"
for check in "$root"/dev/check_*.py; do
  name=$(basename "$check" .py)
  grep -qE "^ok +${name#check_} +[0-9]+ s  $name says so$" output || fail "$name has no line"
done
for package in transformers tokenizers lm-eval peft trl; do
  grep -qE "install --upgrade .*\b$package\b" installed || fail "$package is not installed"
done
grep -q 'install --upgrade torch$' installed && fail "PyTorch is installed though there is one"
[ "$(cat environments/newest/env/lib/python3.11/site-packages/torch.pth)" = "$TORCH" ] || fail "PyTorch is not found"
expect 0 '^transformers newest: [0-9]+ checks, 0 bad$' newest  # over the environment of before
TORCH="" expect 0 'checks, 0 bad' newest
grep -q 'install --upgrade torch$' installed || fail "no PyTorch is installed"

expect 0 '^transformers 4[.]49: [0-9]+ checks, 0 bad$' newest 4.49
grep -q 'download .* transformers==4[.]49[.][*]$' installed || fail "another version: $(cat installed)"
grep -q -- '--uploaded-prior-to 2025-02-19 .*tokenizers' installed || fail "not the tokenizers of that day"
grep -q -- '--uploaded-prior-to 2025-02-19 .*peft' installed || fail "not the peft of that day"
grep -qE '^ok +(lm_eval|tensorboard) ' output && fail "checks of other packages ran"
expect 0 'checks, 0 bad' newest 4.57.6
grep -q 'transformers==4[.]57[.]6$' installed || fail "another version: $(cat installed)"

# failed BAD WORD VERSION...: a check ends with a code, and the script with 1; others go on
echo 'check_modelling 1' >results
for version in "" 4.49; do
  newest $version >output 2>&1
  [ $? = 1 ] || fail "a check that fails is no failure"
  grep -qE '^FAILED +modelling .* says so$' output || fail "nobody says which check failed"
  grep -qE '^ok +transformers ' output || fail "the checks after it do not run"
  grep -q 'checks, 1 bad$' output || fail "no count"
done
echo 'check_modelling 77' >results
newest >output 2>&1
[ $? = 1 ] || fail "a check that is skipped against the newest packages is no failure"
expect 0 '^skipped +modelling .* says so$' newest 4.49
: >results
PARTLY=check_callers newest >output 2>&1
[ $? = 1 ] || fail "a part that is skipped against the newest packages is no failure"
grep -qE '^skipped +callers ' output && grep -q 'checks, 1 bad$' output || fail "nobody says what was skipped in part"
PARTLY=check_callers expect 0 '^ok +callers .* says so$' newest 4.49
HELD_BACK=1.2.0 expect 69 'transformers 1[.]2[.]3 became 1[.]2[.]0' newest

for wrong in x 4 4.49.1.2 '4.49; true' ../4.49; do expect 64 'TRANSFORMERS_VERSION' newest "$wrong"; done
expect 64 'TRANSFORMERS_VERSION' newest 4.49 4.57
BUILD=nowhere expect 66 'nowhere has no programs' newest
PYTHON=no-such-python expect 64 'there is no no-such-python' newest
NO_SUCH_VERSION=1 expect 69 'there is no transformers 9[.]99' newest 9.99
mkdir environments/5.1 && touch environments/5.1/notes
expect 64 'not an environment of this script' newest 5.1
[ -e environments/5.1/notes ] || fail "somebody's directory was removed"
echo "newest: $failures failures"
[ $failures = 0 ]
