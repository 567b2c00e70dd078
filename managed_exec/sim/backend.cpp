// The simulated accelerator: a PyTorch backend on the dispatch key PrivateUse1 whose device memory is host memory.
//
// Parts, in the order of this file:
//   1. settings, time and waiting        one clock per engine and per link; every wait gives up the GIL
//   2. queues                            what CUDA calls a stream: work in order, run by a thread of its own
//   3. faults                            injected allocation failures, broken devices
//   4. device memory                     capacity, cache, poison, frees in stream order
//   5. pinned host memory
//   6. devices, streams, events, generators: what torch asks of a backend
//   7. kernels                           run by the CPU's kernels on aliases of the device memory, all or nothing
//   8. copies
//   9. operators registered by name, sparse layouts, autocast
//  10. registration and the Python module
//
// Guarantees
//   - Kernels block their caller and run after everything queued on the current stream before them. Copies that are
//     asynchronous on CUDA (pinned host <-> device, device -> device, both non_blocking) are queued.
//   - An allocation fails only if the device's live bytes and the request exceed its capacity (or a fault is injected).
//   - A kernel that raises has changed no tensor and no generator.
//   - Threads of this file never take the GIL and hold neither tensors nor storages.
//
// Lock order: a Queue's mutex and the memory mutex are never held together (except by the fork handler, which takes
// all queues and then the memory mutex). Timelines' mutexes are leaves. No lock is held while anything waits, sleeps,
// copies, or takes the GIL.
//
// State that threads or destructors may reach while the process exits is allocated once and never freed.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/NativeFunctions.h>
#include <ATen/NestedTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <dlfcn.h>
#include <pthread.h>

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::DataPtr;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using torch::jit::Stack;

constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 64;
constexpr int kStreamsPerDevice = 33; // the default stream (id 0) and a pool of 32, reused in turn as CUDA's is
constexpr size_t kGranuleBytes = 512; // allocations are rounded up to this, as CUDA's allocator does
constexpr size_t kCacheLimitBytes = size_t{256} << 20; // freed host memory kept per device, at most

// ---------------------------------------------------------------------------------------------------------------------
// 1. Settings, time and waiting

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

struct Settings {
  std::atomic<int> device_count{0};
  // Counts the calls of configure(): what a thread remembers of an earlier configuration is dropped.
  std::atomic<uint64_t> epoch{0};
  // Bytes a second and seconds; 0 means that no time is simulated.
  std::atomic<double> host_bandwidth{0};
  std::atomic<double> peer_bandwidth{0};
  std::atomic<double> kernel_seconds{0};
};

Settings& settings() {
  static auto* instance = new Settings();
  return *instance;
}

// Gives up the GIL for a scope if the calling thread holds it. Construct it before taking a lock, so that the lock is
// released before the GIL is asked for again.
class GilRelease {
 public:
  GilRelease() {
    if (Py_IsInitialized() && PyGILState_Check()) {
      saved_ = PyEval_SaveThread();
    }
  }
  ~GilRelease() {
    if (saved_ != nullptr) {
      PyEval_RestoreThread(saved_);
    }
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* saved_ = nullptr;
};

// Something that does one thing at a time: a device's compute engine, one direction of a link.
class Timeline {
 public:
  // Books `seconds` from `earliest` on, behind what is booked already; returns when it will be over.
  TimePoint book(TimePoint earliest, double seconds) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto start = std::max(earliest, busy_until_);
    busy_until_ = start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
    return busy_until_;
  }
  void reset() {
    std::lock_guard<std::mutex> lock(mutex_);
    busy_until_ = TimePoint{};
  }

 private:
  std::mutex mutex_; // guards busy_until_
  TimePoint busy_until_{};
};

void sleep_until(TimePoint when) {
  if (Clock::now() < when) {
    GilRelease no_gil;
    std::this_thread::sleep_until(when);
  }
}

// What a thread has chosen, and what it remembers for the fault "first tries fail".
struct ThreadState {
  uint64_t epoch = 0;
  int device = 0;
  std::array<uint8_t, kMaxDevices> stream{}; // current stream id per device
  double kernel_seconds = -1; // < 0: the configured time
  const std::string* kernel = nullptr; // the operator being run, for fault identities and error texts
  std::list<std::pair<std::string, size_t>> tried; // most recent first, at most 64
  uint64_t tried_generation = 0;
};

ThreadState& thread_state() {
  thread_local ThreadState state;
  const auto epoch = settings().epoch.load(std::memory_order_relaxed);
  if (C10_UNLIKELY(state.epoch != epoch)) {
    state.epoch = epoch;
    state.device = 0;
    state.stream.fill(0);
  }
  return state;
}

// ---------------------------------------------------------------------------------------------------------------------
// 2. Queues

class Queue;

// The first `number` items of a queue. Done once all of them are.
struct Ticket {
  Queue* queue = nullptr;
  uint64_t number = 0;
  bool done() const;
  void wait() const;
};

bool device_broken(int device);

class Queue {
 public:
  using Item = std::function<void()>;

  Queue(int device, int id) : device(device), id(id) {}

  const int device;
  const int id;

  bool idle() const {
    return completed_.load(std::memory_order_acquire) == submitted_.load(std::memory_order_acquire);
  }

  Ticket now() {
    return {this, submitted_.load(std::memory_order_acquire)};
  }

  bool done(uint64_t number) const {
    return completed_.load(std::memory_order_acquire) >= number;
  }

  Ticket push(Item item) {
    std::lock_guard<std::mutex> lock(mutex_);
    items_.push_back(std::move(item));
    const auto number = submitted_.fetch_add(1, std::memory_order_acq_rel) + 1;
    if (!worker_) {
      worker_ = true;
      std::thread([this] { work(); }).detach();
    }
    changed_.notify_all();
    return {this, number};
  }

  void wait(uint64_t number) {
    if (done(number)) {
      return;
    }
    GilRelease no_gil;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done(number); });
  }

  void drain() {
    wait(submitted_.load(std::memory_order_acquire));
  }

  void hold() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++held_;
  }

  void release() {
    std::lock_guard<std::mutex> lock(mutex_);
    --held_;
    changed_.notify_all();
  }

  void wake() {
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }

  // The fork handler's: see below.
  void before_fork() {
    mutex_.lock();
  }
  void after_fork_in_parent() {
    mutex_.unlock();
  }
  // Only the forking thread exists here: the worker is gone and so is whoever waited. Returns whether work was lost.
  bool after_fork_in_child() {
    new (&mutex_) std::mutex();
    new (&changed_) std::condition_variable();
    worker_ = false;
    const bool lost = !idle();
    items_.clear();
    completed_.store(submitted_.load());
    return lost;
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      // A broken device's work ends (without effect) even if a test holds the stream.
      changed_.wait(lock, [&] { return !items_.empty() && (held_ == 0 || device_broken(device)); });
      auto item = std::move(items_.front());
      items_.pop_front();
      lock.unlock();
      item();
      item = nullptr; // what it referred to is gone before the item counts as done
      lock.lock();
      completed_.fetch_add(1, std::memory_order_acq_rel);
      changed_.notify_all();
    }
  }

  std::mutex mutex_; // guards items_, held_, worker_, and the writing of the two counters
  std::condition_variable changed_; // any change of the fields that mutex_ guards
  std::deque<Item> items_;
  int held_ = 0;
  bool worker_ = false; // whether the thread has been started; it is needed from the first item on
  // Invariant: completed_ <= submitted_, their difference is items_ plus the one being run.
  std::atomic<uint64_t> submitted_{0};
  std::atomic<uint64_t> completed_{0};
};

bool Ticket::done() const {
  return queue == nullptr || queue->done(number);
}

