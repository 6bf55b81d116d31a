// The device runtime of generated kernels: one text for two compilers.
//
//   GPU  NVRTC for sm_90a. No CUDA header is available, so this text is self-contained.
//   CPU  g++ (C++17), after `simt.h`, which defines FUSER_SIMT and plays the GPU: its threads are loops, or fibers
//        where a kernel has barriers. FUSER_SIMT_CHECKED adds bounds, alignment, initialisation and race checks.
// The parts are concatenated in the order rt.h, rt_float8.h, rt_math.h, rt_complex.h, rt_random.h, rt_reduce.h, then the
// kernel's text.
//
// ---- contract for generated text -------------------------------------------------------------------------------------
//   #define nvfuser_index_t int                       // first line: int or int64_t; undefined again after the kernel
//   extern "C" __global__ void __launch_bounds__(N) NAME(
//       FUSER_PTR(const __bfloat) T0, FUSER_PTR(float) T2, const int64_t s0, const int s1) { ... }
// - Nothing else at file scope than helpers; the text of a kernel may share a translation unit with others (each in a
//   namespace of its own). No #include, no static `__shared__`, no inline PTX: those live here.
// - int64_t is `long long` on both compilers: write 5LL, never 5L. Scalar parameters: bool, int, int64_t, float, double.
// - A pointer parameter is used as `T0[i]`, as `T0 + i`, or passed to a helper below. Never `&T0[i]`, never a cast:
//   the checked build's pointers are objects. FUSER_ALIASED_PTR(T) is FUSER_PTR(T) without __restrict__ (in-place outputs).
// - Elements of type __half, __bfloat, __e4m3, __e5m2 and __e8m0 have no arithmetic: convert to float, compute, convert back.
//
//   types        __half __bfloat __e4m3 __e5m2 __e8m0 float double int int64_t bool; Array<T, N> (registers, aligned for vector access; a[i], a.set(v))
//   conversions  fm_cast<To>(x) between any two scalar types (to half types through float, round to nearest even, NaN kept)
//                __half2float __float2half __bfloat2float __float2bfloat __half2double __double2half __bfloat2double
//                __double2bfloat; for N elements at once (packed instructions): half2float_vec<N>(dst, src)
//                float2half_vec<N> bfloat2float_vec<N> float2bfloat_vec<N>, dst and src arrays
//   places       fm_is_at(x, base, step): whether x is base + step, a place in a tensor that differs from thread to thread
//                fm_is_row(x, n): whether x is a position of an axis of n elements; the checked build fails where it is not
//   vectors      load_vec<N>(array, T0, index)   store_vec<N>(T0, index, array)   N elements, 1 2 4 8 or 16 bytes, aligned
//                load_vec<N>(array, at, T0, index)   store_vec<N>(T0, index, array, at)   starting at array[at]
//                load_vec_any: same, element by element where the address is not aligned
//                load_vec_cs, store_vec_cs: same, data used once (streaming); load_cs(T0, i), store_cs(T0, i, value): one element
//                prefetch(T0, index): a load of this element follows
//                forget(array): what the compiler computed from the elements before is not kept in registers
//                `array` is an Array or a C array; T0 a global or a shared pointer (_cs: global)
//   shared       FUSER_SMEM(smem);                       the block's one dynamic buffer, of the launch's smem_bytes
//                FUSER_BLOCK_SMEM(smem, X, Y, Z); the same in a block of this shape, for which reductions are compiled
//                FUSER_SHARED(float) T3 = FUSER_SHARED_AT(float, smem, offset_bytes, count);
//                (FUSER_SHARED(T) is T*, a checked pointer in the checked build; uninitialised reads and races are found)
//   threads      threadIdx blockIdx blockDim gridDim; __syncthreads __syncwarp __shfl_sync __shfl_xor_sync __shfl_up_sync
//                __shfl_down_sync __ballot_sync __any_sync __all_sync __threadfence __nanosleep
//                atomicAdd(T0 + i, v) for int, unsigned, unsigned long long, float
//                A kernel using any of these barriers, shuffles, FUSER_SMEM or the reductions has uses_barriers = True.
//   reductions   rt_reduce.h: SumOp ProdOp MaxOp MinOp WelfordOp, block_reduce, cluster_reduce, grid_reduce and their
//                _array forms; a cluster is C blocks along y, of a kernel marked __cluster_dims__(1, C, 1)
//   math         rt_math.h: the table at its top
//   complex      rt_complex.h: Complex<float> Complex<double>; no scalar parameters
//   random       rt_random.h: fm_uniform, fm_normal
//   pragmas      FUSER_UNROLL (before a loop with constant bounds), FUSER_SIMD (independent iterations),
//                FUSER_SIMD_SUM(x) FUSER_SIMD_PROD(x): the loop adds to (multiplies) the scalar x; FUSER_SIMD_MAX(x)
//                FUSER_SIMD_MIN(x): the loop does x = fm_maximum(x, v) or fm_minimum (slow before and after the loop);
//                several times faster for floating types: int nan = 0; FUSER_SIMD_MAX_NAN(x, nan) for (...)
//                fm_max_step(x, nan, v); x = fm_nan_if(nan, x); and the same with MIN and fm_min_step.
//                All but the first two are nothing on the GPU
// ----------------------------------------------------------------------------------------------------------------------
#ifdef FUSER_SIMT
#define FUSER_DEVICE static inline __attribute__((always_inline))
#define FUSER_CONSTEXPR static constexpr
#define FUSER_METHOD inline __attribute__((always_inline))
#ifdef FUSER_KEEPS_LOOPS
#define FUSER_UNROLL _Pragma("GCC unroll 1")
#else
#define FUSER_UNROLL _Pragma("GCC unroll 32")
#endif
#define FUSER_PRAGMA(text) _Pragma(#text)
#define FUSER_SIMD _Pragma("omp simd")
#define FUSER_SIMD_SUM(...) FUSER_PRAGMA(omp simd reduction(+ : __VA_ARGS__))
#define FUSER_SIMD_PROD(...) FUSER_PRAGMA(omp simd reduction(* : __VA_ARGS__))
#define FUSER_SIMD_MAX(x) FUSER_PRAGMA(omp simd reduction(fuser_max_nan : x))
#define FUSER_SIMD_MIN(x) FUSER_PRAGMA(omp simd reduction(fuser_min_nan : x))
#define FUSER_SIMD_MAX_NAN(x, nan) FUSER_PRAGMA(omp simd reduction(max : x) reduction(| : nan))
#define FUSER_SIMD_MIN_NAN(x, nan) FUSER_PRAGMA(omp simd reduction(min : x) reduction(| : nan))
#else
#define FUSER_DEVICE static __device__ __forceinline__
#define FUSER_CONSTEXPR static __host__ __device__ constexpr
#define FUSER_METHOD __device__ __forceinline__
#define FUSER_UNROLL _Pragma("unroll")
// The CPU's loops: unrolling hundreds of iterations over a local array takes a GPU's compiler half a minute.
#define FUSER_SIMD _Pragma("unroll 1")
#define FUSER_SIMD_SUM(...)
#define FUSER_SIMD_PROD(...)
#define FUSER_SIMD_MAX(x)
#define FUSER_SIMD_MIN(x)
#define FUSER_SIMD_MAX_NAN(x, nan)
#define FUSER_SIMD_MIN_NAN(x, nan)
#endif

typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned int uint32_t;
typedef unsigned short uint16_t;
typedef unsigned char uint8_t;

#ifdef FUSER_SIMT
// g++ vectorises no loop that copies a struct as a whole; these copies move the number inside.
#define FUSER_BITS(T, Bits)                            \
  Bits bits;                                           \
  T() = default;                                       \
  FUSER_METHOD explicit T(Bits value) : bits(value) {} \
  FUSER_METHOD T(const T& other) : bits(other.bits) {} \
  FUSER_METHOD T& operator=(const T& other) {          \
    bits = other.bits;                                 \
    return *this;                                      \
  }
#else
#define FUSER_BITS(T, Bits) Bits bits;
#endif
struct alignas(2) __half {
  FUSER_BITS(__half, uint16_t)
};
struct alignas(2) __bfloat {
  FUSER_BITS(__bfloat, uint16_t)
};

#ifndef FUSER_SIMT
#define FUSER_PTR(...) __VA_ARGS__* __restrict__
#define FUSER_ALIASED_PTR(...) __VA_ARGS__*
#define FUSER_SMEM(name) extern __shared__ __align__(16) char name[]
#define FUSER_BLOCK_SMEM(name, X, Y, Z) \
  extern __shared__ __align__(16) char fuser_smem[]; \
  const FuserShaped<X, Y, Z> name { fuser_smem }
