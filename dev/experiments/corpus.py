"""The text of the experiments: the sources of Python's own library, as documents of JSON lines.

    python3 dev/experiments/corpus.py OUT.jsonl

Every *.py of the standard library of the interpreter that runs this, without installed packages, in the order of
their paths; of files that are equal the first. 31.5 MB of a full CPython 3.11.7; distributions leave its tests away,
so that there may be less (a note says so below 20 MB). Licence: PSF-2.0 and the compatible ones named in its LICENSE;
nothing of it is part of this project.
"""

import hashlib
import json
import os
import sys
import sysconfig


def sources(root):
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(f for f in folders if f not in ("site-packages", "dist-packages"))
        yield from (os.path.join(folder, name) for name in sorted(names) if name.endswith(".py"))


def documents(root):
    """The text of each file once; not of those that hold bytes which are no UTF-8, as some of the tests do."""
    seen = set()
    for path in sources(root):
        with open(path, "rb") as file:
            data = file.read()
        digest = hashlib.sha256(data).digest()
        if not data.strip() or digest in seen:
            continue
        seen.add(digest)
        try:
            yield data.decode()
        except UnicodeDecodeError:
            pass


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: corpus.py OUT.jsonl")
    out, total, count = sys.argv[1], 0, 0
    with open(out + ".part", "w", encoding="ascii") as file:
        for text in documents(sysconfig.get_paths()["stdlib"]):
            file.write(json.dumps({"text": text}) + "\n")
            total, count = total + len(text.encode()), count + 1
    os.replace(out + ".part", out)
    version = sys.version.split()[0]
    print(f"{count} documents, {total:,} bytes of Python {version}")
    if total < 20_000_000:
        print("below 20 MB: this Python came without its tests; the numbers in the records are of a full one")


main()