void Ticket::wait() const {
  if (queue != nullptr) {
    queue->wait(number);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// 3. Faults (the state of devices is here, because a broken one is a fault)

struct Memory;
using MemoryRef = std::shared_ptr<Memory>;

// Freed memory of one device, by stream and size, given up oldest first. Guarded by the memory mutex.
class Cache {
 public:
  size_t bytes() const {
    return bytes_;
  }
  void put(Queue* queue, size_t size, MemoryRef memory) {
    order_.push_back({queue, size, std::move(memory)});
    index_[{queue, size}].push_back(std::prev(order_.end()));
    bytes_ += size;
  }
  MemoryRef take(Queue* queue, size_t size) {
    const auto found = index_.find({queue, size});
    if (found == index_.end()) {
      return nullptr;
    }
    const auto entry = found->second.back();
    found->second.pop_back();
    if (found->second.empty()) {
      index_.erase(found);
    }
    return remove(entry);
  }
  MemoryRef take_oldest() {
    const auto entry = order_.begin();
    const auto found = index_.find({entry->queue, entry->size});
    found->second.pop_front(); // entries of one key are in the order of order_
    if (found->second.empty()) {
      index_.erase(found);
    }
    return remove(entry);
  }

 private:
  struct Entry {
    Queue* queue;
    size_t size;
    MemoryRef memory;
  };
  using Order = std::list<Entry>;
  MemoryRef remove(Order::iterator entry) {
    auto memory = std::move(entry->memory);
    bytes_ -= entry->size;
    order_.erase(entry);
    return memory;
  }
  Order order_; // oldest first
  std::map<std::pair<Queue*, size_t>, std::deque<Order::iterator>> index_;
  size_t bytes_ = 0; // sum of the sizes in order_
};

struct DeviceState {
  std::atomic<bool> broken{false};
  Timeline compute;
  Timeline from_host;
  Timeline to_host;
  std::array<Timeline, kMaxDevices> to_peer;
  // Created on first use, never freed: ids stay valid for the life of the process.
  std::array<std::atomic<Queue*>, kStreamsPerDevice> queues{};
  std::atomic<uint32_t> next_stream{0};
  // Guarded by the memory mutex. Bytes are rounded sizes. Invariant whenever the mutex is free:
  // allocated + pending + cache.bytes() <= capacity, unless the capacity was lowered below what is in use.
  size_t capacity = 0;
  size_t allocated = 0; // of live blocks
  size_t pending = 0; // of blocks that were freed and wait for a stream
  Cache cache;
  c10::CachingDeviceAllocator::DeviceStats stats;
};

DeviceState& state_of(int device) {
  static auto* devices = new std::array<DeviceState, kMaxDevices>();
  return (*devices)[device];
}

bool device_broken(int device) {
  return state_of(device).broken.load(std::memory_order_acquire);
}

std::mutex& queue_creation_mutex() { // guards the creation of queues
  static auto* mutex = new std::mutex();
  return *mutex;
}

Queue* queue_of(int device, int id) {
  auto& slot = state_of(device).queues[id];
  auto* queue = slot.load(std::memory_order_acquire);
  if (C10_UNLIKELY(queue == nullptr)) {
    std::lock_guard<std::mutex> lock(queue_creation_mutex());
    queue = slot.load(std::memory_order_acquire);
    if (queue == nullptr) {
      queue = new Queue(device, id);
      slot.store(queue, std::memory_order_release);
    }
  }
  return queue;
}

template <typename F>
void for_each_queue(int device, F&& visit) {
  for (auto& slot : state_of(device).queues) {
    if (auto* queue = slot.load(std::memory_order_acquire)) {
      visit(*queue);
    }
  }
}

int device_count() {
  return settings().device_count.load(std::memory_order_acquire);
}

int current_device() {
  const int device = thread_state().device;
  return device < device_count() ? device : 0;
}

Queue* current_queue(int device) {
  return queue_of(device, thread_state().stream[device]);
}

int checked_index(int64_t index) {
  if (index < 0) {
    index = current_device();
  }
  TORCH_CHECK(
      index < device_count(),
      "sim: invalid device index ", index, ": ", device_count(),
      " simulated device(s) exist (managed_exec.sim.enable() makes them)");
  return static_cast<int>(index);
}

void check_alive(int device) {
  if (C10_UNLIKELY(device_broken(device))) {
    throw c10::AcceleratorError(
        {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 1,
        c10::str(
            "sim error: device sim:", device,
            " is broken (managed_exec.sim.faults.break_device); its memory can be freed, nothing else works until"
            " faults.clear()"));
  }
}

std::mutex& memory_mutex() {
  static auto* mutex = new std::mutex();
  return *mutex;
}

// Notified when bytes of a device stop being pending.
std::condition_variable& memory_changed() {
  static auto* changed = new std::condition_variable();
  return *changed;
}

// Guarded by the memory mutex.
struct Faults {
  struct Nth {
    int device; // -1: any
    int64_t remaining; // allocations until the one that fails
  };
  struct Share {
    int device;
    double share;
    std::mt19937_64 random;
  };
  std::vector<Nth> nth;
  std::vector<Share> shares;
  std::vector<int> first_tries; // devices, -1: any
  uint64_t generation = 0; // of the threads' memories of what was tried
  int64_t injected = 0;
};

Faults& faults() {
  static auto* instance = new Faults();
  return *instance;
}

std::atomic<bool> any_fault{false}; // whether faults() has anything to inject: spares the common path the search

bool concerns(int fault_device, int device) {
  return fault_device < 0 || fault_device == device;
}

// Decides whether an allocation fails by injection; names the fault, or null. The memory mutex is held.
const char* injected_fault(int device, size_t bytes) {
  auto& all = faults();
  const char* reason = nullptr;
  for (auto& fault : all.nth) {
    if (concerns(fault.device, device) && --fault.remaining == 0) {
      reason = "fail_allocation";
    }
  }
  for (auto& fault : all.shares) {
    if (concerns(fault.device, device) && std::uniform_real_distribution<double>()(fault.random) < fault.share) {
      reason = "fail_share";
    }
  }
  for (const int fault_device : all.first_tries) {
    if (!concerns(fault_device, device)) {
      continue;
    }
    auto& thread = thread_state();
    if (thread.tried_generation != all.generation) {
      thread.tried_generation = all.generation;
      thread.tried.clear();
    }
    const std::pair<std::string, size_t> identity{thread.kernel ? *thread.kernel : std::string(), bytes};
    auto known = std::find(thread.tried.begin(), thread.tried.end(), identity);
    if (known == thread.tried.end()) {
      reason = "fail_first_tries";
      thread.tried.push_front(identity);
      if (thread.tried.size() > 64) {
        thread.tried.pop_back();
      }
    } else {
      thread.tried.splice(thread.tried.begin(), thread.tried, known);
    }
  }
  if (reason != nullptr) {
    ++all.injected;
  }
  return reason;
}

// ---------------------------------------------------------------------------------------------------------------------
// 4. Device memory

// Host memory that stands for device memory. Queued copies hold a reference, so that a source or target that was freed
// too early shows as wrong data (poison, or a later tensor's bytes) and never as a crash.
struct Memory {
  explicit Memory(size_t size) : data(std::aligned_alloc(kGranuleBytes, size)) {}
  ~Memory() {
    std::free(data);
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* const data;
};

struct Block {
  MemoryRef memory;
  size_t size; // rounded
  size_t requested;
  int device;
  Queue* queue; // the stream it was allocated on, in whose order the free takes effect
  std::vector<Queue*> used_on; // record_stream(); guarded by the memory mutex
  std::atomic<int> waits{0}; // streams that have not reached the free yet
};

void poison(const MemoryRef& memory, size_t size) {
  std::memset(memory->data, 0xFF, size); // NaN for every floating type
}

void count(c10::CachingAllocator::StatArray& stat, size_t size, int64_t amount) {
  using c10::CachingAllocator::StatType;
  const auto pool = size <= (size_t{1} << 20) ? StatType::SMALL_POOL : StatType::LARGE_POOL;
  for (const auto type : {StatType::AGGREGATE, pool}) {
    auto& entry = stat[static_cast<size_t>(type)];
    if (amount >= 0) {
      entry.increase(static_cast<size_t>(amount));
    } else {
      entry.decrease(static_cast<size_t>(-amount));
    }
  }
}

void count_reserved(DeviceState& device, size_t size, int sign) {
  count(device.stats.segment, size, sign);
  count(device.stats.reserved_bytes, size, sign * static_cast<int64_t>(size));
  ++(sign > 0 ? device.stats.num_device_alloc : device.stats.num_device_free);
}

void count_active(DeviceState& device, size_t size, int sign) {
  count(device.stats.active, size, sign);
  count(device.stats.active_bytes, size, sign * static_cast<int64_t>(size));
}

void count_allocated(DeviceState& device, size_t size, size_t requested, int sign) {
  count(device.stats.allocation, size, sign);
  count(device.stats.allocated_bytes, size, sign * static_cast<int64_t>(size));
  count(device.stats.requested_bytes, size, sign * static_cast<int64_t>(requested));
}

// Gives up cached memory until at most `keep` bytes are cached. The memory mutex is held; what is given up is moved to
// `dropped`, to be freed by the caller once the mutex is released.
void shrink_cache(DeviceState& device, size_t keep, std::vector<MemoryRef>& dropped) {
  while (device.cache.bytes() > keep) {
    const auto before = device.cache.bytes();
    dropped.push_back(device.cache.take_oldest());
    count_reserved(device, before - device.cache.bytes(), -1);
  }
}

[[noreturn]] void throw_out_of_memory(int index, size_t bytes, const std::string& why) {
  std::string text;
  {
    std::lock_guard<std::mutex> lock(memory_mutex());
    auto& device = state_of(index);
    ++device.stats.num_ooms;
    const auto used = device.allocated + device.pending;
    using c10::CachingAllocator::format_size;
    text = c10::str(
        "sim out of memory. Tried to allocate ", format_size(bytes), ". Device sim:", index,
        " has a total capacity of ", format_size(device.capacity), " of which ",
        format_size(device.capacity > used ? device.capacity - used : 0), " is free. ", format_size(device.allocated),
        " is allocated by PyTorch, and ", format_size(device.pending), " waits for a stream to be freed.", why);
  }
  C10_THROW_ERROR(OutOfMemoryError, text);
}

void retire(Block* block) noexcept;
void delete_block(void* context) {
  retire(static_cast<Block*>(context));
}

Block* block_of(const DataPtr& data) {
  return data.get_deleter() == &delete_block ? static_cast<Block*>(data.get_context()) : nullptr;
}

DataPtr allocate_on(int index, size_t bytes) {
  index = checked_index(index);
  const Device where(kSim, static_cast<c10::DeviceIndex>(index));
  if (bytes == 0) {
    return DataPtr(nullptr, where); // also how a storage is freed, which works on a broken device
  }
  check_alive(index);
  auto& device = state_of(index);
  const size_t size = (bytes + kGranuleBytes - 1) / kGranuleBytes * kGranuleBytes;
  auto* queue = current_queue(index);
  MemoryRef memory;
  std::vector<MemoryRef> dropped;
  const char* fault = nullptr;
  bool fits = true;
  {
    // The GIL is given up before a wait only, but has to be asked for again after the lock is released.
    std::optional<GilRelease> no_gil;
    std::unique_lock<std::mutex> lock(memory_mutex());
    if (C10_UNLIKELY(any_fault.load(std::memory_order_relaxed))) {
      fault = injected_fault(index, bytes);
    }
    while (fault == nullptr) {
      fits = device.allocated + size <= device.capacity;
      if (!fits || device.allocated + device.pending + size <= device.capacity) {
        break;
      }
      if (!no_gil.has_value()) {
        lock.unlock();
        no_gil.emplace();
        lock.lock();
        ++device.stats.num_alloc_retries;
        continue;
      }
      memory_changed().wait(lock);
    }
    if (fault == nullptr && fits) {
      memory = device.cache.take(queue, size);
      if (memory == nullptr) {
        shrink_cache(device, device.capacity - device.allocated - device.pending - size, dropped);
        count_reserved(device, size, +1);
      }
      device.allocated += size;
      count_active(device, size, +1);
      count_allocated(device, size, bytes, +1);
    }
  }
  if (fault != nullptr) {
    throw_out_of_memory(index, bytes, c10::str(" (Injected by managed_exec.sim.faults.", fault, ".)"));
  }
  if (!fits) {
    throw_out_of_memory(index, bytes, "");
  }
  dropped.clear();
  if (memory == nullptr) {
    memory = std::make_shared<Memory>(size);
    if (memory->data == nullptr) {
      {
        std::lock_guard<std::mutex> lock(memory_mutex());
        device.allocated -= size;
        count_allocated(device, size, bytes, -1);
        count_active(device, size, -1);
        count_reserved(device, size, -1);
      }
      throw_out_of_memory(index, bytes, " (The host itself has no memory left for it.)");
    }
    poison(memory, size); // what a kernel reads before it was written shows as well
  }
  auto* block = new Block{std::move(memory), size, bytes, index, queue, {}};
  return DataPtr(block->memory->data, block, &delete_block, where);
}

// The free takes effect: every stream that used the block has reached it.
void free_block(Block* block, bool was_pending) noexcept {
  poison(block->memory, block->size);
  std::vector<MemoryRef> dropped;
  {
    std::lock_guard<std::mutex> lock(memory_mutex());
    auto& device = state_of(block->device);
    count_active(device, block->size, -1);
    if (was_pending) {
      device.pending -= block->size;
    } else {
      device.allocated -= block->size;
    }
    device.cache.put(block->queue, block->size, std::move(block->memory));
    const auto used = device.allocated + device.pending;
    const auto room = device.capacity > used ? device.capacity - used : 0;
    shrink_cache(device, std::min(room, kCacheLimitBytes), dropped);
    memory_changed().notify_all();
  }
  delete block;
}

// The last reference to the block's storage is gone.
void retire(Block* block) noexcept {
  std::vector<Queue*> busy;
  {
    std::lock_guard<std::mutex> lock(memory_mutex());
    auto& device = state_of(block->device);
    count_allocated(device, block->size, block->requested, -1);
    if (!block->queue->idle()) {
      busy.push_back(block->queue);
    }
    for (auto* queue : block->used_on) {
      if (!queue->idle()) {
        busy.push_back(queue);
      }
    }
    if (!busy.empty()) {
      device.allocated -= block->size;
      device.pending += block->size;
      block->waits = static_cast<int>(busy.size());
    }
  }
  if (busy.empty()) {
    free_block(block, /*was_pending=*/false);
  }
  for (auto* queue : busy) {
    queue->push([block] {
      if (--block->waits == 0) {
        free_block(block, /*was_pending=*/true);
      }
    });
  }
}

struct SimAllocator final : c10::DeviceAllocator {
  DataPtr allocate(size_t bytes) override {
    return allocate_on(current_device(), bytes);
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  bool initialized() override {
    return device_count() > 0;
  }
  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
    std::vector<MemoryRef> dropped;
    std::lock_guard<std::mutex> lock(memory_mutex());
    for (int i = 0; i < kMaxDevices; ++i) {
      shrink_cache(state_of(i), 0, dropped);
    }
  }
  void recordStream(const DataPtr& data, c10::Stream stream) override {
    auto* block = block_of(data);
    if (block == nullptr) {
      return;
    }
    auto* queue = queue_of(checked_index(stream.device_index()), static_cast<int>(stream.id()));
    std::lock_guard<std::mutex> lock(memory_mutex());
    auto& used_on = block->used_on;
    if (queue != block->queue && std::find(used_on.begin(), used_on.end(), queue) == used_on.end()) {
      used_on.push_back(queue);
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const int device = checked_index(index);
    std::lock_guard<std::mutex> lock(memory_mutex());
    return state_of(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    each_stat(index, [](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
    std::lock_guard<std::mutex> lock(memory_mutex());
    auto& stats = state_of(checked_index(index)).stats;
    stats.num_alloc_retries = stats.num_ooms = stats.num_device_alloc = stats.num_device_free = 0;
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    each_stat(index, [](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
  }
  // Overrides where this torch has it. Free: what the device has beyond what the allocator holds, as on CUDA.
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) {
    const int device_index = checked_index(index);
    std::lock_guard<std::mutex> lock(memory_mutex());
    auto& device = state_of(device_index);
    const auto held = device.allocated + device.pending + device.cache.bytes();
    return {device.capacity > held ? device.capacity - held : 0, device.capacity};
  }

 private:
  template <typename F>
  void each_stat(c10::DeviceIndex index, F&& change) {
    const int device = checked_index(index);
    std::lock_guard<std::mutex> lock(memory_mutex());
    auto& stats = state_of(device).stats;
    for (auto* array :
         {&stats.allocation, &stats.segment, &stats.active, &stats.inactive_split, &stats.allocated_bytes,
          &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes, &stats.requested_bytes}) {
      for (auto& stat : *array) {
        change(stat);
      }
    }
  }
};

SimAllocator& allocator() {
  static auto* instance = new SimAllocator();
  return *instance;
}

void synchronize_device(int device) {
  for_each_queue(device, [](Queue& queue) { queue.drain(); });
  check_alive(device);
}

// ---------------------------------------------------------------------------------------------------------------------
// 5. Pinned host memory: blocks of powers of two, kept for reuse, not reused while a queued copy uses them

struct HostBlock {
  void* data;
  size_t size;
  std::vector<Ticket> uses; // queued copies; guarded by HostMemory's mutex
};

void delete_host_block(void* context);

class HostMemory final : public at::HostAllocator {
 public:
  DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return DataPtr(nullptr, c10::DeviceType::CPU);
    }
    size_t size = 1;
    while (size < bytes) {
      size *= 2;
    }
    HostBlock* block = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      reclaim();
      auto& free = free_[size];
      if (!free.empty()) {
        block = free.back();
        free.pop_back();
      } else {
        void* data = std::aligned_alloc(64, std::max<size_t>(size, 64));
        TORCH_CHECK(data != nullptr, "sim: the host has no ", size, " bytes left for pinned memory");
        block = new HostBlock{data, size, {}};
        stats_.allocations.increase(1);
        stats_.allocated_bytes.increase(size);
        ++stats_.num_host_alloc;
      }
      live_.emplace(block->data, block);
      stats_.active_requests.increase(1);
      stats_.active_bytes.increase(size);
    }
    return DataPtr(block->data, block, &delete_host_block, c10::DeviceType::CPU);
  }
  void copy_data(void* target, const void* source, size_t bytes) const override {
    default_copy_data(target, source, bytes);
  }
  void free(HostBlock* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    live_.erase(block->data);
    stats_.active_requests.decrease(1);
    stats_.active_bytes.decrease(block->size);
    waiting_.push_back(block);
    reclaim();
  }
  bool is_pinned(const void* data) {
    std::lock_guard<std::mutex> lock(mutex_);
    return find(data) != nullptr;
  }
  // Notes that the work before `ticket` uses the block that contains `data`.
  bool record(const void* data, Ticket ticket) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* block = find(data);
    if (block == nullptr) {
      return false;
    }
    drop_done(*block);
    block->uses.push_back(ticket);
    return true;
  }
  bool record_event(void* data, void* /*context*/, c10::Stream stream) override {
    auto* queue = queue_of(checked_index(stream.device_index()), static_cast<int>(stream.id()));
    return record(data, queue->now());
  }
  void empty_cache() override {
    std::lock_guard<std::mutex> lock(mutex_);
    reclaim();
    for (auto& [size, blocks] : free_) {
      for (auto* block : blocks) {
        std::free(block->data);
        delete block;
        stats_.allocations.decrease(1);
        stats_.allocated_bytes.decrease(size);
        ++stats_.num_host_free;
      }
      blocks.clear();
    }
  }
  at::HostStats get_stats() override {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }
  void reset_accumulated_stats() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : all_stats()) {
      stat->reset_accumulated();
    }
    stats_.num_host_alloc = stats_.num_host_free = 0;
  }
  void reset_peak_stats() override {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : all_stats()) {
      stat->reset_peak();
    }
  }
  std::mutex& mutex() {
    return mutex_;
  }

 private:
  std::array<c10::CachingAllocator::Stat*, 4> all_stats() {
    return {&stats_.active_requests, &stats_.active_bytes, &stats_.allocations, &stats_.allocated_bytes};
  }
  HostBlock* find(const void* data) {
    auto after = live_.upper_bound(const_cast<void*>(data));
    if (after == live_.begin()) {
      return nullptr;
    }
    auto* block = std::prev(after)->second;
    return static_cast<const char*>(data) < static_cast<const char*>(block->data) + block->size ? block : nullptr;
  }
  static void drop_done(HostBlock& block) {
    auto& uses = block.uses;
    uses.erase(std::remove_if(uses.begin(), uses.end(), [](const Ticket& use) { return use.done(); }), uses.end());
  }
  void reclaim() {
    auto still_used = std::remove_if(waiting_.begin(), waiting_.end(), [this](HostBlock* block) {
      drop_done(*block);
      if (block->uses.empty()) {
        free_[block->size].push_back(block);
        return true;
      }
      return false;
    });
    waiting_.erase(still_used, waiting_.end());
  }

  std::mutex mutex_; // guards everything below and the blocks' uses; a leaf
  std::map<void*, HostBlock*> live_;
  std::vector<HostBlock*> waiting_; // freed, but a queued copy uses them
  std::map<size_t, std::vector<HostBlock*>> free_; // by size
  at::HostStats stats_;
};

HostMemory& host_memory() {
  static auto* instance = new HostMemory();
  return *instance;
}

void delete_host_block(void* context) {
  host_memory().free(static_cast<HostBlock*>(context));
}

// ---------------------------------------------------------------------------------------------------------------------
// Forking. A child has this memory and none of the threads. With all locks taken before the fork the state is
// consistent; a queue that was idle simply starts a new thread when it needs one. Work that was in flight is lost.

std::atomic<bool> bad_fork{false};

template <typename F>
void for_each_queue_of_all(F&& visit) {
  for (int device = 0; device < kMaxDevices; ++device) {
    for_each_queue(device, visit);
  }
}

void before_fork() {
  queue_creation_mutex().lock();
  for_each_queue_of_all([](Queue& queue) { queue.before_fork(); });
  memory_mutex().lock();
  host_memory().mutex().lock();
}

void after_fork_in_parent() {
  host_memory().mutex().unlock();
  memory_mutex().unlock();
  for_each_queue_of_all([](Queue& queue) { queue.after_fork_in_parent(); });
  queue_creation_mutex().unlock();
}

void after_fork_in_child() {
  host_memory().mutex().unlock();
  memory_mutex().unlock();
  new (&memory_changed()) std::condition_variable();
  for_each_queue_of_all([](Queue& queue) {
    if (queue.after_fork_in_child()) {
      bad_fork = true;
    }
  });
  queue_creation_mutex().unlock();
}

// ---------------------------------------------------------------------------------------------------------------------
// 6. Devices, streams, events, generators

c10::Stream stream_of(const Queue& queue) {
  return c10::Stream(c10::Stream::UNSAFE, Device(kSim, static_cast<c10::DeviceIndex>(queue.device)), queue.id);
}

Queue* queue_of(const c10::Stream& stream) {
  return queue_of(checked_index(stream.device_index()), static_cast<int>(stream.id()));
}

struct Event {
  std::mutex mutex; // guards the rest
  bool timed = false;
  bool recorded = false;
  Ticket ticket; // complete when the stream has reached the record
  std::shared_ptr<std::atomic<Clock::rep>> reached; // when it did, for a timed event
};

void set_device(int64_t index) {
  thread_state().device = checked_index(index);
}

int exchange_device(int64_t index) {
  const int before = current_device();
  if (index >= 0 && index != before) {
    set_device(index);
  }
  return before;
}

// Autograd's engine makes its threads at the first backward of the process, one for each device there is then, and
// fails later if a device has an index beyond. Devices can be added here, so the engine, and it alone, is told of as
// many as there can ever be. It is known by the function that asks.
bool asked_by_autograd_engine(void* return_address) {
  Dl_info caller;
  return dladdr(return_address, &caller) != 0 && caller.dli_sname != nullptr &&
      std::strstr(caller.dli_sname, "autograd6Engine20start_device_threads") != nullptr;
}

struct SimGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSim;
  }
  Device exchangeDevice(Device device) const override {
    return Device(kSim, static_cast<c10::DeviceIndex>(exchange_device(device.index())));
  }
  Device getDevice() const override {
    return Device(kSim, static_cast<c10::DeviceIndex>(current_device()));
  }
  void setDevice(Device device) const override {
    if (device.has_index()) {
      set_device(device.index());
    }
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) {
      thread_state().device = device.index();
    }
  }
  c10::Stream getStream(Device device) const override {
    return stream_of(*current_queue(checked_index(device.index())));
  }
  c10::Stream getDefaultStream(Device device) const override {
    return stream_of(*queue_of(checked_index(device.index()), 0));
  }
  c10::Stream getStreamFromGlobalPool(Device device, bool /*high_priority*/ = false) const override {
    return getNewStream(device, 0);
  }
  c10::Stream getNewStream(Device device, int /*priority*/ = 0) const override {
    const int index = checked_index(device.index());
    const int id = 1 + static_cast<int>(state_of(index).next_stream++ % (kStreamsPerDevice - 1));
    return stream_of(*queue_of(index, id));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const int index = checked_index(stream.device_index());
    auto& current = thread_state().stream[index];
    const auto before = stream_of(*queue_of(index, current));
    current = static_cast<uint8_t>(stream.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const { // overrides where this torch has it
    return queue_of(stream);
  }
  __attribute__((noinline)) c10::DeviceIndex deviceCount() const noexcept override {
    if (asked_by_autograd_engine(__builtin_return_address(0))) {
      return kMaxDevices;
    }
    return static_cast<c10::DeviceIndex>(device_count());
  }
  c10::DeviceCapability getDeviceCapability(Device /*device*/) const override {
    return {}; // every type that the CPU's kernels take
  }
  bool queryStream(const c10::Stream& stream) const override {
    check_alive(checked_index(stream.device_index()));
    return queue_of(stream)->idle();
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    queue_of(stream)->drain();
    check_alive(stream.device_index());
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    synchronize_device(checked_index(index));
  }
  void recordDataPtrOnStream(const DataPtr& data, const c10::Stream& stream) const override {
    allocator().recordStream(data, stream);
  }

  void destroyEvent(void* event, const c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** handle, const c10::Stream& stream, const c10::DeviceIndex index, const c10::EventFlag flag)
      const override {
    TORCH_CHECK(
        index < 0 || index == stream.device_index(),
        "sim: the event was created on device ", static_cast<int>(index), " and cannot be recorded on a stream of ",
        static_cast<int>(stream.device_index()));
    auto* queue = queue_of(stream);
    check_alive(queue->device);
    if (*handle == nullptr) {
      *handle = new Event();
    }
    auto& event = *static_cast<Event*>(*handle);
    Ticket ticket = queue->now();
    std::shared_ptr<std::atomic<Clock::rep>> reached;
    const bool timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    if (timed) {
      reached = std::make_shared<std::atomic<Clock::rep>>(Clock::now().time_since_epoch().count());
      if (!ticket.done()) {
        ticket = queue->push([reached] { reached->store(Clock::now().time_since_epoch().count()); });
      }
    }
    std::lock_guard<std::mutex> lock(event.mutex);
    event.timed = timed;
    event.recorded = true;
    event.ticket = ticket;
    event.reached = std::move(reached);
  }
  void block(void* handle, const c10::Stream& stream) const override {
    auto* queue = queue_of(stream);
    check_alive(queue->device);
    const auto ticket = ticket_of(handle);
    if (!ticket.done() && ticket.queue != queue) {
      queue->push([ticket] { ticket.wait(); });
    }
  }
  bool queryEvent(void* handle) const override {
    const auto ticket = ticket_of(handle);
    if (ticket.queue != nullptr) {
      check_alive(ticket.queue->device);
    }
    return ticket.done();
  }
  void synchronizeEvent(void* handle) const override {
    const auto ticket = ticket_of(handle);
    ticket.wait();
    if (ticket.queue != nullptr) {
      check_alive(ticket.queue->device);
    }
  }
  // Milliseconds from the first event to the second.
  double elapsedTime(void* first, void* second, const c10::DeviceIndex /*index*/) const override {
    return std::chrono::duration<double, std::milli>(Clock::duration(reached(second) - reached(first))).count();
  }

 private:
  static Ticket ticket_of(void* handle) {
    if (handle == nullptr) {
      return {}; // never recorded: done
    }
    auto& event = *static_cast<Event*>(handle);
    std::lock_guard<std::mutex> lock(event.mutex);
    return event.ticket;
  }
  static Clock::rep reached(void* handle) {
    TORCH_CHECK(handle != nullptr, "sim: both events must be recorded before calculating elapsed time");
    auto& event = *static_cast<Event*>(handle);
    std::lock_guard<std::mutex> lock(event.mutex);
    TORCH_CHECK(event.timed, "sim: both events must be created with enable_timing=True");
    TORCH_CHECK(event.ticket.done(), "sim: both events must be completed before calculating elapsed time");
    return event.reached->load();
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, SimGuard);

// Wraps a generator of the CPU, so that a seed gives the CPU's numbers.
struct SimGenerator final : c10::GeneratorImpl {
  SimGenerator(int index, at::Generator host)
      : GeneratorImpl(Device(kSim, static_cast<c10::DeviceIndex>(index)), DispatchKeySet(DispatchKey::PrivateUse1)),
        host(std::move(host)) {}

  at::CPUGeneratorImpl& host_impl() const {
    return *static_cast<at::CPUGeneratorImpl*>(host.unsafeGetGeneratorImpl());
  }

  template <typename F>
  auto locked(F&& use) const {
    std::lock_guard<std::mutex> lock(host_impl().mutex_);
    return use(host_impl());
  }

  static c10::DeviceType device_type() {
    return kSim;
  }
  void set_current_seed(uint64_t seed) override {
    locked([&](auto& generator) { generator.set_current_seed(seed); return 0; });
  }
  void set_offset(uint64_t offset) override {
    locked([&](auto& generator) { generator.set_offset(offset); return 0; });
  }
  uint64_t get_offset() const override {
    return locked([&](auto& generator) { return generator.get_offset(); });
  }
  uint64_t current_seed() const override {
    return locked([&](auto& generator) { return generator.current_seed(); });
  }
  uint64_t seed() override {
    return locked([&](auto& generator) { return generator.seed(); });
  }
  void set_state(const c10::TensorImpl& state) override {
    locked([&](auto& generator) { generator.set_state(state); return 0; });
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return locked([&](auto& generator) { return generator.get_state(); });
  }

  const at::Generator host; // kernels lock its own mutex
  // Held by a kernel from before it draws until it is known to succeed, so that what it drew can be given back.
  std::mutex drawing;

 private:
  SimGenerator* clone_impl() const override {
    auto state = get_state();
    auto copy = std::make_unique<SimGenerator>(device().index(), at::detail::createCPUGenerator());
    copy->set_state(*state);
    return copy.release();
  }
};

at::Generator new_generator(int index) {
  return at::make_generator<SimGenerator>(index, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(int64_t index) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>();
    for (int i = 0; i < kMaxDevices; ++i) {
      all->push_back(new_generator(i));
    }
    return all;
  }();
  return (*generators)[checked_index(index)];
}

SimGenerator& sim_generator(const at::Generator& generator) {
  return *static_cast<SimGenerator*>(generator.unsafeGetGeneratorImpl());
}

// What a storage holds is replaced only once its new memory exists: out of memory leaves it as it was.
void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  if (bytes == storage->nbytes() && (bytes == 0 || storage->data() != nullptr)) {
    return;
  }
  const int device = storage->device().index();
  auto data = allocate_on(device, bytes);
  const size_t kept = storage->data() == nullptr ? 0 : std::min(bytes, storage->nbytes());
  if (kept > 0) {
    check_alive(device);
    current_queue(device)->drain();
    std::memcpy(data.get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

struct SimHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    return index < device_count();
  }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_device(index);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return static_cast<c10::DeviceIndex>(exchange_device(index));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(checked_index(index));
  }
  // A pointer does not say whose memory it is without a search; torch asks for memory of other libraries only.
  Device getDeviceFromPtr(void* /*data*/) const override {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "sim: the device of a bare pointer is not known");
  }
  bool isPinnedPtr(const void* data) const override {
    return host_memory().is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &host_memory();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// 7. Kernels
//
// A kernel of this device is the CPU's kernel, run on CPU tensors that alias the device memory. Around it, in order:
//   check      all operands are on one device, or may be on the host
//   drain      the current stream of that device
//   save       the bytes of what will be written, and the generator
//   run        the CPU's kernel
//   allocate   device memory for every output and for every out= that grew; this is where memory runs out
//   commit     copy the outputs in
// Anything that raises puts the saved state back, so the operator may be tried again.

// Redispatches to the CPU must reach kernels: neither autograd, nor autocast, nor a Python mode may see them.
struct HostDispatch {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard no_python{
      DispatchKeySet({DispatchKey::Python, DispatchKey::PythonTLSSnapshot})};
};

// From the check of a device to the end of its time: one kernel.
class KernelScope {
 public:
  KernelScope(int device, const std::string& name) : device_(device), outer_(thread_state().kernel) {
    check_alive(device);
    current_queue(device)->drain();
    check_alive(device);
    begun_ = Clock::now();
    thread_state().kernel = &name;
  }
  ~KernelScope() {
    thread_state().kernel = outer_;
  }
  KernelScope(const KernelScope&) = delete;
  KernelScope& operator=(const KernelScope&) = delete;

  // Books the device's engine for the kernel's time and waits for its end.
  void finish() {
    const double own = thread_state().kernel_seconds;
    finish(own >= 0 ? own : settings().kernel_seconds.load(std::memory_order_relaxed));
  }
  void finish(double seconds) {
    if (seconds > 0) {
      sleep_until(state_of(device_).compute.book(begun_, seconds));
    }
  }

 private:
  const int device_;
  const std::string* const outer_;
  TimePoint begun_;
};

// Number of elements from the first to the last, gaps included.
int64_t extent(at::IntArrayRef sizes, at::IntArrayRef strides) {
  int64_t last = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) {
      return 0;
    }
    last += (sizes[i] - 1) * strides[i];
  }
  return last + 1;
}

