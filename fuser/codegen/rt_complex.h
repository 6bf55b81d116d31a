// Complex numbers: `Complex<float>` and `Complex<double>`, {re, im}, aligned to their size for vector access.
//
//   operators    + - * / == != += -= *= and unary -; explicit construction from a real, a pair, or the other precision
//   fm_complex(re, im)   fm_real fm_imag fm_abs -> real      fm_isfinite fm_isinf fm_isnan fm_isreal -> bool
//   fm_NAME      of Complex<T>: acos acosh asin asinh atan atanh cos cosh sin sinh tan tanh exp exp2 expm1 log log10 log1p
//                log2 sqrt rsqrt reciprocal sigmoid silu neg div pow lerp
//   fm_cast      from a complex to a real type: the real part; to bool: whether it is not 0
//
// All but + - * compute in double and round once: of Complex<float>, results are as good as exact, and nothing on the way
// overflows. Double is kept in range by scaling, and by formulas that know where a part grows large. Branch cuts and signs
// of zeros are those of C99, Annex G, and of torch; products and quotients treat infinities as torch does: by the plain
// formula, without C99's recovery of infinities from NaNs. 0 to the power 0 is 1.
#ifdef FUSER_SIMT
#define FUSER_FUNCTION static __attribute__((noinline))
#else
#define FUSER_FUNCTION static __device__ __noinline__
#endif
// Not fm_NAME, as ops of these names would have.
#define FUSER_PARTS(name)                                                                              \
  FUSER_DEVICE float fuser_##name(float x, float y) { return FUSER_LIBM(name##f)(x, y); }             \
  FUSER_DEVICE double fuser_##name(double x, double y) { return FUSER_LIBM(name)(x, y); }
FUSER_PARTS(hypot)
FUSER_PARTS(copysign)
#undef FUSER_PARTS

template <class T>
struct alignas(2 * sizeof(T)) Complex {
  T re, im;

  Complex() = default;
#ifdef FUSER_SIMT
  // See FUSER_HALF_COPIES.
  FUSER_METHOD Complex(const Complex& other) : re(other.re), im(other.im) {}
  FUSER_METHOD Complex& operator=(const Complex& other) {
    re = other.re;
    im = other.im;
    return *this;
  }
#endif
  FUSER_METHOD explicit Complex(T real, T imag = T(0)) : re(real), im(imag) {}
  template <class U>
  FUSER_METHOD explicit Complex(const Complex<U>& z) : re(static_cast<T>(z.re)), im(static_cast<T>(z.im)) {}

  FUSER_METHOD Complex operator-() const { return Complex(-re, -im); }
  FUSER_METHOD friend Complex operator+(Complex a, Complex b) { return Complex(a.re + b.re, a.im + b.im); }
  FUSER_METHOD friend Complex operator-(Complex a, Complex b) { return Complex(a.re - b.re, a.im - b.im); }
  FUSER_METHOD friend Complex operator*(Complex a, Complex b) {
    return Complex(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re);
  }
  FUSER_METHOD friend Complex operator/(Complex a, Complex b) { return fm_div(a, b); }
  FUSER_METHOD friend bool operator==(Complex a, Complex b) { return a.re == b.re && a.im == b.im; }
  FUSER_METHOD friend bool operator!=(Complex a, Complex b) { return !(a == b); }
  FUSER_METHOD Complex& operator+=(Complex b) { return *this = *this + b; }
  template <class U>
  FUSER_METHOD Complex& operator+=(const Complex<U>& b) {
    return *this += Complex(b);  // the sums of blocks are wider than what they add
  }
  FUSER_METHOD Complex& operator-=(Complex b) { return *this = *this - b; }
  FUSER_METHOD Complex& operator*=(Complex b) { return *this = *this * b; }
};
typedef Complex<double> FuserComplex;

