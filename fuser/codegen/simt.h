// Plays the GPU for g++: the CUDA names that rt.h and generated kernels use, on one CPU thread. Comes before rt.h.
//
// A kernel without barriers runs as loops over blocks and threads (run_loops). A kernel with barriers, and every kernel
// of a checked build, runs its threads as fibers of the engine (simt_engine.cpp); its functions are reached through the
// launch record, so that a kernel's library needs no other library, and no system header is parsed to compile it.
// FUSER_SIMT_CHECKED turns pointers into objects that check bounds, alignment, initialisation and races.
#define FUSER_SIMT 1

#define __global__ __attribute__((visibility("hidden")))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define memcpy __builtin_memcpy
#define FUSER_EXPORT extern "C" __attribute__((visibility("default")))

// Not escaping, thread-local, and restored after each fiber switch: g++ may keep them in registers.
static thread_local simt::Dim threadIdx, blockIdx, blockDim, gridDim;

namespace simt {

static thread_local const Engine* engine;
static thread_local unsigned long long* counters;
static thread_local unsigned smem_bytes;  // of the running launch

static inline void restore(const Thread* t) {
  threadIdx = t->thread;
  blockIdx = t->block;  // blocks of a cluster take turns
}

// The entry of a fiber.
static inline void enter(const Launch* launch, const Thread* t) {
  engine = launch->engine;
  counters = launch->report->counters;
  smem_bytes = launch->smem_bytes;
  gridDim = launch->grid;
  blockDim = launch->block;
  blockIdx = t->block;
  threadIdx = t->thread;
}

template <class Body>
static inline void run_loops(const Launch* launch, Body body) {
  const Dim grid = launch->grid, block = launch->block;
  gridDim = grid;
  blockDim = block;
  for (unsigned bz = 0; bz < grid.z; ++bz)
    for (unsigned by = 0; by < grid.y; ++by)
      for (unsigned bx = 0; bx < grid.x; ++bx) {
        blockIdx = Dim{bx, by, bz};
        for (unsigned tz = 0; tz < block.z; ++tz)
          for (unsigned ty = 0; ty < block.y; ++ty)
            for (unsigned tx = 0; tx < block.x; ++tx) {
              threadIdx = Dim{tx, ty, tz};
              body();
            }
      }
}

// A scalar parameter from its 8-byte slot.
template <class T>
static inline T scalar(const Launch* launch, int slot) {
  T value;
  __builtin_memcpy(&value, &launch->slots[slot], sizeof(T));
  return value;
}

static inline int width_class(unsigned nbytes) {
  return nbytes > 8 ? 4 : nbytes > 4 ? 3 : nbytes > 2 ? 2 : nbytes > 1 ? 1 : 0;
}

#ifdef FUSER_SIMT_CHECKED
static inline void check_register(long long index, long long extent) {
  if (index < 0 || index >= extent) engine->fail_register(index, extent);
}

template <class T>
struct Mutable {
  typedef T type;
  static constexpr bool is_const = false;
};
template <class T>
struct Mutable<const T> {
  typedef T type;
  static constexpr bool is_const = true;
};

// An element of a writable checked pointer: reading it is a load, assigning to it a store.
template <class P>
struct Ref {
  typedef typename P::element T;
  P at;
  operator T() const { return at.load(); }
  T operator=(T value) const {
    at.store(value);
    return value;
  }
  T operator=(const Ref& other) const { return *this = static_cast<T>(other); }
  T operator+=(T value) const { return *this = static_cast<T>(at.load() + value); }
  T operator-=(T value) const { return *this = static_cast<T>(at.load() - value); }
  T operator*=(T value) const { return *this = static_cast<T>(at.load() * value); }
};
template <class P, bool is_const>
struct Access {
  typedef Ref<P> type;
  static type make(P at) { return type{at}; }
};
template <class P>
struct Access<P, true> {
  typedef typename P::element type;
  static type make(P at) { return at.load(); }
};

// A global pointer that knows its tensor: `origin[0 .. extent)` bytes, and where it points within it.
template <class T>
struct Ptr {
  typedef typename Mutable<T>::type element;
  typedef Access<Ptr, Mutable<T>::is_const> access;
  char* origin;
  long long extent, at;
  const char* name;