size_t extent_bytes(const Tensor& tensor) {
  return static_cast<size_t>(extent(tensor.sizes(), tensor.strides())) * tensor.element_size();
}

char* raw_bytes(const Tensor& tensor) {
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  return static_cast<char*>(const_cast<void*>(storage->data())) + tensor.storage_offset() * tensor.element_size();
}

bool is_sim(const Tensor& tensor) {
  return tensor.device().type() == kSim;
}

Tensor new_sim_tensor(int device, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const auto itemsize = c10::elementSize(dtype);
  const auto bytes = static_cast<size_t>(extent(sizes, strides)) * itemsize;
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), bytes, allocate_on(device, bytes), &allocator(), /*resizable=*/true);
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), DispatchKeySet(DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return tensor;
}

// The CPU's view of the tensors of one kernel call, and what is needed to undo it.
class HostView {
 public:
  explicit HostView(int device) : device_(device) {}

  // Returns a CPU tensor on the same bytes. Tensors that share a storage share it on the CPU as well: kernels check
  // operands for overlap by their storages. Host tensors are returned as they are.
  Tensor alias(const Tensor& tensor) {
    if (!tensor.defined() || !is_sim(tensor)) {
      return tensor;
    }
    switch (tensor.layout()) {
      case c10::kStrided:
        break;
      case c10::kSparse:
        return alias_coo(tensor);
      case c10::kSparseCsr:
      case c10::kSparseCsc:
      case c10::kSparseBsr:
      case c10::kSparseBsc:
        return alias_compressed(tensor);
      case c10::kJagged:
      default:
        TORCH_CHECK_NOT_IMPLEMENTED(false, "sim: no kernels for layout ", tensor.layout());
    }
    if (tensor.is_nested()) {
      return alias_nested(tensor);
    }
    auto* impl = tensor.unsafeGetTensorImpl();
    auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
    const auto needed =
        extent_bytes(tensor) + (tensor.numel() == 0 ? 0 : tensor.storage_offset() * tensor.element_size());
    TORCH_CHECK(
        needed <= storage->nbytes(),
        "sim: a kernel reads ", needed, " bytes of a storage that has ", storage->nbytes(),
        " (was its memory freed with untyped_storage().resize_(0)?)");
    auto host = at::detail::make_tensor<c10::TensorImpl>(
        host_storage(storage), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
    auto* host_impl = host.unsafeGetTensorImpl();
    host_impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    if (impl->is_wrapped_number()) {
      host_impl->set_wrapped_number(true);
    }
    if (tensor.is_conj()) {
      host._set_conj(true);
    }
    if (tensor.is_neg()) {
      host._set_neg(true);
    }
    return host;
  }

  // As alias(), for a tensor that the kernel writes: saves its bytes.
  Tensor writable_alias(const Tensor& tensor, bool keep_bytes = true) {
    if (!tensor.defined() || !is_sim(tensor)) {
      return tensor;
    }
    if (tensor.layout() != c10::kStrided || tensor.is_nested()) {
      // Its parts may be replaced rather than written: work on a copy and take over the parts.
      auto host = alias(tensor).clone();
      written_.push_back({tensor, host, nullptr});
      return host;
    }
    auto host = alias(tensor);
    const auto bytes = keep_bytes ? extent_bytes(tensor) : 0;
    if (bytes > 0) {
      Saved saved{raw_bytes(tensor), bytes, std::unique_ptr<char[]>(new char[bytes])};
      std::memcpy(saved.bytes.get(), saved.target, bytes);
      saved_.push_back(std::move(saved));
    }
    auto* storage = host.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    written_.push_back({tensor, host, storage->data()});
    return host;
  }

  // Returns a device tensor with the CPU tensor's contents, strides and bits.
  Tensor to_device(const Tensor& host) {
    if (!host.defined() || is_sim(host)) {
      return host;
    }
    if (host.layout() == c10::kSparse) {
      return coo_to_device(host);
    }
    if (host.layout() != c10::kStrided) {
      return compressed_to_device(host);
    }
    if (host.is_nested()) {
      return nested_to_device(host);
    }
    TORCH_CHECK_NOT_IMPLEMENTED(
        host.unsafeGetTensorImpl()->has_storage() && !host.is_quantized(),
        "sim: a kernel returned a tensor of a kind that the simulated device does not have: ", host.toString());
    auto tensor = new_sim_tensor(device_, host.sizes(), host.strides(), host.scalar_type());
    if (const auto bytes = extent_bytes(host)) {
      std::memcpy(raw_bytes(tensor), raw_bytes(host), bytes);
    }
    if (host.is_conj()) {
      tensor._set_conj(true);
    }
    if (host.is_neg()) {
      tensor._set_neg(true);
    }
    return tensor;
  }

  // Returns a result that stays on the host, copied if it is one of the aliases.
  Tensor unaliased(const Tensor& host) const {
    if (host.defined() && host.layout() == c10::kStrided && !host.is_nested()) {
      for (const auto& [sim, alias] : storages_) {
        if (host.storage().unsafeGetStorageImpl() == alias.unsafeGetStorageImpl()) {
          return host.clone();
        }
      }
    }
    return host;
  }

  // Gives the written device tensors what the kernel made of their aliases. First everything that may fail.
  void commit() {
    struct Grown {
      const Written* written;
      DataPtr data;
      size_t bytes;
    };
    std::vector<Grown> grown;
    std::vector<std::pair<Tensor, Tensor>> replaced; // the parts of sparse tensors
    for (const auto& written : written_) {
      if (written.data_before == nullptr && written.host.layout() != c10::kStrided) {
        replaced.emplace_back(written.tensor, to_device(written.host));
      } else if (written.host.is_nested()) {
        replaced.emplace_back(written.tensor, to_device(written.host));
      } else if (host_data(written.host) != written.data_before) {
        const auto bytes = static_cast<size_t>(
            (written.host.storage_offset() + extent(written.host.sizes(), written.host.strides())) *
            static_cast<int64_t>(written.host.element_size()));
        grown.push_back({&written, allocate_on(device_, bytes), bytes});
      }
    }
    for (auto& [written, data, bytes] : grown) {
      std::memcpy(data.get(), host_data(written->host), bytes);
      auto* storage = written->tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      storage->set_data_ptr_noswap(std::move(data));
      storage->set_nbytes(bytes);
    }
    for (auto& [target, source] : replaced) {
      take_parts(target, source);
    }
    for (const auto& written : written_) {
      if (written.host.layout() == c10::kStrided && !written.host.is_nested() &&
          (written.host.sizes() != written.tensor.sizes() || written.host.strides() != written.tensor.strides())) {
        written.tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
            written.host.sizes(), written.host.strides(), written.host.storage_offset());
      }
    }
  }

