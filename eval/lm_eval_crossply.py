#!/usr/bin/env python3
"""crossply's models in lm-evaluation-harness: a model named "crossply", computed by the program `score`.

  eval/lm_eval_crossply.py --model DIR --tasks crossply_choice,crossply_sums [--output results.json]

The harness finds no plugins by itself, hence this driver; it knows the harness's own tasks, those beside it in
eval/tasks, which need no network, and those of --include_path. From Python: import this file, and

  lm_eval.simple_evaluate(model="crossply", model_args={"model": DIR}, tasks=[...])

Exit codes are those of `score`: 0 done, 64 wrong usage, 65 bad data or a request that cannot be answered, 66 a file is
missing, 74 a file cannot be written, and so on.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import threading

import lm_eval.models  # noqa: F401  first: the harness fills an empty registry with its own models, and only those
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

HERE = pathlib.Path(__file__).resolve().parent
# Installed, all programs are one file beside this one. In the source tree, each is a file of build/.
INSTALLED = (HERE / "crossply").is_file()
SCORE = [str(HERE / "crossply"), "score"] if INSTALLED else [str(HERE.parent / "build" / "score")]


# Settings of generation that mean nothing where the most likely token is taken.
OF_SAMPLING = {"top_k", "top_p", "min_p"}


class ScoreError(RuntimeError):
  """`score` ended early; the message is its own."""

  def __init__(self, code, said):
    super().__init__(said or f"score ended with exit code {code}")
    self.code = code


@register_model("crossply")
class Crossply(LM):
  """Texts go to `score` as they are: it has the model's tokenizer, and splits and cuts as TemplateLM and HFLM do."""

  def __init__(self, model, score=None, device="cpu", tokenizer=None, prefix_token=None, batch_tokens=None,
               batch_size=None, max_batch_size=None):
    """batch_size and max_batch_size, which the harness always gives, mean nothing: batches are of batch_tokens."""
    super().__init__()
    self.model = str(model)
    command = [*([str(score)] if score else SCORE), "--model", self.model, "--device", device or "cpu"]
    for flag, value in (("--tokenizer", tokenizer), ("--prefix-token", prefix_token), ("--batch-tokens", batch_tokens)):
      if value is not None:
        command += [flag, str(value)]
    self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  encoding="utf-8", errors="replace")
    self.said = ""
    self.listener = threading.Thread(target=self.listen, daemon=True)
    self.listener.start()

  def listen(self):
    """Passes on what `score` says, such as how far it is; its error is kept."""
    for line in self.child.stderr:
      if line.startswith("error: "):
        self.said = line.removeprefix("error: ").strip()
      else:
        sys.stderr.write(line)

  def ended(self):
    code = self.child.wait()
    self.listener.join()
    return ScoreError(code, self.said)

  @property
  def tokenizer_name(self):
    return self.model

  def ask(self, requests):
    """The answers to all requests. `score` reads to the empty line before it writes, but for a line that it refuses."""
    writer = threading.Thread(target=self.write, args=(requests,), daemon=True)
    writer.start()
    answers = []
    for _ in requests:
      line = self.child.stdout.readline()
      if not line:
        raise self.ended()
      answers.append(json.loads(line))
    writer.join()
    return answers

  def write(self, requests):
    try:
      self.child.stdin.writelines(json.dumps(request) + "\n" for request in requests)
      self.child.stdin.write("\n")
      self.child.stdin.flush()
    except BrokenPipeError:  # who reads the answers sees it, too
      pass

  def keep(self, kind, requests, answers):
    """For the harness's --use_cache."""
    for request, answer in zip(requests, answers):
      self.cache_hook.add_partial(kind, request.args, answer)
    return answers

  def loglikelihood(self, requests, disable_tqdm=False):
    answers = self.ask([{"context": context, "continuation": continuation}
                        for context, continuation in (request.args for request in requests)])
    return self.keep("loglikelihood", requests, [(answer["logprob"], answer["greedy"]) for answer in answers])

  def loglikelihood_rolling(self, requests, disable_tqdm=False):
    # The harness's number: its own models score the token that begins every text, given itself.
    answers = self.ask([{"text": request.args[0], "score_begin": True} for request in requests])
    return self.keep("loglikelihood_rolling", requests, [answer["logprob"] for answer in answers])

  def generate_until(self, requests, disable_tqdm=False):
    answers = self.ask([{"context": request.args[0], **self.generation(request.args[1])} for request in requests])
    return self.keep("generate_until", requests, [answer["text"] for answer in answers])

  @staticmethod
  def generation(options):
    options = normalize_gen_kwargs(options)
    if options.get("do_sample") or options.get("temperature"):
      raise ValueError(f"score generates greedily; the task asks for {options}")
    unknown = set(options) - OF_SAMPLING - {"do_sample", "temperature", "until", "max_gen_toks"}
    if unknown:
      raise ValueError(f"score knows no {', '.join(sorted(unknown))}, which the task asks for")
    until = options.get("until") or []
    until = [until] if isinstance(until, str) else until
    return {"until": [text for text in until if text], "max_new_tokens": options["max_gen_toks"]}

  def close(self):
    self.child.stdin.close()
    return self.child.wait()


