#!/usr/bin/env python3
"""Makes a corpus of real English text out of free packages of Debian: train.jsonl, validation.jsonl, test.jsonl.

  make_text.py OUT            downloads (apt-get download), unpacks without root (dpkg-deb -x), cleans, writes OUT/
  make_text.py OUT --deb DIR  the same from packages that are already in DIR (*.deb)
  make_text.py --list DIR     prints the list of files for files.txt, of the packages in DIR

Which text. Dictionaries, books and manuals, most of them older than any release that one may have. files.txt names
each file with the beginning of its SHA-256. A file with other contents is left out, with a note: so the same files make
the same text, whatever the revision of the package, and corpus.json says which were missing.

Cleaning. A file becomes paragraphs: of HTML the blocks of running text, of POD the ordinary paragraphs, of dictionaries
and plain text what stands between empty lines. A paragraph stays if it has at least 8 words and four fifths of its
characters are letters or spaces: tables, code and lists of names go.

Documents. A file, or of a long one pieces of about 2,000 words. The hash of a document's name decides its part: 1 of 20
is for the test, 1 of 20 for validation.

Near-duplicates. A paragraph is known by its runs of 8 words, of which every eighth counts, by hash. It goes if a third
of them, or all of its words, have occurred in an earlier paragraph: first the test part is read, then validation, then
training. So no training paragraph repeats one that is tested, and none occurs twice in a part.

The digest of the three files is in corpus.json and is printed. Numbers of two digests are not of the same text.
Nothing of the text is part of this project; the packages' own licences hold (OUT/copyright has them).
"""
import argparse
import gzip
import hashlib
import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
PACKAGES = (HERE / "packages.txt").read_text().split()
PARTS = ("test", "validation", "train")
MIN_WORDS, PIECE_WORDS, RUN = 8, 2000, 8
MIN_BYTES = 20_000  # of a file: the list stays short, and small files are mostly tables of contents


# --- files ---

def fetch(into):
  """The packages of this machine's release into a directory."""
  for package in PACKAGES:
    done = subprocess.run(["apt-get", "download", package], cwd=into, capture_output=True, text=True)
    if done.returncode != 0:
      print(f"note: no package {package}: {done.stderr.strip().splitlines()[-1:]}", file=sys.stderr)


def unpack(debs, into):
  for deb in sorted(pathlib.Path(debs).glob("*.deb")):
    folder = into / deb.name.split("_")[0]
    folder.mkdir()
    subprocess.run(["dpkg-deb", "-x", deb, folder], check=True)


def digest_of(data):
  return hashlib.sha256(data).hexdigest()[:32]


def contents(path):
  data = path.read_bytes()
  return gzip.decompress(data) if path.suffix in (".gz", ".dz") else data


def kind_of(path):
  """How the file is read; None: it has no running text."""
  name = path.name.removesuffix(".gz").removesuffix(".dz")
  if name.startswith(("changelog", "NEWS", "README", "copyright")) or "index" in name.lower():
    return None
  if path.parent.name == "fortunes" and not path.suffix:
    return fortune_paragraphs
  if path.parent.name == "wordnet" and name.startswith("data."):
    return wordnet_paragraphs
  if "/manual/" in str(path) and "/manual/en/" not in str(path):  # Apache's, in other languages
    return None
  if name.endswith((".html", ".htm")):
    return html_paragraphs
  if name.endswith(".pod"):
    return pod_paragraphs
  return plain_paragraphs if name.endswith((".dict", ".txt")) else None


def print_list(folder):
  for package in PACKAGES:
    for path in sorted((folder / package).rglob("*")):
      if path.is_file() and not path.is_symlink() and kind_of(path) and len(data := contents(path)) >= MIN_BYTES:
        print(digest_of(data), package, path.relative_to(folder / package))


def listed_files(folder):
  """(name, contents, reader) of each file of files.txt that is here as it is listed; and those that are not."""
  here, missing = [], []
  for line in (HERE / "files.txt").read_text().splitlines():
    digest, package, name = line.split(" ", 2)
    path = folder / package / name
    data = contents(path) if path.is_file() else b""
    if digest_of(data) == digest:
      here.append((f"{package}/{name}", data, kind_of(path)))
    else:
      missing.append(f"{package}/{name}")
  return here, missing


# --- paragraphs ---

class Blocks(html.parser.HTMLParser):
  """The text of each block of running text."""
  BLOCKS = {"p", "li", "dd", "blockquote", "div", "td", "h1", "h2", "h3", "h4", "h5", "h6", "dt", "tr", "table", "ul"}
  SILENT = {"script", "style", "head", "pre", "nav", "tt", "footer"}

  def __init__(self):
    super().__init__()
    self.found, self.text, self.silent = [], [], []

  def end_block(self):
    self.found.append("".join(self.text))
    self.text = []

  def handle_starttag(self, tag, attrs):
    if tag in self.SILENT:
      self.silent.append(tag)
    if tag in self.BLOCKS:
      self.end_block()

  def handle_endtag(self, tag):
    if self.silent and tag == self.silent[-1]:
      self.silent.pop()
    if tag in self.BLOCKS:
      self.end_block()

  def handle_data(self, data):
    if not self.silent or self.silent == ["tt"]:
      self.text.append(data)


def html_paragraphs(text):
  blocks = Blocks()
  blocks.feed(text)
  blocks.end_block()
  return blocks.found


def pod_paragraphs(text):
  found = []
  for paragraph in re.split(r"\n\s*\n", text):
    if paragraph[:1] in ("=", " ", "\t"):
      continue
    for _ in range(3):  # codes within codes: C<< x >>, L<text|target>
      paragraph = re.sub(r"L<([^<>|]*)\|[^<>]*>", r"\1", paragraph)
      paragraph = re.sub(r"[A-Z]<<+ (.*?) >>+", r"\1", paragraph, flags=re.DOTALL)
      paragraph = re.sub(r"[A-Z]<([^<>]*)>", r"\1", paragraph)
    found.append(paragraph)
  return found