  void restore() noexcept {
    for (auto saved = saved_.rbegin(); saved != saved_.rend(); ++saved) {
      std::memcpy(saved->target, saved->bytes.get(), saved->size);
    }
  }

  // The dispatch key whose kernels take the aliases made so far.
  DispatchKey key() const {
    return key_;
  }

 private:
  struct Written {
    Tensor tensor;
    Tensor host;
    const void* data_before; // of the alias's storage: another one afterwards means that the kernel made it grow
  };
  struct Saved {
    char* target;
    size_t size;
    std::unique_ptr<char[]> bytes;
  };

  static const void* host_data(const Tensor& host) {
    return host.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()->data();
  }

  c10::Storage host_storage(c10::StorageImpl* storage) {
    for (const auto& [sim, host] : storages_) {
      if (sim == storage) {
        return host;
      }
    }
    // Resizable: an out= that has to grow gets CPU memory, which commit() notices.
    auto host = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), storage->nbytes(),
        DataPtr(const_cast<void*>(storage->data()), c10::DeviceType::CPU), c10::GetCPUAllocator(),
        /*resizable=*/true));
    storages_.emplace_back(storage, host);
    return host;
  }

  Tensor alias_coo(const Tensor& tensor);
  Tensor alias_compressed(const Tensor& tensor);
  Tensor alias_nested(const Tensor& tensor);
  Tensor coo_to_device(const Tensor& host);
  Tensor compressed_to_device(const Tensor& host);
  Tensor nested_to_device(const Tensor& host);
  static void take_parts(const Tensor& target, const Tensor& source);

  const int device_;
  DispatchKey key_ = DispatchKey::CPU;
  std::vector<std::pair<c10::StorageImpl*, c10::Storage>> storages_;
  std::vector<Written> written_;
  std::vector<Saved> saved_;
};

// Sparse and nested tensors are a few strided ones and metadata; the metadata of nested tensors is on the host anyway.

Tensor HostView::alias_coo(const Tensor& tensor) {
  key_ = DispatchKey::SparseCPU;
  auto* impl = at::sparse::get_sparse_impl(tensor);
  auto host = at::_sparse_coo_tensor_unsafe(
      alias(impl->indices()), alias(impl->values()), tensor.sizes(), tensor.options().device(c10::kCPU));
  at::sparse::get_sparse_impl(host)->set_coalesced(impl->coalesced());
  return host;
}

