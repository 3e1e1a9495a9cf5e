#!/usr/bin/env python3
"""Plants mistakes of dev/mutants/*.txt, one at a time, and shows which test notices each.

  dev/mutants.py BUILD_DIR [NAME...]    all mutants without a result in BUILD_DIR/mutants.json, or these
  dev/mutants.py --check [DIR]          only checks that each text of DIR (dev/mutants) is in one place of the sources

A file is named after a label of ctest: its mutants' first tests are those. Its blocks have these lines:

  name:   one word
  was:    a part of a line, which occurs once in all sources
  now:    what replaces it; nothing deletes it
  tests:  optional: a regular expression for `ctest -R`, the tests to run before the label's

The mistake is written into the source file, which is restored afterwards, also after Ctrl-C. A file with uncommitted
changes is refused. Each mutant meets its `tests`, then its label's, then all of the first tier (`make test`). The first
failure ends it. A test that fails without the mutant, too, ends the run. Use a build directory
of its own; it is configured here.

Exit 0: at most two survive. 1: more survive, or a mutant does not apply or compile. 2: wrong usage.
"""
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
ROOMS = ("engine", "cli", "kernels", "ranks", "models", "data", "train", "eval")
# What reads the sources would notice every mutant by its text, and `make test` runs the first tier alone.
FIRST_TIER = ["-LE", "^(tree|second)$"]
MAX_SURVIVORS = 2
KEYS = ("name", "was", "now", "tests")


def stop(message, code=1):
  print(f"mutants: {message}", file=sys.stderr)
  sys.exit(code)


def read_mutants(directory):
  mutants = []
  for file in sorted(directory.glob("*.txt")):
    for number, line in enumerate(file.read_text().splitlines(), 1):
      if not line.strip() or line.startswith("#"):
        continue
      key, colon, value = line.partition(":")
      if not colon or key not in KEYS:
        stop(f"{file}:{number}: '{line}' does not begin with one of {', '.join(KEYS)} and a colon")
      if key == "name":
        mutants.append({"label": file.stem, "place": f"{file}:{number}", "now": ""})
      elif not mutants or key in mutants[-1] and key != "now":
        stop(f"{file}:{number}: '{key}' where a block should begin with its name")
      mutants[-1][key] = value.strip()
  names = [mutant["name"] for mutant in mutants]
  for mutant in mutants:
    if not mutant.get("was") or mutant["was"] == mutant["now"] or names.count(mutant["name"]) > 1:
      stop(f"{mutant['place']}: {mutant['name']} needs a 'was', another 'now', and a name of its own")
  if not mutants:
    stop(f"{directory}: no mutants are there")
  return mutants


def sources():
  files = [file for room in ROOMS for file in (ROOT / room).rglob("*") if file.suffix in (".h", ".cpp", ".cu", ".cuh")]
  return {file: file.read_text() for file in files}


def locate(mutants):
  """Sets the file of each; stops if one is in no place or in several."""
  texts, wrong = sources(), []
  for mutant in mutants:
    places = [file for file, text in texts.items() for _ in range(text.count(mutant["was"]))]
    if len(places) == 1:
      mutant["file"] = places[0]
    else:
      where = ", ".join(str(file.relative_to(ROOT)) for file in places)
      wrong.append(f"{mutant['place']}: {mutant['name']} does not apply: its text is in {len(places)} places"
                   f"{': ' + where if where else ''}; write what the line is now")
  if wrong:
    stop("\n".join(wrong))


def call(*command):
  return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


