// Reductions over threads and blocks. All threads of the block call them, convergently; they may be called in loops.
//
//   combine functors   SumOp<T> ProdOp<T> MaxOp<T> MinOp<T> (NaN wins) AndOp<T> OrOp<T> (bool); any struct with
//                      `T operator()(T earlier, T later) const` and `static constexpr bool commutative`
//                      PairOp<OpA, OpB> on Pair<A, B> {first, second}
//                      WelfordOp<T, N> on Welford<T, N> {shift, avg, m2, n}; mean() is shift + avg; welford_add(w, x) adds one value
//                      or another Welford, welford_add_block and welford_add_batch several values
//   block_reduce<X, Y, Z>(value, combine, identity, smem) -> T
//       combines over the thread axes whose flag is true; every thread gets the result of its group. `smem` is FUSER_SMEM's
//       buffer (or `smem + offset`, 16-byte aligned), sizeof(T) bytes for each thread of the block. Any block shape.
//   block_reduce_array<X, Y, Z, N>(array, combine, identity, smem)
//       the same for N values at once with shared barriers, in place; N * sizeof(T) bytes for each thread.
//   block_broadcast<X, Y, Z>(value, smem) -> T
//       the value of the thread at coordinate 0 of the flagged axes; sizeof(T) bytes for each thread.
//   cluster_reduce<TX, TY, TZ, C>(value, combine, smem) -> T
//       combines over the C blocks of a cluster, in the order of their ranks; every thread gets the result. The T flags name
//       the thread axes over which `value` is already the same (the block_reduce before it). smem: (C + 1) * sizeof(T) bytes
//       for each group of threads (the product of the block's extents along the other axes).
//   cluster_reduce_array<TX, TY, TZ, C, N>(array, combine, smem)
//       the same for N values at once, in place; N times as much.
//   grid_ticket<BX, BY, BZ>(begun) -> unsigned
//       Once, at the start of a kernel, for its grid reductions over these block axes: draws the block's number among those
//       that have begun, in its first thread. `begun`: FUSER_PTR(unsigned), one per group of blocks, zero before the first
//       launch and zero again after each.
//   grid_reduce<BX, BY, BZ, TX, TY, TZ>(value, combine, identity, packets, ticket, smem) -> bool
//       combines over the block axes with a true B flag. The T flags name the thread axes over which `value` (by reference)
//       is already the same (the block_reduce before it). The block that began last waits for the values of the others; it
//       gets true and, in every thread, the result. The others get false and wait for nobody. `packets`:
//       FUSER_PTR(uint64_t), blocks * threads * ceil(sizeof(T) / 4) of them (threads: product of the block's extents along
//       axes that are not reduced), zero before the first launch and zero again after each. smem: as block_reduce, and at
//       least 16 bytes.
//   grid_reduce_array<BX, BY, BZ, TX, TY, TZ, N>(array, combine, identity, packets, ticket, smem) -> bool
//       packets: N times as many; smem as block_reduce_array.
//
// The order of combination depends only on the shape of grid and block, never on timing.

template <class T>
struct SumOp {
  static constexpr bool commutative = true;
  FUSER_METHOD T operator()(T a, T b) const { return a + b; }
};
template <class T>
struct ProdOp {
  static constexpr bool commutative = true;
  FUSER_METHOD T operator()(T a, T b) const { return a * b; }
};
template <class T>
struct MaxOp {
  static constexpr bool commutative = true;
  FUSER_METHOD T operator()(T a, T b) const { return fm_maximum(a, b); }
};
template <class T>
struct MinOp {
  static constexpr bool commutative = true;
  FUSER_METHOD T operator()(T a, T b) const { return fm_minimum(a, b); }
};
template <class T>
struct AndOp {
  static constexpr bool commutative = true;
  FUSER_METHOD T operator()(T a, T b) const { return a && b; }
};
template <class T>
struct OrOp {
  static constexpr bool commutative = true;
  FUSER_METHOD T operator()(T a, T b) const { return a || b; }
};