Tensor HostView::coo_to_device(const Tensor& host) {
  auto* host_impl = at::sparse::get_sparse_impl(host);
  auto tensor = at::detail::make_tensor<at::SparseTensorImpl>(
      DispatchKeySet(DispatchKey::SparsePrivateUse1), host.dtype());
  auto* impl = at::sparse::get_sparse_impl(tensor);
  impl->resize_(host_impl->sparse_dim(), host_impl->dense_dim(), host.sizes());
  impl->set_indices_and_values_unsafe(to_device(host_impl->indices()), to_device(host_impl->values()));
  impl->set_coalesced(host_impl->coalesced());
  return tensor;
}

Tensor HostView::alias_compressed(const Tensor& tensor) {
  key_ = DispatchKey::SparseCsrCPU;
  auto* impl = at::sparse_csr::get_sparse_csr_impl(tensor);
  return at::_sparse_compressed_tensor_unsafe(
      alias(impl->compressed_indices()), alias(impl->plain_indices()), alias(impl->values()), tensor.sizes(),
      tensor.options().device(c10::kCPU));
}

Tensor HostView::compressed_to_device(const Tensor& host) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      at::sparse_csr::is_sparse_compressed(host), "sim: a kernel returned a tensor of layout ", host.layout());
  auto* host_impl = at::sparse_csr::get_sparse_csr_impl(host);
  auto tensor = at::detail::make_tensor<at::SparseCsrTensorImpl>(
      DispatchKeySet(DispatchKey::SparseCsrPrivateUse1), Device(kSim, static_cast<c10::DeviceIndex>(device_)),
      host.layout(), host.dtype());
  at::sparse_csr::get_sparse_csr_impl(tensor)->set_member_tensors(
      to_device(host_impl->compressed_indices()), to_device(host_impl->plain_indices()),
      to_device(host_impl->values()), host.sizes());
  return tensor;
}

Tensor HostView::alias_nested(const Tensor& tensor) {
  key_ = DispatchKey::NestedTensorCPU;
  auto* impl = at::native::get_nested_tensor_impl(tensor);
  return at::_nested_view_from_buffer(
      alias(impl->get_unsafe_storage_as_tensor()), impl->get_nested_sizes(), impl->get_nested_strides(),
      impl->get_storage_offsets());
}

Tensor HostView::nested_to_device(const Tensor& host) {
  auto* impl = at::native::get_nested_tensor_impl(host);
  auto buffer = to_device(impl->get_unsafe_storage_as_tensor());
  return at::detail::make_tensor<at::native::NestedTensorImpl>(
      std::move(buffer), impl->get_nested_sizes(), impl->get_nested_strides(), impl->get_storage_offsets());
}

void HostView::take_parts(const Tensor& target, const Tensor& source) {
  if (target.layout() == c10::kSparse) {
    auto* to = at::sparse::get_sparse_impl(target);
    auto* from = at::sparse::get_sparse_impl(source);
    to->raw_resize_(from->sparse_dim(), from->dense_dim(), source.sizes());
    to->set_indices_and_values_unsafe(from->indices(), from->values());
    to->set_coalesced(from->coalesced());
  } else if (target.is_nested()) {
    auto buffer = at::native::get_nested_tensor_impl(target)->get_unsafe_storage_as_tensor();
    buffer.copy_(at::native::get_nested_tensor_impl(source)->get_unsafe_storage_as_tensor());
  } else {
    auto* from = at::sparse_csr::get_sparse_csr_impl(source);
    at::sparse_csr::get_sparse_csr_impl(target)->set_member_tensors(
        from->compressed_indices(), from->plain_indices(), from->values(), source.sizes());
  }
}

// A kernel for operators that the CPU lacks or that need the device's generator: takes and leaves CPU tensors.
using HostKernel = void (*)(Stack*, const std::optional<at::Generator>&);

// What has to be known about an operator, from its schema alone but for the short tables below.
struct Plan {
  std::string name;
  std::vector<bool> writes; // per argument
  std::vector<bool> may_be_on_host; // per argument
  std::vector<int> returns_argument; // per return: the index of the argument that it is, or -1
  std::vector<bool> stays_on_host; // per return
  std::optional<size_t> generator; // index of the argument
  bool is_view = false; // a return aliases an argument that is not written
  bool draws = false; // needs a generator
  bool asks_for_gradients = false; // the CPU's kernel looks at requires_grad
  bool keeps_bytes = true; // save what is written (not needed where a kernel overwrites everything and cannot fail)
  HostKernel host_kernel = nullptr;
};

struct ArgumentName {
  const char* operator_name;
  const char* argument;
};

// Written, though the schema does not say so: running statistics.
constexpr ArgumentName kSilentlyWritten[] = {
    {"aten::native_batch_norm", "running_mean"},
    {"aten::native_batch_norm", "running_var"},
    {"aten::batch_norm_update_stats", "running_mean"},
    {"aten::batch_norm_update_stats", "running_var"},
    {"aten::batch_norm_gather_stats", "running_mean"},
    {"aten::batch_norm_gather_stats", "running_var"},
    {"aten::batch_norm_gather_stats_with_counts", "running_mean"},
    {"aten::batch_norm_gather_stats_with_counts", "running_var"},
};

// Read by CUDA's kernels from the host as well: lengths and sizes that decide the shapes of what follows.
constexpr ArgumentName kOnHost[] = {
    {"aten::_pack_padded_sequence", "lengths"},
    {"aten::_pack_padded_sequence_backward", "batch_sizes"},
    {"aten::_ctc_loss", "input_lengths"},
    {"aten::_ctc_loss", "target_lengths"},
    {"aten::_ctc_loss_backward", "input_lengths"},
    {"aten::_ctc_loss_backward", "target_lengths"},
    {"aten::_foreach_addcdiv", "scalars"},
    {"aten::_foreach_addcdiv_", "scalars"},
    {"aten::_foreach_addcmul", "scalars"},
    {"aten::_foreach_addcmul_", "scalars"},
    {"aten::nested_from_padded", "cpu_nested_shape_example"},
    {"aten::_nested_from_padded", "cpu_nested_shape_example"},
};

template <size_t N>
bool lists(const ArgumentName (&table)[N], const std::string& operator_name, const std::string& argument) {
  for (const auto& entry : table) {
    if (operator_name == entry.operator_name && argument == entry.argument) {
      return true;
    }
  }
  return false;
}

const std::unordered_map<std::string, HostKernel>& host_kernels();

Plan make_plan(const c10::OperatorHandle& op) {
  Plan plan;
  const auto& schema = op.schema();
  const auto& base_name = schema.name();
  plan.name = base_name;
  if (!schema.overload_name().empty()) {
    plan.name += "." + schema.overload_name();
  }
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& argument = arguments[i];
    const auto* alias = argument.alias_info();
    plan.writes.push_back((alias != nullptr && alias->isWrite()) || lists(kSilentlyWritten, base_name, argument.name()));
    // Indices may be on the host, as on CUDA; they are the only lists of optional tensors there are.
    const auto type = argument.type()->str();
    plan.may_be_on_host.push_back(type == "Tensor?[]" || type == "List[Optional[Tensor]]" || lists(kOnHost, base_name, argument.name()));
    if (argument.name() == "generator" && argument.type()->str().find("Generator") != std::string::npos) {
      plan.generator = i;
    }
  }
  for (const auto& result : schema.returns()) {
    int source = -1;
    if (const auto* alias = result.alias_info()) {
      for (size_t i = 0; i < arguments.size(); ++i) {
        const auto* other = arguments[i].alias_info();
        if (other == nullptr || other->beforeSets() != alias->beforeSets()) {
          continue;
        }
        source = static_cast<int>(i);
        plan.is_view = plan.is_view || !other->isWrite();
      }
    }
    plan.returns_argument.push_back(source);
    // The batch sizes of a packed sequence are host data on every device.
    plan.stays_on_host.push_back(
        base_name == "aten::_pack_padded_sequence" && plan.returns_argument.size() == 2);
  }
  const auto& special = host_kernels();
  if (const auto found = special.find(plan.name); found != special.end()) {
    plan.host_kernel = found->second;
  }
  plan.draws = plan.generator.has_value() || plan.name == "aten::native_dropout";
  // Keeps what its backward needs (and would read beyond the end of) only if an operand requires a gradient.
  plan.asks_for_gradients = base_name == "aten::_sparse_mm_reduce_impl";
  plan.keeps_bytes = plan.name != "aten::fill_.Scalar" && plan.name != "aten::zero_";
  return plan;
}

const Plan& plan_of(const c10::OperatorHandle& op) {
  static auto* mutex = new std::mutex(); // guards plans; a leaf
  static auto* plans = new std::unordered_map<c10::OperatorName, std::unique_ptr<Plan>>();
  {
    std::lock_guard<std::mutex> lock(*mutex);
    const auto found = plans->find(op.operator_name());
    if (found != plans->end()) {
      return *found->second;
    }
  }
  auto plan = std::make_unique<Plan>(make_plan(op));
  std::lock_guard<std::mutex> lock(*mutex);
  return *plans->emplace(op.operator_name(), std::move(plan)).first->second;
}

template <typename F>
void for_each_tensor(const IValue& value, F&& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      visit(value.toTensor());
    }
  } else if (value.isTensorList() || value.isList()) {
    for (const IValue& element : value.toListRef()) {
      if (element.isTensor() && element.toTensor().defined()) {
        visit(element.toTensor());
      }
    }
  }
}

// Rebuilds a value with each tensor replaced.
template <typename F>
IValue map_tensors(const IValue& value, F&& change) {
  if (value.isTensor()) {
    return change(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> changed;
    for (const IValue& element : value.toListRef()) {
      changed.push_back(change(element.toTensor()));
    }
    return changed;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const IValue& element : value.toListRef()) {
      changed.push_back(element.isTensor() ? std::optional<Tensor>(change(element.toTensor())) : std::nullopt);
    }
    return changed;
  }
  return value;
}

struct Placement {
  int device;
  bool results_on_host; // the operator was told to put its result there
};

// The device that a kernel runs on. Raises what CUDA raises if its operands are not together. Zero-dimensional host
// tensors count as numbers.
Placement place(const Plan& plan, const IValue* arguments, size_t n) {
  std::optional<Device> common;
  std::optional<Device> asked_for;
  std::optional<Device> sim;
  for (size_t i = 0; i < n; ++i) {
    if (arguments[i].isDevice()) {
      asked_for = arguments[i].toDevice();
      continue;
    }
    for_each_tensor(arguments[i], [&](const Tensor& tensor) {
      const auto device = tensor.device();
      if (device.type() == kSim) {
        sim = sim.has_value() ? sim : device;
      } else if (device.is_cpu() && !plan.writes[i] && (tensor.dim() == 0 || plan.may_be_on_host[i])) {
        return;
      }
      if (!common.has_value()) {
        common = device;
      }
      TORCH_CHECK(
          *common == device, "Expected all tensors to be on the same device, but found at least two devices, ",
          *common, " and ", device, "! (when running ", plan.name, ")");
    });
  }
  if (sim.has_value()) {
    return {checked_index(sim->index()), asked_for.has_value() && asked_for->is_cpu()};
  }
  return {checked_index(asked_for.has_value() && asked_for->type() == kSim ? asked_for->index() : -1), false};
}

// Holds a generator for a kernel; gives back what was drawn unless keep() was called.
class Draw {
 public:
  explicit Draw(at::Generator generator) : generator_(std::move(generator)) {
    auto& sim = sim_generator(generator_);
    if (!sim.drawing.try_lock()) {
      GilRelease no_gil;
      sim.drawing.lock();
    }
    before_ = sim.host_impl().clone();
  }
  ~Draw() {
    auto& sim = sim_generator(generator_);
    if (before_ != nullptr) {
      auto& host = sim.host_impl();
      std::lock_guard<std::mutex> lock(host.mutex_);
      host.set_engine(before_->engine());
      host.set_next_float_normal_sample(before_->next_float_normal_sample());
      host.set_next_double_normal_sample(before_->next_double_normal_sample());
    }
    sim.drawing.unlock();
  }
  Draw(const Draw&) = delete;
  Draw& operator=(const Draw&) = delete;
  const at::Generator& host() const {
    return sim_generator(generator_).host;
  }
  void keep() {
    before_ = nullptr;
  }

 private:
  at::Generator generator_;
  std::shared_ptr<at::CPUGeneratorImpl> before_;
};

