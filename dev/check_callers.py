#!/usr/bin/env python3
"""Checks saved models in the hands of the libraries that call them: one model of each architecture and backbone, and
one of each pair that goes together.

  dev/check_callers.py [BUILD]      BUILD: the directory with the programs, default build

What forward takes and returns, by every name that a version of transformers has for it; what it cannot do it refuses by
name. Documents in one row, as collators pack them, are what they are in rows of their own. Gradients with
checkpointing, and of blocks sharded by FSDP over two processes, are those of the plain model; so are logits and text
with two blocks on disk. pipeline() in batches, and where there is trl, its SFTTrainer.

Exit 0: all hold. 1: one does not. 77: skipped, PyTorch, transformers or accelerate is not importable.
"""
import copy
import functools
import pathlib
import socket
import sys
import tempfile
import warnings

import check_modelling
from check_modelling import Case, expect, load, write  # skips where there is no transformers
import torch
import torch.distributed
import transformers
from check_transformers import check_equal
from compare_gradients import BOUNDED, CROSSED, OPERATOR_1, SAMPLED, check_complete, need_program, run
from reference.model_dir import windows
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers.modeling_outputs import CausalLMOutputWithPast

try:
  import accelerate
except ImportError:
  print("skipped: accelerate is not importable")
  sys.exit(77)
try:
  import datasets
  import trl
except ImportError:
  trl = None

CACHE = "cache" if "cache" in vars(CausalLMOutputWithPast) else "past_key_values"  # the library's name


class Fixed(transformers.Cache):
  """A cache that does not grow."""
  is_compileable = True

  def __init__(self):
    pass


def variants():
  """Arguments of make_tiny: tied and untied."""
  yield {"arch": "llama", **check_modelling.LLAMAS[1]}
  yield {"arch": "gpt2", **check_modelling.GPT2S[0]}
  seen = set()
  for connection in (*CROSSED[1:], *SAMPLED):
    if connection["arch"] not in seen:
      number = len(seen) % 2
      seen.add(connection["arch"])
      yield {**connection, **check_modelling.LLAMAS[number]}
      yield {**connection, **check_modelling.GPT2S[1 - number]}
  seen = set()
  for options in check_modelling.variants():
    if "+" in options["arch"] and options["arch"] not in seen:
      seen.add(options["arch"])
      yield options
  for connection in ({"arch": "llama", **BOUNDED}, {"arch": "llama", **OPERATOR_1, "loop_passes": 3},
                     {"arch": "lime"}):
    yield {**connection, **check_modelling.LLAMAS[1], **windows("SLSL", 3)}
  yield {"arch": "gpt2", **BOUNDED, **check_modelling.GPT2S[1]}


def expect_refused(what, call, *words):
  """By a ValueError that has one of the words."""
  try:
    call()
  except ValueError as refused:
    expect(f"{what} is refused with {str(refused)!r}", any(word in str(refused) for word in words))
  else:
    raise RuntimeError(f"{what} is not refused")


def check_close(what, got, want, tolerance=1e-11):
  """Of numbers in double: equal but for this part of the largest."""
  expect(f"{what}: {tuple(got.shape)}, not {tuple(want.shape)}", got.shape == want.shape)
  error = ((got - want).abs().max() / want.abs().max().clamp(min=1e-3)).item()
  expect(f"{what} differ by {error:.3g} of the largest", error <= tolerance)


def gradients(model, tokens):
  """The loss, and {name: gradient} of what has one."""
  model.zero_grad()
  loss = model(tokens, labels=tokens).loss
  loss.backward()
  return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def check_gradients(what, got, want):
  check_equal(f"the loss {what}", got[0], want[0])
  scale = max(gradient.abs().max() for gradient in want[1].values())
  for name, gradient in want[1].items():
    expect(f"{what}, {name} has no gradient", name in got[1] or not gradient.any())
    if name in got[1]:
      error = (got[1][name] - gradient).abs().max() / scale
      expect(f"{what}, the gradient of {name} differs by {error:.3g} of the largest", error <= 1e-5)