// Running mean, sum of squared differences from it, and count. The mean is held as its distance from a `shift`, the first
// value: the distance is about as large as the deviations are, so that rounding it loses nothing beside them, however large
// the mean itself is. The identity is {0, 0, 0, 0}.
template <class T, class N = int64_t>
struct Welford {
  T shift;
  T avg;
  T m2;
  N n;
  FUSER_METHOD T mean() const { return shift + avg; }
  FUSER_METHOD int64_t count() const { return static_cast<int64_t>(n); }
};
// An infinity or NaN is no place to measure from: every distance would be NaN.
template <class T>
FUSER_DEVICE T welford_shift(T first) { return fm_isfinite(first) ? first : T(0); }
template <class T, class N = int64_t>
struct WelfordOp {
  static constexpr bool commutative = false;
  FUSER_METHOD Welford<T, N> operator()(Welford<T, N> a, Welford<T, N> b) const {
    const N n = a.n + b.n;
    const T share = n == N(0) ? T(0) : T(b.n) / T(n);
    const T shift = a.n == N(0) ? b.shift : a.shift;
    const T delta = (b.shift - shift) + (b.avg - a.avg);
    return Welford<T, N>{shift, a.avg + delta * share, a.m2 + b.m2 + delta * delta * T(a.n) * share, n};
  }
};
template <class T, class N>
FUSER_DEVICE void welford_add(Welford<T, N>& w, T x) {
  if (w.n == N(0)) w.shift = welford_shift(x);
  w.n += N(1);
  const T delta = (x - w.shift) - w.avg;
  const T step = delta / T(w.n);
  w.avg += step;
  // Not the distance from the new mean: a compiler that fuses x's own product into it would leave a rest for one value.
  w.m2 += delta * (delta - step);
}
template <class To, class T, class N>
FUSER_DEVICE Welford<To, N> welford_cast(Welford<T, N> w) {
  return Welford<To, N>{To(w.shift), To(w.avg), To(w.m2), w.n};
}
template <class T, class U, class N>
FUSER_DEVICE void welford_add(Welford<T, N>& w, Welford<U, N> later) {
  w = WelfordOp<T, N>()(w, welford_cast<T>(later));
}
// Adds the first `count` values of an array: two passes over it, which a CPU vectorises, then one merge.
template <class W, class T, class N, int K>
FUSER_DEVICE void welford_add_block(Welford<W, N>& w, const Array<T, K>& values, int count) {
  if (count == 0) return;
  const T shift = welford_shift(values[0]);
  T sum = T(0), m2 = T(0);
  FUSER_SIMD_SUM(sum)
  for (int i = 0; i < count; ++i) sum += values[i] - shift;
  const T avg = sum / T(count);
  FUSER_SIMD_SUM(m2)
  for (int i = 0; i < count; ++i) m2 += ((values[i] - shift) - avg) * ((values[i] - shift) - avg);
  welford_add(w, Welford<T, N>{shift, avg, m2, N(count)});
}
// Adds the values of an array whose bits are set in `mask` to an accumulator that holds `held` values: where the
// accumulators of several columns hold equally many, they share the division.
template <class T, class N, int K>
FUSER_DEVICE void welford_add_batch(Welford<T, N>& w, N held, const Array<T, K>& values, unsigned mask = ~0u) {
  static_assert(K <= 32, "a mask has 32 bits");
  if (held == N(0)) {
    T first = values[0];
    // Rarely: a row that begins inside of its first word.
    if ((mask & 1u) == 0u) {
      FUSER_UNROLL
      for (int i = K - 1; i >= 0; --i) first = (mask >> i & 1u) != 0u ? values[i] : first;
    }
    w.shift = welford_shift(first);
  }
  int count = 0;
  T sum = T(0), m2 = T(0);
  Array<T, K> rest;
  FUSER_UNROLL
  for (int i = 0; i < K; ++i) {
    const bool exists = (mask >> i & 1u) != 0u;
    rest[i] = exists ? values[i] - w.shift : T(0);
    count += exists ? 1 : 0;
    sum += rest[i];
  }
  w.n = held + N(count);
  if (count == 0) return;
  const T avg = sum / T(count);
  FUSER_UNROLL
  for (int i = 0; i < K; ++i) {
    const T apart = rest[i] - avg;
    m2 += (mask >> i & 1u) != 0u ? apart * apart : T(0);
  }
  const T share = T(count) / T(w.n), delta = avg - w.avg;
  w.avg += delta * share;
  w.m2 += m2 + delta * delta * (T(held) * share);
}