#ifdef FUSER_SIMT
// For FUSER_SIMD_SUM and FUSER_SIMD_PROD.
#define FUSER_DECLARE_COMPLEX(T)                                                                                      \
  FUSER_PRAGMA(omp declare reduction(+ : Complex<T> : omp_out += omp_in) initializer(omp_priv = Complex<T>(T(0))))    \
  FUSER_PRAGMA(omp declare reduction(* : Complex<T> : omp_out *= omp_in) initializer(omp_priv = Complex<T>(T(1))))
FUSER_DECLARE_COMPLEX(float)
FUSER_DECLARE_COMPLEX(double)
#endif

// ---- conversions -----------------------------------------------------------------------------------------------------
// From a real type (half types as everywhere), and from either precision.
template <class T>
struct FuserCast<Complex<T>> {
  template <class From>
  FUSER_METHOD static Complex<T> from(From x) {
    return Complex<T>(FuserCast<T>::from(x));
  }
  template <class U>
  FUSER_METHOD static Complex<T> from(Complex<U> z) {
    return Complex<T>(z);
  }
};
template <class To>
struct FuserFromComplex {
  template <class T>
  FUSER_METHOD static To from(Complex<T> z) {
    return FuserCast<To>::from(z.re);
  }
};
template <>
struct FuserFromComplex<bool> {
  template <class T>
  FUSER_METHOD static bool from(Complex<T> z) {
    return z.re != T(0) || z.im != T(0);
  }
};
template <class U>
struct FuserFromComplex<Complex<U>> {
  template <class T>
  FUSER_METHOD static Complex<U> from(Complex<T> z) {
    return Complex<U>(z);
  }
};
template <class To, class T>
FUSER_DEVICE To fm_cast(Complex<T> z) {
  return FuserFromComplex<To>::from(z);
}

// ---- parts -----------------------------------------------------------------------------------------------------------
#define FUSER_COMPLEX_PARTS(T)                                                                                        \
  FUSER_DEVICE Complex<T> fm_complex(T re, T im) { return Complex<T>(re, im); }                                       \
  FUSER_DEVICE T fm_real(Complex<T> z) { return z.re; }                                                               \
  FUSER_DEVICE T fm_imag(Complex<T> z) { return z.im; }                                                               \
  FUSER_DEVICE T fm_abs(Complex<T> z) { return fuser_hypot(z.re, z.im); }                                                \
  FUSER_DEVICE bool fm_isfinite(Complex<T> z) { return fm_isfinite(z.re) && fm_isfinite(z.im); }                      \
  FUSER_DEVICE bool fm_isinf(Complex<T> z) { return fm_isinf(z.re) || fm_isinf(z.im); }                               \
  FUSER_DEVICE bool fm_isnan(Complex<T> z) { return fm_isnan(z.re) || fm_isnan(z.im); }                               \
  FUSER_DEVICE bool fm_isreal(Complex<T> z) { return z.im == T(0); }                                                  \
  FUSER_DEVICE Complex<T> fm_neg(Complex<T> z) { return -z; }
FUSER_FOR_FLOATING(FUSER_COMPLEX_PARTS)

// i z and -i z: the functions of one half of the plane come from those of the other.
FUSER_DEVICE FuserComplex fuser_times_i(FuserComplex z) { return FuserComplex(-z.im, z.re); }
FUSER_DEVICE FuserComplex fuser_over_i(FuserComplex z) { return FuserComplex(z.im, -z.re); }
FUSER_DEVICE FuserComplex fuser_scaled(FuserComplex z, double by) { return FuserComplex(z.re * by, z.im * by); }
FUSER_DEVICE FuserComplex fuser_divided(FuserComplex z, double by) { return FuserComplex(z.re / by, z.im / by); }
FUSER_DEVICE double fuser_larger_part(FuserComplex z) { return fuser_larger(fm_abs(z.re), fm_abs(z.im)); }

#define FUSER_PI 3.14159265358979323846
#define FUSER_LN2 0.69314718055994530942
#define FUSER_LN10 2.30258509299404568402

