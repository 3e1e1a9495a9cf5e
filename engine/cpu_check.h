// A program compiled for one CPU says so on another, instead of dying of an illegal instruction.
#pragma once

// X(macro of the compiler, name in __builtin_cpu_supports): instruction sets that compilers use by themselves.
// clang-format off
#define CROSSPLY_INSTRUCTION_SETS(X)                                                       \
  X(__SSE4_2__, "sse4.2") X(__POPCNT__, "popcnt") X(__BMI__, "bmi") X(__BMI2__, "bmi2")    \
  X(__AVX__, "avx") X(__AVX2__, "avx2") X(__FMA__, "fma") X(__FMA4__, "fma4")              \
  X(__XOP__, "xop") X(__GFNI__, "gfni") X(__AVX512F__, "avx512f")                          \
  X(__AVX512CD__, "avx512cd") X(__AVX512BW__, "avx512bw") X(__AVX512DQ__, "avx512dq")      \
  X(__AVX512VL__, "avx512vl") X(__AVX512IFMA__, "avx512ifma")                              \
  X(__AVX512VBMI__, "avx512vbmi") X(__AVX512VBMI2__, "avx512vbmi2")                        \
  X(__AVX512VNNI__, "avx512vnni") X(__AVX512BITALG__, "avx512bitalg")                      \
  X(__AVX512VPOPCNTDQ__, "avx512vpopcntdq") X(__AVX512BF16__, "avx512bf16")
// clang-format on

namespace crossply {

// Which of them this program is compiled for, in that order.
extern const bool built_for[];

// Ends the program with exit code 71 if this CPU lacks one of them. It runs before every other constructor: g++ ignores
// that attribute after a declaration without it. run_program() calls it, and the linker puts it into every program.
[[gnu::constructor(101)]] void check_cpu();

}  // namespace crossply