// Several values reduced together: PairOp combines member by member. Pairs nest.
template <class A, class B>
struct Pair {
  A first;
  B second;
};
template <class OpA, class OpB>
struct PairOp {
  static constexpr bool commutative = OpA::commutative && OpB::commutative;
  template <class A, class B>
  FUSER_METHOD Pair<A, B> operator()(Pair<A, B> a, Pair<A, B> b) const {
    return Pair<A, B>{OpA()(a.first, b.first), OpB()(a.second, b.second)};
  }
};

// ---- lanes -----------------------------------------------------------------------------------------------------------
// The shape of the block; where FUSER_BLOCK_SMEM gave it, a constant, which decides how threads combine.
struct FuserShape {
  unsigned x, y, z;
};
template <class S>
FUSER_DEVICE FuserShape fuser_shape(const S&) { return FuserShape{blockDim.x, blockDim.y, blockDim.z}; }
#ifndef FUSER_SIMT
template <unsigned X, unsigned Y, unsigned Z>
FUSER_DEVICE FuserShape fuser_shape(const FuserShaped<X, Y, Z>&) { return FuserShape{X, Y, Z}; }
#endif
FUSER_DEVICE unsigned fuser_block_threads(FuserShape block) { return block.x * block.y * block.z; }
FUSER_DEVICE unsigned fuser_linear_thread(FuserShape block) {
  return threadIdx.x + block.x * (threadIdx.y + block.y * threadIdx.z);
}
// The lanes of this thread's warp that exist: the last warp of a block may be partial.
FUSER_DEVICE unsigned fuser_warp_lanes(FuserShape block) {
  if (fuser_block_threads(block) % 32u == 0u) return 32u;
  const unsigned rest = fuser_block_threads(block) - (fuser_linear_thread(block) & ~31u);
  return rest < 32u ? rest : 32u;
}
FUSER_DEVICE unsigned fuser_warp_mask(FuserShape block) {
  const unsigned lanes = fuser_warp_lanes(block);
  return lanes == 32u ? 0xffffffffu : (1u << lanes) - 1u;
}

// Shuffles of any trivially copyable type, as 32-bit words. `FROM` is the source lane.
template <class T>
FUSER_DEVICE T fuser_shfl(unsigned mask, T value, unsigned from) {
  constexpr int words = (sizeof(T) + 3) / 4;
  uint32_t buffer[words] = {};
  memcpy(buffer, &value, sizeof(T));
  FUSER_UNROLL
  for (int i = 0; i < words; ++i) buffer[i] = __shfl_sync(mask, buffer[i], from);
  memcpy(&value, buffer, sizeof(T));
  return value;
}
FUSER_DEVICE float fuser_shfl(unsigned mask, float value, unsigned from) { return __shfl_sync(mask, value, from); }
FUSER_DEVICE int fuser_shfl(unsigned mask, int value, unsigned from) { return __shfl_sync(mask, value, from); }

// One step of a butterfly: combines with the lane at distance `offset`, the lower lane's value first.
template <class T, class Op>
FUSER_DEVICE T fuser_butterfly(unsigned mask, T value, unsigned lane, unsigned offset, Op combine) {
  const T other = fuser_shfl(mask, value, lane ^ offset);
  if (Op::commutative) return combine(value, other);
  const bool upper = (lane & offset) != 0;
  return combine(upper ? other : value, upper ? value : other);
}

