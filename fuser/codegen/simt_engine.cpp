// The SIMT engine: GPU threads as fibers on one CPU thread, one block after the other (the blocks of a cluster together),
// with the checks of checked mode.
// Compiled once, apart from the kernels; they reach it through `fuser_simt_engine()` and the launch record.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

#include "simt_abi.h"
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

using namespace simt;

namespace {

// ---- context switch --------------------------------------------------------------------------------------------------
#if defined(__x86_64__)
extern "C" void fuser_simt_switch(void** save, void* to);
// The callee-saved registers and the stack pointer; the floating-point control words are the same in all fibers.
asm(R"(
.text
.hidden fuser_simt_switch
.globl fuser_simt_switch
.type fuser_simt_switch,@function
fuser_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size fuser_simt_switch, .-fuser_simt_switch
)");
struct Stack {
  void* pointer;
  void prepare(char* low, size_t nbytes, void (*entry)()) {
    void** top = reinterpret_cast<void**>(low + nbytes - 64);
    *--top = nullptr;
    *--top = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--top = nullptr;
    pointer = top;
  }
  static void change(Stack& from, Stack& to) { fuser_simt_switch(&from.pointer, to.pointer); }
};
#else
// Portable, but each switch makes a system call for the signal mask.
struct Stack {
  ucontext_t context;
  void prepare(char* low, size_t nbytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = low;
    context.uc_stack.ss_size = nbytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
  }
  static void change(Stack& from, Stack& to) { swapcontext(&from.context, &to.context); }
};
#endif

constexpr size_t kStackBytes = 128 * 1024;
constexpr unsigned kMaxThreads = 1024, kMaxCluster = 16;

enum State { kRunnable, kAtBarrier, kAtCluster, kInWarp, kFinished };
enum Exchange { kShuffle, kVote, kSync };

struct Block;
struct Fiber {
  Stack stack;
  Thread place;
  Block* block;
  State state;
  bool asleep;
  const char* file;  // of the barrier that it waits at
  int line;
  unsigned mask, source;  // of the warp operation that it waits in
  Exchange operation;
  unsigned long long value, result;
};

// The last accesses to one byte of shared memory.
struct Shadow {
  unsigned long long write_epoch, write_warp_epoch, read_epoch, read_warp_epoch;
  unsigned writer, reader;
  bool many_readers, many_warps;
  unsigned long long peer_read;  // the cluster's barriers passed when another block read it
};

// A block that is running: one, or those of a cluster. Its epochs count barriers over all blocks of all launches: they
// never repeat, so that shadows need no clearing.
struct Block {
  Fiber* fibers = nullptr;
  std::vector<char> storage;
  char* smem = nullptr;
  std::vector<Shadow> shadow;
  unsigned long long epoch = 1, block_epoch = 1, cluster_epoch = 1;
  unsigned long long warp_epoch[kMaxThreads / 32] = {};
};

struct Context {
  const Launch* launch = nullptr;
  ThreadEntry entry = nullptr;
  bool checked = false, aborted = false;
  std::vector<Fiber> fibers;
  char* stacks = nullptr;
  unsigned reserved = 0;  // stacks there are
  unsigned guarded = 0;   // stacks whose lowest page is protected, each of which is a mapping
  Stack scheduler;
  Fiber* current = nullptr;
  unsigned threads = 0, cluster = 1;  // of a block, and blocks of a cluster
  Block blocks[kMaxCluster];
  unsigned long long meetings = 1;  // barriers of clusters passed, over all launches
  unsigned long long random = 0;

