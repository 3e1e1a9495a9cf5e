#!/usr/bin/env python3
"""Counts a kernel's machine instructions, loop by loop: what an estimate of its time begins with.

  dev/gpu/count_sass.py kernels/attention/attention_hopper_forward.cu [--arch 90a] [--kernel TEXT] [--all] [--order]

Compiles the file with nvcc, disassembles it with nvdisasm (of the CUDA toolkit, or `pip install nvidia-cuda-nvdisasm`)
and prints, for each kernel, what should be nowhere (local memory, doubles, generic accesses), and for each loop the
instructions of one iteration and warp by kind. A loop is a backward branch and what lies between it and its target, so
paths that exclude each other are counted together.

  --kernel TEXT   kernels whose name contains TEXT only
  --all           loops without products of a warpgroup, too, in kernels that have them
  --order         in which order products, waits and barriers come, and what lies between them
"""
import argparse
import collections
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]

# The first that fits the beginning of the name; one that none fits is a kind of its own.
KINDS = [
    ("uniform", r"U(?!LDC)"), ("HGMMA", r"HGMMA"), ("MUFU.EX2", r"MUFU\.EX2"), ("MUFU", r"MUFU"), ("FMNMX", r"FMNMX"),
    ("FFMA", r"FFMA"), ("FADD", r"FADD"), ("FMUL", r"FMUL"), ("to 16 or 8 bits", r"F2FP"), ("SHFL", r"SHFL"),
    ("LDS", r"LDS"), ("STS", r"STS"), ("LDG", r"LDG"), ("STG", r"STG|RED"), ("local", r"LDL|STL"),
    ("generic", r"(LD|ST)(\.|$)|ATOM\b"), ("constants", r"U?LDC"), ("doubles", r"D(FMA|ADD|MUL|SETP)|F2F\.F64"),
    ("barriers", r"BAR|SYNCS|FENCE|MEMBAR|WARPGROUP|WARPSYNC|BSSY|BSYNC"),
    ("selects", r"FSEL|FSETP|ISETP|PLOP3|SEL|VOTE"), ("moves", r"MOV|IMAD\.MOV|R2UR|S2R|S2UR|CS2R"),
    ("integers", r"IMAD|IADD|LOP3|SHF|LEA|PRMT|VIADD|VIMNMX|I2F|F2I|IMNMX"),
    ("branches", r"BRA|EXIT|CALL|RET|NOP"),
]  # fmt: skip
KINDS = [(name, re.compile(pattern)) for name, pattern in KINDS]
EVENTS = ("HGMMA", "WARPGROUP", "BAR", "SYNCS", "BRA")
UNWANTED = ("local", "generic", "doubles")

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?);")


def kind_of(op):
    return next((name for name, pattern in KINDS if pattern.match(op)), op.split(".")[0])


def disassemble(source, arch, folder):
    for program, hint in (("nvcc", "the CUDA toolkit"), ("nvdisasm", "pip install nvidia-cuda-nvdisasm")):
        if shutil.which(program) is None:
            sys.exit(f"{program} is not on the PATH ({hint})")
    cubin = folder / "kernels.cubin"
    subprocess.run(
        ["nvcc", "-std=c++20", "--expt-relaxed-constexpr", "-O3", f"-gencode=arch=compute_{arch},code=sm_{arch}",
         "-DCROSSPLY_CUDA=1", *(["-DCROSSPLY_SM90A=1"] if arch == "90a" else []), f"-I{ROOT}", "-cubin", "-o", cubin,
         source], check=True)  # fmt: skip
    return subprocess.run(["nvdisasm", "-c", cubin], check=True, capture_output=True, text=True).stdout


def kernels_of(text):
    """{name: ([(address, op, arguments)], {label: address})}"""
    kernels, code, labels, waiting = {}, None, {}, []
    for line in text.splitlines():
        if begin := re.match(r"^\.text\.(\S+):", line):
            code, labels, waiting = [], {}, []
            kernels[begin.group(1)] = (code, labels)
        elif line.lstrip().startswith(".section"):
            code = None
        elif code is None:
            continue
        elif label := re.match(r"^(\.L\w+):", line):
            waiting.append(label.group(1))
        elif found := INSTRUCTION.match(line):
            address = int(found.group(1), 16)
            labels.update(dict.fromkeys(waiting, address))
            waiting = []
            code.append((address, found.group(2), found.group(3)))
    return kernels


def readable(name):
    text = subprocess.run(["c++filt", name], capture_output=True, text=True).stdout if shutil.which("c++filt") else name
    return re.sub(r"crossply::|\(anonymous namespace\)::|_GLOBAL__N__\w+::|^void ", "", text).split("(")[0].strip()


def loops_of(code, labels):
    found = {}
    for address, op, arguments in code:
        target = re.search(r"`\((\.L\w+)\)", arguments) if op.startswith("BRA") else None
        begin = labels.get(target.group(1), address + 1) if target else address + 1
        # What a wait repeats lies behind the kernel's end and comes back from there: no loop of the program.
        if begin <= address and not any(begin <= a <= address and o == "EXIT" for a, o, _ in code):
            found[begin] = max(found.get(begin, 0), address)
    return [[c for c in code if begin <= c[0] <= end] for begin, end in sorted(found.items())]


def listed(counts):
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())


def print_order(loop):
    between = collections.Counter()
    for address, op, _ in loop:
        if not op.startswith(EVENTS):
            between[kind_of(op)] += 1
            continue
        if between:
            print(f"          {listed(between)}")
        between.clear()
        print(f"    {address:05x} {op}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--arch", default="90a")
    parser.add_argument("--kernel", default="")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--order", action="store_true")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        kernels = kernels_of(disassemble(flags.source, flags.arch, pathlib.Path(folder)))
    for mangled, (code, labels) in kernels.items():
        name = readable(mangled)
        if flags.kernel not in name:
            continue
        whole = collections.Counter(kind_of(op) for _, op, _ in code)
        print(f"\n{name}: {len(code)} instructions; " + ", ".join(f"{whole[kind]} {kind}" for kind in UNWANTED))
        loops = loops_of(code, labels)
        with_products = [loop for loop in loops if any(op.startswith("HGMMA") for _, op, _ in loop)]
        for loop in loops if flags.all or not with_products else with_products:
            counts = collections.Counter(kind_of(op) for _, op, _ in loop)
            print(f"  {loop[0][0]:05x} to {loop[-1][0]:05x}: {len(loop)} instructions\n    {listed(counts)}")
            if flags.order:
                print_order(loop)


if __name__ == "__main__":
    main()
