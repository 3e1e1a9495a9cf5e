#!/usr/bin/env python3
"""Checks build/score and eval/lm_eval_crossply.py against lm-evaluation-harness's own way with the same weights.

  dev/check_lm_eval.py [BUILD]              BUILD: the directory with the programs, default build
  dev/check_lm_eval.py BUILD MODEL PAIRS    only minimal pairs: a model directory, and a directory like BLiMP's

Small models, trained for a moment on the repository's own text in subword tokens, answer the tasks of eval/tasks, and
requests that are hard to split or to fit: through the program, and through the harness's model "hf" with transformers,
where need be by the modelling file that the model carries. Every log-probability, greedy flag, generated text and score
must be the same, and so must the winner of every minimal pair (`score --pairs`) by the harness's task blimp.

Exit 0: all hold. 1: one does not. 77: skipped, PyTorch, transformers, tokenizers or lm_eval is not importable.
"""
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")
try:
  import datasets
  import lm_eval
  import tokenizers
  import torch
  import transformers
  import yaml
except ImportError as missing:
  print(f"skipped: {missing.name} is not importable")
  sys.exit(77)
from lm_eval.api.instance import Instance
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "eval"))
from compare_gradients import need_program, run
from lm_eval_crossply import Crossply, ScoreError

TASKS = ["crossply_choice", "crossply_cloze", "crossply_texts", "crossply_sums"]
TOLERANCE = 1e-4  # of a log-probability and of a score, absolute below 1 and relative above
POSITIONS = 48  # fewer than some contexts and texts have tokens
END, BEGIN = "<|endoftext|>", "<|begin_of_text|>"
# What is trained, with which flags and tokenizer. The first two are transformers' own models.
MODELS = (
  ("llama", ("--tie", "false"), "gpt2"),
  ("gpt2", (), "gpt2"),
  ("llama", (), "llama3"),
  ("lime", (), "gpt2"),
  ("hyper", ("--rate", "2"), "gpt2"),
)


def make_tokenizer(path, style, text):
  """Byte-level BPE of about 400 tokens in the manner of GPT-2, or of Llama 3, which begins every text with a token."""
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  special = [END] if style == "gpt2" else [END, BEGIN]
  trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False,
                                           initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
  tokenizer.train_from_iterator(text.splitlines(keepends=True), trainer)
  if style == "llama3":
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
      single=f"{BEGIN} $A", pair=f"{BEGIN} $A {BEGIN} $B", special_tokens=[(BEGIN, 1)])
  tokenizer.save(str(path))


def train(build, scratch, arch, flags, style):
  """A model directory with its tokenizer."""
  text = (ROOT / "dev/LOG.md").read_text(encoding="utf-8")[:40000] + (ROOT / "eval/tasks/sums.jsonl").read_text() * 4
  path = scratch / "tokenizer.json"
  make_tokenizer(path, style, text)
  (scratch / "text.txt").write_text(text, encoding="utf-8")
  run(build / f"train_{arch}", "--data", f"text:{scratch / 'text.txt'}", "--tokenizer", path, "--out", scratch / "run",
      "--seq", str(POSITIONS), "--layers", "3", "--width", "32", "--heads", "4", "--batch", "16", "--steps", "80",
      "--lr", "1e-2", "--warmup", "5", *flags)
  directory = scratch / "model"
  shutil.copytree(next((scratch / "run").glob("step_*")), directory)
  (directory / "manifest.json").unlink(missing_ok=True)
  config = json.loads((directory / "config.json").read_text())
  if "n_positions" not in config:
    config["max_position_embeddings"] = POSITIONS
    (directory / "config.json").write_text(json.dumps(config))
  return directory


def check_near(what, got, want):
  if not abs(got - want) <= TOLERANCE * max(1, abs(want)):
    raise RuntimeError(f"{what}: {got}, expected {want}")


LONG = "the data of a run and the model that it trains " * 9
PAIRS = (("", "The model"), ("a layer", " reads"), ("a layer ", "reads"), ("a layer\u00a0\u3000 \n", "reads"),
         ("   ", "x"), ("build/tr", "ain_lime"), ("q", "q"), (LONG, "is read"), (LONG + "  ", "of one"),
         ("", END + "x"), ("é", "ü 漢字"), (END, "and so"), (BEGIN + "a model", " of"), ("x", " " + LONG[:60]))
GENERATIONS = (("The model", [], 20), (LONG, [], 12), ("build/", ["\n\n", "`"], 20), ("a", ["e", "the"], 9),
               (" 3 + 4", ["\n"], 6), ("漢", ["."], 30))


def requests_of(kind, arguments):
  return [Instance(kind, {}, argument, i) for i, argument in enumerate(arguments)]


