// What orders memory on a GPU, told to ThreadSanitizer, which then finds two threads (of a block, of different ranks)
// that use the same bytes with nothing in between: barriers, __syncwarp, and flags by their acquire and release. Not
// the fibers' turns, nor shuffles and votes, which order nothing. Without ThreadSanitizer: nothing.
#pragma once

#ifdef __SANITIZE_THREAD__
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}

namespace emulated {

inline void* watched_thread() { return __tsan_get_current_fiber(); }
inline void* watch_another() { return __tsan_create_fiber(0); }
inline void stop_watching(void* thread) { __tsan_destroy_fiber(thread); }
// It runs from now on. ordered: after all that ran here before.
inline void watch(void* thread, bool ordered) { __tsan_switch_to_fiber(thread, ordered ? 0 : 1); }
inline void ordered_before(void* address) { __tsan_release(address); }
inline void ordered_after(void* address) { __tsan_acquire(address); }

struct Unwatched {  // while it lives, what this thread reads and writes: the emulation's own
  Unwatched() { AnnotateIgnoreReadsBegin("", 0), AnnotateIgnoreWritesBegin("", 0); }
  ~Unwatched() { AnnotateIgnoreReadsEnd("", 0), AnnotateIgnoreWritesEnd("", 0); }
};

}  // namespace emulated
#else
namespace emulated {

inline void* watched_thread() { return nullptr; }
inline void* watch_another() { return nullptr; }
inline void stop_watching(void*) {}
inline void watch(void*, bool) {}
inline void ordered_before(void*) {}
inline void ordered_after(void*) {}

struct Unwatched {
  ~Unwatched() {}
};

}  // namespace emulated
#endif
