// Math of the elementwise ops: `fm_NAME`, overloaded on the argument types. F: float and double. I: int and int64_t.
// Half types are converted to float before. Comparisons, + - * & | ^ ~ ! ?: and casts are plain C++.
//
//   name                                          types   meaning (that of the torch op of the same name)
//   acos acosh asin asinh atan atanh cos cosh     F
//   sin sinh tan tanh exp exp2 expm1 log log10    F
//   log1p log2 sqrt lgamma erf erfc erfinv        F
//   erfcinv reciprocal rsqrt sigmoid silu         F       sigmoid 1/(1+exp(-x)); silu x*sigmoid(x)
//   ceil floor round trunc                        F I     round to even on ties; integers unchanged
//   frac                                          F I     x - trunc(x)
//   abs neg sign relu                             F I     sign(NaN) = 0; relu(NaN) = NaN; integers wrap
//   signbit isfinite isinf isnan isneginf         F I     -> bool
//   isposinf isreal
//   add sub mul                                   I       wrapping (use it where overflow must not be undefined)
//   div                                           F I     integers truncate; x / 0 is -1, never a trap
//   mod                                           I       C remainder, sign of the dividend; x % 0 is x
//   fmod                                          F I
//   remainder                                     F I     sign of the divisor
//   floordiv                                      I       rounds down
//   pow                                           F I     integers wrap; negative exponents give 0 unless |base| = 1
//   maximum minimum                               F I     NaN wins
//   atan2 nextafter                               F
//   gcd                                           I       >= 0
//   lshift rshift logical_rshift                  I       shift counts outside [0, width) shift everything out
//   lerp(start, end, weight)                      F       exact at both ends
//   addcmul(a, b, c, value)                       F I     a + b * c * value
//   clamp(x, lo, hi)                              F I     NaN stays NaN; lo > hi gives hi
//   threshold(x, t, value)                        F I     x <= t ? value : x
//   max_step(x, nan, v) min_step nan_if(nan, x)   F       vectorised maximum and minimum: FUSER_SIMD_MAX_NAN in rt.h
//
// On the CPU, float exp erf tanh log sigmoid silu are branch-free polynomials, so that g++ vectorises loops that
// call them: exp erf tanh log within 3 ulp over all floats (subnormal results included), Inf and NaN as in C. All
// other functions, and double, are libm's. On the GPU all are CUDA's own.
#ifdef FUSER_SIMT
#define FUSER_LIBM(name) __builtin_##name
#define FUSER_NAN __builtin_nanf("")
#define FUSER_INF __builtin_inff()
#else
#define FUSER_NAN __int_as_float(0x7fffffff)
#define FUSER_INF __int_as_float(0x7f800000)
#define FUSER_LIBM(name) ::name
#endif

#define FUSER_UNARY(name)                                                                                             \
  FUSER_DEVICE float fm_##name(float x) { return FUSER_LIBM(name##f)(x); }                                            \
  FUSER_DEVICE double fm_##name(double x) { return FUSER_LIBM(name)(x); }
#define FUSER_UNARY_DOUBLE(name)                                                                                      \
  FUSER_DEVICE double fm_##name(double x) { return FUSER_LIBM(name)(x); }
#define FUSER_BINARY(name)                                                                                            \
  FUSER_DEVICE float fm_##name(float x, float y) { return FUSER_LIBM(name##f)(x, y); }                                \
  FUSER_DEVICE double fm_##name(double x, double y) { return FUSER_LIBM(name)(x, y); }

FUSER_UNARY(acos)
FUSER_UNARY(acosh)
FUSER_UNARY(asin)
FUSER_UNARY(asinh)
FUSER_UNARY(atan)
FUSER_UNARY(atanh)
FUSER_UNARY(cos)
FUSER_UNARY(cosh)
FUSER_UNARY(sin)
FUSER_UNARY(sinh)
FUSER_UNARY(tan)
FUSER_UNARY(exp2)
FUSER_UNARY(expm1)
FUSER_UNARY(erfc)
FUSER_UNARY(log10)
FUSER_UNARY(log1p)
FUSER_UNARY(log2)
FUSER_UNARY(sqrt)
FUSER_UNARY(ceil)
FUSER_UNARY(floor)
FUSER_UNARY(trunc)
FUSER_BINARY(atan2)
FUSER_BINARY(nextafter)
FUSER_BINARY(fmod)
FUSER_BINARY(pow)
FUSER_UNARY_DOUBLE(exp)
FUSER_UNARY_DOUBLE(erf)
FUSER_UNARY_DOUBLE(tanh)
FUSER_UNARY_DOUBLE(log)
FUSER_DEVICE float fm_round(float x) { return FUSER_LIBM(rintf)(x); }
FUSER_DEVICE double fm_round(double x) { return FUSER_LIBM(rint)(x); }