// ---- quotients -------------------------------------------------------------------------------------------------------
// The power of two that brings the larger part near 1; 1 for zeros, infinities and NaN.
FUSER_DEVICE double fuser_scale_of(FuserComplex z) {
  const double size = fuser_larger_part(z);
  if (!(size > 0.0) || fuser_isinf(size)) return 1.0;
  if (size < 1e-290) return 0x1p+900;
  return size > 1e290 ? 0x1p-900 : size < 1e-100 ? 0x1p+300 : size > 1e100 ? 0x1p-300 : 1.0;
}

// By the larger part of the divisor, as torch divides.
FUSER_FUNCTION FuserComplex fuser_c_div(FuserComplex z, FuserComplex by) {
  const double scale = fuser_scale_of(by), own = fuser_scale_of(z);
  const FuserComplex a = fuser_scaled(z, own), b = fuser_scaled(by, scale);
  const double c = fm_abs(b.re), d = fm_abs(b.im);
  if (c == 0.0 && d == 0.0) return FuserComplex(z.re / c, z.im / d);
  double re, im;
  if (c >= d) {
    const double ratio = b.im / b.re, whole = b.re + b.im * ratio;
    re = (a.re + a.im * ratio) / whole;
    im = (a.im - a.re * ratio) / whole;
  } else {
    const double ratio = b.re / b.im, whole = b.re * ratio + b.im;
    re = (a.re * ratio + a.im) / whole;
    im = (a.im * ratio - a.re) / whole;
  }
  // What grows comes first, so that no digits are lost on the way.
  const double first = fuser_larger(scale, 1.0 / own), second = fuser_smaller(scale, 1.0 / own);
  return FuserComplex(re * first * second, im * first * second);
}

// ---- powers and logarithms -------------------------------------------------------------------------------------------
FUSER_FUNCTION FuserComplex fuser_c_exp(FuserComplex z) {
  if (z.im == 0.0) return FuserComplex(fm_exp(z.re), z.im);
  if (z.re == -double(FUSER_INF) && !fm_isfinite(z.im)) return FuserComplex(0.0, 0.0);
  if (z.re == double(FUSER_INF) && !fm_isfinite(z.im)) return FuserComplex(z.re, z.im - z.im);
  // In two steps where e^x alone leaves the range.
  const bool is_large = z.re > 709.0 && z.re < 1500.0;
  const double grown = fm_exp(is_large ? 0.5 * z.re : z.re), again = is_large ? grown : 1.0;
  return FuserComplex(grown * fm_cos(z.im) * again, grown * fm_sin(z.im) * again);
}

// A product that no compiler makes one operation with the sum that takes it.
FUSER_DEVICE double fuser_product(double x, double y) {
#ifdef FUSER_SIMT
  double made = x * y;
  __asm__("" : "+m"(made));
  return made;
#else
  return __dmul_rn(x, y);
#endif
}
// x + y - sum, exactly, where sum is x + y rounded.
FUSER_DEVICE double fuser_lost(double x, double y, double sum) {
  const double other = sum - x;
  return (x - (sum - other)) + (y - other);
}

