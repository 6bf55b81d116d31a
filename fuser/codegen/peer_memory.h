// Reads and writes of memory that the ranks of a host share, reports to the host, time and rest: on GPUs and on CPU ranks.
#ifdef FUSER_SIMT
extern "C" int sched_yield(void);
extern "C" int clock_gettime(int clock, long* time);

FUSER_DEVICE void put_pair(uint64_t* at, uint64_t first, uint64_t second) {
  __atomic_store_n(at, first, __ATOMIC_RELAXED);
  __atomic_store_n(at + 1, second, __ATOMIC_RELAXED);
}
FUSER_DEVICE void get_pair(const uint64_t* at, uint64_t& first, uint64_t& second) {
  first = __atomic_load_n(at, __ATOMIC_RELAXED);
  second = __atomic_load_n(at + 1, __ATOMIC_RELAXED);
}
FUSER_DEVICE void set_flag(uint32_t* flag, uint32_t value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
FUSER_DEVICE uint32_t get_flag(const uint32_t* flag) { return __atomic_load_n(flag, __ATOMIC_ACQUIRE); }
FUSER_DEVICE void set_report(uint64_t* word, uint64_t value) { __atomic_store_n(word, value, __ATOMIC_SEQ_CST); }
FUSER_DEVICE uint64_t get_report(const uint64_t* word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }
FUSER_DEVICE uint64_t now_ns() {
  long time[2];
  clock_gettime(1, time);
  return static_cast<uint64_t>(time[0]) * 1000000000u + static_cast<uint64_t>(time[1]);
}
FUSER_DEVICE void replace_flag(uint32_t* flag, uint32_t old, uint32_t value) {
  __atomic_compare_exchange_n(flag, &old, value, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}
FUSER_DEVICE void fence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
FUSER_DEVICE void rest() { sched_yield(); }
FUSER_DEVICE void stop_everything() {}
#else
FUSER_DEVICE void put_pair(uint64_t* at, uint64_t first, uint64_t second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(first), "l"(second) : "memory");
}
FUSER_DEVICE void get_pair(const uint64_t* at, uint64_t& first, uint64_t& second) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "l"(at) : "memory");
}
FUSER_DEVICE void set_flag(uint32_t* flag, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
FUSER_DEVICE uint32_t get_flag(const uint32_t* flag) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}
FUSER_DEVICE void set_report(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}
FUSER_DEVICE uint64_t get_report(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}
FUSER_DEVICE uint64_t now_ns() {
  uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}
FUSER_DEVICE void replace_flag(uint32_t* flag, uint32_t old, uint32_t value) { atomicCAS_system(flag, old, value); }
FUSER_DEVICE void fence() { __threadfence_system(); }
FUSER_DEVICE void rest() { asm volatile("nanosleep.u32 200;"); }
FUSER_DEVICE void stop_everything() { asm volatile("trap;"); }
#endif