// Combines the `lanes` first lanes of a warp (32 unless it is the block's last one); every lane gets the result.
template <class T, class Op>
FUSER_DEVICE T fuser_warp_reduce(T value, Op combine, unsigned lane, unsigned lanes, unsigned mask) {
  if (lanes == 32u) {
    FUSER_UNROLL
    for (unsigned offset = 1; offset < 32u; offset *= 2) value = fuser_butterfly(mask, value, lane, offset, combine);
    return value;
  }
  for (unsigned offset = 1; offset < lanes; offset *= 2) {
    const T other = fuser_shfl(mask, value, lane + offset < lanes ? lane + offset : lane);
    // Lanes that are a multiple of 2 * offset hold the combination of a full interval; the others are not read again.
    if (lane % (2 * offset) == 0 && lane + offset < lanes) value = combine(value, other);
  }
  return fuser_shfl(mask, value, 0u);
}

// ---- blocks ----------------------------------------------------------------------------------------------------------
// A thread's place: `position` of `count` along the reduced axes, in group `group` of `groups`.
struct FuserPlace {
  unsigned position, count, group, groups;
};
FUSER_DEVICE void fuser_place_axis(FuserPlace& place, bool reduced, unsigned index, unsigned extent) {
  if (reduced) {
    place.position += index * place.count;
    place.count *= extent;
  } else {
    place.group += index * place.groups;
    place.groups *= extent;
  }
}
template <bool X, bool Y, bool Z>
FUSER_DEVICE FuserPlace fuser_thread_place(FuserShape block) {
  FuserPlace place = {0, 1, 0, 1};
  fuser_place_axis(place, X, threadIdx.x, block.x);
  fuser_place_axis(place, Y, threadIdx.y, block.y);
  fuser_place_axis(place, Z, threadIdx.z, block.z);
  return place;
}
template <bool X, bool Y, bool Z>
FUSER_DEVICE FuserPlace fuser_block_place() {
  FuserPlace place = {0, 1, 0, 1};
  fuser_place_axis(place, X, blockIdx.x, gridDim.x);
  fuser_place_axis(place, Y, blockIdx.y, gridDim.y);
  fuser_place_axis(place, Z, blockIdx.z, gridDim.z);
  return place;
}

// The element type of a register array: Array<T, N> or T[N].
template <class A>
struct FuserArrayElement;
template <class T, int N>
struct FuserArrayElement<Array<T, N>> {
  typedef T type;
};
template <class T, int N>
struct FuserArrayElement<T[N]> {
  typedef T type;
};

