// An allreduce as one kernel, over memory that the ranks of a team have mapped. Comes after rt.h, rt_math.h, rt_reduce.h, peer_memory.h
// and the constants of `multidevice/transports/base/allreduce_model.py`, which also writes the kernel that calls allreduce().
//
// Every rank has an area, and all areas are laid out alike: counters, flags, packets, data. A rank only writes into the
// areas of others and only waits for what lies in its own, so that data crosses the link once and nobody reads over it.
//
// The *epoch* is the number of the kernel among those of the team; kernels of a team follow one another on each rank. It
// lies in the area and each kernel advances it, so a launch can be repeated as it is, by a CUDA graph for instance. Packets
// and data have two halves that epochs take in turn: who writes at epoch e has ended e - 1, for which every other rank had
// begun e - 1 and so ended e - 2, the last reader of this half. The halves are those of the kernel, not of a block: epochs
// of all blocks advance together, whatever the grid. Behind LAST_EPOCH they begin anew: none is 0, which what was never
// written holds, and what earlier kernels have left is cleared (`clear_before_the_first`).
//
//   packets   (small)   Each 8 bytes hold 4 of the message and the epoch, and arrive as one: who finds the epoch has the data.
//   one shot  (medium)  Every rank writes its message to all others, then a flag for each block.
//   two shots (large)   Every rank reduces one slice: it gets the slice from all others, and sends the result to them.
//
// Floats of 4 and 2 bytes go in one shot or two without flags, see "words that are their own flags".
//
// Block b of a rank works on what block b of all others works on, and waits for nobody else. Values are added in the order
// of the team, so all ranks get the same bits; 16-bit floats are added as floats and rounded once.

// ---- 16 bytes of a message, as its elements ----------------------------------------------------------------------------
typedef Array<uint32_t, 4> Words;

template <class T, int NBYTES = sizeof(T)>
struct Elements;
template <class T>
struct Elements<T, 2> {
  FUSER_METHOD static T get(const Words& x, int i) {
    T value;
    value.bits = static_cast<uint16_t>(x[i / 2] >> 16 * (i % 2));
    return value;
  }
  FUSER_METHOD static void put(Words& x, int i, T value) {
    const uint32_t bits = value.bits;
    x[i / 2] = i % 2 ? x[i / 2] | bits << 16 : bits;  // the lower one first
  }
};
template <>
struct Elements<float, 4> {
#ifdef FUSER_SIMT
  FUSER_METHOD static float get(const Words& x, int i) { return fuser_bits_float(x[i]); }
  FUSER_METHOD static void put(Words& x, int i, float value) { x[i] = fuser_float_bits(value); }
#else
  FUSER_METHOD static float get(const Words& x, int i) { return __uint_as_float(x[i]); }
  FUSER_METHOD static void put(Words& x, int i, float value) { x[i] = __float_as_uint(value); }
#endif
};
template <class T>
struct Elements<T, 4> {
  FUSER_METHOD static T get(const Words& x, int i) { return static_cast<T>(x[i]); }
  FUSER_METHOD static void put(Words& x, int i, T value) { x[i] = static_cast<uint32_t>(value); }
};
template <class T>
struct Elements<T, 8> {
  FUSER_METHOD static T get(const Words& x, int i) {
    return static_cast<T>(static_cast<uint64_t>(x[2 * i + 1]) << 32 | x[2 * i]);
  }
  FUSER_METHOD static void put(Words& x, int i, T value) {
    x[2 * i] = static_cast<uint32_t>(static_cast<uint64_t>(value));
    x[2 * i + 1] = static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32);
  }
};
template <>
struct Elements<double, 8> {
  FUSER_METHOD static double get(const Words& x, int i) {
    double value;
    const uint64_t bits = static_cast<uint64_t>(x[2 * i + 1]) << 32 | x[2 * i];
#ifdef FUSER_SIMT
    __builtin_memcpy(&value, &bits, 8);
#else
    value = __longlong_as_double(static_cast<int64_t>(bits));
#endif
    return value;
  }
  FUSER_METHOD static void put(Words& x, int i, double value) {
    uint64_t bits;
#ifdef FUSER_SIMT
    __builtin_memcpy(&bits, &value, 8);
#else
    bits = static_cast<uint64_t>(__double_as_longlong(value));
#endif
    x[2 * i] = static_cast<uint32_t>(bits);
    x[2 * i + 1] = static_cast<uint32_t>(bits >> 32);
  }
};

