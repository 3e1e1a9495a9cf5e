#!/usr/bin/env bash
# dev/text/make_text.py on packages made here: which files enter, what is cleaned away, and which repeats go.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
for program in python3 dpkg-deb; do
  command -v $program >/dev/null || { echo "skipped: $program is not here"; exit 77; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
cp "$root/dev/text/make_text.py" .
failures=0
fail() { echo "FAIL: $*"; failures=$((failures + 1)); }

# book.html and words.dict, each long enough; small.html is not, index.html has no text.
printf 'book\nwords\n' >packages.txt
mkdir -p book/DEBIAN book/usr/share/doc/book words/DEBIAN words/usr/share/dictd debs
for name in book words; do
  printf 'Package: %s\nVersion: 1\nArchitecture: all\nMaintainer: x <x@example.org>\nDescription: x\n' $name >$name/DEBIAN/control
done
python3 - <<'END'
import gzip, random
random.seed(1)
words = [f"{a}{b}" for a in "bcdfghjklmnprstvwz" for b in ("an", "el", "io", "our", "umple", "ist", "orne")]
def sentence(n=20): return " ".join(random.choice(words) for _ in range(n)) + "."
paragraphs = [sentence(60) for _ in range(400)]
again = paragraphs[7].replace(" ", "\n  ")                      # the same, set otherwise
near = paragraphs[9].split(); near[30] = "other"                 # the same but for one word
html = "<html><head><title>none of this title stays in the text at all</title></head><body><pre>int code() of eight words or more than that</pre>"
html += "".join(f"<p>{p}</p>" for p in paragraphs + [again, " ".join(near), "1 2 3 4 5 6 7 8 9 10 11 12 13"]) + "</body></html>"
folder = "book/usr/share/doc/book/"
open(folder + "book.html", "w").write(html)
open(folder + "copyright", "w").write("Nobody's.\n")
open(folder + "index.html", "w").write(html)
open(folder + "small.html", "w").write("<p>" + sentence() + "</p>")
entries = [f"{{Word}} {sentence(30)} [1913 Webster]" for _ in range(4000)] + [paragraphs[3]]
open("words/usr/share/dictd/words.dict.dz", "wb").write(gzip.compress("\n\n".join(entries).encode()))
END
build() { for name in book words; do dpkg-deb --root-owner-group -b $name debs/${name}_1_all.deb >/dev/null; done; }
build
python3 make_text.py --list debs >files.txt
[ "$(cut -d' ' -f2- files.txt | tr '\n' ' ')" = 'book usr/share/doc/book/book.html words usr/share/dictd/words.dict.dz ' ] ||
  fail "the list is: $(cat files.txt)"

python3 make_text.py one --deb debs >output
python3 make_text.py two --deb debs >/dev/null
diff -r one two || fail "two calls make two texts"
grep -q ' words in all; digest ' output || fail "no digest: $(cat output)"
[ -s one/copyright/book ] || fail "the licence is not there"
python3 - <<'END' || failures=$((failures + 1))
import json, re, sys
parts = {p: [json.loads(l) for l in open(f"one/{p}.jsonl")] for p in ("test", "validation", "train")}
paragraphs = [q for all in parts.values() for d in all for q in d["text"].split("\n\n")]
bad = [q for q in paragraphs if len(q.split()) < 8 or re.search(r"code\(\)|title stays|[{}]|Webster|\d \d", q)]
assert not bad, bad[:2]
assert len(paragraphs) == len(set(paragraphs)) == 4400, len(paragraphs)  # each once, of the two near ones only one
assert all(parts.values()), {p: len(d) for p, d in parts.items()}
about = json.load(open("one/corpus.json"))
assert about["files"] == 2 and about["missing"] == [], about
assert sum(about["words"].values()) == sum(len(q.split()) for q in paragraphs)
END

# A file of another revision is left out, and the text has another digest; another revision of the package alone changes nothing.
sed -i 's/Version: 1/Version: 2/' book/DEBIAN/control
echo '<p>one more</p>' >>book/usr/share/doc/book/small.html
build
python3 make_text.py three --deb debs >/dev/null
diff -r one three || fail "another revision of a package changed the text"
echo '<p>one more</p>' >>book/usr/share/doc/book/book.html
build
python3 make_text.py four --deb debs >output
grep -q 'note: 1 of 2 listed files are not here' output || fail "nothing is said of the file that is left out: $(cat output)"
grep -q 'book/usr/share/doc/book/book.html' four/corpus.json || fail "corpus.json does not name it"
cmp -s one/train.jsonl four/train.jsonl && fail "the file was not left out"
rm debs/*
python3 make_text.py five --deb debs >output 2>&1 && fail "without a package it ends well"
grep -q 'none of the listed files is here' output && [ ! -e five ] || fail "without packages: $(cat output)"
echo "text: $failures failures"
[ $failures = 0 ]
