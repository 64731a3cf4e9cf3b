// A simulated accelerator: torch's PrivateUse1 backend, with a thread for each stream.
//
// It runs late and out of order wherever a real device may: each stream is a queue that a thread of its own works off,
// and each operation waits a random time first. What it keeps apart, a program must keep apart, too:
//
//   device memory   PROT_NONE where tensors point; streams write through a second mapping. A host access is a crash.
//   copies          run on the stream. Of pageable memory they block the caller, of page-locked memory they do not.
//   events          count their recordings; waiting means the last recording made before the wait.
//   allocator       a freed block goes back to the stream that it was allocated on, and may be used again at once.
//   processes       a forked child must not call the device, and a process or a thread may be told not to.
//   everything else is computed by the CPU backend, and waits for the current stream first.
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <sys/mman.h>
#include <torch/library.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

using namespace c10;
using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;

static constexpr int NUM_DEVICES = 2;
static constexpr auto TYPE = DeviceType::PrivateUse1;
static constexpr size_t PAGE = 4096;

static std::atomic<bool> available{false};       // whether torch may find the devices
static std::atomic<bool> waits_refused{false};   // whether a copy that blocks is an error
static std::atomic<int64_t> max_delay{0};        // microseconds before each operation, at most
static std::atomic<uint64_t> seed{0}, seeding{0};  // of the delays; `seeding` counts how often it was set

// --- Who may call -------------------------------------------------------------------------------------------------

static std::atomic<bool> process_refused{false};  // a forked child, as with CUDA; or one that was told so
static std::atomic<uint64_t> only_thread{0};      // the thread that may call; 0: all may
static std::atomic<uint64_t> num_threads{1};
static thread_local uint64_t this_thread = 0;     // its number, given when it is first needed
static std::atomic<bool> taking_torchs{false};    // whether threads that call now are autograd's
static thread_local bool is_torchs_own = false;

static uint64_t thread_number() { return this_thread ? this_thread : this_thread = num_threads++; }
static const char* refusal() {  // of a call that comes now; null: it may
  if (taking_torchs) is_torchs_own = true;
  if (process_refused) return "the simulated device was called in a process that must not touch it";
  if (uint64_t only = only_thread; only && only != thread_number() && !is_torchs_own)
    return "the simulated device was called by another thread than the one that may";
  return nullptr;
}
static void check_caller() {
  if (auto reason = refusal()) TORCH_CHECK(false, reason);
}

// --- Streams and events -------------------------------------------------------------------------------------------

class Queue {  // a stream: what it is given runs in order, in a thread of its own
 public:
  explicit Queue(uint64_t number) : number_(number) { std::thread([this] { work(); }).detach(); }
  void push(std::function<void()> operation) {
    Lock lock(mutex_);
    waiting_.push_back(std::move(operation));
    changed_.notify_all();
  }
  bool idle() {
    Lock lock(mutex_);
    return waiting_.empty() && !busy_;
  }
  void wait() {
    Lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_.empty() && !busy_; });
  }

 private:
  void work() {
    std::mt19937_64 draw;
    uint64_t seen = ~0ull;
    for (;;) {
      std::function<void()> operation;
      {
        Lock lock(mutex_);
        changed_.wait(lock, [&] { return !waiting_.empty(); });
        operation = std::move(waiting_.front());
        waiting_.pop_front();
        busy_ = true;
      }
      if (seen != seeding) draw.seed(seed + 1000 * number_), seen = seeding;
      if (int64_t most = max_delay) std::this_thread::sleep_for(std::chrono::microseconds(draw() % most));
      operation();
      operation = nullptr;  // what it holds is released before the stream counts as idle
      Lock lock(mutex_);
      busy_ = false;
      changed_.notify_all();
    }
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  bool busy_ = false;
  uint64_t number_;
};

static std::mutex queues_mutex;
static std::map<std::pair<int, StreamId>, Queue*> queues;  // never destroyed: their threads do not end
static std::atomic<StreamId> num_streams{1};                // 0 is the default stream of every device

static Queue& queue_of(int device, StreamId id) {
  Lock lock(queues_mutex);
  auto& found = queues[{device, id}];
  if (!found) found = new Queue(device * 100 + id);
  return *found;
}
template <class F>
static void each_queue(int device, F&& use) {  // device -1: of all
  std::vector<Queue*> found;
  {
    Lock lock(queues_mutex);
    for (auto& [key, queue] : queues)
      if (device < 0 || key.first == device) found.push_back(queue);
  }
  for (auto queue : found) use(*queue);
}