template <unsigned X, unsigned Y, unsigned Z>
struct FuserShaped {
  char* base;
  template <class I>
  FUSER_METHOD char* operator+(I offset) const { return base + offset; }
};
#define FUSER_SHARED(T) T*
#define FUSER_SHARED_AT(T, smem, offset, count) reinterpret_cast<T*>((smem) + (offset))
#endif

// ---- types without <type_traits> -------------------------------------------------------------------------------------
template <class T>
struct FuserPlain {
  typedef T type;
};
template <class T>
struct FuserPlain<const T> {
  typedef T type;
};
template <class A, class B>
struct FuserSame {
  static constexpr bool value = false;
};
template <class A>
struct FuserSame<A, A> {
  static constexpr bool value = true;
};

// The element type behind any pointer of the contract.
template <class P>
struct FuserElement {
  typedef typename P::element type;  // a checked pointer
};
template <class T>
struct FuserElement<T*> {
  typedef typename FuserPlain<T>::type type;
};

// ---- register arrays -------------------------------------------------------------------------------------------------
// The alignment is the largest power of two that divides the size, at most 16 bytes: no padding, vector access allowed.
FUSER_CONSTEXPR int fuser_array_alignment(int nbytes) {
  return nbytes % 16 == 0 ? 16 : nbytes % 8 == 0 ? 8 : nbytes % 4 == 0 ? 4 : nbytes % 2 == 0 ? 2 : 1;
}
FUSER_CONSTEXPR int fuser_max(int a, int b) { return a > b ? a : b; }

template <class T, int N>
struct alignas(fuser_max(alignof(T), fuser_array_alignment(N * (int)sizeof(T)))) Array {
  T data[N];
#ifdef FUSER_SIMT_CHECKED
  Array() { __builtin_memset(static_cast<void*>(data), 0xff, sizeof data); }
  T& operator[](int64_t i) {
    simt::check_register(i, N);
    return data[i];
  }
  const T& operator[](int64_t i) const {
    simt::check_register(i, N);
    return data[i];
  }
#else
  FUSER_METHOD T& operator[](int i) { return data[i]; }
  FUSER_METHOD const T& operator[](int i) const { return data[i]; }
#endif
  FUSER_METHOD void set(T value) {
    FUSER_UNROLL
    for (int i = 0; i < N; ++i) data[i] = value;
  }
};