FUSER_DEVICE Words load_words(const char* from) {
  Words x;
  load_vec<4>(x, reinterpret_cast<const uint32_t*>(from), 0);
  return x;
}
FUSER_DEVICE void store_words(char* to, const Words& x) { store_vec<4>(reinterpret_cast<uint32_t*>(to), 0, x); }

// A tensor of the caller: any number of elements, aligned as an element is.
template <class T>
struct Message {
  T* data;
  int64_t count;
  bool is_aligned;
  static constexpr int WIDTH = 16 / sizeof(T);

  FUSER_METHOD Message(T* data, int64_t count)
      : data(data), count(count), is_aligned(reinterpret_cast<unsigned long long>(data) % 16 == 0) {}
  FUSER_METHOD int64_t vectors() const { return (count + WIDTH - 1) / WIDTH; }
  FUSER_METHOD bool is_whole(int64_t v) const { return is_aligned && (v + 1) * WIDTH <= count; }
  FUSER_METHOD Words load(int64_t v) const {
    Words x;
    if (is_whole(v)) return load_words(reinterpret_cast<const char*>(data + v * WIDTH));
    x.set(0);
    FUSER_UNROLL
    for (int i = 0; i < WIDTH; ++i)
      if (v * WIDTH + i < count) Elements<T>::put(x, i, data[v * WIDTH + i]);
    return x;
  }
  FUSER_METHOD void store(int64_t v, const Words& x) const {
    if (is_whole(v)) {
      store_words(reinterpret_cast<char*>(data + v * WIDTH), x);
      return;
    }
    FUSER_UNROLL
    for (int i = 0; i < WIDTH; ++i)
      if (v * WIDTH + i < count) data[v * WIDTH + i] = Elements<T>::get(x, i);
  }
};

// Of elements T, which are added as A; Average divides by the number of ranks.
template <class T, class A, class Op, bool Average>
struct Reduction {
  typedef T element;
  // 16 bytes of every rank, in the order of the team.
  FUSER_METHOD static Words reduce(const Words (&parts)[RANKS]) {
    Words total;
    const Op op;
    FUSER_UNROLL
    for (int i = 0; i < Message<T>::WIDTH; ++i) {
      A sum = fm_cast<A>(Elements<T>::get(parts[0], i));
      FUSER_UNROLL
      for (int r = 1; r < RANKS; ++r) sum = op(sum, fm_cast<A>(Elements<T>::get(parts[r], i)));
      if (Average) sum = sum / static_cast<A>(RANKS);
      Elements<T>::put(total, i, fm_cast<T>(sum));
    }
    return total;
  }
};

// So many vectors of a thread are loaded before any is used.
constexpr int BATCH = 4, PARTS_BATCH = RANKS < 8 ? 8 / RANKS : 1;

// An odd one is followed by an even one, so that the halves take turns.
constexpr uint32_t LAST_EPOCH = 0xfffffffdu, FIRST_EPOCH = 2;
FUSER_DEVICE uint32_t next_epoch(uint32_t epoch) { return epoch == LAST_EPOCH ? FIRST_EPOCH : epoch + 1; }

// ---- a team ------------------------------------------------------------------------------------------------------------
struct Peers {
  char* areas[RANKS];
  char* own;
  uint64_t* report;  // in memory of the host: what is missing (REPORT_WORDS), and whether somebody has read that
  int me;
  int64_t limit_ns;
  uint64_t tag;
  uint32_t epoch;
  // Of the kernels whose words are their own flags: which buffer this one uses, and how many vectors of theirs the last
  // one and this one use.
  uint32_t turn, used_before, used;