// ln|z|, with its digits near |z| = 1.
FUSER_FUNCTION double fuser_log_abs(FuserComplex z) {
  const double x = fm_abs(z.re), y = fm_abs(z.im);
  if (fuser_isinf(x) || fuser_isinf(y)) return double(FUSER_INF);
  const double more = x > y ? x : y, less = x > y ? y : x;
  if (more > 0.5 && more < 2.0) {
    // |z|^2 - 1 with what its roundings lose: near |z| = 1 the rest is small.
    const double a = fuser_product(more, more), b = fuser_product(less, less);
    const double top = a - 1.0, sum = top + b;
    const double lost = fuser_lost(a, -1.0, top) + fuser_lost(top, b, sum);
    return 0.5 * fm_log1p(sum + (lost + FUSER_LIBM(fma)(more, more, -a) + FUSER_LIBM(fma)(less, less, -b)));
  }
  if (more > 1e300) return fm_log(fuser_hypot(x * 0.25, y * 0.25)) + 2.0 * FUSER_LN2;
  if (more < 1e-290 && more > 0.0) return fm_log(fuser_hypot(x * 0x1p+200, y * 0x1p+200)) - 200.0 * FUSER_LN2;
  return fm_log(fuser_hypot(x, y));
}
FUSER_FUNCTION FuserComplex fuser_c_log(FuserComplex z) {
  return FuserComplex(fuser_log_abs(z), fm_atan2(z.im, z.re));
}
FUSER_FUNCTION FuserComplex fuser_c_log1p(FuserComplex z) {
  const double angle = fm_atan2(z.im, 1.0 + z.re);
  if (fuser_larger_part(z) < 0.5) {
    const double rest = z.re * (2.0 + z.re) + z.im * z.im;
    return FuserComplex(0.5 * fm_log1p(rest), angle);
  }
  return FuserComplex(fuser_log_abs(FuserComplex(1.0 + z.re, z.im)), angle);
}
FUSER_FUNCTION FuserComplex fuser_c_expm1(FuserComplex z) {
  if (!fm_isfinite(z.re) || !fm_isfinite(z.im) || z.re > 700.0) {
    const FuserComplex e = fuser_c_exp(z);
    return FuserComplex(e.re - 1.0, e.im);
  }
  const double half = fm_sin(0.5 * z.im);
  return FuserComplex(fm_expm1(z.re) * fm_cos(z.im) - 2.0 * half * half, fm_exp(z.re) * fm_sin(z.im));
}
FUSER_FUNCTION FuserComplex fuser_c_sqrt(FuserComplex z) {
  if (z.re == 0.0 && z.im == 0.0) return FuserComplex(0.0, z.im);
  if (fuser_isinf(z.im)) return FuserComplex(double(FUSER_INF), z.im);
  if (fuser_isinf(z.re)) {
    const double other = z.im - z.im;  // 0, or NaN
    if (z.re > 0.0) return FuserComplex(z.re, fm_isnan(other) ? other : fuser_copysign(0.0, z.im));
    return FuserComplex(fm_abs(other), fuser_copysign(-z.re, z.im));
  }
  // To where squares neither leave the range nor lose digits; 4^k, so that the root is exact.
  const double size = fuser_larger_part(z);
  const double up = size > 1e300 ? 0x1p-4 : size < 1e-290 ? 0x1p+400 : 1.0;
  const double down = size > 1e300 ? 4.0 : size < 1e-290 ? 0x1p-200 : 1.0;
  const FuserComplex w = fuser_scaled(z, up);
  const double root = fm_sqrt(0.5 * (fm_abs(w.re) + fuser_hypot(w.re, w.im)));
  const double other = fm_abs(w.im) / (2.0 * root);
  const double re = (w.re >= 0.0 ? root : other) * down, im = (w.re >= 0.0 ? other : root) * down;
  return FuserComplex(re, fuser_copysign(im, z.im));
}
FUSER_FUNCTION FuserComplex fuser_c_rsqrt(FuserComplex z) { return fuser_c_div(FuserComplex(1.0), fuser_c_sqrt(z)); }
FUSER_FUNCTION FuserComplex fuser_c_reciprocal(FuserComplex z) { return fuser_c_div(FuserComplex(1.0), z); }
FUSER_FUNCTION FuserComplex fuser_c_log2(FuserComplex z) { return fuser_divided(fuser_c_log(z), FUSER_LN2); }
FUSER_FUNCTION FuserComplex fuser_c_log10(FuserComplex z) { return fuser_divided(fuser_c_log(z), FUSER_LN10); }
FUSER_FUNCTION FuserComplex fuser_c_exp2(FuserComplex z) { return fuser_c_exp(fuser_scaled(z, FUSER_LN2)); }
FUSER_FUNCTION FuserComplex fuser_c_sigmoid(FuserComplex z) {
  // As torch computes it; by the exponential that does not grow where the other leaves the range.
  const FuserComplex one(1.0);
  if (z.re >= -700.0) return fuser_c_div(one, one + fuser_c_exp(-z));
  const FuserComplex e = fuser_c_exp(z);
  return fuser_c_div(e, one + e);
}
FUSER_FUNCTION FuserComplex fuser_c_silu(FuserComplex z) {
  if (z.re >= -700.0) return fuser_c_div(z, FuserComplex(1.0) + fuser_c_exp(-z));
  return z * fuser_c_sigmoid(z);
}
FUSER_FUNCTION FuserComplex fuser_c_pow(FuserComplex z, FuserComplex to) {
  if (to.re == 0.0 && to.im == 0.0) return FuserComplex(1.0);
  if (z.re == 0.0 && z.im == 0.0) {
    if (to.re > 0.0) return FuserComplex(0.0);
    return FuserComplex(to.im == 0.0 ? double(FUSER_INF) : double(FUSER_NAN), double(FUSER_NAN));
  }
  return fuser_c_exp(to * fuser_c_log(z));
}

