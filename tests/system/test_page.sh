#!/usr/bin/env bash
# The page of analyze --what all in a real browser, headless Chromium: what is in its document, that no text from
# outside became more than text, that nothing is wider than the window, and that nothing is asked of a network.
#   tests/system/test_page.sh BUILD_DIR [DIRECTORY]      the directory keeps the page and what it looks like
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
build=$(cd "$1" && pwd)
browser=
for name in chromium chromium-browser google-chrome google-chrome-stable chrome; do
  browser=${browser:-$(command -v $name)}
done
[ -n "$browser" ] || { echo "skipped: there is neither Chromium nor Chrome"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ -z "${2:-}" ] || { mkdir -p "$2" && pictures=$(cd "$2" && pwd); }
# shellcheck source=tests/support/expect.sh
. "$here/../support/expect.sh"
cd "$work" || exit 1
export OMP_NUM_THREADS=2

# Two models, one with a name that is markup (no directory has a / in its name), on a text that is markup.
evil='<script>alert(1)<script>&"'"'"'><img src=x onerror=alert(1)>'
for _ in $(seq 40); do
  echo '<script>alert("text")</script> &amp; <img src="http://example.com/x.png" onerror="alert(2)">'
done >text
small=(--width 8 --ffn 8 --layers 2 --heads 2 --seq 24 --batch 2 --steps 2 --data text:text --device cpu --dtype fp32)
expect 0 'step 2/2' "$build/train_llama" "${small[@]}" --out llama
expect 0 'step 2/2' "$build/train_lime" "${small[@]}" --out "$evil"
expect 0 'wrote .*report.html' "$build/analyze" --model llama "$evil" --data text:text --split all --what all \
  --sequences 4 --length 24 --sae-tokens 2000 --out page
[ $failures = 0 ] || exit 1

# visit WIDTH FILE ARGUMENTS...: the document as the browser has it after a while, in a window of this width.
visit() {
  local width=$1 file=$2
  shift 2
  timeout 120 "$browser" --headless --no-sandbox --disable-gpu --no-first-run --disable-extensions --disable-sync \
    --disable-background-networking --disable-component-update --host-resolver-rules='MAP * ~NOTFOUND' \
    --user-data-dir="$work/profile" --hide-scrollbars --virtual-time-budget=5000 --window-size="$width",900 "$@" \
    "file://$work/$file" 2>browser_errors
}
visit 1280 page/report.html --dump-dom --log-net-log="$work/net.json" >document || fail "the browser did not open it"
cp document output
grep -q '</html>' document || fail "the browser has no document"
# Tags only: text may say what it likes.
tr '\n' ' ' <document | grep -oE '<[a-zA-Z!/][^>]*>' >tags
! grep -qiE '^</?(script|img|iframe|object|embed|link|base|form|foreignObject|image|use)\b' tags ||
  fail "a tag that loads or runs"
! grep -qiE '[[:space:]"](on[a-z]+|src|srcset)=' tags || fail "an attribute that loads or runs"
! grep -E 'href=' tags | grep -qvE 'href="#[a-z0-9-]+"' || fail "a link to elsewhere"
grep -q '<title>Inside llama, &lt;script&gt;' document || fail "no title, or not with the names"
sections=$(grep -c '^<section id=' document)
figures=$(grep -c '^<figure>' document)
files=$(find page -name '*.svg' | wc -l)
[ "$figures" = "$files" ] && [ "$figures" -ge 1 ] || fail "$figures pictures on the page, $files beside it"
[ "$sections" -ge "$figures" ] || fail "$sections sections, $figures pictures"
grep -q 'What the paper saw' document || fail "no captions"
# Requests for anything but files. The browser's own are for its maker's hosts, which it does not find.
requests() { grep -oE '"url":"(https?|wss?|ftp):[^"]*"' "$1" | grep -v 'google\|gstatic\|gvt1'; }
requests net.json >output && fail "the page asks a network"
echo '<img src="http://example.com/x.png">' >loads.html
visit 1280 loads.html --dump-dom --log-net-log="$work/loads.json" >output
requests loads.json | grep -q example.com || fail "the browser does not log what a page asks for"

# How wide everything is. A page around it asks, since it runs no scripts itself.
cat >around.html <<'END'
<!DOCTYPE html><body style="margin:0">
<iframe src="page/report.html" style="border:0;width:WIDTHpx;height:900px"></iframe>
<script>
onload = () => {
  const inside = document.querySelector('iframe').contentWindow, root = inside.document.documentElement;
  const scrolls = e => e && (inside.getComputedStyle(e).overflowX === 'auto' || scrolls(e.parentElement));
  let wide = '';
  for (const e of inside.document.body.querySelectorAll('*'))
    if (e.getBoundingClientRect().right > root.clientWidth + 1 && !scrolls(e.parentElement)) wide += ' ' + e.tagName;
  // Figures scale with the window, in both directions alike, and none vanishes.
  const is_flat = e => {
    const shown = e.getBoundingClientRect(), drawn = e.viewBox.baseVal;
    return !(shown.width > 250 && Math.abs(shown.height / shown.width - drawn.height / drawn.width) < 0.01);
  };
  const flat = [...inside.document.querySelectorAll('.picture svg')].filter(is_flat).length;
  document.body.textContent = `client ${root.clientWidth} scroll ${root.scrollWidth} flat ${flat} wide:${wide}.` +
    ` loaded ${inside.performance.getEntriesByType('resource').length}`;
};
</script>
END
for width in 1280 390 320; do
  sed "s/WIDTH/$width/" around.html >"around_$width.html"
  visit 1280 "around_$width.html" --allow-file-access-from-files --dump-dom >output
  grep -qE "client $width scroll $width flat 0 wide:\. loaded 0" output || fail "at $width pixels"
done
if [ -n "${pictures:-}" ]; then
  for width in 1280 390; do
    visit $width page/report.html --screenshot="$pictures/$width.png" --window-size=$width,3000
  done
  cp -r page "$pictures"
fi
[ $failures = 0 ] && echo "the page passed in $("$browser" --version 2>/dev/null)"
exit $((failures > 0))