  // Each block has three: epoch, turn, and the vectors used in that turn.
  FUSER_METHOD volatile uint32_t* counters(int which = 0) const {
    return reinterpret_cast<volatile uint32_t*>(own) + which * MAX_BLOCKS;
  }
  FUSER_METHOD bool is_dead() const { return counters(3)[0] != 0; }
  FUSER_METHOD uint32_t* flag(char* area, int round, int source) const {
    return reinterpret_cast<uint32_t*>(area + FLAGS_AT) + (round * MAX_BLOCKS + blockIdx.x) * RANKS + source;
  }
  FUSER_METHOD uint64_t* packets(char* area, int source) const {
    return reinterpret_cast<uint64_t*>(area + PACKETS_AT + ((epoch & 1) * RANKS + source) * PACKETS_NBYTES);
  }
  FUSER_METHOD char* data(char* area) const { return area + DATA_AT + (epoch & 1) * DATA_NBYTES; }
  FUSER_METHOD void take_turn(int64_t vectors) {
    turn = (turn + 1) % 3;
    used = static_cast<uint32_t>(vectors);
  }
  FUSER_METHOD char* words(char* area, uint32_t turn) const { return area + WORDS_AT + turn * WORDS_NBYTES; }
  // Tells the host which rank is missing. The host reads that and ends the job, or raises; where nobody does, the
  // kernel fails, because what it leaves behind is no result.
  FUSER_METHOD void give_up(int missing) const {
    counters(3)[0] = 1;
    set_report(report + 1, static_cast<uint64_t>(missing));
    set_report(report + 2, tag);
    set_report(report + 3, epoch);
    set_report(report, 1);
    const uint64_t since = now_ns();
    while (get_report(report + REPORT_READ) == 0) {
      rest();
      if (now_ns() - since > static_cast<uint64_t>(GRACE_NS)) {
        stop_everything();
        return;
      }
    }
  }
};

// A wait that ends: with what it is for, or with a report.
struct Wait {
  const Peers& peers;
  uint64_t since = 0;
  unsigned spins = 0;

  FUSER_METHOD explicit Wait(const Peers& peers) : peers(peers) {}
  FUSER_METHOD bool goes_on(int missing) {
    if (++spins % SPINS != 0) return true;
    const uint64_t now = now_ns();
    if (since == 0) since = now;
    if (peers.is_dead()) return false;
    if (now - since > static_cast<uint64_t>(peers.limit_ns)) {
      peers.give_up(missing);
      return false;
    }
    rest();
    return true;
  }
};

// All threads of the block have written what block b of the others is to find; returns when theirs is here.
FUSER_DEVICE void meet(const Peers& peers, int round) {
  __syncthreads();
  const int other = threadIdx.x;
  // No choice among the areas by value: that would put them into memory.
  FUSER_UNROLL
  for (int r = 0; r < RANKS; ++r)
    if (r == other && r != peers.me) set_flag(peers.flag(peers.areas[r], round, peers.me), peers.epoch);
  __syncwarp();  // nobody waits for one rank before all have been told
  if (other < RANKS && other != peers.me) {
    Wait wait(peers);
    const uint32_t next = next_epoch(peers.epoch);
    // The other rank may already be in its next kernel, but not beyond: anything else is an old flag.
    for (uint32_t found; (found = get_flag(peers.flag(peers.own, round, other))) != peers.epoch && found != next;)
      if (!wait.goes_on(other)) break;
  }
  __syncthreads();
}