#ifdef FUSER_SIMT
// The coefficients below were fitted for this file: weighted minimax on the stated interval, then rounded to float.
// Every select keeps the variable in its `else` branch, so that NaN passes through.
FUSER_DEVICE float fuser_pow2(int n) { return fuser_bits_float(static_cast<uint32_t>(n + 127) << 23); }

FUSER_DEVICE float fm_exp(float x) {
  // x = n ln2 + r, |r| <= ln2/2. The clamp keeps n in [-151, 129]; 2^n is applied in two steps, for subnormal results.
  float t = x > 89.0f ? 89.0f : x;
  t = t < -104.5f ? -104.5f : t;
  const float n = __builtin_rintf(t * 1.44269504089f);
  float r = __builtin_fmaf(n, -0.693145751953125f, t);
  r = __builtin_fmaf(n, -1.42860682030941723e-6f, r);
  float p = 1.381446607e-03f;
  p = __builtin_fmaf(p, r, 8.368780836e-03f);
  p = __builtin_fmaf(p, r, 4.166839272e-02f);
  p = __builtin_fmaf(p, r, 1.666651964e-01f);
  p = __builtin_fmaf(p, r, 4.999999404e-01f);
  p = __builtin_fmaf(p * r, r, r) + 1.0f;
  const int k = static_cast<int>(n);
  const int half = k >> 1;
  return p * fuser_pow2(half) * fuser_pow2(k - half);
}

FUSER_DEVICE float fm_erf(float x) {
  const float t = __builtin_fabsf(x);
  const float s = x * x;
  // |x| < 1: x + x P(x^2).
  float p = 7.853854186e-05f;
  p = __builtin_fmaf(p, s, -8.010191377e-04f);
  p = __builtin_fmaf(p, s, 5.188327283e-03f);
  p = __builtin_fmaf(p, s, -2.685381100e-02f);
  p = __builtin_fmaf(p, s, 1.128358543e-01f);
  p = __builtin_fmaf(p, s, -3.761262596e-01f);
  p = __builtin_fmaf(p, s, 1.283791661e-01f);
  const float near_zero = __builtin_fmaf(p, x, x);
  // 1 <= |x| <= 4: 1 - exp(-t Q(t)); beyond 4 the result is 1 in float.
  const float u = t > 4.0f ? 4.0f : t;
  float q = 1.396297557e-05f;
  q = __builtin_fmaf(q, u, -3.505973145e-04f);
  q = __builtin_fmaf(q, u, 3.757498227e-03f);
  q = __builtin_fmaf(q, u, -2.401011251e-02f);
  q = __builtin_fmaf(q, u, 1.065309197e-01f);
  q = __builtin_fmaf(q, u, 6.349694729e-01f);
  q = __builtin_fmaf(q, u, 1.128694296e+00f);
  const float tail = 1.0f - fm_exp(-u * q);
  return t < 1.0f ? near_zero : __builtin_copysignf(tail, x);
}

FUSER_DEVICE float fm_tanh(float x) {
  const float t = __builtin_fabsf(x);
  const float s = x * x;
  // |x| < 0.625: x + x s P(s), s = x^2.
  float p = -5.704978481e-03f;
  p = __builtin_fmaf(p, s, 2.063907869e-02f);
  p = __builtin_fmaf(p, s, -5.373971164e-02f);
  p = __builtin_fmaf(p, s, 1.333144158e-01f);
  p = __builtin_fmaf(p, s, -3.333328068e-01f);
  const float near_zero = __builtin_fmaf(p * s, t, t);
  const float tail = 1.0f - 2.0f / (fm_exp(2.0f * t) + 1.0f);
  return __builtin_copysignf(t < 0.625f ? near_zero : tail, x);
}