// The one implementation behind the public forms.
template <bool X, bool Y, bool Z, int N, class A, class Op, class S>
FUSER_DEVICE void fuser_block_reduce(A& values, Op combine, S smem) {
  typedef typename FuserArrayElement<A>::type T;
  const FuserShape block = fuser_shape(smem);
  const FuserPlace place = fuser_thread_place<X, Y, Z>(block);
  const unsigned count = place.count;
  if (count == 1u) return;
  FUSER_SHARED(T) slots = FUSER_SHARED_AT(T, smem, 0, N * fuser_block_threads(block));
  // Reduced axes innermost: a group is a run of consecutive linear thread ids, so warps can do the first part.
  constexpr bool contiguous = X && (Y || !Z);
  const unsigned lane = fuser_linear_thread(block) & 31u;
  if (contiguous && count < 32u && place.groups != 1u && (count & (count - 1u)) == 0u) {
    const unsigned mask = fuser_warp_mask(block);
    for (unsigned offset = 1; offset < count; offset *= 2) {
      FUSER_UNROLL
      for (int i = 0; i < N; ++i) values[i] = fuser_butterfly(mask, values[i], lane, offset, combine);
    }
    return;
  }
  if (contiguous && (place.groups == 1u || count % 32u == 0u)) {
    const unsigned lanes = fuser_warp_lanes(block);
    const unsigned mask = fuser_warp_mask(block);
    FUSER_UNROLL
    for (int i = 0; i < N; ++i) values[i] = fuser_warp_reduce(T(values[i]), combine, lane, lanes, mask);
    const unsigned warps = (count + 31u) / 32u;
    if (warps == 1u) return;
    const unsigned first = place.group * warps * N;
    if (lane == 0u) {
      FUSER_UNROLL
      for (int i = 0; i < N; ++i) slots[first + (place.position / 32u) * N + i] = values[i];
    }
    __syncthreads();
    // Every thread combines the few partials itself: broadcast reads, the same order everywhere, no second exchange.
    FUSER_UNROLL
    for (int i = 0; i < N; ++i) values[i] = slots[first + i];
    for (unsigned w = 1; w < warps; ++w) {
      FUSER_UNROLL
      for (int i = 0; i < N; ++i) values[i] = combine(T(values[i]), T(slots[first + w * N + i]));
    }
    __syncthreads();
    return;
  }
  // Few groups, side by side in every warp (a strip of columns, rows over the other axes): lanes combine those of their
  // own group; of the warps' partials one thread combines each value.
  const unsigned threads = fuser_block_threads(block), groups = place.groups;
  if (!X && groups == block.x && groups < 32u && (groups & (groups - 1u)) == 0u && threads % 32u == 0u) {
    for (unsigned offset = groups; offset < 32u; offset *= 2) {
      FUSER_UNROLL
      for (int i = 0; i < N; ++i) values[i] = fuser_butterfly(0xffffffffu, T(values[i]), lane, offset, combine);
    }
    if (threads == 32u) return;
    const unsigned thread = fuser_linear_thread(block), results = groups * N;
    if (lane < groups) {
      FUSER_UNROLL
      for (int i = 0; i < N; ++i) slots[thread / 32u * results + lane * N + i] = values[i];
    }
    __syncthreads();
    for (unsigned r = thread; r < results; r += threads) {
      T all = slots[r];
      for (unsigned w = 1; w < threads / 32u; ++w) all = combine(all, T(slots[w * results + r]));
      slots[r] = all;
    }
    __syncthreads();
    FUSER_UNROLL
    for (int i = 0; i < N; ++i) values[i] = slots[place.group * N + i];
    __syncthreads();
    return;
  }
  // A tree in shared memory over the positions, slot [i][position][group] so that neighbouring groups are neighbours.
  const unsigned plane = fuser_block_threads(block);
  const unsigned own = place.position * place.groups + place.group;
  FUSER_UNROLL
  for (int i = 0; i < N; ++i) slots[i * plane + own] = values[i];
  __syncthreads();
  // Neighbours first: the combined runs stay consecutive, which a combine that does not commute needs.
  for (unsigned stride = 1; stride < count; stride *= 2u) {
    if (place.position % (2u * stride) == 0u && place.position + stride < count) {
      FUSER_UNROLL
      for (int i = 0; i < N; ++i) {
        const T earlier = slots[i * plane + own];
        const T later = slots[i * plane + own + stride * place.groups];
        slots[i * plane + own] = combine(earlier, later);
      }
    }
    __syncthreads();
  }
  FUSER_UNROLL
  for (int i = 0; i < N; ++i) values[i] = slots[i * plane + place.group];
  __syncthreads();
}

template <bool X, bool Y, bool Z, class T, class Op, class I, class S>
FUSER_DEVICE T block_reduce(T value, Op combine, I, S smem) {
  T values[1] = {value};
  fuser_block_reduce<X, Y, Z, 1>(values, combine, smem);
  return values[0];
}
template <bool X, bool Y, bool Z, int N, class A, class Op, class I, class S>
FUSER_DEVICE void block_reduce_array(A& values, Op combine, I, S smem) {
  fuser_block_reduce<X, Y, Z, N>(values, combine, smem);
}

template <bool X, bool Y, bool Z, class T, class S>
FUSER_DEVICE T block_broadcast(T value, S smem) {
  const FuserShape block = fuser_shape(smem);
  const FuserPlace place = fuser_thread_place<X, Y, Z>(block);
  FUSER_SHARED(T) slots = FUSER_SHARED_AT(T, smem, 0, place.groups);
  if (place.position == 0u) slots[place.group] = value;
  __syncthreads();
  const T result = slots[place.group];
  __syncthreads();
  return result;
}