// In the two last epochs: nobody writes packets of the next one before this block, which all others need, has sent
// anything. A flag of this epoch may come meanwhile.
FUSER_DEVICE void clear_before_the_first(const Peers& peers) {
  char* const half = peers.own + PACKETS_AT + (next_epoch(peers.epoch) & 1) * RANKS * PACKETS_NBYTES;
  for (int64_t at = threadIdx.x * 16; at < RANKS * PACKETS_NBYTES; at += blockDim.x * 16)
    put_pair(reinterpret_cast<uint64_t*>(half + at), 0, 0);
  uint32_t* const flags = reinterpret_cast<uint32_t*>(peers.own + FLAGS_AT);
  for (unsigned k = threadIdx.x; k < 2 * MAX_BLOCKS * RANKS; k += blockDim.x) {
    const uint32_t found = get_flag(flags + k);
    if (found != peers.epoch && found != next_epoch(peers.epoch)) replace_flag(flags + k, found, 0);
  }
  fence();
  __syncthreads();
}

// ---- the ways ----------------------------------------------------------------------------------------------------------
// Of the 16 bytes v of a message, the two halves lie in two planes: neighbours write neighbouring memory.
constexpr int64_t PLANE = PACKETS_NBYTES / 16;  // in words of 8 bytes

FUSER_DEVICE void put_packet(const Peers& peers, int to, int64_t v, const Words& x) {
  const uint64_t mark = static_cast<uint64_t>(peers.epoch) << 32;
  uint64_t* const at = peers.packets(peers.areas[to], peers.me) + 2 * v;
  put_pair(at, mark | x[0], mark | x[1]);
  put_pair(at + PLANE, mark | x[2], mark | x[3]);
}

// The packets v of all other ranks, once they are here.
FUSER_DEVICE void get_packets(const Peers& peers, int64_t v, Words (&parts)[RANKS]) {
  const uint64_t mark = static_cast<uint64_t>(peers.epoch) << 32;
  Wait wait(peers);
  int missing;
  do {
    missing = -1;
    FUSER_UNROLL
    for (int r = 0; r < RANKS; ++r) {
      if (r == peers.me) continue;
      const uint64_t* const from = peers.packets(peers.own, r) + 2 * v;
      uint64_t a, b, c, d;
      get_pair(from, a, b);
      get_pair(from + PLANE, c, d);
      if (((a ^ mark) | (b ^ mark) | (c ^ mark) | (d ^ mark)) >> 32) missing = r;
      parts[r][0] = static_cast<uint32_t>(a);
      parts[r][1] = static_cast<uint32_t>(b);
      parts[r][2] = static_cast<uint32_t>(c);
      parts[r][3] = static_cast<uint32_t>(d);
    }
  } while (missing >= 0 && wait.goes_on(missing));
}

// Puts this rank's own part among those of the others.
FUSER_DEVICE void put_own(const Peers& peers, Words (&parts)[RANKS], const Words& x) {
  FUSER_UNROLL
  for (int r = 0; r < RANKS; ++r)
    if (r == peers.me) parts[r] = x;
}

template <class R, class M = Message<typename R::element>>
FUSER_DEVICE void in_packets(const Peers& peers, M out, M inp) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x, vectors = inp.vectors();
  for (int64_t v = first; v < vectors; v += step) {
    const Words x = inp.load(v);
    FUSER_UNROLL
    for (int r = 0; r < RANKS; ++r)
      if (r != peers.me) put_packet(peers, r, v, x);
  }
  for (int64_t v = first; v < vectors; v += step) {
    Words parts[RANKS];
    get_packets(peers, v, parts);
    put_own(peers, parts, inp.load(v));
    out.store(v, R::reduce(parts));
  }
}

// ---- words that are their own flags -------------------------------------------------------------------------------------
// Each 4 bytes are sent with all bits turned over, so that 0 stands for what has not come. The one word that would be 0,
// two NaN of 2 bytes or one of 4, is sent as another NaN.
//
// Of three buffers, by turns of these kernels alone: the kernel of turn t uses one and clears that of t - 1. Others write
// there at t + 2 at the earliest: they have ended t + 1, for which this rank had begun t + 1, and so ended t.
FUSER_DEVICE uint32_t as_sent(uint32_t word) { return word == 0xffffffffu ? 0x00010000u : ~word; }

