#!/usr/bin/env python3
"""Checks that build/tokenize gives the ids of the `tokenizers` package, and how fast both are.

  dev/check_tokenizers.py [BUILD] [--data DIR] [--all] [--speed]

BUILD: the directory with the programs, default build. DIR (or $CROSSPLY_TEXT): a directory of text files, which are
compared too. --all: every character in every context, minutes; otherwise a sample of those beyond the first two planes.
--speed: the speed of both on the texts, one thread and all.

The published files of tests/published/tokenizers, as their writers left them and without what older writers left out.
Then, trained on this repository's own text: files in the styles of GPT-2, GPT-4o, Llama 3, Qwen 2, DeepSeek, and
Llama 2 in two writings. Compared for each: texts, a page of Unicode's difficult characters, characters in contexts,
random bytes read as text; decoding gives the text back; random bytes that are no UTF-8 are refused.

Exit 0: all agree. 1: something does not. 77: skipped, the package is not importable.
"""
import argparse
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

os.environ.setdefault("RAYON_NUM_THREADS", "1")
try:
  import tokenizers
except ImportError as missing:
  print(f"skipped: {missing.name} is not importable")
  sys.exit(77)
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = pathlib.Path(__file__).resolve().parent.parent
BREAK = "<|break|>"  # a special token between texts: they are encoded in one run, each as if it were alone
SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = SUFFIX + (r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
GPT4O = "|".join([
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + SUFFIX + "?",
  r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + SUFFIX + "?",
  r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"])
DEEPSEEK = (r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def byte_level(steps, normalizer=None, **options):
  tokenizer = tokenizers.Tokenizer(models.BPE(**options))
  if normalizer:
    tokenizer.normalizer = normalizer
  level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not steps)
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, level]) if steps else level
  tokenizer.decoder = decoders.ByteLevel()
  return tokenizer, {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": ["<|endoftext|>"]}


def of_characters(normalizer, pre_tokenizer):
  tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
  if normalizer:
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
  if pre_tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
  tokenizer.decoder = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
  # No more characters than these, so that the bytes are needed.
  return tokenizer, {"special_tokens": ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)],
                     "limit_alphabet": 80}


def split(pattern, behavior="isolated", invert=False):
  return pre_tokenizers.Split(Regex(pattern), behavior, invert)


KINDS = {
  "gpt2": lambda: byte_level([]),
  "gpt4o": lambda: byte_level([split(GPT4O, "removed", True)]),
  "llama3": lambda: byte_level([split(LLAMA3)], ignore_merges=True),
  "qwen2": lambda: byte_level([split(QWEN2)], normalizer=normalizers.NFC()),
  "deepseek": lambda: byte_level([split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK)]),
  "deepseek_llm": lambda: byte_level([split("[\r\n]"), split(r"\s?\p{L}+"), split(r"\s?\p{P}+"), split(r"\s+$"),
                                      split("[一-龥ࠀ-一가-퟿]+"),
                                      pre_tokenizers.Digits(individual_digits=True)]),
  "digits": lambda: byte_level([pre_tokenizers.Digits(individual_digits=False), split(" ", "merged_with_next")]),
  "llama2": lambda: of_characters(True, False),
  "metaspace": lambda: of_characters(False, True),
}
def train(kind, texts, directory):
  tokenizer, options = KINDS[kind]()
  # Short pieces also where the style has no cut: training on whole texts takes forever.
  lines = [line for text in texts for line in text.splitlines(keepends=True)]
  tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=3000, show_progress=False, **options))
  tokenizer.add_special_tokens([BREAK, AddedToken("<|left|>", lstrip=True), AddedToken("<|right|>", rstrip=True)])
  tokenizer.add_tokens([AddedToken("<|word|>", single_word=True, normalized=False),
                        AddedToken("<|wor", normalized=False), AddedToken("<|normal|>", normalized=True)])
  path = directory / f"{kind}.json"
  tokenizer.save(str(path))
  return tokenizer, path


def own_texts():
  files = sorted(ROOT.glob("*.md")) + sorted(ROOT.glob("data/*.cpp")) + sorted(ROOT.glob("dev/*.py"))
  return [read(path) for path in files]


def read(path):
  return path.read_bytes().decode("utf-8", errors="replace")