class Flags(argparse.ArgumentParser):
  def error(self, message):
    self.exit(64, f"error: {message}\n")


def read_flags():
  parser = Flags(description="Scores a crossply model on tasks of lm-evaluation-harness.")
  parser.add_argument("--model", required=True, metavar="DIR", help="model or run directory")
  parser.add_argument("--tasks", required=True, metavar="NAME,...")
  parser.add_argument("--include-path", "--include_path", action="append", default=[], metavar="DIR", help="more tasks")
  parser.add_argument("--num-fewshot", "--num_fewshot", type=int)
  parser.add_argument("--limit", type=float, help="so many documents of each task, or that part of them if below 1")
  parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
  parser.add_argument("--tokenizer", metavar="FILE", help="where the directory has none")
  parser.add_argument("--prefix-token", type=int, help="what stands before a text without context")
  parser.add_argument("--batch-tokens", type=int, help="tokens that go through the model together")
  parser.add_argument("--score", metavar="FILE", help="the program `score`")
  parser.add_argument("--output", metavar="FILE", help="the harness's results as JSON")
  return parser.parse_args()


def evaluate(flags):
  """The results, or what is wrong with the flags."""
  tasks = TaskManager(include_path=[str(HERE / "tasks"), *flags.include_path])
  names = flags.tasks.split(",")
  unknown = [name for name in names if not tasks.match_tasks([name])]
  if unknown:
    raise LookupError(f"--tasks: there is no {', '.join(unknown)}; --include-path DIR says where more tasks are")
  model = Crossply(flags.model, flags.score, flags.device, flags.tokenizer, flags.prefix_token, flags.batch_tokens)
  results = simple_evaluate(model, tasks=names, num_fewshot=flags.num_fewshot, limit=flags.limit, task_manager=tasks)
  if code := model.close():
    raise ScoreError(code, "")
  return results


def run(flags):
  # Beside the file, and before the work, so that a directory that is not there costs nothing.
  part = flags.output and open(f"{flags.output}.part", "w", encoding="utf-8")
  try:
    results = evaluate(flags)
    print(make_table(results))
    if part:
      part.write(json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False) + "\n")
      part.close()
      os.replace(part.name, flags.output)
  finally:
    if part:
      part.close()
      pathlib.Path(part.name).unlink(missing_ok=True)


def main():
  flags = read_flags()
  program = pathlib.Path(flags.score or SCORE[0])
  directory = pathlib.Path(flags.output or ".").parent
  if not program.is_file():
    code, why = 66, f"{program} is missing: build it, or say with --score where it is"
  elif not directory.is_dir():
    code, why = 66, f"--output: there is no directory {directory}"
  else:
    try:
      run(flags)
      return 0
    except ScoreError as ended:
      code, why = ended.code, ended
    except LookupError as wrong:
      code, why = 64, wrong.args[0]
    except ValueError as wrong:
      code, why = 65, wrong
    except OSError as failed:
      code, why = 74, failed
  print(f"error: {why}", file=sys.stderr)
  return code


if __name__ == "__main__":
  sys.exit(main())
