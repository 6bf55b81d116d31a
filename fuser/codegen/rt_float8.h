// Floats of one byte. What is rounded goes to the nearest value, of two the even one, as torch's conversions do.
//
//   __e4m3   sign, 4 bits of exponent, 3 of mantissa; NaN but no infinity: what is larger than 448 becomes 448, of
//            fm_e4m3_or_nan(x) NaN where 480 would be nearer, as in older versions of torch
//   __e5m2   sign, 5 bits of exponent, 2 of mantissa; infinities and NaN, as the upper byte of a __half
//   __e8m0   a power of two from 2^-127 to 2^127, or NaN: signs are lost, what is larger becomes NaN, 0 becomes 2^-127
// fm_cast converts from and to each other type; the sign of a NaN is kept where there is one.
struct __e4m3 {
  FUSER_BITS(__e4m3, uint8_t)
};
struct __e5m2 {
  FUSER_BITS(__e5m2, uint8_t)
};
struct __e8m0 {
  FUSER_BITS(__e8m0, uint8_t)
};

#ifndef FUSER_SIMT
FUSER_DEVICE uint32_t fuser_float_bits(float x) { return __float_as_uint(x); }
FUSER_DEVICE float fuser_bits_float(uint32_t bits) { return __uint_as_float(bits); }
#endif

// The bits of a magnitude in a format of so many bits of mantissa; right below its largest value.
template <int mantissa, int bias>
FUSER_DEVICE uint32_t fuser_rounded(uint32_t magnitude) {
  constexpr int shift = 23 - mantissa;
  // Normal: rebase the exponent and round to even by carrying. Subnormal: adding the power of two whose last digit is
  // that of the format lets the FPU round.
  constexpr uint32_t rebase = static_cast<uint32_t>(127 - bias) << 23, half = (1u << (shift - 1)) - 1u;
  constexpr uint32_t unit = static_cast<uint32_t>(127 + 24 - bias - mantissa) << 23;
  const uint32_t normal = (magnitude - rebase + half + ((magnitude >> shift) & 1u)) >> shift;
  const uint32_t subnormal = fuser_float_bits(fuser_bits_float(magnitude) + fuser_bits_float(unit)) - unit;
  return magnitude < rebase + (1u << 23) ? subnormal : normal;
}

FUSER_DEVICE __e4m3 fuser_to_e4m3(float x) {
  const uint32_t bits = fuser_float_bits(x), sign = (bits >> 24) & 0x80u;
#if !defined(FUSER_SIMT) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  return __e4m3{static_cast<uint8_t>(pair | sign)};  // the sign of a NaN
#else
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t rounded = fuser_rounded<3, 7>(magnitude);
  const uint32_t finite = rounded > 0x7eu ? 0x7eu : rounded;
  return __e4m3{static_cast<uint8_t>((magnitude > 0x7f800000u ? 0x7fu : finite) | sign)};
#endif
}
FUSER_DEVICE __e4m3 fm_e4m3_or_nan(float x) {
  const uint32_t lost = (fuser_float_bits(x) & 0x7fffffffu) > 0x43e80000u ? 0x7fu : 0u;  // above 464
  return __e4m3{static_cast<uint8_t>(fuser_to_e4m3(x).bits | lost)};
}
FUSER_DEVICE float fuser_number(__e4m3 x) {
#if !defined(FUSER_SIMT) && __CUDA_ARCH__ >= 890
  uint32_t pair;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"(static_cast<uint16_t>(x.bits)));
  return __half2float(__half{static_cast<uint16_t>(pair)});
#else
  // The exponent is rebased by an exact multiplication, which also normalises subnormals.
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fu) << 20;
  const uint32_t finite = fuser_float_bits(fuser_bits_float(magnitude) * 0x1p120f);
  const uint32_t special = magnitude | 0x7f800000u;
  return fuser_bits_float((magnitude == 0x07f00000u ? special : finite) | static_cast<uint32_t>(x.bits & 0x80u) << 24);
#endif
}

FUSER_DEVICE __e5m2 fuser_to_e5m2(float x) {
  const uint32_t bits = fuser_float_bits(x), sign = (bits >> 24) & 0x80u, magnitude = bits & 0x7fffffffu;
#if !defined(FUSER_SIMT) && __CUDA_ARCH__ >= 890
  // The instruction knows no rounding to infinity, which begins at 61440.
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(0.0f), "f"(x));
  const uint32_t finite = magnitude >= 0x47700000u ? 0x7cu : pair & 0x7fu;
#else
  const uint32_t rounded = fuser_rounded<2, 15>(magnitude);
  const uint32_t finite = rounded > 0x7cu ? 0x7cu : rounded;
#endif
  return __e5m2{static_cast<uint8_t>((magnitude > 0x7f800000u ? 0x7fu : finite) | sign)};
}
FUSER_DEVICE float fuser_number(__e5m2 x) {
  return __half2float(__half{static_cast<uint16_t>(static_cast<uint32_t>(x.bits) << 8)});
}

FUSER_DEVICE __e8m0 fuser_to_e8m0(float x) {
  // Between powers of two the middle goes up; of subnormals, whose 2^-127 is half a step, down.
  const uint32_t magnitude = fuser_float_bits(x) & 0x7fffffffu;
  const uint32_t rounded = (magnitude + (magnitude < 0x800000u ? 0x3fffffu : 0x400000u)) >> 23;
  return __e8m0{static_cast<uint8_t>(rounded > 0xffu ? 0xffu : rounded)};
}
FUSER_DEVICE float fuser_number(__e8m0 x) {
  const uint32_t power = x.bits == 0 ? 0x00400000u : static_cast<uint32_t>(x.bits) << 23;
  return fuser_bits_float(x.bits == 0xffu ? 0x7fc00000u : power);
}

FUSER_CAST_TO(__e4m3, fuser_to_e4m3)
FUSER_CAST_TO(__e5m2, fuser_to_e5m2)
FUSER_CAST_TO(__e8m0, fuser_to_e8m0)