SPACES = "\t\n\v\f\r \u0085\u00a0\u1680\u2000\u2005\u200a\u2028\u2029\u202f\u205f\u3000"
TORTURE = [
  "e\u0301e\u0301\u0323a\u0308\u0301 \u0301a 1\u0301",
  "👩\u200d👩\u200d👧\u200d👦 👍🏽 🇩🇪🏳️\u200d🌈",
  "שלום עולם، مرحبا بالعالم ١٢٣٤",
  "漢字かな交じり文カタカナ。你好，世界！一二三１２３４",
  "\u1112\u1161\u11ab한글 한\u1100\u1161", "\ue000\uf8ff\U000f0000\U0010ffff \ufffe\uffff",
  "\u0378\u0379\U000e0100\U0001fffe \u05ff", "a\u0085b\u180ec\u2028d\u2029e\u200bf\ufeffg",
  "'\u017f 'S 's 'ſ it'\u017f \u212a 'K I'LL i'lL", "İstanbul ıI ǅ ǆ Ǆ ß ẞ ﬁ ﬆ", "\0a\0 \0\0",
  "' '' ''s 's's '1's don't'", SPACES, " ".join(SPACES), "a".join(SPACES) + "\u180e",
  "\r\n\r\n a\r\r\n\n  \n \r\n\t\n", "  \n  a  \n", "a   b    c     ",
  "𝒜𝓁𝑔𝑒𝒷𝓇𝒶 𐐀𐐨 𞤀 𑁦 𐄇 ½ Ⅷ ² ³ ¼ ৪", "x" * 10000, " " * 10000,
  "7" * 10000, "a" + "\u0301\u0323" * 300, "\n" * 5000 + " " * 5000 + "!", "ab" * 5000 + "é" * 3000,
  "!" * 3000 + "'" * 3000, "12345678 1,234.5 1e-5 ١٢٣٤٥ 12\u0301 3",
  "<|left|> a <|left|>  <|right|>  b <|right|>\u3000<|left|>",
  "a<|word|> <|word|>b .<|word|>. <|wo <|wor <|word|", " <|normal|>  <|normal|>x", "<|endoftext|> a",
  "▁ ▁a ▁▁", "Ġ Ċ Ā ĳ", "A\u030a \u212b \u1e9b\u0323 q\u0307\u0323 \u0344 \u0f73 \u2adc \ufb1d",
  "CamelCase camelCase HTTPServer ÀÉ àé Ǆa", "[x] (y) {z} \\n \\ / // /* */ #! $1 %d ^ ~`", "",
]


def in_contexts(everything):
  codes = [c for c in range(0x110000) if not 0xD800 <= c < 0xE000]
  if not everything:
    codes = [c for c in codes if c < 0x3400 or (c < 0x20000 and c % 7 == 0) or c % 101 == 0]
  for code in codes:
    c = chr(code)
    yield f"{c}a{c} {c}'{c}1{c}2\n{c}{c}  {c}.{c}\t{c}A"
    if everything:
      yield from (c, "a" + c, " " + c, "'" + c, "1" + c + "1", c + c, "\n" + c + "\n", "  " + c, "." + c + ".")


def random_bytes(count):
  chance = random.Random(7)
  for i in range(count):
    size = chance.randrange(60)
    if i % 2:
      yield bytes(chance.choice(b"ab '\n\t1<|.\xc3\xa9\xe2\x80\xa8\xf0\x9f\x98\x80\xe3\x81\x82") for _ in range(size))
    else:
      yield chance.randbytes(size)


def ours(build, path, data, *flags, threads="1"):
  env = dict(os.environ, OMP_NUM_THREADS=threads)
  command = [str(build / "tokenize"), "--tokenizer", str(path), *flags]
  return subprocess.run(command, input=data, capture_output=True, env=env)


def our_ids(build, path, text):
  done = ours(build, path, text.encode())
  if done.returncode != 0:
    raise RuntimeError(f"tokenize failed: {done.stderr.decode()}")
  return done.stdout.split()


def check(build, kind, tokenizer, path, what, texts):
  """All the texts in one run; where they differ, the first one that does."""
  texts = [text for text in texts if BREAK not in text]
  whole = BREAK.join(texts)
  want = tokenizer.encode(whole, add_special_tokens=False).ids
  got = list(map(int, our_ids(build, path, whole)))
  if got != want:
    for text in texts:
      theirs = tokenizer.encode(text, add_special_tokens=False).ids
      mine = list(map(int, our_ids(build, path, text)))
      if mine != theirs:
        raise RuntimeError(f"{kind}, {what}: {ascii(text[:200])}: ours {mine[:40]}, theirs {theirs[:40]}")
    raise RuntimeError(f"{kind}, {what}: the ids differ")
  kept = [text for text in texts if "<|left|>" not in text and "<|right|>" not in text]
  if kind == "qwen2":
    kept = [text for text in kept if normalizers.NFC().normalize_str(text) == text]
  if kind in ("llama2", "metaspace"):
    # A mark that the text has itself comes back as a space; each part of a text between added tokens gets a space, and
    # only the first of all loses it, even its own.
    kept = ["x" + "".join(text for text in kept if "▁" not in text and "<" not in text)]
  whole = BREAK.join(kept)
  back = ours(build, path, b" ".join(our_ids(build, path, whole)), "--decode")
  if back.returncode != 0 or back.stdout != whole.encode():
    raise RuntimeError(f"{kind}, {what}: decoding does not give the text back")
  return f"{len(texts)} {what}"