FUSER_DEVICE void put_words(const Peers& peers, int to, int64_t slot, int64_t v, const Words& x) {
  char* const at = peers.words(peers.areas[to], peers.turn) + slot + v * 16;
  const uint64_t first = static_cast<uint64_t>(x[1]) << 32 | x[0], second = static_cast<uint64_t>(x[3]) << 32 | x[2];
  put_pair(reinterpret_cast<uint64_t*>(at), first, second);
}

FUSER_DEVICE Words sent_words(const Words& x) {
  Words y;
  FUSER_UNROLL
  for (int i = 0; i < 4; ++i) y[i] = as_sent(x[i]);
  return y;
}

FUSER_DEVICE Words received_words(const Words& x) {
  Words y;
  FUSER_UNROLL
  for (int i = 0; i < 4; ++i) y[i] = ~x[i];
  return y;
}

// The words v of all other ranks, once they are here; rank r's begin at first + r * slot.
FUSER_DEVICE void get_words(const Peers& peers, int64_t first, int64_t slot, int64_t v, Words (&parts)[RANKS]) {
  const char* const own = peers.words(peers.own, peers.turn) + first + v * 16;
  Wait wait(peers);
  int missing;
  do {
    missing = -1;
    FUSER_UNROLL
    for (int r = 0; r < RANKS; ++r) {
      if (r == peers.me) continue;
      uint64_t a, b;
      get_pair(reinterpret_cast<const uint64_t*>(own + r * slot), a, b);
      parts[r][0] = static_cast<uint32_t>(a);
      parts[r][1] = static_cast<uint32_t>(a >> 32);
      parts[r][2] = static_cast<uint32_t>(b);
      parts[r][3] = static_cast<uint32_t>(b >> 32);
      FUSER_UNROLL
      for (int i = 0; i < 4; ++i)
        if (parts[r][i] == 0) missing = r;
    }
  } while (missing >= 0 && wait.goes_on(missing));
  FUSER_UNROLL
  for (int r = 0; r < RANKS; ++r)
    if (r != peers.me) parts[r] = received_words(parts[r]);
}

// Clears what the turn before has used.
FUSER_DEVICE void clear_words(const Peers& peers) {
  char* const before = peers.words(peers.own, (peers.turn + 2) % 3);
  const int64_t end = static_cast<int64_t>(peers.used_before) * 16;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * 16;
  for (int64_t at = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * 16; at < end; at += step)
    put_pair(reinterpret_cast<uint64_t*>(before + at), 0, 0);
}

template <class R, class M = Message<typename R::element>>
FUSER_DEVICE void in_one_of_words(Peers& peers, M out, M inp) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x, vectors = inp.vectors(), slot = vectors * 16;
  peers.take_turn(RANKS * vectors);
  for (int64_t v = first; v < vectors; v += BATCH * step) {
    Words x[BATCH];
    FUSER_UNROLL
    for (int u = 0; u < BATCH; ++u)
      if (v + u * step < vectors) x[u] = sent_words(inp.load(v + u * step));
    FUSER_UNROLL
    for (int u = 0; u < BATCH; ++u)
      FUSER_UNROLL
      for (int r = 0; r < RANKS; ++r)
        if (r != peers.me && v + u * step < vectors) put_words(peers, r, peers.me * slot, v + u * step, x[u]);
  }
  clear_words(peers);
  for (int64_t v = first; v < vectors; v += step) {
    Words parts[RANKS];
    const Words own = received_words(sent_words(inp.load(v)));
    get_words(peers, 0, slot, v, parts);
    put_own(peers, parts, own);
    out.store(v, R::reduce(parts));
  }
}

