// The device itself: memory on the host, the current device and stream of a thread, generators, hooks.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <cstdlib>
#include <cstring>

#include "counts.h"

namespace pretend {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

constexpr int MAX_DEVICES = 8;
inline const Device CPU(DeviceType::CPU);
inline thread_local DeviceIndex current_device = 0;
inline thread_local std::array<c10::StreamId, MAX_DEVICES> current_streams{};
inline std::atomic<c10::StreamId> last_stream{0};
// from a process that had used the device
inline bool forked = false;

inline DeviceIndex count_devices() {
  static const char* asked = std::getenv("PRETEND_DEVICES");
  static const int n = asked ? std::min(std::max(std::atoi(asked), 1), MAX_DEVICES) : 1;
  return n;
}

inline Device cuda(DeviceIndex index = -1) {
  if (index < 0) index = current_device;
  TORCH_CHECK(index < count_devices(), "CUDA error: invalid device ordinal");
  return Device(DeviceType::CUDA, index);
}

// ---- memory
struct Usage { std::atomic<long> bytes{0}, peak{0}; };
inline std::array<Usage, MAX_DEVICES> usage;

inline void use(DeviceIndex device, long bytes) {
  auto& [now, peak] = usage[device];
  const long total = now += bytes;
  for (long before = peak; before < total && !peak.compare_exchange_weak(before, total);) {}
}

// what a tensor of the device owns: memory of the host, by pointer or with the storage it belongs to
template <class Owner>
struct Block {
  Owner owner;
  size_t bytes;
  DeviceIndex device;

  static c10::DataPtr make(void* data, Owner owner, size_t bytes, Device device) {
    use(device.index(), bytes);
    allocations++;
    return {data, new Block{std::move(owner), bytes, device.index()}, &free, device};
  }
  static void free(void* context) {
    auto* block = static_cast<Block*>(context);
    use(block->device, -static_cast<long>(block->bytes));
    delete block;
  }
};

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    static const char* poison = std::getenv("PRETEND_POISON");
    TORCH_CHECK(!forked, "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, you must use the "
        "'spawn' start method");
    auto host = c10::GetCPUAllocator()->allocate(bytes);
    void* data = host.get();
    // NaN in float16, bfloat16, float32 and float64, also where torch fills what `torch.empty` returns
    auto& torch = at::globalContext();
    bool filled = torch.deterministicAlgorithms() && torch.deterministicFillUninitializedMemory();
    if (bytes && (filled || (poison && *poison == '1'))) std::memset(data, 0xff, bytes);
    return Block<c10::DataPtr>::make(data, std::move(host), bytes, cuda());
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline Memory memory;

// ---- devices and streams; everything runs when it is called, so streams have numbers and events nothing
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device d) const override { Device old = cuda(); setDevice(d); return old; }
  Device getDevice() const override { return cuda(); }
  void setDevice(Device d) const override { current_device = cuda(d.index()).index(); }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0) current_device = d.index(); }
  DeviceIndex deviceCount() const noexcept override { return count_devices(); }

  static Stream stream(Device d, c10::StreamId id) { return Stream(Stream::UNSAFE, cuda(d.index()), id); }
  Stream getStream(Device d) const override { return stream(d, current_streams[cuda(d.index()).index()]); }
  Stream getDefaultStream(Device d) const override { return stream(d, 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return stream(d, ++last_stream); }
  Stream getNewStream(Device d, int) const override { return stream(d, ++last_stream); }
  Stream exchangeStream(Stream s) const override {
    Stream old = getStream(s.device());
    current_streams[s.device_index()] = s.id();
    return old;
  }
  bool queryStream(const Stream&) const override { return true; }
  bool isStreamCapturing(const Stream&) const override { return capturing; }
  void synchronizeStream(const Stream&) const override { wait_for_device("synchronize", "stream"); }
  void synchronizeDevice(const DeviceIndex) const override { wait_for_device("synchronize", "device"); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}

  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override { wait_for_device("synchronize", "event"); }
};

// ---- random numbers, drawn by a generator of the CPU inside
struct Generator final : c10::GeneratorImpl {
  at::Generator inner;
  Generator(Device device, at::Generator g)
      : c10::GeneratorImpl(device, c10::DispatchKeySet(c10::DispatchKey::CUDA)), inner(std::move(g)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override { inner.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  c10::GeneratorImpl* clone_impl() const override { return new Generator(device(), inner.clone()); }
};

inline at::Generator make_generator(DeviceIndex index) {
  return at::make_generator<Generator>(cuda(index), at::detail::createCPUGenerator());
}

inline const at::Generator& default_generator(DeviceIndex index) {
  static std::array<at::Generator, MAX_DEVICES> generators;
  auto& generator = generators[cuda(index).index()];
  if (!generator.defined()) generator = make_generator(index);
  return generator;
}

}  // namespace pretend

namespace at {
struct CUDAHooks final : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return pretend::count_devices(); }
  DeviceIndex current_device() const override { return pretend::current_device; }
  DeviceIndex getCurrentDevice() const override { return pretend::current_device; }
  void setCurrentDevice(DeviceIndex index) const override { exchangeDevice(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return std::exchange(pretend::current_device, pretend::cuda(index).index());
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  const Generator& getDefaultGenerator(DeviceIndex index) const override { return pretend::default_generator(index); }
  Generator getNewGenerator(DeviceIndex index) const override { return pretend::make_generator(index); }
  Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  Allocator* getCUDADeviceAllocator() const override { return &pretend::memory; }
  Device getDeviceFromPtr(void*) const override { return pretend::cuda(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at

// in place of those of libtorch_cpu, which was compiled without CUDA: this library is loaded first, so its symbols win
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
bool isAccelerator(c10::DeviceType type) { return type == c10::DeviceType::CUDA; }
c10::DeviceIndex deviceCount() { return pretend::count_devices(); }
c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) { return pretend::Guard().exchangeDevice(pretend::cuda(index)).index(); }
c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) { return exchangeDevice(index); }
c10::DeviceIndex getDeviceIndex() { return pretend::current_device; }
void setDeviceIndex(c10::DeviceIndex index) { exchangeDevice(index); }
c10::Stream getCurrentStream(c10::DeviceIndex index) { return pretend::Guard().getStream(pretend::cuda(index)); }
void setCurrentStream(c10::Stream stream) { pretend::Guard().exchangeStream(stream); }
void synchronizeDevice(c10::DeviceIndex index) { pretend::Guard().synchronizeDevice(index); }
}  // namespace at::accelerator

extern "C" {
void pretend_set_forked() { pretend::forked = true; }
int pretend_device_count() { return pretend::count_devices(); }
int pretend_get_device() { return pretend::current_device; }
int pretend_exchange_device(int index) {
  const int old = pretend::current_device;
  if (index >= 0 && index < pretend::count_devices()) pretend::current_device = index;
  return old;
}
long pretend_get_stream(int device) { return pretend::current_streams[device]; }
void pretend_set_stream(int device, long id) { pretend::current_streams[device] = id; }
long pretend_allocated(int device) { return pretend::usage[device].bytes; }
long pretend_peak(int device) { return pretend::usage[device].peak; }
void pretend_reset_peak(int device) { pretend::usage[device].peak = pretend::usage[device].bytes.load(); }
}
