// The SIMT engine: GPU threads as fibers on one CPU thread, one block after the other, with the checks of checked mode.
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
constexpr unsigned kMaxThreads = 1024;

enum State { kRunnable, kAtBarrier, kInWarp, kFinished };
enum Exchange { kShuffle, kVote, kSync };

struct Fiber {
  Stack stack;
  Thread place;
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
};

struct Context {
  const Launch* launch = nullptr;
  ThreadEntry entry = nullptr;
  bool checked = false, aborted = false;
  std::vector<Fiber> fibers;
  char* stacks = nullptr;
  unsigned guarded = 0;  // stacks whose lowest page is protected, each of which is a mapping
  Stack scheduler;
  Fiber* current = nullptr;
  unsigned threads = 0;
  std::vector<char> smem_storage;
  char* smem = nullptr;
  std::vector<Shadow> shadow;
  // Barriers passed, over all blocks of all launches: never repeats, so shadows need no clearing.
  unsigned long long epoch = 1, block_epoch = 1;
  unsigned long long warp_epoch[kMaxThreads / 32] = {};
  unsigned long long random = 0;

  ~Context() {
    if (stacks) munmap(stacks, kMaxThreads * kStackBytes);
  }
};
thread_local Context context;

const char* kind_name(int kind) {
  static const char* const names[] = {"none", "out of bounds", "misaligned access", "uninitialised read", "race",
                                      "divergence", "deadlock", "register index"};
  return names[kind];
}

// Records the first finding of a launch and leaves the kernel for good: its fibers are never resumed.
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
// Completes the warp operation of `warp` if all lanes that its mask names, and that still run, have arrived.
void complete_warp(unsigned warp) {
  const unsigned base = warp * 32, lanes = context.threads - base < 32 ? context.threads - base : 32;
  Fiber* const fibers = &context.fibers[base];
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
      // A lane that does not exist, or does not take part, sends poison.
      const unsigned source = fiber.source;
      if (fiber.operation == kVote) fiber.result = ballot;
      if (fiber.operation == kShuffle)
        fiber.result = source < lanes && (waiting >> source & 1) ? fibers[source].value : ~0ull;
      fiber.state = kRunnable;
    }
    if (fibers[leader].operation == kSync) ++context.warp_epoch[warp];
    ++context.launch->report->counters[kWarpExchange];
  }
}

const Thread* warp_operation(Exchange operation, unsigned mask, unsigned long long value, unsigned source,
                             unsigned long long* result) {
  Fiber& fiber = *context.current;
  const unsigned lane = fiber.place.linear & 31;
  if (!(mask >> lane & 1))
    FAIL(kDivergence, "lane %u takes part in a warp operation whose mask 0x%08x does not name it", lane, mask);
  fiber.operation = operation;
  fiber.mask = mask;
  fiber.value = value;
  fiber.source = source;
  fiber.state = kInWarp;
  complete_warp(fiber.place.linear / 32);
  if (fiber.state == kInWarp) leave();
  *result = fiber.result;
  return &fiber.place;
}

// ---- blocks ----------------------------------------------------------------------------------------------------------
// Nothing can run: either everybody waits at the block's barrier, or the kernel is wrong.
bool release_barrier() {
  const Fiber *first = nullptr, *other = nullptr, *in_warp = nullptr, *finished = nullptr;
  unsigned at_barrier = 0, exited = 0;
  for (unsigned i = 0; i < context.threads; ++i) {
    const Fiber& fiber = context.fibers[i];
    if (fiber.state == kFinished) ++exited, finished = finished ? finished : &fiber;
    if (fiber.state == kInWarp) in_warp = in_warp ? in_warp : &fiber;
    if (fiber.state != kAtBarrier) continue;
    ++at_barrier;
    if (!first) first = &fiber;
    if (fiber.line != first->line || strcmp(fiber.file, first->file) != 0) other = &fiber;
  }
  if (in_warp) {
    record(kDeadlock, &in_warp->place,
           "a warp operation with mask 0x%08x waits for lanes that never arrive (%u threads at a barrier, %u returned)",
           in_warp->mask, at_barrier, exited);
    return false;
  }
  if (context.checked && other) {
    record(kDivergence, &other->place, "threads of one block wait at different barriers: %s:%d and %s:%d", first->file,
           first->line, other->file, other->line);
    return false;
  }
  if (context.checked && exited) {
    record(kDivergence, &first->place, "%u threads wait at the barrier %s:%d, but %u have returned, thread (%u, %u, %u) first",
           at_barrier, first->file, first->line, exited, finished->place.thread.x, finished->place.thread.y,
           finished->place.thread.z);
    return false;
  }
  for (unsigned i = 0; i < context.threads; ++i)
    if (context.fibers[i].state == kAtBarrier) context.fibers[i].state = kRunnable;
  ++context.epoch;
  ++context.launch->report->counters[kBlockBarrier];
  return true;
}

void run_block(Dim block) {
  const Dim extent = context.launch->block;
  static thread_local std::vector<unsigned> order;
  ++context.epoch;
  context.block_epoch = context.epoch;
  // 0xff is a NaN in every floating type, and an unlikely integer.
  if (context.launch->smem_bytes) memset(context.smem, 0xff, context.launch->smem_bytes);
  for (unsigned i = 0; i < context.threads; ++i) {
    Fiber& fiber = context.fibers[i];
    fiber.place = Thread{{i % extent.x, i / extent.x % extent.y, i / (extent.x * extent.y)}, block, i};
    fiber.state = kRunnable;
    fiber.asleep = false;
    fiber.stack.prepare(context.stacks + i * kStackBytes, kStackBytes, fiber_main);
  }
  order_of(order, context.threads);
  unsigned left = context.threads, idle_passes = 0;
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
        complete_warp(fiber.place.linear / 32);
      }
    }
    idle_passes = ran && !awake ? idle_passes + 1 : 0;
    if (idle_passes > 100000) {
      record(kDeadlock, &context.current->place, "threads wait for another block; here blocks run one after the other");
      return;
    }
    if (!ran && left > 0) {
      if (!release_barrier()) return;
      if (context.launch->order_seed > 1) order_of(order, context.threads);
    }
  }
}

