#include "engine/io/sha256.h"

#include <algorithm>
#include <bit>
#include <cstring>

#ifdef __SHA__
#include <immintrin.h>
#endif

namespace crossply {
namespace {

constexpr std::array<uint32_t, 64> first_primes() {
  std::array<uint32_t, 64> primes{};
  size_t count = 0;
  for (uint32_t n = 2; count < primes.size(); ++n) {
    bool prime = true;
    for (size_t i = 0; i < count; ++i) prime = prime && n % primes[i] != 0;
    if (prime) primes[count++] = n;
  }
  return primes;
}

// The round constants: the first 32 bits of the fractional parts of the cube roots of the first 64 primes, which is
// floor(cbrt(prime * 2^96)) mod 2^32.
constexpr std::array<uint32_t, 64> round_constants() {
  std::array<uint32_t, 64> out = first_primes();
  for (uint32_t& entry : out) {
    const unsigned __int128 cube = static_cast<unsigned __int128>(entry) << 96;
    unsigned __int128 root = 0;
    for (int bit = 35; bit >= 0; --bit) {
      const unsigned __int128 next = root | static_cast<unsigned __int128>(1) << bit;
      if (next * next * next <= cube) root = next;
    }
    entry = static_cast<uint32_t>(root);
  }
  return out;
}

constexpr std::array<uint32_t, 64> K = round_constants();

#ifndef __SHA__
uint32_t load_big_endian(const uint8_t* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | uint32_t{p[3]};
}
#endif

}  // namespace

#ifdef __SHA__  // five times as fast: the CPU does two rounds in one instruction
void Sha256::compress(const uint8_t* block) {
  auto word = [&](int i) { return static_cast<int>(state_[static_cast<size_t>(i)]); };
  // As the instructions want the state, the first letter in the highest lane.
  __m128i abef = _mm_set_epi32(word(0), word(1), word(4), word(5));
  __m128i cdgh = _mm_set_epi32(word(2), word(3), word(6), word(7));
  const __m128i abef_before = abef, cdgh_before = cdgh;
  const __m128i big_endian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
  __m128i w[4];  // a ring of 16 words: four rounds' words in each
#pragma GCC unroll 16
  for (int t = 0; t < 16; ++t) {
    __m128i& now = w[t % 4];
    const __m128i &after = w[(t + 1) % 4], &third = w[(t + 2) % 4], &last = w[(t + 3) % 4];
    if (t < 4) {
      now = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block) + t), big_endian);
    } else {
      const __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(now, after), _mm_alignr_epi8(last, third, 4));
      now = _mm_sha256msg2_epu32(sum, last);
    }
    const __m128i wk = _mm_add_epi32(now, _mm_loadu_si128(reinterpret_cast<const __m128i*>(K.data()) + t));
    // Two rounds each. They give a, b, e, f; those before are the new c, d, g, h.
    cdgh = _mm_sha256rnds2_epu32(cdgh, abef, wk);
    abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(wk, 0x0e));
  }
  abef = _mm_add_epi32(abef, abef_before), cdgh = _mm_add_epi32(cdgh, cdgh_before);
  uint32_t feba[4], hgdc[4];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(feba), abef);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(hgdc), cdgh);
  state_ = {feba[3], feba[2], hgdc[3], hgdc[2], feba[1], feba[0], hgdc[1], hgdc[0]};
}
#else
void Sha256::compress(const uint8_t* block) {
  uint32_t w[64];
  for (int t = 0; t < 16; ++t) w[t] = load_big_endian(block + 4 * t);
  for (int t = 16; t < 64; ++t) {
    const uint32_t s0 = std::rotr(w[t - 15], 7) ^ std::rotr(w[t - 15], 18) ^ w[t - 15] >> 3;
    const uint32_t s1 = std::rotr(w[t - 2], 17) ^ std::rotr(w[t - 2], 19) ^ w[t - 2] >> 10;
    w[t] = w[t - 16] + s0 + w[t - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (int t = 0; t < 64; ++t) {
    const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + K[t] + w[t];
    const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  state_[0] += a, state_[1] += b, state_[2] += c, state_[3] += d;
  state_[4] += e, state_[5] += f, state_[6] += g, state_[7] += h;
}
#endif

void Sha256::update(const void* data, size_t bytes) {
  const uint8_t* from = static_cast<const uint8_t*>(data);
  total_ += bytes;
  while (bytes > 0) {
    if (used_ == 0 && bytes >= block_.size()) {
      compress(from);
      from += block_.size(), bytes -= block_.size();
      continue;
    }
    const size_t n = std::min(bytes, block_.size() - used_);
    std::memcpy(block_.data() + used_, from, n);
    from += n, bytes -= n, used_ += n;
    if (used_ == block_.size()) compress(block_.data()), used_ = 0;
  }
}

std::string Sha256::hex() {
  // Padding: a one bit, zeros, and the length in bits, big-endian, in the last eight bytes of a block.
  const uint64_t bits = total_ * 8;
  const uint8_t one = 0x80, zero = 0;
  update(&one, 1);
  while (used_ != 56) update(&zero, 1);
  uint8_t length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(bits >> (56 - 8 * i));
  update(length, sizeof length);
  std::string out;
  for (uint32_t word : state_) {
    for (int shift = 28; shift >= 0; shift -= 4) out += "0123456789abcdef"[word >> shift & 15];
  }
  return out;
}

}  // namespace crossply