// ---- clusters --------------------------------------------------------------------------------------------------------
// Blocks that run at the same time and read each other's shared memory. A barrier before: what they read is written; one
// after: nobody overwrites it, or returns, while others read.
#ifdef FUSER_SIMT
FUSER_DEVICE void fuser_cluster_sync() { simt::restore(simt::engine->cluster_barrier()); }
template <class P>
FUSER_DEVICE auto fuser_peer_load(P slots, unsigned rank) { return simt::peer_load(slots, rank); }
#else
FUSER_DEVICE void fuser_cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
template <class T>
FUSER_DEVICE T fuser_peer_load(T* slot, unsigned rank) {
  uint64_t generic;
  asm("mapa.u64 %0, %1, %2;" : "=l"(generic) : "l"(slot), "r"(rank));
  return *reinterpret_cast<const T*>(generic);
}
#endif

template <bool TX, bool TY, bool TZ, unsigned C, int N, class A, class Op, class S>
FUSER_DEVICE void cluster_reduce_array(A& values, Op combine, S smem) {
  typedef typename FuserArrayElement<A>::type T;
  const FuserPlace place = fuser_thread_place<TX, TY, TZ>(fuser_shape(smem));
  const unsigned mine = place.group * N, first = place.group * C * N;
  FUSER_SHARED(T) slots = FUSER_SHARED_AT(T, smem, 0, N * place.groups);
  FUSER_SHARED(T) parts = FUSER_SHARED_AT(T, smem, N * place.groups * sizeof(T), C * N * place.groups);
  if (place.position == 0u) {
    FUSER_UNROLL
    for (int i = 0; i < N; ++i) slots[mine + i] = values[i];
  }
  fuser_cluster_sync();
  // Few threads read what all need: the others find it nearby.
  for (unsigned r = place.position; r < C; r += place.count) {
    FUSER_UNROLL
    for (int i = 0; i < N; ++i) parts[first + r * N + i] = fuser_peer_load(slots + (mine + i), r);
  }
  __syncthreads();
  FUSER_UNROLL
  for (int i = 0; i < N; ++i) values[i] = parts[first + i];
  for (unsigned r = 1; r < C; ++r) {
    FUSER_UNROLL
    for (int i = 0; i < N; ++i) values[i] = combine(T(values[i]), T(parts[first + r * N + i]));
  }
  fuser_cluster_sync();
}
template <bool TX, bool TY, bool TZ, unsigned C, class T, class Op, class S>
FUSER_DEVICE T cluster_reduce(T value, Op combine, S smem) {
  T values[1] = {value};
  cluster_reduce_array<TX, TY, TZ, C, 1>(values, combine, smem);
  return values[0];
}

// ---- grids -----------------------------------------------------------------------------------------------------------
// Partial results travel as words of 8 bytes that are 0 until they are written, and arrive as one: who finds a word has what
// it holds. So an exchange is one store and one load, without the fence and the atomic that a counter of those that have
// written would take before the loads.
//
// One block of a group waits for the others, and only for blocks that have begun: its ticket says that all have. So it does
// not matter in which order blocks are dispatched, or how many fit: a block that waits keeps no other from beginning that it
// waits for. Nor do several reductions of one kernel block each other: who has not yet written what another waits for can
// itself wait only in a reduction before that one.
//
// The waiting block clears the words, and the tickets begin anew by themselves, so that the next launch on the same memory
// finds both as this one did. Launches that may overlap each have memory of their own (`runtime/launch.py`).
// In a packet 8 bytes of floating numbers are their own flag: all bits set, a NaN, becomes another NaN. Of other types, which
// use all of their values, it is 4 bytes and a flag.
template <class T>
struct FuserOwnFlag {
  static constexpr bool value = FuserSame<T, float>::value || FuserSame<T, double>::value;
};
template <class T, class N>
struct FuserOwnFlag<Welford<T, N>> {
  // The bytes of the count, which is not negative, are never all set: nor is the word that they are in.
  static constexpr bool value = FuserOwnFlag<T>::value && (FuserSame<N, int64_t>::value || FuserSame<N, int>::value);
};
template <class A, class B>
struct FuserOwnFlag<Pair<A, B>> {
  static constexpr bool value = FuserOwnFlag<A>::value && FuserOwnFlag<B>::value;
};

// The packets of N values.
template <class T, int N>
struct FuserPackets {
  static constexpr bool own_flag = FuserOwnFlag<T>::value;
  static constexpr int payload = own_flag ? 8 : 4;
  static constexpr int count = (N * (int)sizeof(T) + payload - 1) / payload;
  uint64_t words[count];