void run_kernel(const c10::OperatorHandle& op, const Plan& plan, Stack* stack) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !plan.is_view, "sim: ", plan.name, " returns a view of its argument and is not known to the simulated device");
  const size_t n_arguments = plan.writes.size();
  const size_t first = stack->size() - n_arguments;
  const auto where = place(plan, stack->data() + first, n_arguments);
  KernelScope scope(where.device, plan.name);

  // Kept: what is returned as it came, and the owners of the memory that the aliases point to.
  const std::vector<IValue> given(stack->begin() + static_cast<std::ptrdiff_t>(first), stack->end());
  std::optional<Draw> draw;
  HostView view(where.device);
  HostDispatch host_dispatch;
  if (plan.draws) {
    auto generator = plan.generator.has_value() && given[*plan.generator].isGenerator()
        ? given[*plan.generator].toGenerator()
        : default_generator(where.device);
    TORCH_CHECK(
        generator.device().type() == kSim, "Expected a '", Device(kSim), "' device type for generator but found '",
        generator.device().type(), "'");
    draw.emplace(std::move(generator));
  }
  try {
    for (size_t i = 0; i < n_arguments; ++i) {
      auto& value = (*stack)[first + i];
      if (value.isDevice()) {
        value = Device(c10::kCPU);
      } else if (plan.generator == i) {
        value = draw->host();
      } else if (plan.writes[i]) {
        value = map_tensors(value, [&](const Tensor& t) { return view.writable_alias(t, plan.keeps_bytes); });
      } else {
        value = map_tensors(value, [&](const Tensor& t) {
          auto host = view.alias(t);
          if (plan.asks_for_gradients && is_sim(t) && t.requires_grad()) {
            host.set_requires_grad(true);
          }
          return host;
        });
      }
    }
    if (plan.host_kernel != nullptr) {
      plan.host_kernel(stack, draw.has_value() ? std::optional<at::Generator>(draw->host()) : std::nullopt);
    } else {
      op.redispatchBoxed(DispatchKeySet(view.key()), stack);
    }
    const size_t n_returns = plan.returns_argument.size();
    const size_t first_return = stack->size() - n_returns;
    for (size_t i = 0; i < n_returns; ++i) {
      auto& value = (*stack)[first_return + i];
      if (plan.returns_argument[i] >= 0) {
        value = given[plan.returns_argument[i]];
      } else if (where.results_on_host || plan.stays_on_host[i]) {
        value = map_tensors(value, [&](const Tensor& t) { return view.unaliased(t); });
      } else {
        value = map_tensors(value, [&](const Tensor& t) { return view.to_device(t); });
      }
    }
    view.commit();
  } catch (...) {
    view.restore();
    throw;
  }
  if (draw.has_value()) {
    draw->keep();
    draw.reset();
  }
  scope.finish();
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  run_kernel(op, plan_of(op), stack);
}

// The same for operators registered by name: the plan is made once and found without a search.
class NamedFallback final : public c10::OperatorKernel {
 public:
  void operator()(const c10::OperatorHandle& op, DispatchKeySet /*keys*/, Stack* stack) {
    auto* plan = plan_.load(std::memory_order_acquire);
    if (C10_UNLIKELY(plan == nullptr)) {
      plan = &plan_of(op);
      plan_.store(plan, std::memory_order_release);
    }
    run_kernel(op, *plan, stack);
  }

 private:
  std::atomic<const Plan*> plan_{nullptr};
};

// ---------------------------------------------------------------------------------------------------------------------
// Kernels that the CPU does not have under the name that torch calls on accelerators. They do what the CPU's own path
// does, in its order of operations.

template <typename... Results>
void leave(Stack* stack, size_t n_arguments, Results&&... results) {
  torch::jit::drop(*stack, n_arguments);
  torch::jit::push(*stack, std::forward<Results>(results)...);
}

Tensor tensor_or_none(const IValue& value) {
  return value.isTensor() ? value.toTensor() : Tensor();
}

// A bias may be missing; gates + bias in the order of the CPU's linear layers.
Tensor with_bias(const Tensor& gates, const Tensor& bias) {
  return bias.defined() ? gates + bias : gates;
}

// (input_gates, hidden_gates, cx, input_bias?, hidden_bias?) -> (hy, cy, workspace: the activated gates)
void lstm_cell(Stack* stack, const std::optional<at::Generator>& /*generator*/) {
  const auto arguments = torch::jit::last(*stack, 5).vec();
  const auto cx = arguments[2].toTensor();
  const auto gates = with_bias(arguments[1].toTensor(), tensor_or_none(arguments[4])) +
      with_bias(arguments[0].toTensor(), tensor_or_none(arguments[3]));
  auto parts = gates.chunk(4, 1);
  const auto in = parts[0].sigmoid();
  const auto forget = parts[1].sigmoid();
  const auto cell = parts[2].tanh();
  const auto out = parts[3].sigmoid();
  auto cy = (forget * cx).add_(in * cell);
  auto hy = out * cy.tanh();
  leave(stack, 5, std::move(hy), std::move(cy), at::cat({in, forget, cell, out}, 1));
}

// (grad_hy?, grad_cy?, cx, cy, workspace, has_bias) -> (grad_gates, grad_cx, grad_bias)
void lstm_cell_backward(Stack* stack, const std::optional<at::Generator>& /*generator*/) {
  const auto arguments = torch::jit::last(*stack, 6).vec();
  const auto cx = arguments[2].toTensor();
  const auto cy = arguments[3].toTensor();
  const auto parts = arguments[4].toTensor().chunk(4, 1);
  const auto& in = parts[0];
  const auto& forget = parts[1];
  const auto& cell = parts[2];
  const auto& out = parts[3];
  auto grad_hy = tensor_or_none(arguments[0]);
  auto grad_cy = tensor_or_none(arguments[1]);
  if (!grad_hy.defined() && !grad_cy.defined()) {
    leave(stack, 6, Tensor(), Tensor(), Tensor());
    return;
  }
  grad_hy = grad_hy.defined() ? grad_hy : at::zeros_like(cx);
  grad_cy = grad_cy.defined() ? grad_cy : at::zeros_like(cy);
  const auto tanh_cy = cy.tanh();
  const auto grad_cell_state = grad_hy * out * (1 - tanh_cy * tanh_cy) + grad_cy;
  const auto grad_gates = at::cat(
      {grad_cell_state * cell * in * (1 - in), grad_cell_state * cx * forget * (1 - forget),
       grad_cell_state * in * (1 - cell * cell), grad_hy * tanh_cy * out * (1 - out)},
      1);
  const auto grad_bias = arguments[5].toBool() ? grad_gates.sum(0) : Tensor();
  leave(stack, 6, grad_gates, grad_cell_state * forget, grad_bias);
}

// (input_gates, hidden_gates, hx, input_bias?, hidden_bias?) -> (hy, workspace: reset, input, new, hx, hidden new)
void gru_cell(Stack* stack, const std::optional<at::Generator>& /*generator*/) {
  const auto arguments = torch::jit::last(*stack, 5).vec();
  const auto hx = arguments[2].toTensor();
  const auto input = with_bias(arguments[0].toTensor(), tensor_or_none(arguments[3])).chunk(3, 1);
  const auto hidden = with_bias(arguments[1].toTensor(), tensor_or_none(arguments[4])).chunk(3, 1);
  const auto reset = (hidden[0] + input[0]).sigmoid();
  const auto update = (hidden[1] + input[1]).sigmoid();
  const auto fresh = (input[2] + hidden[2] * reset).tanh();
  auto hy = (hx - fresh).mul_(update).add_(fresh);
  leave(stack, 5, std::move(hy), at::cat({reset, update, fresh, hx, hidden[2]}, 1));
}

// (grad_hy, workspace, has_bias) -> (grad_input_gates, grad_hidden_gates, grad_hx, grad_input_bias, grad_hidden_bias)
void gru_cell_backward(Stack* stack, const std::optional<at::Generator>& /*generator*/) {
  const auto arguments = torch::jit::last(*stack, 3).vec();
  const auto grad = arguments[0].toTensor();
  const auto parts = arguments[1].toTensor().chunk(5, 1);
  const auto& reset = parts[0];
  const auto& update = parts[1];
  const auto& fresh = parts[2];
  const auto& hx = parts[3];
  const auto& hidden_fresh = parts[4];
  const auto grad_update = grad * (hx - fresh) * update * (1 - update);
  const auto grad_fresh = grad * (1 - update) * (1 - fresh * fresh);
  const auto grad_reset = grad_fresh * hidden_fresh * reset * (1 - reset);
  const auto grad_input = at::cat({grad_reset, grad_update, grad_fresh}, 1);
  const auto grad_hidden = at::cat({grad_reset, grad_update, grad_fresh * reset}, 1);
  const bool has_bias = arguments[2].toBool();
  leave(
      stack, 3, grad_input, grad_hidden, grad * update, has_bias ? grad_input.sum(0) : Tensor(),
      has_bias ? grad_hidden.sum(0) : Tensor());
}

// (input, p, train?) -> (output, mask), drawn from the device's generator
void dropout(Stack* stack, const std::optional<at::Generator>& generator) {
  const auto arguments = torch::jit::last(*stack, 3).vec();
  const auto input = arguments[0].toTensor();
  const double keep = 1 - arguments[1].toDouble();
  if (!arguments[2].isNone() && !arguments[2].toBool()) {
    leave(stack, 3, input.clone(), at::ones_like(input, input.options().dtype(at::kBool)));
    return;
  }
  auto mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(keep, generator);
  auto output = input.mul(mask).mul_(keep == 0 ? 0. : 1. / keep);
  leave(stack, 3, std::move(output), std::move(mask));
}

// What a backend may override for convolutions: the CPU's convolution.
void convolution(Stack* stack, const std::optional<at::Generator>& /*generator*/) {
  const auto a = torch::jit::last(*stack, 9).vec();
  const auto bias = tensor_or_none(a[2]);
  auto output = at::convolution(
      a[0].toTensor(), a[1].toTensor(), bias.defined() ? std::optional<Tensor>(bias) : std::nullopt,
      a[3].toIntVector(), a[4].toIntVector(), a[5].toIntVector(), a[6].toBool(), a[7].toIntVector(), a[8].toInt());
  leave(stack, 9, std::move(output));
}

void convolution_backward(Stack* stack, const std::optional<at::Generator>& /*generator*/) {
  const auto a = torch::jit::last(*stack, 10).vec();
  const auto mask = a[9].toBoolList();
  const auto grad = a[0].toTensor();
  auto results = at::convolution_backward(
      grad, a[1].toTensor(), a[2].toTensor(), at::IntArrayRef({grad.size(1)}), a[3].toIntVector(),
      a[4].toIntVector(), a[5].toIntVector(), a[6].toBool(), a[7].toIntVector(), a[8].toInt(),
      {mask[0], mask[1], mask[2]});
  leave(stack, 10, std::get<0>(results), std::get<1>(results), std::get<2>(results));
}

// (query, key, value, attn_bias?, dropout_p, is_causal, return_debug_mask, scale?) -> (output, logsumexp, and what
// other devices keep for the backward pass). See choose_attention().
void attention(Stack* stack, const std::optional<at::Generator>& /*generator*/) {
  const auto a = torch::jit::last(*stack, 8).vec();
  auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), a[4].toDouble(), a[5].toBool(),
      a[3].toOptional<Tensor>(), a[7].toOptional<double>());
  const int64_t none = 0;
  leave(stack, 8, output, logsumexp, Tensor(), Tensor(), none, none, Tensor(), Tensor(), Tensor());
}

// (grad_out, query, key, value, attn_bias, grad_input_mask, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k,
// dropout_p, is_causal, philox_seed, philox_offset, scale?) -> the gradients of query, key, value, attn_bias
void attention_backward(Stack* stack, const std::optional<at::Generator>& /*generator*/) {
  const auto a = torch::jit::last(*stack, 17).vec();
  const auto bias = tensor_or_none(a[4]);
  auto gradients = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      a[0].toTensor(), a[1].toTensor(), a[2].toTensor(), a[3].toTensor(), a[6].toTensor(), a[7].toTensor(),
      a[12].toDouble(), a[13].toBool(), bias.defined() ? std::optional<Tensor>(bias) : std::nullopt,
      a[16].toOptional<double>());
  leave(stack, 17, std::get<0>(gradients), std::get<1>(gradients), std::get<2>(gradients), Tensor());
}

// Attention is composed of products unless a device has a kernel for it. The CPU has one, which rounds differently;
// to give its values, it is used in the same cases. Only shapes and types are looked at.
int64_t choose_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask, double dropout_p,
    bool is_causal, std::optional<double> scale, bool enable_gqa) {
  const auto choice =
      at::native::_fused_sdp_choice_cpp(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa);
  const auto chosen = choice == static_cast<int64_t>(at::SDPBackend::flash_attention)
      ? at::SDPBackend::overrideable
      : static_cast<at::SDPBackend>(choice);
  return static_cast<int64_t>(chosen);
}

