// The candidates of a row in descending order are not sorted but dealt into bins by |z|, where z <= 0 is the logit less the greatest
// over the temperature. Counts and masses of whole bins say in which bin top_k, top_p, min_p and the draw end; only such a bin is sorted.
//
// This is plain C++ for the compiler to vectorise. Every addition has its place: a bin's mass grows in the order of ids, then of z.
#include "sample.h"

#include <string.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "pool.h"
#include "simd.h"
#include "small_ops.h"

namespace bny {
namespace {

constexpr float GREEDY_EPS = 1e-6f;
// 64 bins for every octave of |z|, from 2^-10 over the temperature (and less) on: the first 24 bits of a logit's distance at any temperature.
constexpr int OCTAVES = 24, BIN_BITS = 6, BINS = OCTAVES << BIN_BITS, SHIFT = 23 - BIN_BITS;
constexpr int64_t BLOCK = 64;
constexpr double SLACK = 1e-15;  // of z, in which the rounding of its weight is lost

BNY_INLINE int32_t size_bits(float z) {
  int32_t bits;
  memcpy(&bits, &z, 4);
  return bits & 0x7fffffff;
}

// exp of x in [-700, 0], to about 1 ulp, exactly 1 at 0. Cody and Waite's reduction, Taylor's polynomial.
BNY_INLINE double exp_of(double x) {
  const double round = 6755399441055744.0;  // 1.5 * 2^52: behind adding it the low bits are the integer
  const double shifted = x * 1.4426950408889634 + round;
  const double n = shifted - round;
  const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double p = 1.0 / 479001600;
  p = p * r + 1.0 / 39916800;
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  uint64_t bits, power;
  memcpy(&bits, &p, 8);
  memcpy(&power, &shifted, 8);
  bits += power << 52;
  memcpy(&p, &bits, 8);
  return p;
}

// Weights of a block. What is below -700 has that weight, 1e-304, which no sum notices beside the greatest one, 1.
void weights_of(const float* z, double* weight) {
  float x[BLOCK];  // apart, or the compiler makes two ways through the polynomial, and vectors of neither
  for (int64_t j = 0; j < BLOCK; j++) x[j] = z[j] < -700.0f ? -700.0f : z[j];
  for (int64_t j = 0; j < BLOCK; j++) weight[j] = exp_of(x[j]);
}

// The uniform of layers/rng.py.
uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
double uniform(int64_t seed, int64_t position) {
  const uint64_t golden = 0x9e3779b97f4a7c15u, state = mix((uint64_t)seed + golden);
  return (double)(mix(state + golden * ((uint64_t)position + 1)) >> 11) * 0x1p-53;
}

struct Member {
  uint32_t bits, id;  // of |z|
  bool operator<(const Member& other) const { return bits != other.bits ? bits < other.bits : id < other.id; }
};

// One row, and memory that a thread keeps for the next one.
class Row {
 public:
  int64_t draw(const float* x, int64_t V, float top, float temperature, float top_p, float min_p, int64_t top_k, double u) {
    deal(x, V, top, temperature);
    const int64_t k = std::min(std::max<int64_t>(top_k, 1), V);
    int last = bin_at(k - 1);
    if (min_p > 0 && top_p >= 1) last = std::min(last, likely_bin(min_p, SLACK) + 1);
    weigh(last);
    int64_t kept = k;
    if (top_p < 1) kept = std::min(kept, count_to((double)top_p * mass_of(k)));
    if (min_p > 0) kept = std::min(kept, count_likely(min_p));
    kept = std::max<int64_t>(kept, 1);
    return at_mass(u * mass_of(kept), kept);
  }

 private:
  std::vector<float> z_;
  std::vector<uint16_t> bin_;
  int64_t size_ = 0;
  int64_t base_ = 0;
  int last_ = 0;                 // the last bin whose mass is known
  int64_t count_[BINS + 1];      // before each bin
  double mass_[BINS + 1];        // before each bin
  int open_ = -1;                // the bin whose members are these, in their order
  std::vector<Member> members_;
  std::vector<double> weight_, mass_to_;  // mass of the row up to and with each member