// ---- half types ------------------------------------------------------------------------------------------------------
#ifdef FUSER_SIMT
FUSER_DEVICE uint32_t fuser_float_bits(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
FUSER_DEVICE float fuser_bits_float(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
FUSER_DEVICE float __half2float(__half h) {
  // The exponent is rebased by an exact multiplication, which also normalises subnormals.
  const uint32_t magnitude = static_cast<uint32_t>(h.bits & 0x7fffu) << 13;
  const uint32_t finite = fuser_float_bits(fuser_bits_float(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7f800000u;
  const uint32_t sign = static_cast<uint32_t>(h.bits & 0x8000u) << 16;
  return fuser_bits_float((magnitude >= 0x0f800000u ? special : finite) | sign);
}
FUSER_DEVICE __half __float2half(float x) {
  const uint32_t bits = fuser_float_bits(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal: rebase the exponent and round to even by carrying. Subnormal: adding 0.5 lets the FPU round at 2^-24.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  const uint32_t subnormal = fuser_float_bits(fuser_bits_float(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x477ff000u ? 0x7c00u : result;
  result = magnitude > 0x7f800000u ? 0x7e00u : result;
  return __half{static_cast<uint16_t>(result | ((bits >> 16) & 0x8000u))};
}
FUSER_DEVICE float __bfloat2float(__bfloat b) { return fuser_bits_float(static_cast<uint32_t>(b.bits) << 16); }
FUSER_DEVICE __bfloat __float2bfloat(float x) {
  const uint32_t bits = fuser_float_bits(x);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t quieted = (bits >> 16) | 0x40u;
  return __bfloat{static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? quieted : rounded)};
}
#else
FUSER_DEVICE float __half2float(__half h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h.bits));
  return x;
}
FUSER_DEVICE __half __float2half(float x) {
  __half h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(x));
  return h;
}
FUSER_DEVICE float __bfloat2float(__bfloat b) { return __uint_as_float(static_cast<uint32_t>(b.bits) << 16); }
FUSER_DEVICE __bfloat __float2bfloat(float x) {
  __bfloat b;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b.bits) : "f"(x));
  return b;
}
#endif
FUSER_DEVICE double __half2double(__half h) { return __half2float(h); }
FUSER_DEVICE double __bfloat2double(__bfloat b) { return __bfloat2float(b); }
// Through float, as torch does: both roundings are part of the meaning.
FUSER_DEVICE __half __double2half(double x) { return __float2half(static_cast<float>(x)); }
FUSER_DEVICE __bfloat __double2bfloat(double x) { return __float2bfloat(static_cast<float>(x)); }

// A value as a type with arithmetic, exactly.
template <class T>
FUSER_DEVICE T fuser_number(T x) {
  return x;
}
FUSER_DEVICE float fuser_number(__half x) { return __half2float(x); }
FUSER_DEVICE float fuser_number(__bfloat x) { return __bfloat2float(x); }

template <class T>
struct FuserCast {
  template <class From>
  FUSER_METHOD static T from(From x) {
    return static_cast<T>(fuser_number(x));
  }
};
// A type without arithmetic: through float, as torch does.
#define FUSER_CAST_TO(T, from_float)                       \
  template <>                                              \
  struct FuserCast<T> {                                    \
    template <class From>                                  \
    FUSER_METHOD static T from(From x) {                   \
      return from_float(static_cast<float>(fuser_number(x))); \
    }                                                      \
    FUSER_METHOD static T from(T x) { return x; }          \
  };
FUSER_CAST_TO(__half, __float2half)
FUSER_CAST_TO(__bfloat, __float2bfloat)
template <class To, class From>
FUSER_DEVICE To fm_cast(From x) {
  return FuserCast<To>::from(x);
}

// For a thread that compares x with many places, 0 <= step < 2^31, all but the last comparison is common.
FUSER_DEVICE bool fm_is_at(int64_t x, int64_t base, int step) {
  const uint64_t distance = static_cast<uint64_t>(x) - static_cast<uint64_t>(base);
  int near = distance >> 31 ? -1 : static_cast<int>(distance);
#ifndef FUSER_SIMT
  asm("" : "+r"(near));  // or the compiler compares 64 bits again
#endif
  return near == step;
}

// Outside of a table nothing is read, as no kernel can raise an error; the checked build can.
FUSER_DEVICE bool fm_is_row(int64_t x, int64_t n) {
  const bool is_row = static_cast<uint64_t>(x) < static_cast<uint64_t>(n);
#ifdef FUSER_SIMT_CHECKED
  if (!is_row) simt::engine->fail_row(x, n);
#endif
  return is_row;
}

// Pairs go through one packed conversion on the GPU; on the CPU the plain loop vectorises.
template <int N, class D, class S>
FUSER_DEVICE void half2float_vec(D& dst, const S& src) {
  FUSER_UNROLL
  for (int i = 0; i < N; ++i) dst[i] = __half2float(src[i]);
}
template <int N, class D, class S>
FUSER_DEVICE void bfloat2float_vec(D& dst, const S& src) {
  FUSER_UNROLL
  for (int i = 0; i < N; ++i) dst[i] = __bfloat2float(src[i]);
}
template <int N, class D, class S>
FUSER_DEVICE void float2half_vec(D& dst, const S& src) {
#ifndef FUSER_SIMT
  FUSER_UNROLL
  for (int i = 0; i + 1 < N; i += 2) {
    uint32_t pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(src[i + 1]), "f"(src[i]));
    dst[i].bits = static_cast<uint16_t>(pair);
    dst[i + 1].bits = static_cast<uint16_t>(pair >> 16);
  }
  if (N % 2) dst[N - 1] = __float2half(src[N - 1]);
#else
  for (int i = 0; i < N; ++i) dst[i] = __float2half(src[i]);
#endif
}
template <int N, class D, class S>
FUSER_DEVICE void float2bfloat_vec(D& dst, const S& src) {
#ifndef FUSER_SIMT
  FUSER_UNROLL
  for (int i = 0; i + 1 < N; i += 2) {
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(src[i + 1]), "f"(src[i]));
    dst[i].bits = static_cast<uint16_t>(pair);
    dst[i + 1].bits = static_cast<uint16_t>(pair >> 16);
  }
  if (N % 2) dst[N - 1] = __float2bfloat(src[N - 1]);