const std::unordered_map<std::string, HostKernel>& host_kernels() {
  static auto* kernels = new std::unordered_map<std::string, HostKernel>{
      {"aten::_thnn_fused_lstm_cell", &lstm_cell},
      {"aten::_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward},
      {"aten::_thnn_fused_gru_cell", &gru_cell},
      {"aten::_thnn_fused_gru_cell_backward", &gru_cell_backward},
      {"aten::native_dropout", &dropout},
      {"aten::_scaled_dot_product_fused_attention_overrideable", &attention},
      {"aten::_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward},
      {"aten::convolution_overrideable", &convolution},
      {"aten::convolution_backward_overrideable", &convolution_backward},
  };
  return *kernels;
}

// ---------------------------------------------------------------------------------------------------------------------
// 8. Copies

// Waits on a link until `bytes` have passed; nothing else passes meanwhile.
void occupy(Timeline& link, size_t bytes, double bytes_per_second) {
  if (bytes_per_second > 0) {
    sleep_until(link.book(Clock::now(), static_cast<double>(bytes) / bytes_per_second));
  }
}

Timeline* link_between(const Device& source, const Device& target, double& bandwidth) {
  if (source == target) {
    return nullptr;
  }
  if (source.is_privateuseone() && target.is_privateuseone()) {
    bandwidth = settings().peer_bandwidth.load(std::memory_order_relaxed);
    return &state_of(source.index()).to_peer[target.index()];
  }
  bandwidth = settings().host_bandwidth.load(std::memory_order_relaxed);
  return source.is_privateuseone() ? &state_of(source.index()).to_host : &state_of(target.index()).from_host;
}

MemoryRef memory_of(const Tensor& tensor) {
  if (!is_sim(tensor)) {
    return nullptr;
  }
  auto* block = block_of(tensor.unsafeGetTensorImpl()->unsafe_storage().data_ptr());
  return block == nullptr ? nullptr : block->memory;
}

// Same bytes in the same order: one memcpy does it.
bool same_layout(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() &&
      ((a.is_contiguous() && b.is_contiguous()) ||
       (a.is_non_overlapping_and_dense() && b.is_non_overlapping_and_dense() && a.strides() == b.strides()));
}

void check_reads(const Tensor& tensor) {
  if (is_sim(tensor)) {
    HostView(tensor.device().index()).alias(tensor);
  }
}

// Queues the copy if it is one that is asynchronous on CUDA; returns whether it was.
bool copy_queued(const Tensor& target, const Tensor& source) {
  const bool from_sim = is_sim(source);
  const bool to_sim = is_sim(target);
  if (!same_layout(target, source) || (!from_sim && !host_memory().is_pinned(raw_bytes(source))) ||
      (!to_sim && !host_memory().is_pinned(raw_bytes(target)))) {
    return false;
  }
  check_reads(target);
  check_reads(source);
  const auto bytes = static_cast<size_t>(source.numel()) * source.element_size();
  double bandwidth = 0;
  auto* link = link_between(source.device(), target.device(), bandwidth);
  const int from_index = from_sim ? source.device().index() : -1;
  const int to_index = to_sim ? target.device().index() : -1;
  // Between devices the copy belongs to the source's stream, and the target's stream waits for it, as on CUDA.
  auto* queue = current_queue(from_sim ? from_index : to_index);
  auto* other = from_sim && to_sim && from_index != to_index ? current_queue(to_index) : nullptr;
  if (other != nullptr && !other->idle()) {
    queue->push([before = other->now()] { before.wait(); });
  }
  auto item = [to = raw_bytes(target), from = raw_bytes(source), bytes, link, bandwidth, from_index, to_index,
               kept_target = memory_of(target), kept_source = memory_of(source)] {
    if (link != nullptr) {
      occupy(*link, bytes, bandwidth);
    }
    if ((from_index < 0 || !device_broken(from_index)) && (to_index < 0 || !device_broken(to_index))) {
      std::memcpy(to, from, bytes);
    }
  };
  const auto ticket = queue->push(std::move(item));
  if (!from_sim) {
    host_memory().record(raw_bytes(source), ticket);
  }
  if (!to_sim) {
    host_memory().record(raw_bytes(target), ticket);
  }
  if (other != nullptr) {
    other->push([ticket] { ticket.wait(); });
  }
  return true;
}

const std::string kCopyName = "aten::copy_";

void copy_strided(const Tensor& target, const Tensor& source, bool non_blocking) {
  if (target.numel() == 0 || target.is_same(source)) {
    return;
  }
  for (const auto& tensor : {target, source}) {
    if (is_sim(tensor)) {
      check_alive(checked_index(tensor.device().index()));
    } else {
      TORCH_CHECK(tensor.device().is_cpu(), "sim: cannot copy between ", source.device(), " and ", target.device());
    }
  }
  if (C10_UNLIKELY(bad_fork)) {
    TORCH_CHECK(false, "sim: copies were queued when this process was forked; the simulator cannot be used in it");
  }
  if (non_blocking && copy_queued(target, source)) {
    return;
  }
  const auto run = [&](int device) {
    HostView view(device);
    HostDispatch host_dispatch;
    auto to = view.alias(target);
    const auto from = view.alias(source);
    if (same_layout(to, from)) {
      std::memmove(raw_bytes(to), raw_bytes(from), static_cast<size_t>(to.numel()) * to.element_size());
    } else {
      to.copy_(from);
    }
  };
  if (source.device() == target.device()) {
    KernelScope scope(target.device().index(), kCopyName);
    run(target.device().index());
    scope.finish();
    return;
  }
  for (const auto& tensor : {target, source}) {
    if (is_sim(tensor)) {
      current_queue(tensor.device().index())->drain();
      check_alive(tensor.device().index());
    }
  }
  double bandwidth = 0;
  auto* link = link_between(source.device(), target.device(), bandwidth);
  occupy(*link, static_cast<size_t>(source.numel()) * source.element_size(), bandwidth);
  run(is_sim(target) ? target.device().index() : source.device().index());
}

// ---------------------------------------------------------------------------------------------------------------------
// 9. Operators registered by name

int index_or_current(std::optional<Device> device) {
  TORCH_CHECK(!device.has_value() || device->type() == kSim, "sim: asked for memory on ", *device);
  return checked_index(device.has_value() ? device->index() : -1);
}

void check_not_pinned(std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
}

// Sets the current device for allocations by torch's own helpers, and the name that faults know them by.
class AllocationScope {
 public:
  AllocationScope(int device, const std::string& name)
      : device_(exchange_device(device)), kernel_(std::exchange(thread_state().kernel, &name)) {}
  ~AllocationScope() {
    thread_state().device = device_;
    thread_state().kernel = kernel_;
  }
  AllocationScope(const AllocationScope&) = delete;
  AllocationScope& operator=(const AllocationScope&) = delete;

 private:
  const int device_;
  const std::string* const kernel_;
};

const std::string kEmptyName = "aten::empty.memory_format";

Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "sim: expected strided layout, got ", *layout);
  check_not_pinned(pin_memory);
  AllocationScope scope(index_or_current(device), kEmptyName);
  return at::detail::empty_generic(
      size, &allocator(), DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), memory_format);
}

const std::string kEmptyStridedName = "aten::empty_strided";

Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout,
    std::optional<Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(c10::layout_or_default(layout) == c10::kStrided, "sim: expected strided layout, got ", *layout);
  check_not_pinned(pin_memory);
  AllocationScope scope(index_or_current(device), kEmptyStridedName);
  return at::detail::empty_strided_generic(
      size, stride, &allocator(), DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

Tensor efficient_zero_tensor(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<Device> device,
    std::optional<bool> /*pin_memory*/) {
  at::native::ZeroTensorAllocator none(Device(kSim, static_cast<c10::DeviceIndex>(index_or_current(device))));
  const auto keys = DispatchKeySet(DispatchKey::PrivateUse1) | DispatchKeySet(DispatchKey::ZeroTensor);
  return at::detail::empty_generic(size, &none, keys, c10::dtype_or_default(dtype), std::nullopt);
}

// Makes the storage large enough for the tensor's extent, then changes the tensor.
void resize_to(
    const Tensor& tensor, at::IntArrayRef size, std::optional<at::IntArrayRef> stride, int64_t storage_offset) {
  auto* impl = tensor.unsafeGetTensorImpl();
  int64_t n_elements = 1;
  for (const auto length : size) {
    n_elements *= length;
  }
  const auto elements = stride.has_value() ? extent(size, *stride) : n_elements;
  const auto bytes = elements == 0
      ? size_t{0}
      : static_cast<size_t>(storage_offset + elements) * static_cast<size_t>(tensor.element_size());
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    TORCH_CHECK(storage->resizable(), "Trying to resize storage that is not resizable");
    resize_storage(storage, bytes);
  }
  if (stride.has_value()) {
    impl->set_sizes_and_strides(size, *stride, storage_offset);
  } else {
    impl->set_sizes_contiguous(size);
  }
}

const std::string kResizeName = "aten::resize_";

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> memory_format) {
  at::detail::check_size_nonnegative(size);
  if (self.sizes() != size) {
    AllocationScope scope(self.device().index(), kResizeName);
    resize_to(self, size, std::nullopt, self.storage_offset());
  }
  if (memory_format.has_value()) {
    TORCH_CHECK(
        *memory_format != at::MemoryFormat::Preserve, "Unsupported memory format Preserve for resize_");
    self.unsafeGetTensorImpl()->empty_tensor_restride(*memory_format);
  }
  return self;
}

Tensor& set_storage_view(
    Tensor& self, at::Storage source, int64_t storage_offset, at::IntArrayRef size, at::IntArrayRef stride) {
  TORCH_CHECK(
      source.device() == self.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
      "\" to a storage on different device \"", source.device(), "\".  This is no longer allowed; the devices must match.");
  TORCH_CHECK(storage_offset >= 0, "Tensor: invalid storage offset ", storage_offset);
  at::detail::check_size_nonnegative(size);
  std::vector<int64_t> strides(stride.begin(), stride.end());
  if (strides.size() != size.size()) {
    TORCH_CHECK(stride.empty(), "unequal size length (", size.size(), ") and stride length (", stride.size(), ")");
    const auto contiguous = c10::contiguous_strides(size);
    strides.assign(contiguous.begin(), contiguous.end());
  }
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  resize_to(self, size, at::IntArrayRef(strides), storage_offset);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto length = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_storage_view(self, std::move(source), 0, {length}, {});
}

Tensor& set_nothing(Tensor& self) {
  auto storage = c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), 0, allocate_on(self.device().index(), 0), &allocator(),
      /*resizable=*/true));
  return set_storage_view(self, std::move(storage), 0, {0}, {});
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.is_nested() || source.is_nested()) {
    return at::native::copy_nested_(self, source, non_blocking);
  }
  if (self.layout() != c10::kStrided || source.layout() != c10::kStrided) {
    return at::native::copy_(self, source, non_blocking);
  }
  TORCH_CHECK(self.defined() && source.defined(), "copy_: both tensors must be defined");
  if (source._is_zerotensor()) {
    return self.zero_();
  }
  copy_strided(self, source.sizes() == self.sizes() ? source : source.expand(self.sizes()), non_blocking);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& target, bool non_blocking) {
  copy_strided(target, self.sizes() == target.sizes() ? self : self.expand(target.sizes()), non_blocking);
  return target;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, /*non_blocking=*/false);
}

const std::string kItemName = "aten::_local_scalar_dense";

// A read of one element: a copy to the host, not a kernel.
at::Scalar local_scalar_dense(const Tensor& self) {
  const int device = self.device().index();
  check_alive(device);
  current_queue(device)->drain();
  check_alive(device);
  HostView view(device);
  HostDispatch host_dispatch;
  return at::_local_scalar_dense(view.alias(self));
}

void record_stream(Tensor& self, c10::Stream stream) {
  allocator().recordStream(self.unsafeGetTensorImpl()->unsafe_storage().data_ptr(), stream);
}

Tensor view(const Tensor& self, at::IntArrayRef size) {
  return at::native::view(self, size);
}

Tensor as_strided(
    const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> storage_offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, storage_offset);
}

Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::as_strided_tensorimpl(self, size, stride, self.storage_offset());
}

bool is_set_to(const Tensor& self, const Tensor& other) {
  return at::native::is_set_to(self, other);
}

Tensor unfold(const Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &efficient_zero_tensor);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_storage_view);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_", &set_nothing);
  m.impl("is_set_to", &is_set_to);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
  m.impl("_nested_view_from_buffer", &at::native::_nested_view_from_buffer);
}