  template <class A>
  FUSER_METHOD void pack(const A& values) {
    char bytes[count * payload] = {};
    FUSER_UNROLL
    for (int i = 0; i < N; ++i) memcpy(bytes + i * sizeof(T), &values[i], sizeof(T));
    FUSER_UNROLL
    for (int k = 0; k < count; ++k) {
      uint64_t word = 0;
      memcpy(&word, bytes + k * payload, payload);
      words[k] = !own_flag ? 1ull << 32 | word : word == ~0ull ? 0x8000000080000000ull : ~word;
    }
  }
  FUSER_METHOD void unpack(T (&values)[N]) const {
    char bytes[count * payload];
    FUSER_UNROLL
    for (int k = 0; k < count; ++k) {
      const uint64_t word = own_flag ? ~words[k] : words[k];
      memcpy(bytes + k * payload, &word, payload);
    }
    memcpy(values, bytes, N * sizeof(T));
  }
  FUSER_METHOD void fill(uint64_t word) {
    FUSER_UNROLL
    for (int k = 0; k < count; ++k) words[k] = word;
  }
};

#ifdef FUSER_SIMT
template <class P>
FUSER_DEVICE void fuser_put_packet(P packets, int64_t at, uint64_t word) { packets[at] = word; }
// Reads a word that has not been found yet.
template <class P>
FUSER_DEVICE void fuser_poll_packet(P packets, int64_t at, uint64_t& word) {
  if (word == 0u) word = packets[at];
}
// Blocks run one after the other here: the engine reports the wait for one that has not written.
FUSER_DEVICE void fuser_wait() { __nanosleep(20); }
template <class Q>
FUSER_DEVICE unsigned fuser_draw(Q begun, unsigned group, unsigned count) {
  const unsigned before = atomicAdd(begun + group, 1u);
  if (before == count - 1u) begun[group] = 0u;
  return before;
}
template <class S>
FUSER_DEVICE bool fuser_first_thread_says(bool value, S smem) { return block_broadcast<true, true, true>(value, smem); }
#else
FUSER_DEVICE void fuser_put_packet(uint64_t* packets, int64_t at, uint64_t word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(packets + at), "l"(word) : "memory");
}
FUSER_DEVICE void fuser_poll_packet(uint64_t* packets, int64_t at, uint64_t& word) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.eq.u64 p, %0, 0;\n\t@p ld.relaxed.gpu.global.u64 %0, [%1];\n\t}"
               : "+l"(word)
               : "l"(packets + at)
               : "memory");
}
FUSER_DEVICE void fuser_wait() {}
FUSER_DEVICE unsigned fuser_draw(unsigned* begun, unsigned group, unsigned count) {
  unsigned before;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(begun + group), "r"(count - 1u));
  return before;
}
template <class S>
FUSER_DEVICE bool fuser_first_thread_says(bool value, S) { return __syncthreads_or(value) != 0; }
#endif

// Not yet compared with anything: the answer comes while the block computes what it will exchange.
template <bool BX, bool BY, bool BZ, class Q>
FUSER_DEVICE unsigned grid_ticket(Q begun) {
  const FuserPlace block = fuser_block_place<BX, BY, BZ>();
  const bool is_first_thread = (threadIdx.x | threadIdx.y | threadIdx.z) == 0u;
  return is_first_thread && block.count > 1u ? fuser_draw(begun, block.group, block.count) : 0u;
}