// ---- hyperbolic and trigonometric ------------------------------------------------------------------------------------
// (cosh x, sinh x) times (a, b), also where they leave the range and the products do not.
FUSER_FUNCTION FuserComplex fuser_grown(double x, double a, double b) {
  if (fm_abs(x) < 709.0 || !(fm_abs(x) < 1500.0)) return FuserComplex(fm_cosh(x) * a, fm_sinh(x) * b);
  const double half = fm_exp(0.5 * fm_abs(x));
  return FuserComplex(0.5 * half * a * half, fuser_copysign(0.5, x) * half * b * half);
}
FUSER_FUNCTION FuserComplex fuser_c_cosh(FuserComplex z) {
  if (z.im == 0.0) return FuserComplex(fm_cosh(z.re), fm_isnan(z.re) ? z.im : fuser_copysign(1.0, z.re) * z.im);
  if (z.re == 0.0) return FuserComplex(fm_cos(z.im), fm_isfinite(z.im) ? z.re * fm_sin(z.im) : 0.0);
  if (fuser_isinf(z.re) && !fm_isfinite(z.im)) return FuserComplex(double(FUSER_INF), double(FUSER_NAN));
  return fuser_grown(z.re, fm_cos(z.im), fm_sin(z.im));
}
FUSER_FUNCTION FuserComplex fuser_c_sinh(FuserComplex z) {
  if (z.im == 0.0) return FuserComplex(fm_sinh(z.re), z.im);
  if (z.re == 0.0) return FuserComplex(fm_isfinite(z.im) ? z.re * fm_cos(z.im) : z.re, fm_sin(z.im));
  if (fuser_isinf(z.re) && !fm_isfinite(z.im)) return FuserComplex(z.re, double(FUSER_NAN));
  const FuserComplex grown = fuser_grown(z.re, fm_sin(z.im), fm_cos(z.im));
  return FuserComplex(grown.im, grown.re);
}
FUSER_FUNCTION FuserComplex fuser_c_tanh(FuserComplex z) {
  if (fuser_isinf(z.re)) {
    const double turned = fm_isfinite(z.im) ? fm_sin(2.0 * z.im) : 1.0;
    return FuserComplex(fuser_copysign(1.0, z.re), fuser_copysign(0.0, turned));
  }
  if (z.im == 0.0) return FuserComplex(fm_tanh(z.re), z.im);
  if (!fm_isfinite(z.im)) return FuserComplex(z.re == 0.0 ? z.re : double(FUSER_NAN), double(FUSER_NAN));
  if (fm_abs(z.re) > 22.0) {
    const double fallen = fm_exp(-fm_abs(z.re));
    return FuserComplex(fuser_copysign(1.0, z.re), 4.0 * fm_sin(z.im) * fm_cos(z.im) * fallen * fallen);
  }
  // Kahan, Branch cuts for complex elementary functions (1987).
  const double t = fm_tan(z.im), s = fm_sinh(z.re), b = 1.0 + t * t, c = fm_sqrt(1.0 + s * s);
  if (fuser_isinf(t)) return FuserComplex(c / s, 1.0 / t);
  const double whole = 1.0 + b * s * s;
  return FuserComplex(b * c * s / whole, t / whole);
}
FUSER_FUNCTION FuserComplex fuser_c_cos(FuserComplex z) { return fuser_c_cosh(fuser_times_i(z)); }
FUSER_FUNCTION FuserComplex fuser_c_sin(FuserComplex z) { return fuser_over_i(fuser_c_sinh(fuser_times_i(z))); }
FUSER_FUNCTION FuserComplex fuser_c_tan(FuserComplex z) { return fuser_over_i(fuser_c_tanh(fuser_times_i(z))); }