def check_requests(ours, theirs, style):
  """What no task asks, request by request."""
  # Nothing but spaces before the continuation: without a token that begins texts, the harness has no rule for it.
  pairs = requests_of("loglikelihood", [pair for pair in PAIRS if pair[0] != "   " or style == "llama3"])
  for request, got, want in zip(pairs, ours.loglikelihood(pairs), theirs.loglikelihood(pairs, disable_tqdm=True)):
    check_near(f"log-probability of {request.args}", got[0], want[0])
    if got[1] != want[1]:
      raise RuntimeError(f"{request.args}: greedy {got[1]}, expected {want[1]}")
  texts = requests_of("loglikelihood_rolling", [(LONG,), ("x",), ("",), (LONG[:150],)])
  for request, got, want in zip(texts, ours.loglikelihood_rolling(texts), theirs.loglikelihood_rolling(texts)):
    check_near(f"log-probability of the text {request.args}", got, want)
  # Without the harness's key: the tokens of the text, given what begins every text, which is not scored.
  for text in ("x", LONG[:60], BEGIN + "x" if style == "llama3" else END + "x"):
    got = ours.ask([{"text": text}])[0]["logprob"]
    want = theirs.loglikelihood(requests_of("loglikelihood", [("", text)]), disable_tqdm=True)[0][0]
    check_near(f"log-probability of the text {text!r} after its begin", got, want)
  asked = requests_of("generate_until", [(context, {"until": list(until), "max_gen_toks": most, "do_sample": False})
                                         for context, until, most in GENERATIONS])
  for request, got, want in zip(asked, ours.generate_until(asked), theirs.generate_until(asked)):
    if got != want:
      raise RuntimeError(f"after {request.args}: {got!r}, expected {want!r}")


def check_tasks(ours, theirs, tasks):
  """All responses and all scores of the offline tasks."""
  got, want = (lm_eval.simple_evaluate(model, tasks=TASKS, task_manager=tasks, bootstrap_iters=0)
               for model in (ours, theirs))
  for task in TASKS:
    for a, b in zip(got["samples"][task], want["samples"][task], strict=True):
      for x, y in zip(flat(a["resps"]), flat(b["resps"]), strict=True):
        if isinstance(y, float):
          check_near(f"{task} {a['doc']}", x, y)
        elif x != y:
          raise RuntimeError(f"{task} {a['doc']}: {x!r}, expected {y!r}")
    for name, value in want["results"][task].items():
      if isinstance(value, float):
        check_near(f"{task} {name}", got["results"][task][name], value)
  return sum(len(want["samples"][task]) for task in TASKS)


def check_driver(directory, build, tasks):
  """The command line gives the same as the class, and a child that dies says so."""
  out = directory.parent / "results.json"
  done = subprocess.run(
    [sys.executable, ROOT / "eval/lm_eval_crossply.py", "--model", directory, "--score", build / "score",
     "--tasks", "crossply_cloze", "--output", out], capture_output=True, text=True)
  if done.returncode != 0 or "crossply_cloze" not in done.stdout:
    raise RuntimeError(f"the driver ended with {done.returncode}: {done.stderr.strip()}")
  results = json.loads(out.read_text())["results"]["crossply_cloze"]
  model = Crossply(directory, build / "score")
  want = lm_eval.simple_evaluate(model, tasks=["crossply_cloze"], task_manager=tasks, bootstrap_iters=0)
  check_near("perplexity", results["perplexity,none"], want["results"]["crossply_cloze"]["perplexity,none"])
  model.close()
  for flags, code, says in ((["--tasks", "crossply_cloze,nothing"], 64, "no nothing"),
                            (["--tusks", "x"], 64, "--tasks"),
                            (["--tasks", "x", "--score", "nowhere"], 66, "nowhere"),
                            (["--tasks", "x", "--output", "nowhere/it.json"], 66, "no directory nowhere")):
    done = subprocess.run([sys.executable, ROOT / "eval/lm_eval_crossply.py", "--model", directory, "--score",
                           build / "score", *flags], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1:]
    if done.returncode != code or not last[0].startswith("error: ") or says not in last[0]:
      raise RuntimeError(f"{flags} end with {done.returncode} and {last}")


def check_refusals(directory, build):
  """What cannot be answered raises what `score` says, also where it stands between more than pipes hold."""
  good, long = ("a layer", " reads"), ("a", "漢" * 100)
  for pairs, settings, code, says in (([good], {"prefix_token": 10**6}, 64, "1000000"),
                                      ([good, ("a", "")], {}, 65, "line 2: the \"continuation\" \"\" has no tokens"),
                                      ([good] * 3000 + [long] + [good] * 20000, {}, 65, "line 3001: the continuation")):
    try:
      Crossply(directory, build / "score", **settings).loglikelihood(requests_of("loglikelihood", pairs))
    except ScoreError as ended:
      if ended.code == code and says in str(ended):
        continue
      raise
    raise RuntimeError(f"nothing is said of {says}")
  for options in ({"num_beams": 2}, {"do_sample": True, "temperature": 1.0}):
    try:
      Crossply.generation(options)
    except ValueError as refused:
      if next(iter(options)) in str(refused):
        continue
    raise RuntimeError(f"{options} are not refused")


