// Random numbers without a state: element `index` of a tensor is a function of (seed, offset, index).
//
//   FuserRandom r;                                          per thread and op: the words that it computed last
//   fm_uniform<T>(r, seed, offset, base, step, low, high)        in [low, high), or [0, 1); T: float double __half __bfloat
//   fm_normal<T>(r, seed, offset, base, step, mean, deviation)   standard without the last two
//
// The index is base + step, a multiple of 4 and at least 0: the compiler sees which neighbours share words.
//
// Philox 4x32-10 (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; 2011) of the key `seed` and the counter
// (offset, index / lanes) gives four words: 4 floats or 2 doubles. Half types are rounded floats. A uniform number is
// the same in every bit on both compilers; a normal one as far as log is (and sin and cos, of double).
struct FuserRandom {
  uint64_t block = ~0ull;  // no element is in this one
  uint32_t w0, w1, w2, w3;
};

FUSER_DEVICE void fuser_philox(FuserRandom& r, uint64_t seed, uint64_t offset, uint64_t block) {
  uint32_t c0 = static_cast<uint32_t>(offset), c1 = static_cast<uint32_t>(offset >> 32);
  uint32_t c2 = static_cast<uint32_t>(block), c3 = static_cast<uint32_t>(block >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  FUSER_UNROLL
  for (int round = 0; round < 10; ++round) {
    const uint64_t p = static_cast<uint64_t>(0xD2511F53u) * c0, q = static_cast<uint64_t>(0xCD9E8D57u) * c2;
    c0 = static_cast<uint32_t>(q >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(q);
    c2 = static_cast<uint32_t>(p >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  r.w0 = c0;
  r.w1 = c1;
  r.w2 = c2;
  r.w3 = c3;
}

// The words of a block. A GPU's thread mostly comes to neighbours one after the other: it keeps what it has. On the
// CPU the iterations of a loop stay independent, so that g++ vectorises it.
#ifdef FUSER_SIMT
FUSER_DEVICE FuserRandom fuser_words(FuserRandom&, uint64_t seed, uint64_t offset, uint64_t block) {
  FuserRandom r;
  fuser_philox(r, seed, offset, block);
  return r;
}
FUSER_DEVICE float fuser_fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
FUSER_DEVICE double fuser_fma(double x, double y, double z) { return __builtin_fma(x, y, z); }
#else
FUSER_DEVICE const FuserRandom& fuser_words(FuserRandom& r, uint64_t seed, uint64_t offset, uint64_t block) {
  if (r.block != block) {
    r.block = block;
    fuser_philox(r, seed, offset, block);
  }
  return r;
}
FUSER_DEVICE float fuser_fma(float x, float y, float z) { return __fmaf_rn(x, y, z); }
FUSER_DEVICE double fuser_fma(double x, double y, double z) { return __fma_rn(x, y, z); }
#endif

// In (0, 1]: the next number above the words, and 2^-33 or 2^-54 more.
FUSER_DEVICE float fuser_unit(uint32_t x) { return (static_cast<float>(x) + 0.5f) * 2.3283064365386963e-10f; }
FUSER_DEVICE double fuser_unit(uint32_t low, uint32_t high) {
  const uint64_t x = (static_cast<uint64_t>(high) << 32 | low) >> 11;
  return (static_cast<double>(static_cast<int64_t>(x)) + 0.5) * 1.1102230246251565e-16;
}

// sin or cos of x turns, 0 <= x <= 1, within 2e-7: of what is left of the nearest quarter of a turn. The coefficients
// were fitted for this file, as those of rt_math.h.
FUSER_DEVICE float fuser_wave(float x, bool is_sine) {
  const int quarter = static_cast<int>(4.0f * x + 0.5f);
  const float r = fuser_fma(static_cast<float>(quarter), -0.25f, x), s = r * r;
  float p = -75.40184020996094f, q = 59.42423629760742f;
  p = fuser_fma(p, s, 81.59254455566406f);
  q = fuser_fma(q, s, -85.44882202148438f);
  p = fuser_fma(p, s, -41.3416633605957f);
  q = fuser_fma(q, s, 64.93936920166016f);
  p = fuser_fma(p, s, 6.2831854820251465f) * r;
  q = fuser_fma(q, s, -19.739208221435547f);
  q = fuser_fma(q, s, 1.0f);
  const int n = quarter + (is_sine ? 0 : 1);
  const float wave = n & 1 ? q : p;
  return n & 2 ? -wave : wave;
}
FUSER_DEVICE double fuser_wave(double x, bool is_sine) {
  const double angle = x * 6.283185307179586;
  return is_sine ? fm_sin(angle) : fm_cos(angle);
}

// How the words of a block make numbers: here float, and what is computed as float.
template <class T>
struct FuserRandomOf {
  typedef float real;
  static constexpr int lanes = 4;
  FUSER_METHOD static float uniform(const FuserRandom& r, int lane) {
    const uint32_t a = lane & 1 ? r.w1 : r.w0, b = lane & 1 ? r.w3 : r.w2;
    return fuser_unit(lane & 2 ? b : a);
  }
  // Box and Muller: two neighbours are the ends of one arrow.
  FUSER_METHOD static float normal(const FuserRandom& r, int lane) {
    const float u = fuser_unit(lane & 2 ? r.w2 : r.w0), v = fuser_unit(lane & 2 ? r.w3 : r.w1);
    return fm_sqrt(-2.0f * fm_log(u)) * fuser_wave(v, lane & 1);
  }
};
template <>
struct FuserRandomOf<double> {
  typedef double real;
  static constexpr int lanes = 2;
  FUSER_METHOD static double uniform(const FuserRandom& r, int lane) {
    return fuser_unit(lane ? r.w2 : r.w0, lane ? r.w3 : r.w1);
  }
  FUSER_METHOD static double normal(const FuserRandom& r, int lane) {
    const double u = fuser_unit(r.w0, r.w1), v = fuser_unit(r.w2, r.w3);
    return fm_sqrt(-2.0 * fm_log(u)) * fuser_wave(v, lane);
  }
};

template <int lanes>
FUSER_DEVICE uint64_t fuser_block_of(int64_t base, int64_t step) {
  return static_cast<uint64_t>(base) / lanes + static_cast<uint64_t>(step) / lanes;
}
template <class T, class Real = typename FuserRandomOf<T>::real>
FUSER_DEVICE T fm_uniform(FuserRandom& r, int64_t seed, int64_t offset, int64_t base, int64_t step, Real low = 0, Real high = 1) {
  constexpr int lanes = FuserRandomOf<T>::lanes;
  const FuserRandom& words = fuser_words(r, seed, offset, fuser_block_of<lanes>(base, step));
  const Real unit = FuserRandomOf<T>::uniform(words, static_cast<int>(step) & (lanes - 1));
  const T x = fm_cast<T>(fuser_fma(unit, high - low, low));
  // What is rounded to the upper end is the lower one.
  return fm_cast<Real>(x) == fm_cast<Real>(fm_cast<T>(high)) ? fm_cast<T>(low) : x;
}
template <class T, class Real = typename FuserRandomOf<T>::real>
FUSER_DEVICE T fm_normal(FuserRandom& r, int64_t seed, int64_t offset, int64_t base, int64_t step, Real mean = 0, Real deviation = 1) {
  constexpr int lanes = FuserRandomOf<T>::lanes;
  const FuserRandom& words = fuser_words(r, seed, offset, fuser_block_of<lanes>(base, step));
  const Real z = FuserRandomOf<T>::normal(words, static_cast<int>(step) & (lanes - 1));
  return fm_cast<T>(fuser_fma(z, deviation, mean));
}
