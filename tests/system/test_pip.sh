#!/usr/bin/env bash
# `pip install .` into an empty virtual environment: the programs train, the module reads what they wrote, the plugin finds
# `score`, and uninstalling leaves nothing. It compiles everything once more, without optimization. Exit 77: skipped,
# scikit-build-core is not importable by $PYTHON (default python3), or there is no network for pandas.
set -uo pipefail
tree=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
"$python" -c 'import scikit_build_core, pandas' 2>/dev/null || { echo "skipped: scikit-build-core or pandas is not here"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1
fail() { echo "FAIL: $*"; exit 1; }

# The environment has what $python has, and nothing else of its own.
"$python" -m venv --without-pip venv || fail "no virtual environment"
"$python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' >venv/packages
site=$(venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
cp venv/packages "$site/others.pth"
ls "$site" >before
venv/bin/python -m pip install --no-build-isolation --no-deps --no-index ${PIP_FLAGS--Ccmake.build-type=None} "$tree" \
  >pip.log 2>&1 || { tail -20 pip.log; fail "pip install"; }

# It goes to other machines: no place of this one, no instruction of its CPU alone.
! grep -rlaF "$tree" "$site/crossply" || fail "the path $tree is in these files"
! readelf -d "$site"/crossply/{crossply,comm_mpi.so} 2>/dev/null | grep -iE '\((rpath|runpath)\)' || fail "a library's place is in it"
tag=$(grep -E '^Tag: ' "$site"/crossply-*.dist-info/WHEEL)
[[ $tag == "Tag: py3-none-"* ]] || fail "the wheel is for $tag"

PATH=$work/venv/bin:$PATH
version=$(sed -nE 's/^project\(crossply VERSION ([0-9.]+) .*/\1/p' "$tree/CMakeLists.txt")
[[ $(crossply --version) == "crossply $version, commit "* ]] || fail "version: $(crossply --version)"
tiny=(--data arith:3 --train-samples 400 --test-samples 50 --width 8 --ffn 8 --layers 1 --heads 1 --batch 2
  --eval-samples 2 --answer-samples 2)
crossply train_lime "${tiny[@]}" --steps 3 --out run >log || fail "train_lime: $(tail -5 log)"
grep -q '^next: *crossply generate --model run' log || fail "the next command: $(tail -3 log)"
crossply compare --arch llama,lime "${tiny[@]}" --steps 2 --out both >log || fail "compare: $(tail -5 log)"
venv/bin/python - "$version" <<'END' || fail "the module"
import importlib.metadata, sys
import crossply
assert "pandas" not in sys.modules
assert importlib.metadata.version("crossply") == sys.argv[1]
metrics = crossply.read_metrics("run")
assert list(metrics["step"]) == [1, 2, 3] and metrics["loss"].notna().all(), metrics
with open("run/metrics.jsonl", "a") as file:
  file.write('{"step": 4, "lo')
assert len(crossply.read_metrics("run/metrics.jsonl")) == 3
results = crossply.read_results("both")
assert list(results["arch"]) == ["llama", "lime"] and results["test_loss"].notna().all(), results
END
if venv/bin/python -c 'import lm_eval' 2>/dev/null; then
  venv/bin/python -m crossply.lm_eval_crossply --model run --tasks crossply_sums --limit 2 >log 2>&1 || fail "lm_eval: $(tail -5 log)"
fi
venv/bin/python -m pip uninstall -y -q crossply || fail "pip uninstall"
ls "$site" | diff before - || fail "uninstalling left files"
[ ! -e venv/bin/crossply ] || fail "uninstalling left the command"
echo "pip: installed, tried, removed"