struct Recording {  // an event
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, reached = 0;
  Clock::time_point when;  // of the last recording that was reached
  bool done() const { return reached >= recorded; }
};
using Shared = std::shared_ptr<Recording>;
static Shared& event_of(void* event) { return *static_cast<Shared*>(event); }

static thread_local int current_device = 0;
static thread_local std::array<StreamId, NUM_DEVICES> current_stream{};
static Queue& current_queue(int device) { return queue_of(device, current_stream[device]); }

struct Guard final : impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(DeviceType) {}
  static int index(Device device) { return device.has_index() ? device.index() : current_device; }
  static Stream stream(int device, StreamId id) { return Stream(Stream::UNSAFE, Device(TYPE, device), id); }

  DeviceType type() const override { return TYPE; }
  DeviceIndex deviceCount() const noexcept override { return available ? NUM_DEVICES : 0; }
  Device getDevice() const override { check_caller(); return Device(TYPE, current_device); }
  void setDevice(Device device) const override { check_caller(); current_device = index(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index(device); }
  Device exchangeDevice(Device device) const override {
    check_caller();
    return Device(TYPE, std::exchange(current_device, index(device)));
  }
  Stream getStream(Device device) const override { check_caller(); return stream(index(device), current_stream[index(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(index(device), 0); }
  Stream getNewStream(Device device, int) const override { check_caller(); return stream(index(device), num_streams++); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream next) const override {
    check_caller();
    return stream(next.device_index(), std::exchange(current_stream[next.device_index()], next.id()));
  }
  bool queryStream(const Stream& asked) const override { check_caller(); return queue_of(asked.device_index(), asked.id()).idle(); }
  void synchronizeStream(const Stream& asked) const override { check_caller(); queue_of(asked.device_index(), asked.id()).wait(); }
  void synchronizeDevice(const DeviceIndex device) const override {
    check_caller();
    each_queue(device < 0 ? current_device : device, [](Queue& queue) { queue.wait(); });
  }
  void record(void** slot, const Stream& on, const DeviceIndex, const EventFlag) const override {
    check_caller();
    if (!*slot) *slot = new Shared(std::make_shared<Recording>());
    Shared event = event_of(*slot);
    Lock lock(event->mutex);
    queue_of(on.device_index(), on.id()).push([event, number = ++event->recorded] {
      Lock lock(event->mutex);
      event->reached = std::max(event->reached, number);
      event->when = Clock::now();
      event->changed.notify_all();
    });
  }
  void block(void* slot, const Stream& waiting) const override {
    check_caller();
    if (!slot) return;  // never recorded
    Shared event = event_of(slot);
    Lock lock(event->mutex);
    queue_of(waiting.device_index(), waiting.id()).push([event, number = event->recorded] {
      Lock lock(event->mutex);
      event->changed.wait(lock, [&] { return event->reached >= number; });
    });
  }
  bool queryEvent(void* slot) const override {
    check_caller();
    if (!slot) return true;
    Lock lock(event_of(slot)->mutex);
    return event_of(slot)->done();
  }
  void synchronizeEvent(void* slot) const override {
    check_caller();
    if (!slot) return;
    Shared event = event_of(slot);
    Lock lock(event->mutex);
    event->changed.wait(lock, [&, number = event->recorded] { return event->reached >= number; });
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    TORCH_CHECK(queryEvent(first) && queryEvent(second), "both events must be completed");
    return std::chrono::duration<double, std::milli>(event_of(second)->when - event_of(first)->when).count();
  }
  void destroyEvent(void* slot, const DeviceIndex) const noexcept override { delete static_cast<Shared*>(slot); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// --- Memory -------------------------------------------------------------------------------------------------------

struct Block {
  size_t bytes;
  char* writable;  // the second mapping
  int device;
  StreamId stream;
};
static std::mutex memory_mutex;
static std::map<uintptr_t, Block> blocks;  // by the address that tensors have; never unmapped
static std::map<std::tuple<int, StreamId, size_t>, std::vector<void*>> free_blocks;
static std::array<int64_t, NUM_DEVICES> allocated{}, reserved{};

static char* writable(const void* address) {
  Lock lock(memory_mutex);
  auto after = blocks.upper_bound(reinterpret_cast<uintptr_t>(address));
  TORCH_CHECK(after != blocks.begin(), "no device memory at this address");
  auto& [start, block] = *std::prev(after);
  size_t offset = reinterpret_cast<uintptr_t>(address) - start;
  TORCH_CHECK(offset <= block.bytes, "no device memory at this address");
  return block.writable + offset;
}
static void release(void* address) {
  Lock lock(memory_mutex);
  auto& block = blocks.at(reinterpret_cast<uintptr_t>(address));
  allocated[block.device] -= block.bytes;
  free_blocks[{block.device, block.stream, block.bytes}].push_back(address);
}
struct BlockAllocator final : Allocator {
  DataPtr allocate(size_t wanted) override {
    check_caller();
    Device device(TYPE, current_device);
    if (!wanted) return {nullptr, device};
    Block block{(wanted + PAGE - 1) / PAGE * PAGE, nullptr, current_device, current_stream[current_device]};
    Lock lock(memory_mutex);
    allocated[block.device] += block.bytes;
    auto& freed = free_blocks[{block.device, block.stream, block.bytes}];
    void* address = nullptr;
    if (!freed.empty()) {
      address = freed.back();
      freed.pop_back();
    } else {
      int file = memfd_create("simulated device", 0);
      TORCH_CHECK(ftruncate(file, block.bytes) == 0, "no memory");
      address = mmap(nullptr, block.bytes, PROT_NONE, MAP_SHARED, file, 0);
      void* second = mmap(nullptr, block.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      close(file);
      TORCH_CHECK(address != MAP_FAILED && second != MAP_FAILED, "no memory");
      block.writable = static_cast<char*>(second);
      blocks[reinterpret_cast<uintptr_t>(address)] = block;
      reserved[block.device] += block.bytes;
    }
    return {address, address, &release, device};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "device memory is copied by streams"); }
};
static BlockAllocator block_allocator;
REGISTER_ALLOCATOR(TYPE, &block_allocator)

static std::mutex pinned_mutex;
static std::map<uintptr_t, size_t> pinned;  // page-locked host memory: start, bytes

static bool is_pinned(const void* address) {
  Lock lock(pinned_mutex);
  auto after = pinned.upper_bound(reinterpret_cast<uintptr_t>(address));
  return after != pinned.begin() && reinterpret_cast<uintptr_t>(address) < std::prev(after)->first + std::prev(after)->second;
}
struct HostAllocator final : Allocator {
  DataPtr allocate(size_t wanted) override {
    check_caller();
    void* address = std::aligned_alloc(PAGE, (wanted + PAGE) / PAGE * PAGE);
    Lock lock(pinned_mutex);
    pinned[reinterpret_cast<uintptr_t>(address)] = wanted;
    return {address, address, &give_back, Device(kCPU)};
  }
  static void give_back(void* address) {
    {
      Lock lock(pinned_mutex);
      pinned.erase(reinterpret_cast<uintptr_t>(address));
    }
    std::shared_ptr<void> kept(address, std::free);  // until every stream did what it has to do now
    each_queue(-1, [&](Queue& queue) { queue.push([kept] {}); });
  }
  DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* into, const void* from, size_t bytes) const override { std::memcpy(into, from, bytes); }
};
static HostAllocator host_allocator;

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { check_caller(); return available; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { check_caller(); return available ? NUM_DEVICES : 0; }
  DeviceIndex getCurrentDevice() const override { check_caller(); return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { check_caller(); current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return std::exchange(current_device, device < 0 ? current_device : device);
  }
  bool isPinnedPtr(const void* address) const override { check_caller(); return is_pinned(address); }
  Allocator* getPinnedMemoryAllocator() const override {
    check_caller();
    TORCH_CHECK(available, "no accelerator is available");
    return &host_allocator;
  }
};

// --- Operations ---------------------------------------------------------------------------------------------------

static at::Tensor copy_from(const at::Tensor& from, const at::Tensor& into, bool non_blocking) {
  check_caller();
  if (!into.numel()) return into;
  at::Tensor source = from.sizes() == into.sizes() ? from : from.expand_as(into);
  auto address = [](const at::Tensor& tensor) {
    char* data = static_cast<char*>(const_cast<void*>(tensor.const_data_ptr()));
    return tensor.is_cpu() ? data : writable(data);
  };
  bool on_host = from.is_cpu() || into.is_cpu();
  bool waits = on_host && !(non_blocking && is_pinned((from.is_cpu() ? from : into).const_data_ptr()));
  TORCH_CHECK(!(waits && waits_refused), "called a synchronizing operation of the simulated device");
  Queue& queue = current_queue((from.is_cpu() ? into : from).device().index());
  queue.push([a = address(source), b = address(into), sizes = into.sizes().vec(), s = source.strides().vec(),
              t = into.strides().vec(), from_type = source.scalar_type(), into_type = into.scalar_type()] {
    InferenceMode plain;
    auto seen = at::from_blob(a, sizes, s, at::TensorOptions().dtype(from_type));
    at::from_blob(b, sizes, t, at::TensorOptions().dtype(into_type)).copy_(seen);
  });
  if (waits) queue.wait();
  return into;
}
static at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& into) {
  at::native::resize_(into, from.sizes(), std::nullopt);
  return const_cast<at::Tensor&>(into).copy_(from);
}
static at::Tensor empty(IntArrayRef size, std::optional<ScalarType> dtype, std::optional<Layout>,
                        std::optional<Device> device, std::optional<bool>, std::optional<MemoryFormat> format) {
  DeviceGuard guard(device_or_default(device));
  return at::detail::empty_generic(size, &block_allocator, DispatchKeySet(DispatchKey::PrivateUse1),
                                   dtype_or_default(dtype), format);
}
static at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<ScalarType> dtype,
                                std::optional<Layout>, std::optional<Device> device, std::optional<bool>) {
  DeviceGuard guard(device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &block_allocator, DispatchKeySet(DispatchKey::PrivateUse1),
                                           dtype_or_default(dtype));
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_and_resize);
  library.impl("_local_scalar_dense", [](const at::Tensor& tensor) { return tensor.cpu().item(); });
  library.impl("view", [](const at::Tensor& tensor, SymIntArrayRef size) {
    return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
  });
  library.impl("as_strided", [](const at::Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride,
                                std::optional<SymInt> offset) {
    return at::cpu::as_strided_symint(tensor, size, stride, offset);
  });
  library.impl("_reshape_alias", [](const at::Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride) {
    return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  });
  library.impl("resize_", [](const at::Tensor& tensor, SymIntArrayRef size, std::optional<MemoryFormat> format)
                              -> const at::Tensor& {
    return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
  });
  library.impl("set_.source_Storage_storage_offset",
               [](at::Tensor& tensor, at::Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride)
                   -> at::Tensor& { return at::cpu::set_(tensor, storage, offset, size, stride); });
}
static void on_the_cpu(const OperatorHandle& operation, torch::jit::Stack* stack) {
  at::native::cpu_fallback(operation, stack);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_cpu>());
}

// --- What Python asks for, by ctypes ------------------------------------------------------------------------------

extern "C" {
void register_hooks() {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  at::globalContext().lazyInitDevice(TYPE);  // before that torch takes no memory for page-locked
  pthread_atfork(nullptr, nullptr, [] { process_refused = true; });
}
void set_available(bool value) { available = value; }
void take_torchs_threads(bool value) {
  taking_torchs = value;
  is_torchs_own = false;
}
void refuse_process(bool value) { process_refused = value; }
void allow_only_this_thread(bool value) { only_thread = value ? thread_number() : 0; }
const char* refusal_of_caller() { return refusal(); }
int num_devices() { return available ? NUM_DEVICES : 0; }
void refuse_waits(bool value) { waits_refused = value; }
void set_delay(int64_t microseconds, uint64_t new_seed) {
  max_delay = microseconds;
  seed = new_seed;
  ++seeding;
}
void sleep_on_stream(int64_t microseconds) {
  current_queue(current_device).push([=] { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); });
}
void call_on_stream(void (*function)(void*), void* argument) {
  current_queue(current_device).push([=] { function(argument); });
}
int64_t allocated_bytes(int device) {
  Lock lock(memory_mutex);
  return allocated[device];
}
int64_t reserved_bytes(int device) {
  Lock lock(memory_mutex);
  return reserved[device];
}
int page_lock(uintptr_t address, size_t bytes) {  // codes are those of CUDA
  if (msync(reinterpret_cast<void*>(address), bytes, MS_ASYNC)) return 1;  // nothing is mapped there
  Lock lock(pinned_mutex);
  return pinned.emplace(address, bytes).second ? 0 : 712;
}
int page_unlock(uintptr_t address) {
  Lock lock(pinned_mutex);
  return pinned.erase(address) ? 0 : 713;
}
}