// What lies behind the end of the message is sent as zeros, so that every rank hears of every other.
template <class R, class M = Message<typename R::element>>
FUSER_DEVICE void in_two_of_words(Peers& peers, M out, M inp) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  const int64_t length = (inp.vectors() + RANKS - 1) / RANKS, slot = length * 16, mine = peers.me * length;
  peers.take_turn(2 * RANKS * length);
  for (int64_t k = first; k < length; k += step) {
    Words x[RANKS];
    FUSER_UNROLL
    for (int r = 0; r < RANKS; ++r)
      if (r != peers.me) x[r] = sent_words(inp.load(r * length + k));
    FUSER_UNROLL
    for (int r = 0; r < RANKS; ++r)
      if (r != peers.me) put_words(peers, r, peers.me * slot, k, x[r]);
  }
  clear_words(peers);
  for (int64_t k = first; k < length; k += step) {
    Words parts[RANKS];
    const Words own = received_words(sent_words(inp.load(mine + k)));
    get_words(peers, 0, slot, k, parts);
    put_own(peers, parts, own);
    const Words total = sent_words(R::reduce(parts));
    FUSER_UNROLL
    for (int r = 0; r < RANKS; ++r)
      if (r != peers.me) put_words(peers, r, (RANKS + peers.me) * slot, k, total);
    out.store(mine + k, received_words(total));
  }
  for (int64_t k = first; k < length; k += step) {
    Words parts[RANKS];
    get_words(peers, RANKS * slot, slot, k, parts);
    FUSER_UNROLL
    for (int r = 0; r < RANKS; ++r)
      if (r != peers.me) out.store(r * length + k, parts[r]);
  }
}

// What a block does of `vectors`: [begin, end).
struct Chunk {
  int64_t begin, end;
  FUSER_METHOD explicit Chunk(int64_t vectors) {
    const int64_t size = (vectors + gridDim.x - 1) / gridDim.x;
    begin = fm_minimum(size * blockIdx.x, vectors);
    end = fm_minimum(begin + size, vectors);
  }
};

template <class R, class M = Message<typename R::element>>
FUSER_DEVICE void in_one_shot(const Peers& peers, M out, M inp) {
  const Chunk chunk(inp.vectors());
  const int64_t slot = inp.vectors() * 16, step = blockDim.x;
  for (int64_t v = chunk.begin + threadIdx.x; v < chunk.end; v += BATCH * step) {
    Words x[BATCH];
    FUSER_UNROLL
    for (int u = 0; u < BATCH; ++u)
      if (v + u * step < chunk.end) x[u] = inp.load(v + u * step);
    FUSER_UNROLL
    for (int u = 0; u < BATCH; ++u)
      FUSER_UNROLL
      for (int r = 0; r < RANKS; ++r)
        if (r != peers.me && v + u * step < chunk.end)
          store_words(peers.data(peers.areas[r]) + peers.me * slot + (v + u * step) * 16, x[u]);
  }
  meet(peers, 0);
  for (int64_t v = chunk.begin + threadIdx.x; v < chunk.end; v += PARTS_BATCH * step) {
    Words parts[PARTS_BATCH][RANKS];
    FUSER_UNROLL
    for (int u = 0; u < PARTS_BATCH; ++u)
      FUSER_UNROLL
      for (int r = 0; r < RANKS; ++r) {
        const int64_t at = v + u * step;
        if (at < chunk.end)
          parts[u][r] = r == peers.me ? inp.load(at) : load_words(peers.data(peers.own) + r * slot + at * 16);
      }
    FUSER_UNROLL
    for (int u = 0; u < PARTS_BATCH; ++u)
      if (v + u * step < chunk.end) out.store(v + u * step, R::reduce(parts[u]));
  }
}