  int bin_of(int32_t bits) const { return (int)std::min<int64_t>(std::max<int64_t>((bits >> SHIFT) - base_, 0), BINS - 1); }
  // The bin where weights fall below min_p, or one beside it.
  int likely_bin(float min_p, double slack) const {
    return bin_of(size_bits((float)std::max(slack - std::log((double)min_p), 0.0)));
  }
  // The bin of the candidate at place i.
  int bin_at(int64_t i) const { return (int)(std::upper_bound(count_ + 1, count_ + BINS, i) - count_) - 1; }
  int64_t count(int b) const { return count_[b + 1] - count_[b]; }

  // z and bins of all, and how many are in each bin.
  void deal(const float* x, int64_t V, float top, float temperature) {
    size_ = V, open_ = -1;
    const size_t room = (size_t)((V + BLOCK - 1) / BLOCK * BLOCK);
    if (z_.size() < room) z_.resize(room), bin_.resize(room);
    const int32_t base = (size_bits(0x1p-10f / temperature) >> 23) << BIN_BITS;
    base_ = base;
    int32_t counts[BINS] = {0};
    for (int64_t begin = 0; begin < V; begin += BLOCK) {
      const int64_t n = std::min(BLOCK, V - begin);
      float* z = z_.data() + begin;
      uint16_t* bin = bin_.data() + begin;
      if (n == BLOCK)
        deal_block(x + begin, top, temperature, base, z, bin);
      else
        deal_rest(x + begin, n, top, temperature, base, z, bin);
      for (int64_t j = 0; j < n; j++) counts[bin[j]]++;
    }
    count_[0] = 0;
    for (int b = 0; b < BINS; b++) count_[b + 1] = count_[b] + counts[b];
  }
  static void deal_block(const float* x, float top, float temperature, int32_t base, float* z, uint16_t* bin) {
    for (int64_t j = 0; j < BLOCK; j++) {
      z[j] = (x[j] - top) / temperature;
      const int32_t b = (size_bits(z[j]) >> SHIFT) - base, low = b < 0 ? 0 : b;
      bin[j] = (uint16_t)(low < BINS - 1 ? low : BINS - 1);
    }
  }
  static void deal_rest(const float* x, int64_t n, float top, float temperature, int32_t base, float* z, uint16_t* bin) {
    float padded[BLOCK];
    for (int64_t j = 0; j < BLOCK; j++) padded[j] = j < n ? x[j] : top;
    deal_block(padded, top, temperature, base, z, bin);
  }

  // Masses of the bins up to last; blocks that have no candidate there are skipped.
  void weigh(int last) {
    last_ = last;
    double masses[BINS] = {0};
    for (int64_t begin = 0; begin < size_; begin += BLOCK) {
      const uint16_t* bin = bin_.data() + begin;
      if (last < BINS - 1 && !any_within(bin, 0, last)) continue;
      const float* z = z_.data() + begin;
      double weight[BLOCK];
      weights_of(z, weight);
      for (int64_t j = 0, n = std::min(BLOCK, size_ - begin); j < n; j++) masses[bin[j]] += weight[j];
    }
    mass_[0] = 0;
    for (int b = 0; b <= last; b++) mass_[b + 1] = mass_[b] + masses[b];
  }
  static bool any_within(const uint16_t* bin, int first, int last) {
    uint16_t any = 0;
    const uint16_t from = (uint16_t)first, span = (uint16_t)(last - first);
    for (int64_t j = 0; j < BLOCK; j++) any |= (uint16_t)((uint16_t)(bin[j] - from) <= span);
    return any != 0;
  }