// ---- inverses --------------------------------------------------------------------------------------------------------
// As in Kahan's paper, by the roots of 1 - z and 1 + z: terms of one sign, so that nothing cancels.
FUSER_DEVICE FuserComplex fuser_root_below(FuserComplex z) { return fuser_c_sqrt(FuserComplex(1.0 - z.re, -z.im)); }
FUSER_DEVICE FuserComplex fuser_root_above(FuserComplex z) { return fuser_c_sqrt(FuserComplex(1.0 + z.re, z.im)); }
// From here on the inverses are their leading terms, 2z for z: the squares of z leave nothing of 1.
FUSER_DEVICE bool fuser_is_far(FuserComplex z) {
  return fuser_larger_part(z) > 1e150 || fuser_isinf(z.re) || fuser_isinf(z.im);
}
FUSER_DEVICE double fuser_far_log(FuserComplex z) { return fuser_log_abs(z) + FUSER_LN2; }

FUSER_FUNCTION FuserComplex fuser_c_asin(FuserComplex z) {
  if (fuser_is_far(z)) return FuserComplex(fm_atan2(z.re, fm_abs(z.im)), fuser_copysign(fuser_far_log(z), z.im));
  if (z.re == 0.0 && fm_isnan(z.im)) return z;
  const FuserComplex a = fuser_root_below(z), b = fuser_root_above(z);
  return FuserComplex(fm_atan2(z.re, a.re * b.re - a.im * b.im), fuser_copysign(fm_asinh(a.re * b.im - a.im * b.re), z.im));
}
FUSER_FUNCTION FuserComplex fuser_c_acos(FuserComplex z) {
  if (fuser_is_far(z)) return FuserComplex(fm_atan2(fm_abs(z.im), z.re), -fuser_copysign(fuser_far_log(z), z.im));
  if (z.re == 0.0 && fm_isnan(z.im)) return FuserComplex(0.5 * FUSER_PI, z.im);
  const FuserComplex a = fuser_root_below(z), b = fuser_root_above(z);
  return FuserComplex(2.0 * fm_atan2(a.re, b.re), -fuser_copysign(fm_asinh(b.im * a.re - b.re * a.im), z.im));
}
FUSER_FUNCTION FuserComplex fuser_c_asinh(FuserComplex z) { return fuser_over_i(fuser_c_asin(fuser_times_i(z))); }
FUSER_FUNCTION FuserComplex fuser_c_acosh(FuserComplex z) {
  // i acos z or -i acos z, whose real part is not negative.
  const FuserComplex w = fuser_c_acos(z);
  if (fm_isnan(w.re) && fm_isnan(w.im)) return w;
  if (fm_isnan(w.re)) return FuserComplex(fm_abs(w.im), w.re);
  return FuserComplex(fm_abs(w.im), fuser_copysign(w.re, z.im));
}
FUSER_FUNCTION FuserComplex fuser_c_atanh(FuserComplex z) {
  const double x = fm_abs(z.re), y = fm_abs(z.im);
  double re, im;
  if (fuser_isinf(x) || fuser_isinf(y)) {
    re = 0.0;
    im = fm_isnan(y) ? y : 0.5 * FUSER_PI;
  } else if (fm_isnan(x) || fm_isnan(y)) {
    re = x == 0.0 ? 0.0 : double(FUSER_NAN);
    im = double(FUSER_NAN);
  } else if (x > 1e150 || y > 1e150) {
    const double size = fuser_hypot(0.5 * x, 0.5 * y);
    re = 0.25 * x / size / size;
    im = 0.5 * FUSER_PI;
  } else if (x == 1.0) {
    re = y == 0.0 ? double(FUSER_INF) : 0.5 * (fm_log(fuser_hypot(2.0, y)) - fm_log(y));
    im = y == 0.0 ? 0.0 : 0.5 * fm_atan2(2.0 * y, -(y * y));
  } else {
    re = 0.25 * fm_log1p(4.0 * x / ((1.0 - x) * (1.0 - x) + y * y));
    im = 0.5 * fm_atan2(2.0 * y, (1.0 - x) * (1.0 + x) - y * y);
  }
  return FuserComplex(fuser_copysign(re, z.re), fuser_copysign(im, z.im));
}
FUSER_FUNCTION FuserComplex fuser_c_atan(FuserComplex z) { return fuser_over_i(fuser_c_atanh(fuser_times_i(z))); }