FUSER_DEVICE float fm_log(float x) {
  // x = 2^k (1 + f), 1 + f in [sqrt(1/2), sqrt(2)); subnormals are scaled into the normal range first.
  const bool tiny = x < 0x1p-126f;
  const float y = tiny ? x * 0x1p24f : x;
  const uint32_t bits = fuser_float_bits(y);
  const uint32_t shifted = bits - 0x3f3504f3u;
  const int k = static_cast<int>(shifted) >> 23;
  const float f = fuser_bits_float(bits - (static_cast<uint32_t>(k) << 23)) - 1.0f;
  const float n = static_cast<float>(k) - (tiny ? 24.0f : 0.0f);
  float p = 6.746591628e-02f;
  p = __builtin_fmaf(p, f, -1.167563871e-01f);
  p = __builtin_fmaf(p, f, 1.188817769e-01f);
  p = __builtin_fmaf(p, f, -1.240559220e-01f);
  p = __builtin_fmaf(p, f, 1.421955079e-01f);
  p = __builtin_fmaf(p, f, -1.666799635e-01f);
  p = __builtin_fmaf(p, f, 2.000211924e-01f);
  p = __builtin_fmaf(p, f, -2.500000894e-01f);
  p = __builtin_fmaf(p, f, 3.333331347e-01f);
  const float s = f * f;
  float r = __builtin_fmaf(p * f, s, n * 1.42860682030941723e-6f);
  r = __builtin_fmaf(s, -0.5f, r);
  r = __builtin_fmaf(n, 0.693145751953125f, f + r);
  r = x == 0.0f ? -__builtin_inff() : r;
  r = x < 0.0f ? __builtin_nanf("") : r;
  // Infinity and NaN are their own logarithms.
  return (bits & 0x7f800000u) == 0x7f800000u ? (x < 0.0f ? __builtin_nanf("") : x) : r;
}

FUSER_DEVICE float fm_lgamma(float x) {
  int sign;  // lgamma itself writes a global variable, which threads would share
  return __builtin_lgammaf_r(x, &sign);
}
FUSER_DEVICE double fm_lgamma(double x) {
  int sign;
  return __builtin_lgamma_r(x, &sign);
}

// Halley's iteration on erfc(v) = y for 0 < y <= 1; the start is Winitzki's closed form (relative error 2e-3).
static inline double fuser_erfcinv_upper(double y) {
  const double a = 0.147;
  const double l = __builtin_log(y * (2.0 - y));
  const double t = 2.0 / (3.14159265358979323846 * a) + 0.5 * l;
  double v = __builtin_sqrt(__builtin_sqrt(t * t - l / a) - t);
  for (int i = 0; i < 5; ++i) {
    const double slope = -1.12837916709551257390 * __builtin_exp(-v * v);
    const double step = (__builtin_erfc(v) - y) / slope;
    v -= step / (1.0 + v * step);
  }
  return v;
}
// The same iteration on erf(v) = x for |x| < 1/2, where erfc would cancel.
static inline double fuser_erfinv_center(double x) {
  double v = 0.88622692545275801365 * x;
  for (int i = 0; i < 5; ++i) {
    const double slope = 1.12837916709551257390 * __builtin_exp(-v * v);
    const double step = (__builtin_erf(v) - x) / slope;
    v -= step / (1.0 + v * step);
  }
  return v;
}
static inline double fm_erfcinv(double y) {
  if (!(y >= 0.0 && y <= 2.0)) return __builtin_nan("");
  if (y == 0.0) return __builtin_inf();
  if (y == 2.0) return -__builtin_inf();
  if (y > 0.5 && y < 1.5) return fuser_erfinv_center(1.0 - y);
  return y <= 0.5 ? fuser_erfcinv_upper(y) : -fuser_erfcinv_upper(2.0 - y);
}
static inline double fm_erfinv(double x) {
  const double t = __builtin_fabs(x);
  if (!(t <= 1.0)) return __builtin_nan("");
  if (t == 1.0) return __builtin_copysign(__builtin_inf(), x);
  return t < 0.5 ? fuser_erfinv_center(x) : __builtin_copysign(fuser_erfcinv_upper(1.0 - t), x);
}
static inline float fm_erfinv(float x) { return static_cast<float>(fm_erfinv(static_cast<double>(x))); }
static inline float fm_erfcinv(float x) { return static_cast<float>(fm_erfcinv(static_cast<double>(x))); }
FUSER_DEVICE float fm_rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
FUSER_DEVICE double fm_rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
#else
FUSER_DEVICE float fm_exp(float x) { return ::expf(x); }
FUSER_DEVICE float fm_erf(float x) { return ::erff(x); }
// Branch-free, as a warp would take both branches of the library's: the same two forms as on the CPU, with the special
// function unit's 2^x and 1/x (2 and 1 ulp).
FUSER_DEVICE float fm_tanh(float x) {
  const float t = fabsf(x);
  const float s = x * x;
  float p = -5.704978481e-03f;
  p = __fmaf_rn(p, s, 2.063907869e-02f);
  p = __fmaf_rn(p, s, -5.373971164e-02f);
  p = __fmaf_rn(p, s, 1.333144158e-01f);
  p = __fmaf_rn(p, s, -3.333328068e-01f);
  const float near_zero = __fmaf_rn(p * s, t, t);
  float e, r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(t * 2.885390082f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(e + 1.0f));
  return copysignf(t < 0.625f ? near_zero : __fmaf_rn(-2.0f, r, 1.0f), x);
}
FUSER_DEVICE float fm_log(float x) { return ::logf(x); }
FUSER_UNARY(lgamma)
FUSER_UNARY(erfinv)
FUSER_UNARY(erfcinv)
FUSER_UNARY(rsqrt)
#endif