def check_refusals(build, path, samples):
  broken = [data for data in samples if data.decode("utf-8", errors="replace").encode() != data][:20]
  for data in broken:
    done = ours(build, path, data)
    try:
      data.decode()
    except UnicodeDecodeError as error:
      if done.returncode != 65 or f"wrong at byte {error.start}".encode() not in done.stderr:
        raise RuntimeError(f"{data!r} is not refused at byte {error.start}: {done.stderr!r}")


def check_published(build, path, directory):
  """A published file, also without what files of older versions of the package do not have."""
  whole = json.loads(path.read_text(encoding="utf-8"))
  writings = {"as it is": whole, "without model.type": {**whole, "model": without(whole["model"], "type")}}
  for key in ("fuse_unk", "dropout", "unk_token", "ignore_merges"):
    if key in whole["model"] and not whole["model"][key]:
      writings[f"without model.{key}"] = {**whole, "model": without(whole["model"], key)}
  pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in whole["model"]["merges"]]
  writings["merges as pairs"] = {**whole, "model": {**whole["model"], "merges": pairs}}
  text = "\n".join(TORTURE)
  for name, writing in writings.items():
    file = directory / f"published_{path.stem}.json"
    file.write_text(json.dumps(writing), encoding="utf-8")
    want = tokenizers.Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False).ids
    if list(map(int, our_ids(build, file, text))) != want:
      raise RuntimeError(f"published {path.stem}, {name}: the ids differ")
  return len(writings)


def without(values, key):
  return {name: value for name, value in values.items() if name != key}


def speed(build, path, texts):
  """In MB/s: ours without its start, which reads the file."""
  text = "\n".join(texts)
  text = text * max(1, round(2e7 / len(text)))
  data = text.encode()
  start = time.perf_counter()
  ours(build, path, b"a")
  begun = time.perf_counter() - start
  for threads in ("1", str(os.cpu_count())):
    best = min(timed(lambda: ours(build, path, data, threads=threads)) for _ in range(3)) - begun
    code = ("import sys, time, tokenizers; t = tokenizers.Tokenizer.from_file(sys.argv[1]); "
            "x = sys.stdin.buffer.read().decode(); x = [x[i:i + 100000] for i in range(0, len(x), 100000)]; "
            "s = time.perf_counter(); t.encode_batch_fast(x, add_special_tokens=False); print(time.perf_counter() - s)")
    env = dict(os.environ, RAYON_NUM_THREADS=threads, TOKENIZERS_PARALLELISM="false" if threads == "1" else "true")
    theirs = float(subprocess.run([sys.executable, "-c", code, str(path)], input=data, capture_output=True, env=env,
                                  check=True).stdout)
    print(f"  {threads} threads: ours {len(data) / best / 1e6:.1f} MB/s, with printing the ids; the package "
          f"{len(data) / theirs / 1e6:.1f} MB/s, in parts of 100 000 characters")


def timed(call):
  start = time.perf_counter()
  call()
  return time.perf_counter() - start


def main():
  parser = argparse.ArgumentParser(description="Our token ids against those of the tokenizers package.")
  parser.add_argument("build", nargs="?", default="build", type=pathlib.Path)
  parser.add_argument("--data", default=os.environ.get("CROSSPLY_TEXT"), type=pathlib.Path)
  parser.add_argument("--all", action="store_true")
  parser.add_argument("--speed", action="store_true")
  parser.add_argument("--kinds", default=",".join(KINDS))
  args = parser.parse_args()
  texts = own_texts()
  corpora = []
  if args.data and args.data.is_dir():
    corpora = [read(path) for path in sorted(args.data.iterdir()) if re.search(r"\.(txt|json|md)$", path.name)]
  else:
    print("no --data and no $CROSSPLY_TEXT: only this repository's text is compared")
  samples = list(random_bytes(10000))
  with tempfile.TemporaryDirectory() as directory:
    for path in sorted((ROOT / "tests/published/tokenizers").glob("*.json")):
      writings = check_published(args.build, path, pathlib.Path(directory))
      print(f"ok: published {path.stem}: {writings} writings", flush=True)
    for kind in args.kinds.split(","):
      tokenizer, path = train(kind, texts + [text[:300000] for text in corpora], pathlib.Path(directory))
      done = [check(args.build, kind, tokenizer, path, "texts", texts + corpora),
              check(args.build, kind, tokenizer, path, "difficult texts", TORTURE),
              check(args.build, kind, tokenizer, path, "characters in contexts", list(in_contexts(args.all))),
              check(args.build, kind, tokenizer, path, "random byte strings",
                    [data.decode("utf-8", errors="replace") for data in samples])]
      check_refusals(args.build, path, samples)
      print(f"ok: {kind}: {', '.join(done)}", flush=True)
      if args.speed:
        speed(args.build, path, corpora or texts)


try:
  main()
except RuntimeError as error:
  print(f"FAIL: {error}")
  sys.exit(1)