def plain_paragraphs(text):
  return re.split(r"\n\s*\n", text)


def fortune_paragraphs(text):
  return re.split(r"\n%\n", text)


def wordnet_paragraphs(text):
  """The definitions, with their examples."""
  return [line.split("|", 1)[1] for line in text.splitlines() if "|" in line]


def cleaned(paragraph):
  """On one line; "" if it is no running text."""
  # The names in brackets are notes of dict-gcide's editors.
  text = re.sub(r"\[1913 Webster\]|\[PJC\]|[{}]|[\x00-\x08\x0e-\x1f\x7f\ufffd]", "", paragraph)
  text = " ".join(text.split())
  letters = sum(c.isalpha() or c == " " for c in text)
  return text if len(text.split()) >= MIN_WORDS and letters >= 0.8 * len(text) else ""


def decoded(data):
  try:
    return data.decode()
  except UnicodeDecodeError:
    return data.decode("latin-1")


def documents(files):
  """(name, paragraphs): a file, or pieces of it."""
  for name, data, reader in files:
    piece, words, number = [], 0, 0
    for paragraph in filter(None, map(cleaned, reader(decoded(data)))):
      piece.append(paragraph)
      words += len(paragraph.split())
      if words >= PIECE_WORDS:
        yield f"{name}#{number}", piece
        piece, words, number = [], 0, number + 1
    if piece:
      yield f"{name}#{number}", piece


def part_of(name):
  place = int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20
  return PARTS[min(place, 2)]


# --- near-duplicates ---

def hash_of(text):
  return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def marks_of(paragraph):
  """Hashes of the paragraph and of every eighth of its runs of words."""
  words = re.findall(r"[a-z0-9]+", paragraph.lower())
  runs = (hash_of(" ".join(words[i : i + RUN])) for i in range(len(words) - RUN + 1))
  return hash_of(" ".join(words)), [run for run in runs if run % 8 == 0]


def without_repeats(paragraphs, seen):
  kept = []
  for paragraph in paragraphs:
    whole, runs = marks_of(paragraph)
    known = sum(run in seen for run in runs)
    if whole in seen or (runs and 3 * known >= len(runs)):
      continue
    seen.add(whole)
    seen.update(runs)
    kept.append(paragraph)
  return kept


# --- the corpus ---

def write(out, folder, files, missing):
  parts = {part: [] for part in PARTS}
  for name, paragraphs in documents(files):
    parts[part_of(name)].append((name, paragraphs))
  out.mkdir(parents=True, exist_ok=True)
  seen, words, counts, digest = set(), {}, {}, hashlib.sha256()
  for part, all_documents in parts.items():
    lines = []
    for name, paragraphs in all_documents:
      kept = without_repeats(paragraphs, seen)
      if kept:
        lines.append(json.dumps({"text": "\n\n".join(kept), "source": name}, ensure_ascii=False) + "\n")
        words[part] = words.get(part, 0) + sum(len(paragraph.split()) for paragraph in kept)
    counts[part] = len(lines)
    data = "".join(lines).encode()
    digest.update(data)
    (out / f"{part}.jsonl").write_bytes(data)
    print(f"{part}: {counts[part]:,} documents, {words.get(part, 0):,} words, {len(data):,} bytes", flush=True)
  copies = out / "copyright"
  shutil.rmtree(copies, ignore_errors=True)
  copies.mkdir()
  for path in folder.glob("*/usr/share/doc/*/copyright"):
    shutil.copy(path, copies / path.parent.name)
  (out / "corpus.json").write_text(json.dumps({
    "digest": digest.hexdigest(), "words": words, "documents": counts, "files": len(files), "missing": missing,
  }, indent=2) + "\n")
  print(f"{sum(words.values()):,} words in all; digest {digest.hexdigest()[:16]}")
  if missing:
    print(f"note: {len(missing)} of {len(files) + len(missing)} listed files are not here, or are others (corpus.json "
          "names them): this text has a digest of its own, and its numbers are not comparable with the full one's")


def main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("out", type=pathlib.Path, nargs="?", help="directory to write")
  parser.add_argument("--deb", type=pathlib.Path, help="directory with the packages, instead of apt-get download")
  parser.add_argument("--list", type=pathlib.Path, help="print the list of files of the packages in this directory")
  flags = parser.parse_args()
  if (flags.out is None) == (flags.list is None):
    parser.error("either OUT or --list")
  if shutil.which("dpkg-deb") is None or (not flags.deb and not flags.list and shutil.which("apt-get") is None):
    sys.exit("make text needs apt-get and dpkg-deb, which Debian and Ubuntu have. Elsewhere: bring the packages "
             "(packages.txt) and dpkg-deb, and give --deb DIR; or bring any text: --data text:DIR")
  with tempfile.TemporaryDirectory() as scratch:
    scratch = pathlib.Path(scratch)
    debs, folder = flags.deb or flags.list or scratch / "debs", scratch / "unpacked"
    folder.mkdir()
    if not (flags.deb or flags.list):
      debs.mkdir()
      print(f"downloading {len(PACKAGES)} packages, about 60 MB ...", flush=True)
      fetch(debs)
    unpack(debs, folder)
    if flags.list:
      print_list(folder)
      return
    files, missing = listed_files(folder)
    if not files:
      sys.exit("none of the listed files is here: see the notes above")
    write(flags.out, folder, files, missing)


if __name__ == "__main__":
  main()
