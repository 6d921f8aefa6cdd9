// The part of libgomp that csrc/'s loops use, on std::thread and std::mutex: ThreadSanitizer sees
// what these order and nothing of libgomp, whose barriers it would take for races. Linked in its
// place by tests/tools/test_sanitizers.py; what is missing here fails to link.

#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace {

struct Team {
  explicit Team(int threads) : size(threads) {}
  int size;
  std::mutex mutex;
  std::condition_variable changed;
  int waiting = 0;
  int64_t phase = 0;
  // The loop that is running, taken in chunks; `left` counts the threads that are done with it.
  bool loop = false;
  long next = 0, end = 0, step = 1, chunk = 1;
  int left = 0;

  void barrier() {
    std::unique_lock<std::mutex> lock(mutex);
    const int64_t mine = phase;
    if (++waiting == size) {
      waiting = 0;
      ++phase;
      changed.notify_all();
    } else {
      changed.wait(lock, [&] { return phase != mine; });
    }
  }
};

thread_local Team* team = nullptr;
thread_local int thread_num = 0;
std::mutex critical;

bool take(long* first, long* last) {
  const long end = team->end;
  if (team->next >= end) return false;
  *first = team->next;
  *last = end - *first < team->chunk * team->step ? end : *first + team->chunk * team->step;
  team->next = *last;
  return true;
}

}  // namespace

extern "C" {

int omp_get_thread_num() { return thread_num; }
int omp_get_num_threads() { return team ? team->size : 1; }

void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
  Team made(threads == 0 ? 1 : static_cast<int>(threads));
  Team* const before = team;
  const int number = thread_num;
  std::vector<std::thread> others;
  for (int i = 1; i < made.size; ++i) {
    others.emplace_back([&made, body, data, i] {
      team = &made;
      thread_num = i;
      body(data);
    });
  }
  team = &made;
  thread_num = 0;
  body(data);
  for (std::thread& other : others) other.join();
  team = before;
  thread_num = number;
}

void GOMP_barrier() { team->barrier(); }
void GOMP_critical_name_start(void**) { critical.lock(); }
void GOMP_critical_name_end(void**) { critical.unlock(); }

bool GOMP_loop_nonmonotonic_dynamic_start(long start, long end, long step, long chunk, long* first,
                                          long* last) {
  std::lock_guard<std::mutex> lock(team->mutex);
  if (!team->loop) {
    team->loop = true;
    team->next = start;
    team->end = end;
    team->step = step;
    team->chunk = chunk;
    team->left = 0;
  }
  return take(first, last);
}

bool GOMP_loop_nonmonotonic_dynamic_next(long* first, long* last) {
  std::lock_guard<std::mutex> lock(team->mutex);
  return take(first, last);
}

void GOMP_loop_end() {
  {
    std::lock_guard<std::mutex> lock(team->mutex);
    if (++team->left == team->size) team->loop = false;
  }
  team->barrier();
}
}