def blimp_task(path):
  """The harness's own task of BLiMP, on a file of pairs instead of the one that it downloads."""
  template = pathlib.Path(lm_eval.__file__).parent / "tasks/blimp/_template_yaml"
  config = yaml.safe_load(template.read_text())
  for key in ("dataset_path", "should_decontaminate", "doc_to_decontamination_query"):
    config.pop(key, None)
  documents = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
  split = {config["validation_split"]: datasets.Dataset.from_list(documents)}
  return ConfigurableTask(config={**config, "task": f"pairs_{path.stem}", "custom_dataset": lambda **_: split})


def check_pairs(directory, build, theirs, pairs):
  """The same winner of every pair, by file; returns how many pairs there are, and how many of them tie."""
  out = pathlib.Path(tempfile.mkdtemp()) / "pairs.json"
  run(build / "score", "--model", directory, "--pairs", pairs, "--json", out)
  got = json.loads(out.read_text())
  shutil.rmtree(out.parent)
  different, count = [], 0
  for path in sorted(pairs.glob("*.jsonl")):
    task, ours = blimp_task(path), got["files"][path.stem]
    results = lm_eval.simple_evaluate(theirs, tasks=[task], bootstrap_iters=0)
    samples = sorted(results["samples"][task.task_name], key=lambda sample: sample["doc_id"])
    for sample, good, bad in zip(samples, ours["good"], ours["bad"], strict=True):
      count += 1
      want = [response[0][0] for response in sample["resps"]]
      check_near(f"{path.stem}: {sample['doc']}, good", good, want[0])
      check_near(f"{path.stem}: {sample['doc']}, bad", bad, want[1])
      if (good >= bad) != bool(sample["acc"]):
        different.append(f"{path.stem}: {good} and {bad}, expected {want}: {sample['doc']}")
    if not different and ours["accuracy"] != results["results"][task.task_name]["acc,none"]:
      different.append(f"{path.stem}: accuracy {ours['accuracy']}")
  if different:
    raise RuntimeError(f"{len(different)} of {count} pairs differ: " + "; ".join(different[:5]))
  return count, got["ties"]


def write_pairs(directory):
  """Pairs that differ at the beginning, in the middle, at the end and nowhere, of several lengths."""
  words = "the data of a run and the model that it trains on two cores".split()
  pairs = []
  for n in range(3, len(words)):
    for changed in range(0, n, 2):
      other = words[:changed] + [words[-1 - changed]] + words[changed + 1:n]
      pairs.append((" ".join(words[:n]) + ".", " ".join(other) + "."))
    pairs += [(" ".join(words[:n]), " ".join(words[:n + 1])), (" ".join(words[:n]),) * 2]
  lines = [json.dumps({"sentence_good": good, "sentence_bad": bad, "field": "f", "linguistics_term": "t"})
           for good, bad in pairs]
  directory.mkdir()
  (directory / "pairs.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
  return directory


def flat(value):
  return [leaf for part in value for leaf in flat(part)] if isinstance(value, (list, tuple)) else [value]


def as_hf(directory, batch_size=5):
  return HFLM(pretrained=str(directory), tokenizer=str(directory), dtype="float32", device="cpu", batch_size=batch_size,
              trust_remote_code=True)


def main():
  build = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build").resolve()
  if len(sys.argv) == 4:
    need_program(build / "score")
    logging.disable(logging.WARNING)
    directory, pairs = (pathlib.Path(path) for path in sys.argv[2:])
    count, ties = check_pairs(directory, build, as_hf(directory, 64), pairs)
    print(f"{count} pairs alike, {ties} of them ties")
    sys.exit(0)
  for program in ("score", *{f"train_{arch}" for arch, *_ in MODELS}):
    need_program(build / program)
  transformers.utils.logging.set_verbosity_error()
  logging.disable(logging.WARNING)
  tasks = TaskManager(include_path=str(ROOT / "eval/tasks"), include_defaults=False)
  failures = 0
  for arch, flags, style in MODELS:
    name = f"{arch} with a tokenizer of {style}'s kind"
    with tempfile.TemporaryDirectory() as scratch:
      try:
        directory = train(build, pathlib.Path(scratch), arch, flags, style)
        ours = Crossply(directory, build / "score")
        theirs = as_hf(directory)
        check_requests(ours, theirs, style)
        documents = check_tasks(ours, theirs, tasks)
        pairs, _ = check_pairs(directory, build, theirs, write_pairs(pathlib.Path(scratch) / "pairs"))
        if code := ours.close():
          raise RuntimeError(f"score ended with {code}")
        if (arch, flags, style) == MODELS[0]:
          check_driver(directory, build, tasks)
          check_refusals(directory, build)
        print(f"{name}: {documents} documents and {pairs} pairs alike")
      except (RuntimeError, ValueError, OSError) as problem:
        failures += 1
        print(f"FAILED: {name}: {problem}")
  sys.exit(1 if failures else 0)


if __name__ == "__main__":
  main()