class Called(Case):
  """A saved model in others' hands."""

  def check_refusals(self):
    model, tokens = self.model, self.tokens
    T, ones = tokens.shape[1], torch.ones(1, tokens.shape[1], dtype=torch.long)
    for more in ({"inputs_embeds": torch.zeros(1, T, 8)}, {"output_hidden_states": True}, {"output_attentions": True},
                 {"seq_idx": ones}, {"cu_seq_lens_q": torch.tensor([0, 4, T])}, {"max_length_q": T}, {"num_logits": 1}):
      expect_refused(list(more), lambda: model(tokens, **more), *more)
    expect_refused("inputs_embeds alone", lambda: model(inputs_embeds=torch.zeros(1, T, 8)), "inputs_embeds")
    for name in ("cache", "past_key_values"):
      expect_refused("a fixed cache", lambda: model(tokens, **{name: Fixed()}), "Fixed")
      expect_refused("a list", lambda: model(tokens, **{name: [1]}), "list")
    caches = {"cache": transformers.DynamicCache(), "past_key_values": transformers.DynamicCache()}
    expect_refused("a cache by two names", lambda: model(tokens, **caches), "two names")
    for mask in (ones[None].expand(1, 1, T, T).tril(), ones[:, 1:], 2 * ones, ones.cumsum(-1)):
      expect_refused(f"the mask {mask.tolist()}", lambda: model(tokens, attention_mask=mask), "attention_mask")
    packed = torch.arange(T)[None] % 4
    for positions in (packed[0], packed[:, 1:], packed - 1):
      expect_refused(f"positions {positions.tolist()}", lambda: model(tokens, position_ids=positions), "position_ids")
    bounds, numbers = torch.tensor([0, 4, 8, T]), torch.arange(T)[None] // 4
    for more in ({"cu_seq_lens_q": bounds[1:]}, {"cu_seq_lens_k": bounds + 1}, {"max_length_q": 5}, {"seq_idx": ones},
                 {"max_length_k": 3}, {"cu_seq_lens_q": bounds, "attention_mask": ones},
                 {"seq_idx": numbers, CACHE: transformers.DynamicCache()}):
      expect_refused(f"{more} beside packed positions", lambda: model(tokens, position_ids=packed, **more), *more)
    gap = (packed != 0).long()  # padding between the documents, and in front of the first
    for mask, positions in ((ones, packed), (gap, packed), (gap, packed - 1)):
      expect_refused(f"packed positions beside the mask {mask.tolist()}",
                     lambda: model(tokens, attention_mask=mask, position_ids=positions), "position_ids")
    for more in ({}, {"attention_mask": ones}):
      cache = transformers.DynamicCache()
      model(tokens[:, :4], **{CACHE: cache})
      expect_refused(f"a start again behind a cache, {list(more)}",
                     lambda: model(tokens[:, 4:], **{CACHE: cache}, position_ids=ones[:, 4:].cumsum(-1) - 1, **more),
                     "position_ids")
    full = transformers.DynamicCache()
    model(tokens[:, :4], **{CACHE: full})
    expect_refused("packed positions behind a cache", lambda: model(tokens[:, 4:], position_ids=packed[:, 4:],
                                                                    **{CACHE: full}), "position_ids")
    expect_refused("labels cut short", lambda: model(tokens, labels=tokens[:, 1:]), "labels")
    mask = ones.clone()
    mask[0, -1] = 0
    expect_refused("padding on the right", lambda: write(model, tokens, mask), "padding")
    expect_refused("a word that generate does not know", lambda: write(model, tokens, nonsense=1), "nonsense")
    model.config.output_hidden_states = True
    expect_refused("output_hidden_states of the configuration", lambda: model(tokens), "output_hidden_states")
    model.config.output_hidden_states = False

  @torch.no_grad()
  def check_outputs(self):
    model, tokens = self.model, self.tokens
    whole = model(tokens)
    for name in ("cache", "past_key_values"):
      cache = transformers.DynamicCache()
      model(tokens[:, :4], **{name: cache})
      expect(f"{name} is not filled", cache.get_seq_length() == 4)
      last = model(tokens[:, 4:], **{name: cache})
      check_equal(f"logits with {name}", last.logits, whole.logits[:, 4:])
      expect("the cache is returned by another name", last[CACHE] is cache)
    harmless = {"use_cache": False, "cache_position": torch.arange(tokens.shape[1]), "output_attentions": None,
                "output_hidden_states": False, "token_type_ids": torch.zeros_like(tokens), "return_dict": True}
    check_equal("logits beside harmless words", model(input_ids=tokens, **harmless).logits, whole.logits)
    positions = torch.arange(tokens.shape[1])[None]
    check_equal("logits at their positions", model(tokens, position_ids=positions).logits, whole.logits)
    for kept in (torch.tensor([1, 3]), torch.tensor([-1])):
      check_equal("kept logits", model(tokens, logits_to_keep=kept).logits, whole.logits[:, kept])
    check_equal("the last two logits", model(tokens, logits_to_keep=2).logits, whole.logits[:, -2:])
    loss, logits = model(tokens, labels=tokens, return_dict=False)
    check_equal("the logits of a tuple", logits, whole.logits)
    many = model(tokens, labels=tokens, num_items_in_batch=torch.tensor(3)).loss
    check_equal("the loss of three items", many, loss * (tokens.shape[1] - 1) / 3)
    mask = torch.ones_like(tokens)
    hidden = model.base_model(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
    check_equal("the head of what is below it", model.get_output_embeddings()(hidden), whole.logits)
    cached, rows = write(model, tokens[:, :5]), torch.cat([tokens[:, 2:7], tokens[:, :5]])
    padded = torch.tensor([[0] * 2 + [1] * 3, [1] * 5])
    for more in ({}, {"use_cache": False}, {CACHE: transformers.DynamicCache()}):
      expect(f"a row beside padding, {more}", torch.equal(write(model, rows, padded, **more)[1:], cached))
    want, places = model(rows, attention_mask=padded).logits[:, 2:], padded.cumsum(-1) - 1
    for filler in (0, 1):  # what versions of the library write at padding
      positions, cache = places.masked_fill(padded == 0, filler), transformers.DynamicCache()
      pieces = [model(rows[:, part], attention_mask=padded[:, : part.stop], position_ids=positions[:, part],
                      **{CACHE: cache}).logits for part in (slice(0, 3), slice(3, 5))]
      check_equal(f"logits at positions with {filler} at padding", torch.cat(pieces, dim=1)[:, 2:], want)

  @torch.no_grad()
  def check_windows(self):
    """The library's cache forgets what a layer's window does not hold; another layer may run in its place."""
    model, tokens, cache = self.model, self.tokens, transformers.DynamicCache(config=self.model.config)
    expect("the library's cache has no windows", any(cache.is_sliding))
    pieces = [model(piece, **{CACHE: cache}).logits for piece in tokens.split([4, 1, self.T - 5], dim=1)]
    check_equal("logits with the library's cache", torch.cat(pieces, dim=1), model(tokens).logits)
    filled = transformers.DynamicCache(config=model.config)
    filled.update(torch.zeros(1, 1, 4, 6), torch.zeros(1, 1, 4, 6), filled.is_sliding.index(True))
    expect_refused("a cache filled within a window", lambda: model(tokens, **{CACHE: filled}), "window")

  def check_packed(self):
    """In double. The collator's labels leave out what would be foretold from another document."""
    model, tokens, collate = copy.deepcopy(self.model).double(), self.tokens, transformers.DataCollatorWithFlattening
    documents = tokens[0].split([4, 1, self.T - 5])
    batch = collate(return_flash_attn_kwargs=True, return_seq_idx=True)([{"input_ids": ids} for ids in documents])
    del batch["labels"]
    with torch.no_grad():
      alone = torch.cat([model(ids[None]).logits for ids in documents], dim=1)
      packed = model(**batch)
      check_close("packed documents", packed.logits, alone)
      expect("packed documents leave a cache", getattr(packed, CACHE) is None)
      rows, whole = torch.cat([tokens, tokens]), torch.arange(self.T)[None]
      mixed = model(rows, position_ids=torch.cat([whole, batch["position_ids"]])).logits
      check_close("packed documents and a whole row", mixed, torch.cat([model(tokens).logits, alone]))
      check_close("packed rows of equal lengths", model(rows, position_ids=batch["position_ids"]).logits[1:], alone)
    batch = collate()([{"input_ids": ids} for ids in documents])
    model.zero_grad()
    model(**batch).loss.backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    for ids in documents:
      if len(ids) > 1:
        model(ids[None], labels=ids[None], num_items_in_batch=self.T - len(documents)).loss.backward()
    for name, parameter in model.named_parameters():
      if parameter.grad is not None:  # of a loss in float32
        check_close(f"of packed documents the gradients of {name}", got[name], parameter.grad, 1e-6)

  def check_checkpointing(self):
    model = load(self.directory).train()
    tokens = torch.cat([self.tokens, self.tokens.flip(1)])
    want = gradients(model, tokens)
    for kwargs in (None, {"use_reentrant": True}, {"use_reentrant": False}):
      with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
      expect("checkpointing is not on", model.is_gradient_checkpointing)
      check_gradients(f"with checkpointing, {kwargs}", gradients(model, tokens), want)
      expect("there is a cache", getattr(model(tokens), CACHE) is None)
      expect_refused("a cache", lambda: model(tokens, **{CACHE: transformers.DynamicCache()}), "checkpointing")

  def check_offloaded(self):
    """Two blocks on disk, whose hooks rebuild what is passed; and all of a GPT-2, whose files we read ourselves."""
    model = self.model
    parts = [name for name, _ in (*model.model.named_children(), *model.model.named_parameters(recurse=False))]
    where = {f"model.{name}": "cpu" for name in parts if name != "layers"} | {"lm_head": "cpu"}
    where |= {f"model.layers.{i}": "disk" if i in (1, 2) else "cpu" for i in range(model.config.num_hidden_layers)}
    for where in (where, "disk") if "n_embd" in model.config.to_dict() else (where,):
      folder = self.scratch / ("whole" if where == "disk" else "offloaded")
      try:
        spread = load(self.directory, device_map=where, offload_folder=str(folder))
      except ValueError as refused:  # older versions of accelerate put no whole model on disk, and say so
        if where != "disk" or "offload the whole model to the disk" not in str(refused):
          raise
        continue
      expect("nothing is on disk", any(p.device.type == "meta" for p in spread.parameters()))
      with torch.no_grad():
        check_equal(f"the logits with {folder.name} on disk", spread(self.tokens).logits, model(self.tokens).logits)
      prompt = self.tokens[:, :5]
      expect(f"{folder.name} on disk writes another text", torch.equal(write(spread, prompt), write(model, prompt)))

  def check(self):
    self.check_refusals()
    self.check_outputs()
    self.check_packed()
    if "sliding_window" in self.model.config.to_dict():
      self.check_windows()
    self.check_checkpointing()
    self.check_offloaded()


def shard(rank, port, directories, said):
  """One of two processes: blocks sharded both ways give the loss and the gradients of the whole model. What goes wrong
  is in the file RANK of the directory said, a line each."""
  torch.set_num_threads(1)
  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  warnings.simplefilter("ignore")
  torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
  tokens = torch.randint(0, check_modelling.V, (2, 9), generator=torch.Generator().manual_seed(1))
  for directory in directories:
    for way in (shard_flat, shard_tensors):
      try:
        check_gradients(f"by {way.__name__}", way(load(directory), tokens), gradients(load(directory), tokens))
      except Exception as problem:  # a crash of one model, too
        what = f"{directory.parent.name}, {way.__name__}: {type(problem).__name__}: {problem}"
        with open(said / str(rank), "a", encoding="utf-8") as lines:
          print(" ".join(what.split()), file=lines)
  torch.distributed.destroy_process_group()


def shard_flat(model, tokens):
  policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
  sharded = FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=True,
                                     device_id=torch.device("cpu"))
  loss = sharded(tokens, labels=tokens).loss
  loss.backward()
  with FullyShardedDataParallel.summon_full_params(sharded, with_grads=True):
    return loss.detach(), {name.replace("_fsdp_wrapped_module.", ""): p.grad.clone()
                           for name, p in sharded.named_parameters() if p.grad is not None}


