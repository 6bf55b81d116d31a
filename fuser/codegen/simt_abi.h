// What a compiled CPU kernel and the SIMT engine know of each other. Both include this; the layout of Launch and Report
// is also written by `fuser/runtime/cpu_kernel.py`.
#pragma once

namespace simt {

struct Dim {
  unsigned x, y, z;
};

// Where the running GPU thread is.
struct Thread {
  Dim thread, block;
  unsigned linear;
};

enum Kind : int {
  kNone = 0,
  kOutOfBounds = 1,
  kMisaligned = 2,
  kUninitialised = 3,
  kRace = 4,
  kDivergence = 5,
  kDeadlock = 6,
  kRegister = 7,
};

// Counters: accesses by log2 of their width in bytes (1, 2, 4, 8, 16), then events.
enum Counter : int {
  kGlobalLoad = 0,
  kGlobalStore = 5,
  kSharedLoad = 10,
  kSharedStore = 15,
  kBlockBarrier = 20,
  kWarpExchange = 21,
  kAtomic = 22,
  kClusterBarrier = 23,
  kCounters = 24,
};

struct Report {
  int kind;
  int reserved;
  char message[1016];
  unsigned long long counters[kCounters];
};

struct Engine;

// One launch. `slots` holds 8 bytes per parameter; a checked kernel finds the extents of its pointers, in bytes, after them.
struct Launch {
  Dim grid, block;
  unsigned smem_bytes;
  unsigned order_seed;  // 0: threads and blocks run in order; 1: reversed; else shuffled
  const Engine* engine;
  Report* report;
  unsigned long long slots[1];
};

typedef void (*ThreadEntry)(const Launch*, const Thread*);

// The engine's functions. Those that may switch to another fiber return the thread's own place again.
struct Engine {
  int (*run)(const Launch*, ThreadEntry, int checked, unsigned cluster);  // blocks along y that run together
  const Thread* (*barrier)(const char* file, int line);
  const Thread* (*sync_warp)(unsigned mask);
  const Thread* (*exchange)(unsigned mask, unsigned long long value, unsigned source, unsigned long long* result);
  const Thread* (*vote)(unsigned mask, int predicate, unsigned* ballot);
  const Thread* (*sleep)();
  char* (*smem)();
  void (*shared_access)(const char* name, unsigned at, unsigned nbytes, unsigned alignment, unsigned begin, unsigned end,
                        int is_store);
  void (*fail_global)(const char* name, long long at, unsigned nbytes, unsigned alignment, long long extent,
                      unsigned element, int is_store);
  void (*fail_register)(long long index, long long extent);
  void (*fail_row)(long long index, long long extent);
  const Thread* (*cluster_barrier)();
  // What lies at byte `at` of the shared memory of another block of the cluster; bounds are those of the array.
  const char* (*peer_smem)(const char* name, unsigned at, unsigned nbytes, unsigned begin, unsigned end, unsigned rank);
};

}  // namespace simt