int run(const Launch* launch, ThreadEntry entry, int checked) {
  Context& c = context;
  c.launch = launch;
  c.entry = entry;
  c.checked = checked;
  c.aborted = false;
  c.random = launch->order_seed;
  c.threads = launch->block.x * launch->block.y * launch->block.z;
  launch->report->kind = kNone;
  if (c.threads > kMaxThreads) {
    record(kOutOfBounds, nullptr, "a block of %u threads; at most %u are possible", c.threads, kMaxThreads);
    return launch->report->kind;
  }
  if (!c.stacks) {
    void* memory = mmap(nullptr, kMaxThreads * kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) {
      record(kDeadlock, nullptr, "no memory for the stacks of %u threads", kMaxThreads);
      return launch->report->kind;
    }
    c.stacks = static_cast<char*>(memory);
  }
  // The lowest page of each stack is a guard: an overflow stops the process instead of corrupting a neighbour.
  for (; c.guarded < c.threads; ++c.guarded)
    mprotect(c.stacks + c.guarded * kStackBytes, static_cast<size_t>(sysconf(_SC_PAGESIZE)), PROT_NONE);
  if (c.fibers.size() < c.threads) c.fibers.resize(c.threads);
  if (c.smem_storage.size() < launch->smem_bytes + 128u) c.smem_storage.resize(launch->smem_bytes + 128u);
  c.smem = c.smem_storage.data() + (128 - reinterpret_cast<size_t>(c.smem_storage.data()) % 128) % 128;
  if (checked && c.shadow.size() < launch->smem_bytes) c.shadow.resize(launch->smem_bytes);
  const Dim grid = launch->grid;
  static thread_local std::vector<unsigned> blocks;
  order_of(blocks, grid.x * grid.y * grid.z);
  for (unsigned b : blocks) {
    run_block(Dim{b % grid.x, b / grid.x % grid.y, b / (grid.x * grid.y)});
    if (c.aborted) break;
  }
  return launch->report->kind;
}

// ---- what kernels call -----------------------------------------------------------------------------------------------
const Thread* barrier(const char* file, int line) {
  Fiber& fiber = *context.current;
  fiber.file = file;
  fiber.line = line;
  fiber.state = kAtBarrier;
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
char* smem() { return context.smem; }

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
  FAIL(kRegister, "element %lld of a register array of %lld", index, extent);
}

void fail_row(long long index, long long extent) {
  FAIL(kOutOfBounds, "an index of %lld, into an axis of %lld elements", index, extent);
}

// Whether an access of `thread` is unordered with one by `other`, made at the given epochs.
bool unordered(unsigned thread, unsigned other, unsigned long long epoch, unsigned long long warp_epoch) {
  if (thread == other || epoch != context.epoch) return false;
  return thread / 32 != other / 32 || warp_epoch == context.warp_epoch[thread / 32];
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
  const unsigned thread = context.current->place.linear;
  const unsigned long long warp_epoch = context.warp_epoch[thread / 32];
  for (unsigned i = at; i < at + nbytes; ++i) {
    Shadow& s = context.shadow[i];
    const bool written = s.write_epoch >= context.block_epoch;
    if (!is_store && !written)
      FAIL(kUninitialised, "load of byte %u of shared memory (byte %u of %s), which no thread has written", i, i - begin,
           name);
    if (written && unordered(thread, s.writer, s.write_epoch, s.write_warp_epoch))
      FAIL(kRace, "%s of byte %u of shared memory (byte %u of %s), written by thread %u since the last barrier", what, i,
           i - begin, name, s.writer);
    if (!is_store) {
      const bool same_epoch = s.read_epoch == context.epoch;
      s.many_readers = same_epoch && (s.many_readers || s.reader != thread);
      s.many_warps = same_epoch && (s.many_warps || s.reader / 32 != thread / 32);
      s.reader = thread;
      s.read_epoch = context.epoch;
      s.read_warp_epoch = warp_epoch;
      continue;
    }
    const bool other_reader = s.reader != thread || s.many_readers;
    const bool read_here = s.read_epoch == context.epoch && s.read_epoch >= context.block_epoch;
    const bool ordered_by_warp = !s.many_warps && s.reader / 32 == thread / 32 && s.read_warp_epoch != warp_epoch;
    if (read_here && other_reader && !ordered_by_warp)
      FAIL(kRace, "store to byte %u of shared memory (byte %u of %s), read by thread %u%s since the last barrier", i,
           i - begin, name, s.reader, s.many_readers ? " and others" : "");
    s.writer = thread;
    s.write_epoch = context.epoch;
    s.write_warp_epoch = warp_epoch;
  }
}

const Engine engine = {run, barrier, sync_warp, exchange, vote, sleep_a_while, smem, shared_access, fail_global,
                       fail_register, fail_row};

}  // namespace

extern "C" __attribute__((visibility("default"))) const Engine* fuser_simt_engine() { return &engine; }