def shard_tensors(model, tokens):
  mesh = init_device_mesh("cpu", (2,))
  for part in (*model.model.layers, model):
    fully_shard(part, mesh=mesh)
  loss, found = gradients(model, tokens)
  return loss, {name: gradient.full_tensor() for name, gradient in found.items()}


def check_sharding(directories, said):
  """What goes wrong, each in words. said: a new directory."""
  said.mkdir()
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
  torch.multiprocessing.spawn(shard, (port, directories, said), nprocs=2)
  return [line for path in sorted(said.iterdir()) for line in path.read_text(encoding="utf-8").splitlines()]


def check_pipeline(build, scratch):
  """Prompts in batches of two, by the tokenizer that was saved, and a little training by trl."""
  saved = scratch / "saved"
  run(build / "train_lime", "--data", "arith:3", "--layers", "2", "--width", "8", "--heads", "2", "--seq", "40",
      "--steps", "0", "--out", saved)
  model, tokenizer = load(saved), transformers.AutoTokenizer.from_pretrained(saved, trust_remote_code=True)
  expect(f"{tokenizer('4').keys()} are model inputs", "token_type_ids" not in tokenizer("4"))
  writer = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)
  prompts = ["4 * ( 2 - 8 ) =", "7 =", "( 3 + 5 ) * 2 ="]
  options = {"do_sample": False, "max_new_tokens": 6, "return_full_text": False}
  single, pairs = ([said[0]["generated_text"] for said in writer(prompts, batch_size=size, **options)]
                   for size in (1, 2))
  expect(f"in batches the pipeline writes {pairs}, not {single}", single == pairs)
  if trl is not None:
    check_sft(scratch, saved, tokenizer, prompts)


