#!/usr/bin/env python3
"""Checks README.md and docs/: length, sentences, links, flags that prose names, and words that are never right.

  tests/docs.py TREE HELP      HELP: a file with the --help texts of all programs

Prints every finding as FILE:LINE: ...; exit code 1 if there is one. Links are checked in every page of the repository.
"""
import pathlib
import re
import sys

README_LINES, SENTENCE_WORDS = 160, 35
FOREIGN_FLAGS = {"--logdir"}  # TensorBoard's
CODE = {".h", ".cpp", ".cu", ".cuh", ".py", ".sh"}
FENCE = r"^ *```%s$.*?^ *```$"


def without(pattern, text, instead=""):
  """The text without what the pattern matches; lines keep their numbers."""
  return re.sub(pattern, lambda m: m.expand(instead) + "\n" * (m[0].count("\n") - m.expand(instead).count("\n")), text,
                flags=re.M | re.S)


def line_of(match):
  return match.string.count("\n", 0, match.start()) + 1


def sentences(text):
  """Yields (line, words) for each sentence outside code, tables and headings. A name in code counts as one word."""
  text = without(r"^[|#<][^\n]*|^\[[^\]\n]+\]: [^\n]*", without("`[^`]*`", text, "code"))
  text = without(r"!?\[([^\]]*)\](\([^)]*\)|\[[^\]]*\])", text, r"\1")
  words, start = [], 1
  for number, line in enumerate(text.split("\n") + [""], 1):
    item = re.match(r" *([*+-]|\d+\.) ", line)
    if words and (item or not line.strip()):
      yield start, words
      words = []
    for word in line[item.end() if item else 0:].split():
      start = start if words else number
      words.append(word)
      if re.search(r"[.!?][\"')*_]*$", word):
        yield start, words
        words = []


def long_sentences(text):
  for line, words in sentences(text):
    if len(words) > SENTENCE_WORDS:
      yield line, f"{len(words)} words: {' '.join(words[:8])} ..."


def anchors(page):
  """The names that GitHub gives to a page's headings."""
  text = without(FENCE % "[^\n]*", page.read_text())
  names, seen = re.findall(r'<a (?:id|name)="([^"]+)"', text), {}
  for heading in re.findall(r"^#+ +(.*?) *$", text, re.M):
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    name = re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")
    seen[name] = seen.get(name, -1) + 1
    names.append(f"{name}-{seen[name]}" if seen[name] else name)
  return names


def broken_links(page, text):
  """Yields (line, complaint), as all below. text: without code."""
  for m in re.finditer(r'\]\(([^)\s]+)|^\[[^\]\n]+\]: (\S+)|(?:src|srcset|href)="([^"\s]+)', text, re.M):
    link = next(group for group in m.groups() if group)
    if re.match(r"\w+:", link):
      continue
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    if not target.exists():
      yield line_of(m), f"{link}: there is no such file"
    elif anchor and target.suffix == ".md" and anchor not in anchors(target):
      yield line_of(m), f"{link}: there is no such heading"
  defined = re.findall(r"^\[([^\]\n]+)\]: ", text, re.M)
  for m in re.finditer(r"\]\[([^\]]+)\]", text):
    if m[1] not in defined:
      yield line_of(m), f"[{m[1]}] is not defined"


def word_rules(file):
  """(pattern, remedy) by section."""
  sections, section = {}, None
  for line in file.read_text().splitlines():
    if line.startswith("["):
      section = sections.setdefault(line.strip("[]"), [])
    elif line and not line.startswith("#"):
      words, remedy = line.split(" -> ")
      section.append((re.compile(rf"\b({words})\b".replace(" ", r"\s+"), re.I), remedy))
  return sections


def wrong_words(text, rules):
  for pattern, remedy in rules:
    for m in pattern.finditer(text):
      yield line_of(m), f"'{' '.join(m[0].split())}': write {remedy}"


def unknown_flags(text, flags):
  for m in re.finditer("`[^`]*`", text):
    for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", m[0]):
      if flag not in flags:
        yield line_of(m), f"{flag}: no program has this flag"


def main():
  tree, help_text = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]).read_text()
  files = {str(f.relative_to(tree)): f for f in tree.rglob("*") if f.suffix in CODE | {".md"} or f.name == "Makefile"}
  files = {name: f for name, f in files.items() if not re.match(r"\.|build|deps/|runs/", name)}
  rules = word_rules(tree / "tests" / "banned_words.txt")
  in_pages = rules["pages"] + rules["everywhere"]
  scripts = [f for name, f in files.items() if name.startswith("dev/") or re.search(r"\.(sh|py)$|Makefile$", name)]
  flags = FOREIGN_FLAGS.union(re.findall(r"--[a-z][\w-]*", help_text + "".join(f.read_text() for f in scripts)))

  findings = [("--help", *finding) for finding in wrong_words(help_text, in_pages)]
  for name, file in files.items():
    text = file.read_text()
    found = []
    if name.endswith(".md"):
      prose = without(FENCE % "[^\n]*", text)
      found += broken_links(file, without("`[^`]*`", prose))
    elif name not in ("tests/test_docs.sh", "Makefile"):
      found += wrong_words(text, rules["everywhere"])
    if name == "README.md" or name.startswith("docs/"):
      found += wrong_words(without("`[^`]*`", without(FENCE % "(cpp|python)[^\n]*", text)), in_pages)
      found += unknown_flags(prose, flags)
      found += long_sentences(prose)
    if name == "README.md" and text.count("\n") > README_LINES:
      found.append((README_LINES + 1, f"more than {README_LINES} lines"))
    findings += [(name, *finding) for finding in found]
  for finding in sorted(findings):
    print("%s:%d: %s" % finding)
  sys.exit(bool(findings))


main()