// Slice r of the message is reduced by rank r. What it gets lies in one slot for each rank, what all get from it behind.
template <class R, class M = Message<typename R::element>>
FUSER_DEVICE void in_two_shots(const Peers& peers, M out, M inp) {
  const int64_t vectors = inp.vectors(), length = (vectors + RANKS - 1) / RANKS;
  const int64_t slot = length * 16, results = RANKS * slot;
  const Chunk chunk(length);
  const int64_t mine = peers.me * length, step = blockDim.x;
  for (int64_t k = chunk.begin + threadIdx.x; k < chunk.end; k += PARTS_BATCH * step) {
    Words x[PARTS_BATCH][RANKS];
    FUSER_UNROLL
    for (int u = 0; u < PARTS_BATCH; ++u)
      FUSER_UNROLL
      for (int r = 0; r < RANKS; ++r)
        if (r != peers.me && k + u * step < chunk.end) x[u][r] = inp.load(r * length + k + u * step);
    FUSER_UNROLL
    for (int u = 0; u < PARTS_BATCH; ++u)
      FUSER_UNROLL
      for (int r = 0; r < RANKS; ++r)
        if (r != peers.me && k + u * step < chunk.end)
          store_words(peers.data(peers.areas[r]) + peers.me * slot + (k + u * step) * 16, x[u][r]);
  }
  meet(peers, 0);
  for (int64_t k = chunk.begin + threadIdx.x; k < chunk.end; k += PARTS_BATCH * step) {
    Words parts[PARTS_BATCH][RANKS];
    FUSER_UNROLL
    for (int u = 0; u < PARTS_BATCH; ++u)
      FUSER_UNROLL
      for (int r = 0; r < RANKS; ++r) {
        const int64_t at = k + u * step;
        if (at < chunk.end)
          parts[u][r] = r == peers.me ? inp.load(mine + at) : load_words(peers.data(peers.own) + r * slot + at * 16);
      }
    FUSER_UNROLL
    for (int u = 0; u < PARTS_BATCH; ++u) {
      const int64_t at = k + u * step;
      if (at >= chunk.end) continue;
      const Words total = R::reduce(parts[u]);
      FUSER_UNROLL
      for (int r = 0; r < RANKS; ++r)
        if (r != peers.me) store_words(peers.data(peers.areas[r]) + results + (mine + at) * 16, total);
      out.store(mine + at, total);
    }
  }
  meet(peers, 1);
  for (int64_t k = chunk.begin + threadIdx.x; k < chunk.end; k += PARTS_BATCH * step) {
    Words x[PARTS_BATCH][RANKS];
    FUSER_UNROLL
    for (int u = 0; u < PARTS_BATCH; ++u)
      FUSER_UNROLL
      for (int r = 0; r < RANKS; ++r)
        if (r != peers.me && k + u * step < chunk.end)
          x[u][r] = load_words(peers.data(peers.own) + results + (r * length + k + u * step) * 16);
    FUSER_UNROLL
    for (int u = 0; u < PARTS_BATCH; ++u)
      FUSER_UNROLL
      for (int r = 0; r < RANKS; ++r)
        if (r != peers.me && k + u * step < chunk.end) out.store(r * length + k + u * step, x[u][r]);
  }
}

// Grid, block and count are the same on all ranks. `way`: one of those above.
template <class R, class T, class Way>
FUSER_DEVICE void allreduce(Peers& peers, T* out, T* inp, int64_t count, Way way) {
  peers.epoch = next_epoch(peers.counters()[blockIdx.x]);
  peers.turn = peers.counters(1)[blockIdx.x];
  peers.used = peers.used_before = peers.counters(2)[blockIdx.x];
  if (peers.is_dead()) return;
  if (peers.epoch >= LAST_EPOCH - 1 && blockIdx.x == 0) clear_before_the_first(peers);
  way(peers, Message<T>(out, count), Message<T>(inp, count));
  // All threads have read the counters. Those of blocks that this grid does not have advance, too.
  __syncthreads();
  for (unsigned b = blockIdx.x + threadIdx.x * gridDim.x; b < MAX_BLOCKS; b += blockDim.x * gridDim.x) {
    peers.counters()[b] = peers.epoch;
    peers.counters(1)[b] = peers.turn;
    peers.counters(2)[b] = peers.used;
  }
}