// ---- the rest is one text for both compilers -------------------------------------------------------------------------
#define FUSER_FOR_FLOATING(M) M(float) M(double)
#define FUSER_FOR_INTEGER(M) M(int, uint32_t) M(int64_t, uint64_t)

#ifdef FUSER_SIMT
FUSER_DEVICE bool fuser_isnan(float x) { return __builtin_isnan(x); }
FUSER_DEVICE bool fuser_isnan(double x) { return __builtin_isnan(x); }
FUSER_DEVICE bool fuser_isinf(float x) { return __builtin_isinf(x); }
FUSER_DEVICE bool fuser_isinf(double x) { return __builtin_isinf(x); }
// By hand: g++ 12 fails (internal error) where it vectorises __builtin_signbit of a converted half.
FUSER_DEVICE bool fuser_signbit(float x) { return (fuser_float_bits(x) >> 31) != 0; }
FUSER_DEVICE bool fuser_signbit(double x) {
  int64_t bits;
  __builtin_memcpy(&bits, &x, 8);
  return bits < 0;
}
FUSER_DEVICE float fm_abs(float x) { return __builtin_fabsf(x); }
FUSER_DEVICE double fm_abs(double x) { return __builtin_fabs(x); }
#else
FUSER_DEVICE bool fuser_isnan(float x) { return x != x; }
FUSER_DEVICE bool fuser_isnan(double x) { return x != x; }
FUSER_DEVICE bool fuser_isinf(float x) { return ::fabsf(x) == __int_as_float(0x7f800000); }
FUSER_DEVICE bool fuser_isinf(double x) { return ::fabs(x) == __longlong_as_double(0x7ff0000000000000LL); }
FUSER_DEVICE bool fuser_signbit(float x) { return __float_as_int(x) < 0; }
FUSER_DEVICE bool fuser_signbit(double x) { return __double_as_longlong(x) < 0; }
FUSER_DEVICE float fm_abs(float x) { return ::fabsf(x); }
FUSER_DEVICE double fm_abs(double x) { return ::fabs(x); }
#endif