// ---- the ops ---------------------------------------------------------------------------------------------------------
#define FUSER_COMPLEX_UNARY(name)                                                                                     \
  FUSER_DEVICE Complex<double> fm_##name(Complex<double> z) { return fuser_c_##name(z); }                             \
  FUSER_DEVICE Complex<float> fm_##name(Complex<float> z) { return Complex<float>(fuser_c_##name(FuserComplex(z))); }
#define FUSER_COMPLEX_BINARY(name)                                                                                    \
  FUSER_DEVICE Complex<double> fm_##name(Complex<double> a, Complex<double> b) { return fuser_c_##name(a, b); }       \
  FUSER_DEVICE Complex<float> fm_##name(Complex<float> a, Complex<float> b) {                                         \
    return Complex<float>(fuser_c_##name(FuserComplex(a), FuserComplex(b)));                                          \
  }
FUSER_COMPLEX_UNARY(acos)
FUSER_COMPLEX_UNARY(acosh)
FUSER_COMPLEX_UNARY(asin)
FUSER_COMPLEX_UNARY(asinh)
FUSER_COMPLEX_UNARY(atan)
FUSER_COMPLEX_UNARY(atanh)
FUSER_COMPLEX_UNARY(cos)
FUSER_COMPLEX_UNARY(cosh)
FUSER_COMPLEX_UNARY(sin)
FUSER_COMPLEX_UNARY(sinh)
FUSER_COMPLEX_UNARY(tan)
FUSER_COMPLEX_UNARY(tanh)
FUSER_COMPLEX_UNARY(exp)
FUSER_COMPLEX_UNARY(exp2)
FUSER_COMPLEX_UNARY(expm1)
FUSER_COMPLEX_UNARY(log)
FUSER_COMPLEX_UNARY(log10)
FUSER_COMPLEX_UNARY(log1p)
FUSER_COMPLEX_UNARY(log2)
FUSER_COMPLEX_UNARY(sqrt)
FUSER_COMPLEX_UNARY(rsqrt)
FUSER_COMPLEX_UNARY(reciprocal)
FUSER_COMPLEX_UNARY(sigmoid)
FUSER_COMPLEX_UNARY(silu)
FUSER_COMPLEX_BINARY(div)
FUSER_COMPLEX_BINARY(pow)

template <class T>
FUSER_DEVICE Complex<T> fm_lerp(Complex<T> start, Complex<T> end, Complex<T> weight) {
  const Complex<T> span = end - start;
  return fm_abs(weight) < T(0.5) ? start + weight * span : end - span * (Complex<T>(T(1)) - weight);
}