// Waits for the packets of `count` blocks, the first of which lies at `first`, combines them in order and clears them. Those
// of the block itself, number `self`, are `own` and were never written. `pitch` and `stride`: from block to block, and from
// packet to packet. BATCH blocks are loaded before the first is used.
template <int BATCH, int N, class A, class Op, class P, class K>
FUSER_DEVICE void fuser_collect(A& values, Op combine, P packets, int64_t first, int64_t pitch, int64_t stride, int count,
                                int self, const K& own) {
  typedef typename FuserArrayElement<A>::type T;
  for (; count > 0; count -= BATCH, self -= BATCH, first += BATCH * pitch) {
    K parts[BATCH];
    FUSER_UNROLL
    for (int j = 0; j < BATCH; ++j) {
      parts[j].fill(j < count ? 0u : 1u);
      if (j == self) parts[j] = own;
    }
    bool complete = false;
    while (!complete) {
      FUSER_UNROLL
      for (int j = 0; j < BATCH; ++j)
        FUSER_UNROLL
        for (int k = 0; k < K::count; ++k) fuser_poll_packet(packets, first + j * pitch + k * stride, parts[j].words[k]);
      complete = true;
      FUSER_UNROLL
      for (int j = 0; j < BATCH; ++j)
        FUSER_UNROLL
        for (int k = 0; k < K::count; ++k) complete = complete && parts[j].words[k] != 0u;
      if (!complete) fuser_wait();
    }
    FUSER_UNROLL
    for (int j = 0; j < BATCH; ++j) {
      if (j >= count) continue;
      FUSER_UNROLL
      for (int k = 0; k < K::count; ++k) fuser_put_packet(packets, first + j * pitch + k * stride, 0u);
      T part[N];
      parts[j].unpack(part);
      FUSER_UNROLL
      for (int i = 0; i < N; ++i) values[i] = combine(T(values[i]), part[i]);
    }
  }
}

template <bool BX, bool BY, bool BZ, bool TX, bool TY, bool TZ, int N, class A, class Op, class I, class P, class S>
FUSER_DEVICE bool grid_reduce_array(A& values, Op combine, I identity, P packets, unsigned ticket, S smem) {
  typedef typename FuserArrayElement<A>::type T;
  typedef FuserPackets<T, N> Packets;
  const FuserPlace block = fuser_block_place<BX, BY, BZ>();
  const FuserPlace thread = fuser_thread_place<TX, TY, TZ>(fuser_shape(smem));
  if (block.count == 1u) return true;
  // packets[group of blocks][block in the group][k][group of threads]
  const int64_t stride = thread.groups, pitch = Packets::count * stride;
  const int64_t base = static_cast<int64_t>(block.group) * block.count * pitch + thread.group;
  Packets own;
  own.pack(values);
  // Of other threads than the first the ticket is 0, which is not the last of several.
  if (!fuser_first_thread_says(ticket == block.count - 1u, smem)) {
    if (thread.position != 0u) return false;
    FUSER_UNROLL
    for (int k = 0; k < Packets::count; ++k)
      fuser_put_packet(packets, base + block.position * pitch + k * stride, own.words[k]);
    return false;
  }
  FUSER_UNROLL
  for (int i = 0; i < N; ++i) values[i] = T(identity);
  // The threads along reduced axes share the partials: consecutive runs, so that the order stays that of the blocks.
  const int run = (block.count + thread.count - 1u) / thread.count, begin = thread.position * run;
  const int left = static_cast<int>(block.count) - begin, count = left < run ? left : run;
  const int64_t first = base + begin * pitch;
  const int self = static_cast<int>(block.position) - begin;
  // The loads' latency is all that this phase costs, so that many are under way at once: as many as 64 registers hold,
  // more would leave the blocks that sum fewer threads. A short run is spared the instructions of a long one.
  constexpr int each = Packets::count * 8, most = each >= 128 ? 2 : each > 16 ? 4 : 8;
  if (run <= 2)
    fuser_collect<2, N>(values, combine, packets, first, pitch, stride, count, self, own);
  else
    fuser_collect<most, N>(values, combine, packets, first, pitch, stride, count, self, own);
  fuser_block_reduce<TX, TY, TZ, N>(values, combine, smem);
  return true;
}

template <bool BX, bool BY, bool BZ, bool TX, bool TY, bool TZ, class T, class Op, class I, class P, class S>
FUSER_DEVICE bool grid_reduce(T& value, Op combine, I identity, P packets, unsigned ticket, S smem) {
  T values[1] = {value};
  const bool last = grid_reduce_array<BX, BY, BZ, TX, TY, TZ, 1>(values, combine, identity, packets, ticket, smem);
  value = values[0];
  return last;
}