  ~Context() {
    if (stacks) munmap(stacks, static_cast<size_t>(reserved) * kStackBytes);
  }
};
thread_local Context context;

const char* kind_name(int kind) {
  static const char* const names[] = {"none", "out of bounds", "misaligned access", "uninitialised read", "race",
                                      "divergence", "deadlock", "register index"};
  return names[kind];
}

// Records the first error of a launch and leaves the kernel: its fibers are never resumed.
template <class... Values>
void record(int kind, const Thread* place, const char* format, Values... values) {
  Report& report = *context.launch->report;
  context.aborted = true;
  if (report.kind != kNone) return;
  report.kind = kind;
  int used = snprintf(report.message, sizeof report.message, "%s: ", kind_name(kind));
  used += snprintf(report.message + used, sizeof report.message - used, format, values...);
  if (place && used < static_cast<int>(sizeof report.message))
    snprintf(report.message + used, sizeof report.message - used, "; thread (%u, %u, %u) of block (%u, %u, %u)",
             place->thread.x, place->thread.y, place->thread.z, place->block.x, place->block.y, place->block.z);
}
void leave() { Stack::change(context.current->stack, context.scheduler); }
[[noreturn]] void abandon() {
  leave();
  abort();  // an abandoned fiber is never resumed
}
#define FAIL(kind, ...)                                    \
  do {                                                     \
    record(kind, &context.current->place, __VA_ARGS__);    \
    abandon();                                             \
  } while (0)

void fiber_main() {
  Fiber& fiber = *context.current;
  context.entry(context.launch, &fiber.place);
  fiber.state = kFinished;
  abandon();
}

unsigned next_random() {
  context.random = context.random * 6364136223846793005ull + 1442695040888963407ull;
  return static_cast<unsigned>(context.random >> 33);
}

void order_of(std::vector<unsigned>& order, unsigned count) {
  order.resize(count);
  for (unsigned i = 0; i < count; ++i) order[i] = context.launch->order_seed == 1 ? count - 1 - i : i;
  if (context.launch->order_seed > 1)
    for (unsigned i = count; i > 1; --i) {
      const unsigned j = next_random() % i, kept = order[i - 1];
      order[i - 1] = order[j];
      order[j] = kept;
    }
}

// ---- warps -----------------------------------------------------------------------------------------------------------
// Completes the warp operation of `warp` if all running lanes in its mask have arrived.
void complete_warp(Block& block, unsigned warp) {
  const unsigned base = warp * 32, lanes = context.threads - base < 32 ? context.threads - base : 32;
  Fiber* const fibers = block.fibers + base;
  unsigned done = 0;
  for (unsigned leader = 0; leader < lanes; ++leader) {
    if (fibers[leader].state != kInWarp || (done >> leader & 1)) continue;
    const unsigned mask = fibers[leader].mask;
    bool ready = true;
    unsigned ballot = 0, waiting = 0;
    for (unsigned lane = 0; lane < lanes; ++lane) {
      if (!(mask >> lane & 1) || fibers[lane].state == kFinished) continue;
      const bool here = fibers[lane].state == kInWarp && fibers[lane].mask == mask &&
                        fibers[lane].operation == fibers[leader].operation;
      if (!here) ready = false;
      if (here) waiting |= 1u << lane;
      if (here && fibers[lane].value) ballot |= 1u << lane;
    }
    done |= waiting;
    if (!ready) continue;
    for (unsigned lane = 0; lane < lanes; ++lane) {
      if (!(waiting >> lane & 1)) continue;
      Fiber& fiber = fibers[lane];
      // A lane that does not exist, or does not take part, sends a poison value.
      const unsigned source = fiber.source;
      if (fiber.operation == kVote) fiber.result = ballot;
      if (fiber.operation == kShuffle)
        fiber.result = source < lanes && (waiting >> source & 1) ? fibers[source].value : ~0ull;
      fiber.state = kRunnable;
    }
    if (fibers[leader].operation == kSync) ++block.warp_epoch[warp];
    ++context.launch->report->counters[kWarpExchange];
  }
}

const Thread* warp_operation(Exchange operation, unsigned mask, unsigned long long value, unsigned source,
                             unsigned long long* result) {
  Fiber& fiber = *context.current;
  const unsigned lane = fiber.place.linear & 31;
  if (!(mask >> lane & 1))
    FAIL(kDivergence, "lane %u takes part in a warp operation whose mask 0x%08x does not include it", lane, mask);
  fiber.operation = operation;
  fiber.mask = mask;
  fiber.value = value;
  fiber.source = source;
  fiber.state = kInWarp;
  complete_warp(*fiber.block, fiber.place.linear / 32);
  if (fiber.state == kInWarp) leave();
  *result = fiber.result;
  return &fiber.place;
}

// ---- blocks ----------------------------------------------------------------------------------------------------------
// The waiting threads of a block, by the reason of the wait.
struct Waiting {
  const Fiber *at_barrier, *other, *at_cluster, *in_warp, *finished;
  unsigned barrier, exited;
};
Waiting waiting_of(const Block& block) {
  Waiting w = {};
  for (unsigned i = 0; i < context.threads; ++i) {
    const Fiber& fiber = block.fibers[i];
    if (fiber.state == kFinished) ++w.exited, w.finished = w.finished ? w.finished : &fiber;
    if (fiber.state == kInWarp) w.in_warp = w.in_warp ? w.in_warp : &fiber;
    if (fiber.state == kAtCluster) w.at_cluster = w.at_cluster ? w.at_cluster : &fiber;
    if (fiber.state != kAtBarrier) continue;
    ++w.barrier;
    if (!w.at_barrier) w.at_barrier = &fiber;
    if (fiber.line != w.at_barrier->line || strcmp(fiber.file, w.at_barrier->file) != 0) w.other = &fiber;
  }
  return w;
}

// No thread of a block can run: all wait at its barrier, or for the cluster, or the kernel is wrong. Returns whether
// threads can run again.
bool release_barrier(Block& block, const Waiting& w) {
  if (w.in_warp) {
    record(kDeadlock, &w.in_warp->place,
           "a warp operation with mask 0x%08x waits for lanes that never arrive (%u threads at a barrier, %u returned)",
           w.in_warp->mask, w.barrier, w.exited);
    return false;
  }
  if (!w.at_barrier) return false;
  if (w.at_cluster) {
    record(kDivergence, &w.at_cluster->place, "a thread waits for its cluster, but others wait at the barrier %s:%d",
           w.at_barrier->file, w.at_barrier->line);
    return false;
  }
  if (context.checked && w.other) {
    record(kDivergence, &w.other->place, "threads of one block wait at different barriers: %s:%d and %s:%d",
           w.at_barrier->file, w.at_barrier->line, w.other->file, w.other->line);
    return false;
  }
  if (context.checked && w.exited) {
    record(kDivergence, &w.at_barrier->place,
           "%u threads wait at the barrier %s:%d, but %u have returned, thread (%u, %u, %u) first", w.barrier,
           w.at_barrier->file, w.at_barrier->line, w.exited, w.finished->place.thread.x, w.finished->place.thread.y,
           w.finished->place.thread.z);
    return false;
  }
  for (unsigned i = 0; i < context.threads; ++i)
    if (block.fibers[i].state == kAtBarrier) block.fibers[i].state = kRunnable;
  ++block.epoch;
  ++context.launch->report->counters[kBlockBarrier];
  return true;
}

// All blocks wait for their cluster. A thread that has returned can never arrive.
bool release_cluster() {
  const Fiber *there = nullptr, *missing = nullptr;
  for (unsigned b = 0; b < context.cluster; ++b) {
    const Waiting w = waiting_of(context.blocks[b]);
    if (w.at_cluster) there = w.at_cluster;
    if (w.finished) missing = w.finished;
  }
  if (missing) {
    record(kDivergence, &there->place, "a thread waits for its cluster, but thread (%u, %u, %u) of block (%u, %u, %u) has returned",
           missing->place.thread.x, missing->place.thread.y, missing->place.thread.z, missing->place.block.x,
           missing->place.block.y, missing->place.block.z);
    return false;
  }
  ++context.meetings;
  for (unsigned b = 0; b < context.cluster; ++b) {
    Block& block = context.blocks[b];
    for (unsigned i = 0; i < context.threads; ++i) block.fibers[i].state = kRunnable;
    block.cluster_epoch = ++block.epoch;
  }
  ++context.launch->report->counters[kClusterBarrier];
  return true;
}

void begin_block(Block& block, Fiber* fibers, Dim place) {
  const Dim extent = context.launch->block;
  block.fibers = fibers;
  block.block_epoch = block.cluster_epoch = ++block.epoch;
  // 0xff is a NaN in every floating type, and an unlikely integer.
  if (context.launch->smem_bytes) memset(block.smem, 0xff, context.launch->smem_bytes);
  for (unsigned i = 0; i < context.threads; ++i) {
    Fiber& fiber = fibers[i];
    fiber.place = Thread{{i % extent.x, i / extent.x % extent.y, i / (extent.x * extent.y)}, place, i};
    fiber.block = &block;
    fiber.state = kRunnable;
    fiber.asleep = false;
    fiber.stack.prepare(context.stacks + (fibers - context.fibers.data() + i) * kStackBytes, kStackBytes, fiber_main);
  }
}

// Releases threads that wait at barriers. Returns false, after a report, if none can be released.
bool release_waiting() {
  bool released = false;
  for (unsigned b = 0; b < context.cluster; ++b) {
    released |= release_barrier(context.blocks[b], waiting_of(context.blocks[b]));
    if (context.aborted) return false;
  }
  return released || release_cluster();
}

// Runs the blocks of a cluster: `first` and the next ones along y.
void run_blocks(Dim first) {
  static thread_local std::vector<unsigned> order;
  const unsigned all = context.threads * context.cluster;
  ++context.meetings;
  for (unsigned b = 0; b < context.cluster; ++b)
    begin_block(context.blocks[b], &context.fibers[b * context.threads], Dim{first.x, first.y + b, first.z});
  order_of(order, all);
  unsigned left = all, idle_passes = 0;
  while (left > 0) {
    bool ran = false, awake = false;
    for (unsigned i : order) {
      Fiber& fiber = context.fibers[i];
      if (fiber.state != kRunnable) continue;
      ran = true;
      context.current = &fiber;
      Stack::change(context.scheduler, fiber.stack);
      if (context.aborted) return;
      awake |= !fiber.asleep;
      fiber.asleep = false;
      if (fiber.state == kFinished) {
        --left;
        complete_warp(*fiber.block, fiber.place.linear / 32);
      }
    }
    idle_passes = ran && !awake ? idle_passes + 1 : 0;
    if (idle_passes > 100000) {
      record(kDeadlock, &context.current->place, "threads wait for another block, but on the CPU blocks run one after another");
      return;
    }
    if (!ran && left > 0) {
      if (!release_waiting()) return;
      if (context.launch->order_seed > 1) order_of(order, all);
    }
  }
}

// Allocates the stacks and the shared memory of a cluster. Returns false, after a report, without memory.
bool make_room(const Launch* launch) {
  Context& c = context;
  const unsigned all = c.threads * c.cluster;
  if (c.reserved < all) {
    if (c.stacks) munmap(c.stacks, static_cast<size_t>(c.reserved) * kStackBytes);
    c.reserved = all < kMaxThreads ? kMaxThreads : all;
    c.guarded = 0;
    void* memory = mmap(nullptr, static_cast<size_t>(c.reserved) * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    c.stacks = memory == MAP_FAILED ? nullptr : static_cast<char*>(memory);
    if (!c.stacks) {
      record(kDeadlock, nullptr, "not enough memory for the stacks of %u threads", c.reserved);
      c.reserved = 0;
      return false;
    }
  }
  // The lowest page of each stack is a guard: an overflow ends the process instead of corrupting another stack.
  for (; c.guarded < all; ++c.guarded)
    mprotect(c.stacks + c.guarded * kStackBytes, static_cast<size_t>(sysconf(_SC_PAGESIZE)), PROT_NONE);
  if (c.fibers.size() < all) c.fibers.resize(all);
  for (unsigned b = 0; b < c.cluster; ++b) {
    Block& block = c.blocks[b];
    if (block.storage.size() < launch->smem_bytes + 128u) block.storage.resize(launch->smem_bytes + 128u);
    block.smem = block.storage.data() + (128 - reinterpret_cast<size_t>(block.storage.data()) % 128) % 128;
    if (c.checked && block.shadow.size() < launch->smem_bytes) block.shadow.resize(launch->smem_bytes);
  }
  return true;
}

int run(const Launch* launch, ThreadEntry entry, int checked, unsigned cluster) {
  Context& c = context;
  c.launch = launch;
  c.entry = entry;
  c.checked = checked;
  c.aborted = false;
  c.random = launch->order_seed;
  c.threads = launch->block.x * launch->block.y * launch->block.z;
  c.cluster = cluster;
  launch->report->kind = kNone;
  const Dim grid = launch->grid;
  if (c.threads > kMaxThreads) {
    record(kOutOfBounds, nullptr, "a block has %u threads, but at most %u are possible", c.threads, kMaxThreads);
    return launch->report->kind;
  }
  if (cluster > kMaxCluster || grid.y % cluster != 0) {
    record(kOutOfBounds, nullptr, "%u blocks along y cannot be divided into clusters of %u; a cluster has at most %u blocks", grid.y, cluster,
           kMaxCluster);
    return launch->report->kind;
  }
  if (!make_room(launch)) return launch->report->kind;
  static thread_local std::vector<unsigned> clusters;
  const unsigned along_y = grid.y / cluster;
  order_of(clusters, grid.x * along_y * grid.z);
  for (unsigned k : clusters) {
    run_blocks(Dim{k % grid.x, k / grid.x % along_y * cluster, k / (grid.x * along_y)});
    if (c.aborted) break;
  }
  return launch->report->kind;
}

// ---- called by kernels -----------------------------------------------------------------------------------------------
const Thread* barrier(const char* file, int line) {
  Fiber& fiber = *context.current;
  fiber.file = file;
  fiber.line = line;
  fiber.state = kAtBarrier;
  leave();
  return &fiber.place;
}
const Thread* cluster_barrier() {
  Fiber& fiber = *context.current;
  fiber.state = kAtCluster;
  leave();
  return &fiber.place;
}
const Thread* sync_warp(unsigned mask) {
  unsigned long long unused;
  return warp_operation(kSync, mask, 0, 0, &unused);
}
const Thread* exchange(unsigned mask, unsigned long long value, unsigned source, unsigned long long* result) {
  return warp_operation(kShuffle, mask, value, source, result);
}
const Thread* vote(unsigned mask, int predicate, unsigned* ballot) {
  unsigned long long result;
  const Thread* place = warp_operation(kVote, mask, predicate != 0, 0, &result);
  *ballot = static_cast<unsigned>(result);
  return place;
}
const Thread* sleep_a_while() {
  context.current->asleep = true;
  leave();
  return &context.current->place;
}
char* smem() { return context.current->block->smem; }

void fail_global(const char* name, long long at, unsigned nbytes, unsigned alignment, long long extent, unsigned element,
                 int is_store) {
  const char* what = is_store ? "store" : "load";
  if (at < 0 || at + nbytes > extent)
    FAIL(kOutOfBounds, "%s of %u bytes at %s[%lld], which has %lld elements of %u bytes", what, nbytes, name,
         at / static_cast<long long>(element), extent / element, element);
  FAIL(kMisaligned, "%s of %u bytes at %s[%lld] (elements of %u bytes): the address is not a multiple of %u", what, nbytes,
       name, at / static_cast<long long>(element), element, alignment);
}
void fail_register(long long index, long long extent) {
  FAIL(kRegister, "element %lld of a register array of %lld elements", index, extent);
}

void fail_row(long long index, long long extent) {
  FAIL(kOutOfBounds, "the index %lld is out of range for an axis of %lld elements", index, extent);
}

// Whether an access of `thread` is unordered with one by `other`, made at the given epochs.
bool unordered(const Block& block, unsigned thread, unsigned other, unsigned long long epoch,
               unsigned long long warp_epoch) {
  if (thread == other || epoch != block.epoch) return false;
  return thread / 32 != other / 32 || warp_epoch == block.warp_epoch[thread / 32];
}

void shared_access(const char* name, unsigned at, unsigned nbytes, unsigned alignment, unsigned begin, unsigned end,
                   int is_store) {
  const char* what = is_store ? "store" : "load";
  if (at < begin || static_cast<unsigned long long>(at) + nbytes > end)
    FAIL(kOutOfBounds, "%s of %u bytes at byte %d of shared array %s, which has %u bytes", what, nbytes,
         static_cast<int>(at - begin), name, end - begin);
  if (at % alignment != 0)
    FAIL(kMisaligned, "%s of %u bytes at byte %u of shared memory (%s): not a multiple of %u", what, nbytes, at, name,
         alignment);
  Block& block = *context.current->block;
  const unsigned thread = context.current->place.linear;
  const unsigned long long warp_epoch = block.warp_epoch[thread / 32];
  for (unsigned i = at; i < at + nbytes; ++i) {
    Shadow& s = block.shadow[i];
    const bool written = s.write_epoch >= block.block_epoch;
    if (!is_store && !written)
      FAIL(kUninitialised, "load of byte %u of shared memory (byte %u of %s), which no thread has written", i, i - begin,
           name);
    if (written && unordered(block, thread, s.writer, s.write_epoch, s.write_warp_epoch))
      FAIL(kRace, "%s of byte %u of shared memory (byte %u of %s), written by thread %u since the last barrier", what, i,
           i - begin, name, s.writer);
    if (!is_store) {
      const bool same_epoch = s.read_epoch == block.epoch;
      s.many_readers = same_epoch && (s.many_readers || s.reader != thread);
      s.many_warps = same_epoch && (s.many_warps || s.reader / 32 != thread / 32);
      s.reader = thread;
      s.read_epoch = block.epoch;
      s.read_warp_epoch = warp_epoch;
      continue;
    }
    const bool other_reader = s.reader != thread || s.many_readers;
    const bool read_here = s.read_epoch == block.epoch && s.read_epoch >= block.block_epoch;
    const bool ordered_by_warp = !s.many_warps && s.reader / 32 == thread / 32 && s.read_warp_epoch != warp_epoch;
    if (read_here && other_reader && !ordered_by_warp)
      FAIL(kRace, "store to byte %u of shared memory (byte %u of %s), read by thread %u%s since the last barrier", i,
           i - begin, name, s.reader, s.many_readers ? " and others" : "");
    if (s.peer_read == context.meetings)
      FAIL(kRace, "store to byte %u of shared memory (byte %u of %s), read by another block since the cluster's last barrier",
           i, i - begin, name);
    s.writer = thread;
    s.write_epoch = block.epoch;
    s.write_warp_epoch = warp_epoch;
  }
}

const char* peer_smem(const char* name, unsigned at, unsigned nbytes, unsigned begin, unsigned end, unsigned rank) {
  if (rank >= context.cluster)
    FAIL(kOutOfBounds, "a load from block %u of a cluster of %u blocks", rank, context.cluster);
  Block& peer = context.blocks[rank];
  if (!context.checked) return peer.smem + at;
  if (at < begin || static_cast<unsigned long long>(at) + nbytes > end)
    FAIL(kOutOfBounds, "load of %u bytes at byte %d of shared array %s of block %u of the cluster, which has %u bytes", nbytes,
         static_cast<int>(at - begin), name, rank, end - begin);
  for (unsigned i = at; i < at + nbytes; ++i) {
    Shadow& s = peer.shadow[i];
    if (s.write_epoch < peer.block_epoch)
      FAIL(kUninitialised, "load of byte %u of the shared memory of block %u of the cluster (byte %u of %s), which no thread has written",
           i, rank, i - begin, name);
    // Its own block may have passed barriers of its own since.
    if (s.write_epoch >= peer.cluster_epoch)
      FAIL(kRace, "load of byte %u of the shared memory of block %u of the cluster (byte %u of %s), written since the cluster's last barrier",
           i, rank, i - begin, name);
    s.peer_read = context.meetings;
  }
  return peer.smem + at;
}

const Engine engine = {run, barrier, sync_warp, exchange, vote, sleep_a_while, smem, shared_access, fail_global,
                       fail_register, fail_row, cluster_barrier, peer_smem};

}  // namespace

extern "C" __attribute__((visibility("default"))) const Engine* fuser_simt_engine() { return &engine; }