  // Sorts the members of a bin and adds up their masses.
  void open(int b) {
    if (open_ == b) return;
    open_ = b;
    members_.clear();
    for (int64_t begin = 0; begin < size_ && (int64_t)members_.size() < count(b); begin += BLOCK) {
      const uint16_t* bin = bin_.data() + begin;
      if (!any_within(bin, b, b)) continue;
      for (int64_t j = 0, n = std::min(BLOCK, size_ - begin); j < n; j++)
        if (bin[j] == b) members_.push_back({(uint32_t)size_bits(z_[begin + j]), (uint32_t)(begin + j)});
    }
    if (!std::is_sorted(members_.begin(), members_.end())) std::sort(members_.begin(), members_.end());
    weight_.resize(members_.size()), mass_to_.resize(members_.size());
    double mass = mass_[b];
    for (size_t i = 0; i < members_.size(); i++) mass_to_[i] = mass += weight_[i] = exp_of(std::max(z_[members_[i].id], -700.0f));
  }

  // The bin with which the mass is at least a target, or above it; the last one where it never is.
  int bin_to(double target) const { return (int)(std::lower_bound(mass_ + 1, mass_ + last_ + 1, target) - mass_) - 1; }
  int bin_beyond(double target) const { return (int)(std::upper_bound(mass_ + 1, mass_ + last_ + 1, target) - mass_) - 1; }

  // Mass of the first n candidates.
  double mass_of(int64_t n) {
    const int b = bin_at(n - 1);
    if (count_[b + 1] == n || mass_[b + 1] == mass_[b]) return mass_[b + 1];
    open(b);
    return mass_to_[n - count_[b] - 1];
  }
  // How many candidates have less mass than target before them.
  int64_t count_to(double target) {
    const int b = bin_to(target);
    if (mass_[b + 1] < target) return count_[b + 1];
    if (target <= mass_[b]) return count_[b];
    open(b);
    const int64_t n = std::lower_bound(mass_to_.begin(), mass_to_.end(), target) - mass_to_.begin();
    return std::min(count_[b] + n + 1, count_[b + 1]);
  }
  // How many candidates of the weighed bins have at least min_p times the greatest weight, which is 1.
  int64_t count_likely(float min_p) {
    for (int b = std::max(likely_bin(min_p, -SLACK) - 1, 0); b <= last_; b++) {
      if (count(b) == 0) continue;
      open(b);
      int64_t n = 0, members = (int64_t)members_.size();
      while (n < members && weight_[n] >= (double)min_p) n++;
      if (n < members) return count_[b] + n;
    }
    return count_[last_ + 1];
  }
  // The first of the kept candidates with which the mass is above target, or the last of them.
  int64_t at_mass(double target, int64_t kept) {
    int b = bin_beyond(target);
    if (count_[b] < kept) {
      open(b);
      auto n = std::upper_bound(mass_to_.begin(), mass_to_.end(), target) - mass_to_.begin();
      // Added up in another order, the members may end a last bit below the bin's mass: then it is the last that adds anything.
      if (n == (int64_t)mass_to_.size()) n = std::lower_bound(mass_to_.begin(), mass_to_.end(), mass_to_.back()) - mass_to_.begin();
      if (count_[b] + n < kept) return members_[n].id;
    }
    b = bin_at(kept - 1);
    open(b);
    return members_[kept - 1 - count_[b]].id;
  }
};

thread_local Row row;

}  // namespace
}  // namespace bny

extern "C" void bny_sample(const bny_sampling* sampling, const float* x, int64_t ldx, int64_t* ids, int64_t S, int64_t V) {
  const auto one = [&](int64_t s) {
    const float* logits = x + s * ldx;
    const int64_t best = bny::greedy_id(logits, V);
    const float temperature = sampling->temperature[s];
    if (best < 0 || temperature < bny::GREEDY_EPS || sampling->top_k[s] == 1) return best;
    const double u = bny::uniform(sampling->seed[s], sampling->position[s]);
    return bny::row.draw(logits, V, logits[best], temperature, sampling->top_p[s], sampling->min_p[s], sampling->top_k[s], u);
  };
  bny_parallel(bny_threads(S * V * 8), S, [&](int64_t s) { ids[s] = one(s); });
}