// The larger and the smaller of two; NaN wins. One instruction where there is one.
template <class T>
FUSER_DEVICE T fuser_larger(T x, T y) { return x > y || x != x ? x : y; }
template <class T>
FUSER_DEVICE T fuser_smaller(T x, T y) { return x < y || x != x ? x : y; }
#if !defined(FUSER_SIMT) && __CUDA_ARCH__ >= 800
FUSER_DEVICE float fuser_larger(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
FUSER_DEVICE float fuser_smaller(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
#endif

#define FUSER_FLOATING(T)                                                                                             \
  FUSER_DEVICE bool fm_isnan(T x) { return fuser_isnan(x); }                                                          \
  FUSER_DEVICE bool fm_isinf(T x) { return fuser_isinf(x); }                                                          \
  FUSER_DEVICE bool fm_isfinite(T x) { return !fuser_isnan(x) && !fuser_isinf(x); }                                   \
  FUSER_DEVICE bool fm_isreal(T) { return true; }                                                                     \
  FUSER_DEVICE bool fm_isposinf(T x) { return fuser_isinf(x) && x > T(0); }                                           \
  FUSER_DEVICE bool fm_isneginf(T x) { return fuser_isinf(x) && x < T(0); }                                           \
  FUSER_DEVICE bool fm_signbit(T x) { return fuser_signbit(x); }                                                      \
  FUSER_DEVICE T fm_neg(T x) { return -x; }                                                                           \
  FUSER_DEVICE T fm_sign(T x) { return T(x > T(0)) - T(x < T(0)); }                                                   \
  FUSER_DEVICE T fm_relu(T x) { return x < T(0) ? T(0) : x; } /* -0.0 stays */                                         \
  FUSER_DEVICE T fm_frac(T x) { return x - fm_trunc(x); }                                                             \
  FUSER_DEVICE T fm_reciprocal(T x) { return T(1) / x; }                                                              \
  FUSER_DEVICE T fm_sigmoid(T x) {                                                                                    \
    const T e = fm_exp(-fm_abs(x)); /* never overflows, so small results keep their digits */                         \
    return (x >= T(0) ? T(1) : e) / (T(1) + e);                                                                       \
  }                                                                                                                   \
  FUSER_DEVICE T fm_silu(T x) { return x * fm_sigmoid(x); }                                                           \
  FUSER_DEVICE T fm_div(T x, T y) { return x / y; }                                                                   \
  FUSER_DEVICE T fm_maximum(T x, T y) { return fuser_larger(x, y); }                                                  \
  FUSER_DEVICE T fm_minimum(T x, T y) { return fuser_smaller(x, y); }                                                 \
  /* one step of a maximum or minimum whose NaNs are collected apart: see FUSER_SIMD_MAX_NAN */                       \
  FUSER_DEVICE void fm_max_step(T& x, int& nan, T v) {                                                                \
    nan |= fuser_isnan(v);                                                                                            \
    x = x < v ? v : x;                                                                                                \
  }                                                                                                                   \
  FUSER_DEVICE void fm_min_step(T& x, int& nan, T v) {                                                                \
    nan |= fuser_isnan(v);                                                                                            \
    x = v < x ? v : x;                                                                                                \
  }                                                                                                                   \
  FUSER_DEVICE T fm_nan_if(int nan, T x) { return nan ? T(FUSER_NAN) : x; }                                           \
  FUSER_DEVICE T fm_remainder(T x, T y) {                                                                             \
    const T r = fm_fmod(x, y);                                                                                        \
    return r != T(0) && (r < T(0)) != (y < T(0)) ? r + y : r;                                                         \
  }                                                                                                                   \
  FUSER_DEVICE T fm_lerp(T start, T end, T weight) {                                                                  \
    const T span = end - start;                                                                                       \
    return fm_abs(weight) < T(0.5) ? start + weight * span : end - span * (T(1) - weight);                            \
  }                                                                                                                   \
  FUSER_DEVICE T fm_addcmul(T a, T b, T c, T value) { return a + b * c * value; }                                     \
  /* x itself where a bound equals it, so that zeros keep their signs; a bound that is NaN gives NaN */                \
  FUSER_DEVICE T fm_clamp(T x, T lo, T hi) {                                                                          \
    const T y = x < lo || fuser_isnan(lo) ? lo : x;                                                                   \
    return y > hi || fuser_isnan(hi) ? hi : y;                                                                        \
  }                                                                                                                   \
  FUSER_DEVICE T fm_threshold(T x, T t, T value) { return x <= t ? value : x; }
FUSER_FOR_FLOATING(FUSER_FLOATING)

// Integer arithmetic wraps through the unsigned type U: signed overflow is undefined in C++.
#define FUSER_INTEGER(T, U)                                                                                           \
  FUSER_DEVICE bool fm_isnan(T) { return false; }                                                                     \
  FUSER_DEVICE bool fm_isinf(T) { return false; }                                                                     \
  FUSER_DEVICE bool fm_isfinite(T) { return true; }                                                                   \
  FUSER_DEVICE bool fm_isreal(T) { return true; }                                                                     \
  FUSER_DEVICE bool fm_isposinf(T) { return false; }                                                                  \
  FUSER_DEVICE bool fm_isneginf(T) { return false; }                                                                  \
  FUSER_DEVICE bool fm_signbit(T x) { return x < 0; }                                                                 \
  FUSER_DEVICE T fm_ceil(T x) { return x; }                                                                           \
  FUSER_DEVICE T fm_floor(T x) { return x; }                                                                          \
  FUSER_DEVICE T fm_round(T x) { return x; }                                                                          \
  FUSER_DEVICE T fm_trunc(T x) { return x; }                                                                          \
  FUSER_DEVICE T fm_frac(T) { return 0; }                                                                             \
  FUSER_DEVICE T fm_add(T x, T y) { return T(U(x) + U(y)); }                                                          \
  FUSER_DEVICE T fm_sub(T x, T y) { return T(U(x) - U(y)); }                                                          \
  FUSER_DEVICE T fm_mul(T x, T y) { return T(U(x) * U(y)); }                                                          \
  FUSER_DEVICE T fm_neg(T x) { return T(U(0) - U(x)); }                                                               \
  FUSER_DEVICE T fm_abs(T x) { return x < 0 ? fm_neg(x) : x; }                                                        \
  FUSER_DEVICE T fm_sign(T x) { return T(x > 0) - T(x < 0); }                                                         \
  FUSER_DEVICE T fm_relu(T x) { return x <= 0 ? T(0) : x; }                                                           \
  FUSER_DEVICE T fm_div(T x, T y) { return y == 0 ? T(-1) : y == T(-1) ? fm_neg(x) : x / y; }                         \
  FUSER_DEVICE T fm_mod(T x, T y) { return y == 0 ? x : y == T(-1) ? T(0) : x % y; }                                  \
  FUSER_DEVICE T fm_fmod(T x, T y) { return fm_mod(x, y); }                                                           \
  FUSER_DEVICE T fm_remainder(T x, T y) {                                                                             \
    const T r = fm_mod(x, y);                                                                                         \
    return y != 0 && r != 0 && (r < 0) != (y < 0) ? r + y : r;                                                        \
  }                                                                                                                   \
  FUSER_DEVICE T fm_floordiv(T x, T y) {                                                                              \
    const T q = fm_div(x, y);                                                                                         \
    return y != 0 && fm_mod(x, y) != 0 && (x < 0) != (y < 0) ? q - 1 : q;                                             \
  }                                                                                                                   \
  FUSER_DEVICE T fm_pow(T base, T exponent) {                                                                         \
    if (exponent < 0) return base == 1 ? T(1) : base == T(-1) ? (exponent & 1 ? T(-1) : T(1)) : T(0);                 \
    U result = 1;                                                                                                     \
    for (U b = U(base), e = U(exponent); e != 0; e >>= 1, b *= b) result = e & 1 ? result * b : result;               \
    return T(result);                                                                                                 \
  }                                                                                                                   \
  FUSER_DEVICE T fm_maximum(T x, T y) { return x > y ? x : y; }                                                       \
  FUSER_DEVICE T fm_minimum(T x, T y) { return x < y ? x : y; }                                                       \
  FUSER_DEVICE T fm_gcd(T x, T y) {                                                                                   \
    U a = U(fm_abs(x)), b = U(fm_abs(y));                                                                             \
    while (b != 0) {                                                                                                  \
      const U r = a % b;                                                                                              \
      a = b;                                                                                                          \
      b = r;                                                                                                          \
    }                                                                                                                 \
    return T(a);                                                                                                      \
  }                                                                                                                   \
  FUSER_DEVICE T fm_lshift(T x, T count) { return U(count) < 8 * sizeof(T) ? T(U(x) << count) : T(0); }               \
  FUSER_DEVICE T fm_rshift(T x, T count) { return x >> (U(count) < 8 * sizeof(T) ? count : T(8 * sizeof(T) - 1)); }   \
  FUSER_DEVICE T fm_logical_rshift(T x, T count) { return U(count) < 8 * sizeof(T) ? T(U(x) >> count) : T(0); }       \
  FUSER_DEVICE T fm_addcmul(T a, T b, T c, T value) { return T(U(a) + U(b) * U(c) * U(value)); }                      \
  FUSER_DEVICE T fm_clamp(T x, T lo, T hi) { return fm_minimum(fm_maximum(x, lo), hi); }                              \
  FUSER_DEVICE T fm_threshold(T x, T t, T value) { return x <= t ? value : x; }
FUSER_FOR_INTEGER(FUSER_INTEGER)

#ifdef FUSER_SIMT
// For FUSER_SIMD_MAX and FUSER_SIMD_MIN: OpenMP's own max and min would lose NaN.
#define FUSER_DECLARE_REDUCTIONS(T)                                                                                   \
  FUSER_PRAGMA(omp declare reduction(fuser_max_nan : T : omp_out = fm_maximum(omp_out, omp_in)) initializer(omp_priv = omp_orig)) \
  FUSER_PRAGMA(omp declare reduction(fuser_min_nan : T : omp_out = fm_minimum(omp_out, omp_in)) initializer(omp_priv = omp_orig))
FUSER_DECLARE_REDUCTIONS(float)
FUSER_DECLARE_REDUCTIONS(double)
FUSER_DECLARE_REDUCTIONS(int)
FUSER_DECLARE_REDUCTIONS(int64_t)
#endif