#else
  for (int i = 0; i < N; ++i) dst[i] = __float2bfloat(src[i]);
#endif
}

// ---- vector access ---------------------------------------------------------------------------------------------------
#ifdef FUSER_SIMT
template <int NBYTES, class P, class I>
FUSER_DEVICE void fuser_copy_in(void* dst, P src, I index) {
  simt::copy_in<NBYTES>(dst, src, index);
}
template <int NBYTES, class P, class I>
FUSER_DEVICE void fuser_copy_out(P dst, I index, const void* src) {
  simt::copy_out<NBYTES>(dst, index, src);
}
#define fuser_copy_in_cs fuser_copy_in
#define fuser_copy_out_cs fuser_copy_out
template <class P, class I>
FUSER_DEVICE bool fuser_is_aligned(P src, I index, unsigned nbytes) {
  return simt::address(src + index) % nbytes == 0;
}
#else
template <class T, class I>
FUSER_DEVICE bool fuser_is_aligned(T* src, I index, unsigned nbytes) {
  return (static_cast<unsigned>(reinterpret_cast<size_t>(src + index)) & (nbytes - 1)) == 0;
}
template <int NBYTES>
struct FuserWord;
template <>
struct FuserWord<1> {
  typedef unsigned char type;
};
template <>
struct FuserWord<2> {
  typedef unsigned short type;
};
template <>
struct FuserWord<4> {
  typedef unsigned int type;
};
template <>
struct FuserWord<8> {
  typedef uint2 type;
};
template <>
struct FuserWord<16> {
  typedef uint4 type;
};
template <int NBYTES, class T, class I>
FUSER_DEVICE void fuser_copy_in(void* dst, T* src, I index) {
  typedef typename FuserWord<NBYTES>::type W;
  *reinterpret_cast<W*>(dst) = *reinterpret_cast<const W*>(src + index);
}
template <int NBYTES, class T, class I>
FUSER_DEVICE void fuser_copy_out(T* dst, I index, const void* src) {
  typedef typename FuserWord<NBYTES>::type W;
  *reinterpret_cast<W*>(dst + index) = *reinterpret_cast<const W*>(src);
}
template <int NBYTES, class T, class I>
FUSER_DEVICE void fuser_copy_in_cs(void* dst, T* src, I index) {
  typedef typename FuserWord<NBYTES>::type W;
  *reinterpret_cast<W*>(dst) = __ldcs(reinterpret_cast<const W*>(src + index));
}
template <int NBYTES, class T, class I>
FUSER_DEVICE void fuser_copy_out_cs(T* dst, I index, const void* src) {
  typedef typename FuserWord<NBYTES>::type W;
  __stcs(reinterpret_cast<W*>(dst + index), *reinterpret_cast<const W*>(src));
}
#endif