  Ptr operator+(long long n) const { return Ptr{origin, extent, at + n * static_cast<long long>(sizeof(T)), name}; }
  Ptr operator-(long long n) const { return *this + -n; }
  typename access::type operator[](long long n) const { return access::make(*this + n); }
  typename access::type operator*() const { return access::make(*this); }
  operator Ptr<const element>() const { return Ptr<const element>{origin, extent, at, name}; }
  char* touch(unsigned nbytes, unsigned alignment, bool is_store) const {
    if (at < 0 || at + nbytes > extent || reinterpret_cast<unsigned long>(origin + at) % alignment != 0)
      engine->fail_global(name, at, nbytes, alignment, extent, sizeof(T), is_store);
    ++counters[(is_store ? kGlobalStore : kGlobalLoad) + width_class(nbytes)];
    return origin + at;
  }
  element load() const {
    element value;
    __builtin_memcpy(&value, touch(sizeof(T), alignof(T), false), sizeof(T));
    return value;
  }
  void store(element value) const { __builtin_memcpy(touch(sizeof(T), alignof(T), true), &value, sizeof(T)); }
};

// A shared-memory pointer: byte offsets in the block's buffer, with the bounds of the array that it belongs to.
template <class T>
struct SharedPtr {
  typedef typename Mutable<T>::type element;
  typedef Access<SharedPtr, Mutable<T>::is_const> access;
  unsigned begin, end;
  long long at;
  const char* name;

  SharedPtr operator+(long long n) const { return SharedPtr{begin, end, at + n * static_cast<long long>(sizeof(T)), name}; }
  SharedPtr operator-(long long n) const { return *this + -n; }
  typename access::type operator[](long long n) const { return access::make(*this + n); }
  typename access::type operator*() const { return access::make(*this); }
  char* touch(unsigned nbytes, unsigned alignment, bool is_store) const {
    engine->shared_access(name, static_cast<unsigned>(at), nbytes, alignment, begin, end, is_store);
    ++counters[(is_store ? kSharedStore : kSharedLoad) + width_class(nbytes)];
    return engine->smem() + at;
  }
  element load() const {
    element value;
    __builtin_memcpy(&value, touch(sizeof(T), alignof(T), false), sizeof(T));
    return value;
  }
  void store(element value) const { __builtin_memcpy(touch(sizeof(T), alignof(T), true), &value, sizeof(T)); }
};

template <class T, class U>
static inline SharedPtr<T> shared_at(SharedPtr<U> smem, long long offset, long long count, const char* name) {
  const long long begin = smem.at + offset, end = begin + count * static_cast<long long>(sizeof(T));
  // The array as a whole must fit, whether or not its end is ever used.
  if (count > 0) engine->shared_access(name, static_cast<unsigned>(begin), 0, alignof(T), smem.begin, smem.end, 0);
  if (end > smem.end) engine->shared_access(name, smem.end, static_cast<unsigned>(end - smem.end), 1, smem.begin, smem.end, 0);
  return SharedPtr<T>{static_cast<unsigned>(begin), static_cast<unsigned>(end), begin, name};
}

// An element of the same array of another block of the cluster.
template <class T>
static inline T peer_load(SharedPtr<T> src, unsigned rank) {
  T value;
  __builtin_memcpy(&value, engine->peer_smem(src.name, static_cast<unsigned>(src.at), sizeof(T), src.begin, src.end, rank), sizeof(T));
  ++counters[kSharedLoad + width_class(sizeof(T))];
  return value;
}

template <class T>
static inline unsigned long address(Ptr<T> src) {
  return reinterpret_cast<unsigned long>(src.origin + src.at);
}
template <int NBYTES, class P>
static inline void copy_in(void* dst, P src, long long index) {
  __builtin_memcpy(dst, (src + index).touch(NBYTES, NBYTES, false), NBYTES);
}
template <int NBYTES, class P>
static inline void copy_out(P dst, long long index, const void* src) {
  __builtin_memcpy((dst + index).touch(NBYTES, NBYTES, true), src, NBYTES);
}
template <class T>
static inline T atomic_add(Ptr<T> target, T value) {
  ++counters[kAtomic];
  const T old = target.load();
  target.store(static_cast<T>(old + value));
  return old;
}
template <class T>
static inline Ptr<T> pointer(const Launch* launch, int slot, int slots, const char* name) {
  return Ptr<T>{reinterpret_cast<char*>(launch->slots[slot]), static_cast<long long>(launch->slots[slots + slot]), 0, name};
}
#define FUSER_PTR(...) simt::Ptr<__VA_ARGS__>
#define FUSER_ALIASED_PTR(...) simt::Ptr<__VA_ARGS__>
#define FUSER_ATOMIC_TARGET(T) simt::Ptr<T>
#define FUSER_SMEM(name) const simt::SharedPtr<char> name{0, simt::smem_bytes, 0, #name}
#define FUSER_BLOCK_SMEM(name, X, Y, Z) FUSER_SMEM(name)
#define FUSER_SHARED(T) simt::SharedPtr<T>
#define FUSER_SHARED_AT(T, smem, offset, count) simt::shared_at<T>(smem, offset, count, (smem).name)

#else
template <class T>
static inline T peer_load(T* src, unsigned rank) {
  const unsigned at = static_cast<unsigned>(reinterpret_cast<char*>(src) - engine->smem());
  T value;
  __builtin_memcpy(&value, engine->peer_smem("", at, sizeof(T), 0, smem_bytes, rank), sizeof(T));
  return value;
}
template <class T>
static inline __attribute__((always_inline)) unsigned long address(T* src) {
  return reinterpret_cast<unsigned long>(src);
}
template <int NBYTES, class T>
static inline __attribute__((always_inline)) void copy_in(void* dst, T* src, long long index) {
  __builtin_memcpy(dst, src + index, NBYTES);
}
template <int NBYTES, class T>
static inline __attribute__((always_inline)) void copy_out(T* dst, long long index, const void* src) {
  __builtin_memcpy(dst + index, src, NBYTES);
}
template <class T>
static inline T atomic_add(T* target, T value) {
  const T old = *target;
  *target = static_cast<T>(old + value);
  return old;
}
template <class T>
static inline T* pointer(const Launch* launch, int slot, int, const char*) {
  return reinterpret_cast<T*>(launch->slots[slot]);
}
#define FUSER_PTR(...) __VA_ARGS__* __restrict__
#define FUSER_ALIASED_PTR(...) __VA_ARGS__*
#define FUSER_ATOMIC_TARGET(T) T*
#define FUSER_SMEM(name) char* const name = simt::engine->smem()
#define FUSER_BLOCK_SMEM(name, X, Y, Z) FUSER_SMEM(name)
#define FUSER_SHARED(T) T*
#define FUSER_SHARED_AT(T, smem, offset, count) reinterpret_cast<T*>((smem) + (offset))
#endif

template <class T>
static inline T shuffle(unsigned mask, T value, unsigned source) {
  unsigned long long sent = 0, got;
  __builtin_memcpy(&sent, &value, sizeof(T));
  restore(engine->exchange(mask, sent, source, &got));
  __builtin_memcpy(&value, &got, sizeof(T));
  return value;
}
static inline unsigned lane() {
  return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & 31u;
}
static inline unsigned vote(unsigned mask, bool predicate) {
  unsigned ballot;
  restore(engine->vote(mask, predicate, &ballot));
  return ballot;
}

}  // namespace simt