class Bench:
  def __init__(self, build):
    self.build, self.file = build, build / "mutants.json"
    build.mkdir(parents=True, exist_ok=True)
    known = json.loads(self.file.read_text()) if self.file.exists() else {}
    self.results, self.sound = known.get("results", {}), set(known.get("sound", []))
    done = call("cmake", "-S", ".", "-B", str(build))
    if done.returncode:
      stop(done.stdout)

  def save(self):
    fresh = self.file.with_suffix(".new")
    fresh.write_text(json.dumps({"results": self.results, "sound": sorted(self.sound)}, indent=2) + "\n")
    os.replace(fresh, self.file)

  def compile(self, everything):
    targets = ["all", "tests", "fault_injection"] if everything else ["tests"]
    return call("cmake", "--build", str(self.build), "-j", str(os.cpu_count()), "--target", *targets)

  def first_failure(self, *which):
    """The first test that fails, or an empty text."""
    done = call("ctest", "--test-dir", str(self.build), "-j", str(os.cpu_count()), "--stop-on-failure", "--timeout",
                "900", *which)
    failed = re.search(r"Test +#\d+: (\S+) \.*\** *\*\*\*(?!Skipped)", done.stdout)
    if done.returncode and not failed:
      stop(f"ctest {' '.join(which)}:\n{done.stdout}")
    return failed.group(1) if failed else ""

  def is_sound(self, test):
    """Whether a test passes without the mutant: the file is restored by now."""
    if test not in self.sound:
      done = self.compile(not test.startswith("test_"))
      if done.returncode:
        stop(f"without a mutant:\n{done.stdout}")
      if self.first_failure("-R", f"^{re.escape(test)}$"):
        return False
      self.sound.add(test)
    return True

  def meet(self, mutant):
    """The name of the test that notices the mutant; '' if none does."""
    rounds = [["-R", mutant["tests"]]] if "tests" in mutant else []
    rounds += [["-L", f"^{mutant['label']}$"] + FIRST_TIER, FIRST_TIER]
    for which in rounds:
      everything = which is FIRST_TIER or "tests" in mutant and not mutant["tests"].startswith("test_")
      with Planted(mutant):
        done = self.compile(everything)
        if done.returncode or "warning:" in done.stdout:
          stop(f"{mutant['name']} does not compile without warnings:\n{done.stdout[-3000:]}")
        failed = self.first_failure(*which)
      if failed and self.is_sound(failed):
        return failed
      if failed:
        stop(f"{failed} fails without {mutant['name']}, too: repair that first")
    return ""


class Planted:
  def __init__(self, mutant):
    self.file, self.was, self.now = mutant["file"], mutant["was"], mutant["now"]
    if call("git", "diff", "--quiet", "HEAD", "--", str(self.file)).returncode:
      stop(f"{self.file.relative_to(ROOT)} has uncommitted changes: commit them, or `git checkout` it")

  def __enter__(self):
    self.text = self.file.read_text()
    self.file.write_text(self.text.replace(self.was, self.now))

  def __exit__(self, *_):
    self.file.write_text(self.text)


def main():
  arguments = sys.argv[1:]
  if not arguments or arguments[0] in ("-h", "--help"):
    print(__doc__)
    sys.exit(0 if arguments else 2)
  check = arguments[0] == "--check"
  mutants = read_mutants(pathlib.Path(arguments[1]) if check and arguments[1:] else ROOT / "dev/mutants")
  locate(mutants)
  if check:
    return print(f"{len(mutants)} mutants apply, each in one place")
  for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # ends every `with`, which restores the file
    if signal.getsignal(number) != signal.SIG_IGN:
      signal.signal(number, lambda *_: stop("stopped; the same command goes on", 75))
  names = arguments[1:]
  if unknown := set(names) - {mutant["name"] for mutant in mutants}:
    stop(f"unknown: {', '.join(sorted(unknown))}", 2)
  bench = Bench(pathlib.Path(arguments[0]).resolve())
  chosen = [mutant for mutant in mutants if not names or mutant["name"] in names]
  survivors = []
  for mutant in chosen:
    name = mutant["name"]
    if names or name not in bench.results:
      start = time.time()
      bench.results[name] = {"caught_by": bench.meet(mutant), "seconds": round(time.time() - start)}
      bench.save()
    caught, seconds = bench.results[name]["caught_by"], bench.results[name]["seconds"]
    survivors += [] if caught else [name]
    print(f"{name}: {'caught by ' + caught if caught else 'SURVIVED'} after {seconds} s", flush=True)
  print(f"caught {len(chosen) - len(survivors)} of {len(chosen)}")
  sys.exit(len(survivors) > MAX_SURVIVORS)


main()