def check_sft(scratch, saved, tokenizer, prompts):
  datasets.disable_progress_bars()
  rows = datasets.Dataset.from_list([{"text": prompt} for prompt in prompts] * 4)
  options = {"output_dir": str(scratch / "trained"), "max_steps": 2, "per_device_train_batch_size": 2,
             "logging_steps": 1, "log_level": "error", "report_to": "none", "use_cpu": True, "bf16": False,
             "disable_tqdm": True}
  losses = []
  for on in (True, False):
    trainer = trl.SFTTrainer(load(saved), trl.SFTConfig(gradient_checkpointing=on, **options), train_dataset=rows,
                             processing_class=tokenizer)
    trainer.train()
    losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
  check_equal("the losses of SFTTrainer with checkpointing", *losses)
  packed = trl.SFTConfig(packing=True, max_length=16, **options)
  trainer = trl.SFTTrainer(load(saved), packed, train_dataset=rows, processing_class=tokenizer)
  batch, model = next(iter(trainer.get_train_dataloader())), load(saved)
  starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
  expect(f"packing makes no documents of {batch}", len(starts) > 1 and len(batch["input_ids"]) == 1)
  documents = batch["input_ids"][0].tensor_split(starts[1:])
  count = sum(len(ids) - 1 for ids in documents)
  with torch.no_grad():
    alone = sum(model(ids[None], labels=ids[None], num_items_in_batch=count).loss for ids in documents if len(ids) > 1)
    check_equal("the loss of a packed batch", model(**batch).loss, alone)
  trainer.train()


def main():
  build = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build")
  torch.set_num_threads(1)
  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  cases, failures, directories = list(variants()), [], []
  check_complete(cases)
  with tempfile.TemporaryDirectory() as scratch:
    for seed, options in enumerate(cases):
      need_program(build / check_modelling.trainer(options["arch"])[0])
      home = pathlib.Path(scratch) / f"{seed} {options['arch']} {options.get('backbone', '')}".strip()
      home.mkdir()
      try:
        case = Called(build, home, seed, dict(options))
        directories.append(case.directory)
        case.check()
      except Exception as problem:  # a crash of one model, too
        failures.append(f"{options}: {type(problem).__name__}: {problem}")
    failures += check_sharding(directories, pathlib.Path(scratch) / "said")
    try:
      check_pipeline(build, pathlib.Path(scratch))
    except Exception as problem:
      failures.append(f"pipeline: {type(problem).__name__}: {problem}")
  for failure in failures:
    print(f"FAILED: {failure}")
  print(f"{len(cases)} models in others' hands, {len(failures)} failures")
  if trl is None:
    print("skipped: the checks of SFTTrainer, for trl is not importable")
  sys.exit(1 if failures else 0)


if __name__ == "__main__":
  main()