#define __syncthreads() simt::restore(simt::engine->barrier(__FILE__, __LINE__))
static inline void __syncwarp(unsigned mask = 0xffffffffu) { simt::restore(simt::engine->sync_warp(mask)); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __nanosleep(unsigned) { simt::restore(simt::engine->sleep()); }

// `width` is a power of two: lanes exchange within segments of that size, as on the GPU.
template <class T>
static inline T __shfl_sync(unsigned mask, T value, unsigned source, int width = 32) {
  const unsigned base = simt::lane() & ~static_cast<unsigned>(width - 1);
  return simt::shuffle(mask, value, base + (source & static_cast<unsigned>(width - 1)));
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  const unsigned lane = simt::lane(), source = lane ^ distance;
  const bool inside = (source & ~static_cast<unsigned>(width - 1)) <= (lane & ~static_cast<unsigned>(width - 1));
  return simt::shuffle(mask, value, inside ? source : lane);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  const unsigned lane = simt::lane(), source = lane + distance;
  return simt::shuffle(mask, value, (lane & (width - 1u)) + distance < static_cast<unsigned>(width) ? source : lane);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  const unsigned lane = simt::lane();
  return simt::shuffle(mask, value, (lane & (width - 1u)) >= distance ? lane - distance : lane);
}
static inline unsigned __ballot_sync(unsigned mask, int predicate) { return simt::vote(mask, predicate != 0); }
static inline int __any_sync(unsigned mask, int predicate) { return simt::vote(mask, predicate != 0) != 0; }
// The lanes that voted are those of the mask that exist; comparing "no" votes leaves the missing ones out.
static inline int __all_sync(unsigned mask, int predicate) { return simt::vote(mask, predicate == 0) == 0; }

static inline int atomicAdd(FUSER_ATOMIC_TARGET(int) target, int value) { return simt::atomic_add<int>(target, value); }
static inline unsigned atomicAdd(FUSER_ATOMIC_TARGET(unsigned) target, unsigned value) {
  return simt::atomic_add<unsigned>(target, value);
}
static inline unsigned long long atomicAdd(FUSER_ATOMIC_TARGET(unsigned long long) target, unsigned long long value) {
  return simt::atomic_add<unsigned long long>(target, value);
}
static inline float atomicAdd(FUSER_ATOMIC_TARGET(float) target, float value) {
  return simt::atomic_add<float>(target, value);
}