// Sparse tensors: what reads and makes their parts. The parts are device tensors.
TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("empty.memory_format", &at::native::empty_sparse);
  m.impl("_sparse_coo_tensor_with_dims", &at::native::new_with_dims_sparse);
  m.impl("_sparse_coo_tensor_with_dims_and_tensors", TORCH_FN(at::native::new_with_dims_and_tensor_sparse_symint));
  m.impl("_indices", &at::native::_indices_sparse);
  m.impl("_values", &at::native::_values_sparse);
  m.impl("indices", &at::native::indices_sparse);
  m.impl("values", &at::native::values_sparse);
  m.impl("_nnz", &at::native::_nnz_sparse);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse);
  m.impl("dense_dim", &at::native::dense_dim_sparse);
  m.impl("_dimI", &at::native::sparse_dim_sparse);
  m.impl("_dimV", &at::native::dense_dim_sparse);
  m.impl("is_coalesced", &at::native::is_coalesced_sparse);
  m.impl("_coalesced_", &at::native::_coalesced_sparse_);
  m.impl("permute", &at::native::permute_sparse_coo);
  m.impl("unsqueeze", &at::native::unsqueeze_sparse);
  m.impl("copy_", &at::native::copy_sparse_wrapper_);
  m.impl("copy_sparse_to_sparse_", &at::native::copy_sparse_);
}

TORCH_LIBRARY_IMPL(aten, SparseCsrPrivateUse1, m) {
  m.impl("empty.memory_format", &at::native::empty_sparse_compressed);
  m.impl("crow_indices", &at::native::crow_indices_sparse_csr);
  m.impl("col_indices", &at::native::col_indices_sparse_csr);
  m.impl("ccol_indices", &at::native::ccol_indices_sparse_csr);
  m.impl("row_indices", &at::native::row_indices_sparse_csr);
  m.impl("values", &at::native::values_sparse_csr);
  m.impl("_nnz", &at::native::_nnz_sparse_csr);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse_csr);
  m.impl("dense_dim", &at::native::dense_dim_sparse_csr);
  m.impl("select.int", &at::native::select_sparse_csr);
  m.impl("copy_", &at::native::copy_sparse_compressed_);
}

// Nested tensors: one buffer on the device, sizes on the host.
TORCH_LIBRARY_IMPL(aten, NestedTensorPrivateUse1, m) {
  m.impl("_nested_tensor_size", &at::native::_nested_tensor_size);
  m.impl("_nested_tensor_strides", &at::native::_nested_tensor_strides);
  m.impl("_nested_tensor_storage_offsets", &at::native::_nested_tensor_storage_offsets);
  m.impl("alias", &at::native::alias_nested);
  m.impl("detach", &at::native::detach);
  m.impl("view", &at::native::view_nested);
  m.impl("transpose.int", &at::native::transpose_nested);
  m.impl("select.int", &at::native::select_nested);
  m.impl("unbind.int", &at::native::NestedTensor_unbind);
  m.impl("unsqueeze", &at::native::unsqueeze_nested);
  m.impl("squeeze", &at::native::squeeze_nested);
  m.impl("values", &at::native::values_nested);
  m.impl("copy_", &at::native::copy_nested_);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, SparsePrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, SparseCsrPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, NestedTensorPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

// Autocast follows torch's own lists for accelerators.
#define SIM_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIM_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIM_FLOAT32_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at; // the lists name its types bare
  AT_FORALL_LOWER_PRECISION_FP(SIM_LOWER_PRECISION)
  AT_FORALL_FP32(SIM_FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIM_FLOAT32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SIM_PROMOTE)
}

// ---------------------------------------------------------------------------------------------------------------------
// 10. Registration and the Python module

// Composite kernels come before a backend's fallback. Where they write to an argument they would do it in several
// kernels, with failures in between, so those operators get the fallback by name, as one kernel; so do operators whose
// functional form torch composes for backends though the CPU has a kernel. Left alone are composites that autograd
// differentiates through, views, what only changes metadata, and functional composites.
bool wants_fallback(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  if (!op.hasSchema() || name.name.rfind("aten::", 0) != 0 || name.name == "aten::resize_as_" ||
      name.name == "aten::_resize_output_" || name.name == "aten::copy_" || name.name == "aten::set_data" ||
      name.name == "aten::detach_" || name.name == "aten::record_stream") {
    return false;
  }
  if (op.hasKernelForDispatchKey(DispatchKey::CompositeImplicitAutograd) ||
      op.hasKernelForDispatchKey(DispatchKey::PrivateUse1) || op.hasTag(at::Tag::inplace_view)) {
    return false;
  }
  bool writes = false;
  bool has_generator = false;
  for (const auto& argument : op.schema().arguments()) {
    if (const auto* alias = argument.alias_info()) {
      if (!alias->isWrite()) {
        return false;
      }
      writes = true;
    }
    has_generator = has_generator || argument.type()->str().find("Generator") != std::string::npos;
  }
  if (host_kernels().count(op.schema().name()) != 0) {
    return true;
  }
  if (op.hasTag(at::Tag::nondeterministic_seeded) && !has_generator) {
    return false; // would draw from the CPU's generator; its parts draw from the device's
  }
  // Convolutions: torch would choose among backends' kernels by device; the CPU's choice is what is wanted.
  return writes || op.hasKernelForDispatchKey(DispatchKey::CPU) || name.name == "aten::convolution" ||
      name.name == "aten::convolution_backward";
}

// The same for the other layouts: whatever the CPU has a kernel for, unless it is a view.
bool wants_fallback(const c10::OperatorHandle& op, DispatchKey sim_key, DispatchKey cpu_key) {
  if (!op.hasSchema() || op.operator_name().name.rfind("aten::", 0) != 0 || !op.hasKernelForDispatchKey(cpu_key) ||
      op.hasKernelForDispatchKey(sim_key) || op.hasTag(at::Tag::inplace_view)) {
    return false;
  }
  for (const auto& argument : op.schema().arguments()) {
    if (argument.alias_info() != nullptr && !argument.alias_info()->isWrite()) {
      return false;
    }
  }
  return true;
}

template <typename Wanted>
void register_fallback(DispatchKey key, Wanted&& wanted) {
  // Lives as long as the process: its destructor would take the registrations back.
  auto* library = new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (op.has_value() && wanted(*op)) {
      const auto full_name = c10::toString(name);
      library->impl(
          full_name.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<NamedFallback>()));
    }
  }
}

void register_operators() {
  register_fallback(DispatchKey::PrivateUse1, [](const auto& op) { return wants_fallback(op); });
  for (const auto& [sim_key, cpu_key] :
       {std::pair{DispatchKey::SparsePrivateUse1, DispatchKey::SparseCPU},
        std::pair{DispatchKey::SparseCsrPrivateUse1, DispatchKey::SparseCsrCPU},
        std::pair{DispatchKey::NestedTensorPrivateUse1, DispatchKey::NestedTensorCPU}}) {
    register_fallback(sim_key, [keys = std::pair{sim_key, cpu_key}](const auto& op) {
      return wants_fallback(op, keys.first, keys.second);
    });
  }
  at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose_attention);
}

void register_backend() {
  c10::SetAllocator(kSim, &allocator());
  at::setHostAllocator(kSim, &host_memory());
  at::RegisterPrivateUse1HooksInterface(new SimHooks());
  register_operators();
  pthread_atfork(&before_fork, &after_fork_in_parent, &after_fork_in_child);
}

std::vector<size_t> live_bytes() {
  std::vector<size_t> bytes;
  std::lock_guard<std::mutex> lock(memory_mutex());
  for (int i = 0; i < device_count(); ++i) {
    bytes.push_back(state_of(i).allocated + state_of(i).pending);
  }
  return bytes;
}

void clear_faults() {
  std::lock_guard<std::mutex> lock(memory_mutex());
  auto& all = faults();
  all.nth.clear();
  all.shares.clear();
  all.first_tries.clear();
  ++all.generation;
  all.injected = 0;
  any_fault = false;
  for (int i = 0; i < kMaxDevices; ++i) {
    state_of(i).broken = false;
  }
}

// Only while no device byte is live, which the caller has made sure of.
void configure(int count, size_t capacity, double host_bandwidth, double peer_bandwidth, double kernel_seconds) {
  clear_faults();
  allocator().emptyCache();
  {
    std::lock_guard<std::mutex> lock(memory_mutex());
    for (int i = 0; i < kMaxDevices; ++i) {
      auto& device = state_of(i);
      device.capacity = capacity;
      device.stats = {};
      device.compute.reset();
      device.from_host.reset();
      device.to_host.reset();
      for (auto& link : device.to_peer) {
        link.reset();
      }
    }
  }
  auto& current = settings();
  current.host_bandwidth = host_bandwidth;
  current.peer_bandwidth = peer_bandwidth;
  current.kernel_seconds = kernel_seconds;
  current.device_count = count;
  ++current.epoch;
}

void set_capacity(int64_t index, size_t capacity) {
  std::vector<MemoryRef> dropped;
  const int i = checked_index(index);
  std::lock_guard<std::mutex> lock(memory_mutex());
  auto& device = state_of(i);
  device.capacity = capacity;
  const auto used = device.allocated + device.pending;
  shrink_cache(device, capacity > used ? capacity - used : 0, dropped);
}

int checked_fault_device(int64_t index) {
  return index < 0 ? -1 : checked_index(index);
}

void fail_allocation(int64_t n, int64_t index) {
  const int device = checked_fault_device(index);
  std::lock_guard<std::mutex> lock(memory_mutex());
  faults().nth.push_back({device, n});
  any_fault = true;
}

void fail_share(double share, uint64_t seed, int64_t index) {
  const int device = checked_fault_device(index);
  std::lock_guard<std::mutex> lock(memory_mutex());
  faults().shares.push_back({device, share, std::mt19937_64(seed)});
  any_fault = true;
}

void fail_first_tries(int64_t index) {
  const int device = checked_fault_device(index);
  std::lock_guard<std::mutex> lock(memory_mutex());
  faults().first_tries.push_back(device);
  any_fault = true;
}

void break_device(int64_t index) {
  TORCH_CHECK(index >= 0, "sim: expected a device index, got ", index);
  const int device = checked_index(index);
  state_of(device).broken = true;
  for_each_queue(device, [](Queue& queue) { queue.wake(); });
}

int64_t injected_faults() {
  std::lock_guard<std::mutex> lock(memory_mutex());
  return faults().injected;
}

const std::string kRunKernelName = "managed_exec.sim.run_kernel";

void occupy_engine(double seconds) {
  KernelScope scope(current_device(), kRunKernelName);
  scope.finish(seconds);
}

double exchange_kernel_seconds(double seconds) {
  return std::exchange(thread_state().kernel_seconds, seconds);
}

void hold_stream(int64_t device, int64_t stream) {
  queue_of(checked_index(device), static_cast<int>(stream))->hold();
}

void release_stream(int64_t device, int64_t stream) {
  queue_of(static_cast<int>(device), static_cast<int>(stream))->release();
}

std::pair<size_t, size_t> memory_info(int64_t index) {
  return allocator().getMemoryInfo(static_cast<c10::DeviceIndex>(checked_index(index)));
}

} // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.attr("MAX_DEVICES") = kMaxDevices;
  m.def("register_backend", torch::wrap_pybind_function(register_backend));
  m.def("configure", torch::wrap_pybind_function(configure));
  m.def("live_bytes", torch::wrap_pybind_function(live_bytes));
  m.def("set_capacity", torch::wrap_pybind_function(set_capacity));
  m.def("device_count", torch::wrap_pybind_function(device_count));
  m.def("current_device", torch::wrap_pybind_function(current_device));
  m.def("exchange_device", torch::wrap_pybind_function(exchange_device));
  m.def("set_device", torch::wrap_pybind_function(set_device));
  m.def("synchronize", torch::wrap_pybind_function([](int64_t index) { synchronize_device(checked_index(index)); }));
  m.def("memory_info", torch::wrap_pybind_function(memory_info));
  m.def("default_generator", torch::wrap_pybind_function([](int64_t index) { return default_generator(index); }));
  m.def("in_bad_fork", torch::wrap_pybind_function([]() { return bad_fork.load(); }));
  m.def("run_kernel", torch::wrap_pybind_function(occupy_engine));
  m.def("exchange_kernel_seconds", torch::wrap_pybind_function(exchange_kernel_seconds));
  m.def("hold_stream", torch::wrap_pybind_function(hold_stream));
  m.def("release_stream", torch::wrap_pybind_function(release_stream));
  m.def("fail_allocation", torch::wrap_pybind_function(fail_allocation));
  m.def("fail_share", torch::wrap_pybind_function(fail_share));
  m.def("fail_first_tries", torch::wrap_pybind_function(fail_first_tries));
  m.def("break_device", torch::wrap_pybind_function(break_device));
  m.def("clear_faults", torch::wrap_pybind_function(clear_faults));
  m.def("injected_faults", torch::wrap_pybind_function(injected_faults));
}