#define FUSER_VEC_BYTES(N, P) ((N) * (int)sizeof(typename FuserElement<P>::type))
#define FUSER_VEC_CHECK(N, P)                                                                                         \
  static_assert(FUSER_VEC_BYTES(N, P) <= 16 && (FUSER_VEC_BYTES(N, P) & (FUSER_VEC_BYTES(N, P) - 1)) == 0,            \
                "a vector access is 1, 2, 4, 8 or 16 bytes")
#define FUSER_DEFINE_VEC(SUFFIX)                                                                                      \
  template <int N, class D, class P, class I>                                                                         \
  FUSER_DEVICE void load_vec##SUFFIX(D& dst, int at, P src, I index) {                                                \
    FUSER_VEC_CHECK(N, P);                                                                                            \
    (void)dst[at + (N)-1]; /* the checked build checks both ends of the register range */                             \
    fuser_copy_in##SUFFIX<FUSER_VEC_BYTES(N, P)>(&dst[at], src, index);                                               \
  }                                                                                                                   \
  template <int N, class D, class P, class I>                                                                         \
  FUSER_DEVICE void load_vec##SUFFIX(D& dst, P src, I index) {                                                        \
    load_vec##SUFFIX<N>(dst, 0, src, index);                                                                          \
  }                                                                                                                   \
  template <int N, class D, class P, class I>                                                                         \
  FUSER_DEVICE void store_vec##SUFFIX(P dst, I index, const D& src, int at) {                                         \
    FUSER_VEC_CHECK(N, P);                                                                                            \
    (void)src[at + (N)-1];                                                                                            \
    fuser_copy_out##SUFFIX<FUSER_VEC_BYTES(N, P)>(dst, index, &src[at]);                                              \
  }                                                                                                                   \
  template <int N, class D, class P, class I>                                                                         \
  FUSER_DEVICE void store_vec##SUFFIX(P dst, I index, const D& src) {                                                 \
    store_vec##SUFFIX<N>(dst, index, src, 0);                                                                         \
  }
FUSER_DEFINE_VEC()
FUSER_DEFINE_VEC(_cs)

template <int N, class D, class P, class I>
FUSER_DEVICE void load_vec_any(D& dst, int at, P src, I index) {
  if (fuser_is_aligned(src, index, FUSER_VEC_BYTES(N, P))) {
    load_vec<N>(dst, at, src, index);
    return;
  }
  FUSER_UNROLL
  for (int i = 0; i < N; ++i) dst[at + i] = src[index + i];
}
template <int N, class D, class P, class I>
FUSER_DEVICE void load_vec_any(D& dst, P src, I index) {
  load_vec_any<N>(dst, 0, src, index);
}

// Ask for the line of an element that is loaded soon.
template <class P, class I>
FUSER_DEVICE void prefetch(P src, I index) {
#ifdef FUSER_SIMT
  const typename FuserElement<P>::type value = src[index];  // the checked build checks the place
  (void)value;
#else
  asm volatile("prefetch.global.L2 [%0];" ::"l"(src + index));
#endif
}

// The compiler takes the words of the array for new ones.
template <class A>
FUSER_DEVICE void forget(A& array) {
#ifdef FUSER_SIMT
  (void)array;
#else
  char* bytes = reinterpret_cast<char*>(&array);
  FUSER_UNROLL
  for (int i = 0; i + 4 <= (int)sizeof(A); i += 4) {
    unsigned word;
    memcpy(&word, bytes + i, 4);
    asm volatile("" : "+r"(word));
    memcpy(bytes + i, &word, 4);
  }
#endif
}

template <class P, class I>
FUSER_DEVICE typename FuserElement<P>::type load_cs(P src, I index) {
  typename FuserElement<P>::type value[1];
  load_vec_cs<1>(value, 0, src, index);
  return value[0];
}
template <class P, class I>
FUSER_DEVICE void store_cs(P dst, I index, typename FuserElement<P>::type value) {
  const typename FuserElement<P>::type values[1] = {value};
  store_vec_cs<1>(dst, index, values, 0);
}
