#!/usr/bin/env python3
"""crossply's models in lm-evaluation-harness: a model named "crossply", computed by the program `score`.

  eval/lm_eval_crossply.py --model DIR --tasks crossply_choice,crossply_sums [--output results.json]

The harness finds no plugins by itself, hence this driver; it knows the harness's own tasks, those beside it in
eval/tasks, which need no network, and those of --include_path. From Python: import this file, and

  lm_eval.simple_evaluate(model="crossply", model_args={"model": DIR}, tasks=[...])
"""
import argparse
import json
import pathlib
import subprocess
import sys

import lm_eval.models  # noqa: F401  first: the harness fills an empty registry with its own models, and only those
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable, make_table

HERE = pathlib.Path(__file__).resolve().parent


class ScoreError(RuntimeError):
  """`score` ended; what it had to say is on standard error."""

  def __init__(self, code):
    super().__init__(f"score ended with exit code {code}")
    self.code = code


@register_model("crossply")
class Crossply(LM):
  """Texts go to `score` as they are: it has the model's tokenizer, and splits and cuts as TemplateLM and HFLM do."""

  def __init__(self, model, score=None, device="cpu", tokenizer=None, prefix_token=None, batch_tokens=None, **_):
    super().__init__()
    self.model = str(model)
    command = [str(score or HERE.parent / "build" / "score"), "--model", self.model, "--device", device or "cpu"]
    for flag, value in (("--tokenizer", tokenizer), ("--prefix-token", prefix_token), ("--batch-tokens", batch_tokens)):
      if value is not None:
        command += [flag, str(value)]
    self.child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8")

  @property
  def tokenizer_name(self):
    return self.model

  def ask(self, requests):
    """The answers to all requests. `score` reads them all, to the empty line, before it writes."""
    try:
      self.child.stdin.writelines(json.dumps(request) + "\n" for request in requests)
      self.child.stdin.write("\n")
      self.child.stdin.flush()
    except BrokenPipeError:
      raise ScoreError(self.child.wait()) from None
    answers = []
    for _ in requests:
      line = self.child.stdout.readline()
      if not line:
        raise ScoreError(self.child.wait())
      answers.append(json.loads(line))
    return answers

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
    answers = self.ask([{"text": request.args[0]} for request in requests])
    return self.keep("loglikelihood_rolling", requests, [answer["logprob"] for answer in answers])

  def generate_until(self, requests, disable_tqdm=False):
    answers = self.ask([{"context": request.args[0], **self.generation(request.args[1])} for request in requests])
    return self.keep("generate_until", requests, [answer["text"] for answer in answers])

  @staticmethod
  def generation(options):
    options = normalize_gen_kwargs(options)
    if options["do_sample"] or options["temperature"] != 0:
      raise ValueError(f"score generates greedily; the task asks for {options}")
    until = options.get("until") or []
    until = [until] if isinstance(until, str) else until
    return {"until": [text for text in until if text], "max_new_tokens": options["max_gen_toks"]}

  def close(self):
    self.child.stdin.close()
    return self.child.wait()


def read_flags():
  parser = argparse.ArgumentParser(description="Scores a crossply model on tasks of lm-evaluation-harness.")
  parser.add_argument("--model", required=True, metavar="DIR", help="model or run directory")
  parser.add_argument("--tasks", required=True, metavar="NAME,...")
  parser.add_argument("--include_path", action="append", default=[], metavar="DIR", help="more tasks")
  parser.add_argument("--num_fewshot", type=int)
  parser.add_argument("--limit", type=float, help="so many documents of each task, or that part of them if below 1")
  parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
  parser.add_argument("--tokenizer", metavar="FILE", help="where the directory has none")
  parser.add_argument("--prefix-token", type=int, help="what stands before a text without context")
  parser.add_argument("--batch-tokens", type=int, help="tokens that go through the model together")
  parser.add_argument("--score", metavar="FILE", help="the program (build/score)")
  parser.add_argument("--output", metavar="FILE", help="the harness's results as JSON")
  return parser.parse_args()


def main():
  flags = read_flags()
  model = Crossply(flags.model, flags.score, flags.device, flags.tokenizer, flags.prefix_token, flags.batch_tokens)
  tasks = TaskManager(include_path=[str(HERE / "tasks"), *flags.include_path])
  try:
    results = simple_evaluate(model, tasks=flags.tasks.split(","), num_fewshot=flags.num_fewshot, limit=flags.limit,
                              task_manager=tasks)
  except ScoreError as ended:
    print(f"error: {ended}", file=sys.stderr)
    return ended.code
  print(make_table(results))
  if flags.output:
    text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
    pathlib.Path(flags.output).write_text(text + "\n", encoding="utf-8")
  return model.close()


if __name__ == "__main__":
  sys.exit(main())
