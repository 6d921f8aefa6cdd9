// CUDA tensors in host memory, for a torch without CUDA: views keep their storage, everything else
// is computed by torch's kernels for CPUs. Kernels are launched by fake_cuda_driver.c, which runs
// none. tests/support/fake_cuda.py builds and loads it.
#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <vector>

namespace {

using at::Tensor;
using c10::Device;
using c10::Stream;

constexpr size_t kArenaBytes = size_t{1} << 34, kLine = 512;
std::atomic<int64_t> stream_number{7};
thread_local int64_t device_now = 0;

// Addresses are never given twice.
struct Arena : public c10::Allocator {
  char* base = static_cast<char*>(mmap(nullptr, kArenaBytes, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  size_t used = 0;
  std::vector<int64_t> starts;
  std::mutex lock;
  c10::DataPtr allocate(size_t bytes) override {
    const Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(device_now));
    if (bytes == 0) return {nullptr, device};
    const std::lock_guard locked(lock);
    char* const at = base + used;
    used += (bytes + kLine - 1) / kLine * kLine + kLine;
    TORCH_CHECK(used < kArenaBytes, "fake CUDA: no memory left");
    starts.push_back(reinterpret_cast<int64_t>(at));
    return {at, at, [](void*) {}, device};
  }
  int64_t base_of(int64_t address) {
    const std::lock_guard locked(lock);
    const auto after = std::upper_bound(starts.begin(), starts.end(), address);
    const bool outside =
        after == starts.begin() || address >= reinterpret_cast<int64_t>(base + used);
    return outside ? 0 : *(after - 1);
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return [](void*) {};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
Arena arena;

struct Guard : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    device_now = device.index();
    return before;
  }
  Device getDevice() const override {
    return {c10::kCUDA, static_cast<c10::DeviceIndex>(device_now)};
  }
  void setDevice(Device device) const override { device_now = device.index(); }
  void uncheckedSetDevice(Device device) const noexcept override { device_now = device.index(); }
  Stream getStream(Device device) const override {
    return Stream(Stream::UNSAFE, device, stream_number.load());
  }
  Stream exchangeStream(Stream stream) const override { return stream; }
  void* getStreamNativeHandle(const Stream stream) const override {
    return reinterpret_cast<void*>(stream.id() + stream.device_index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 2; }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks : public at::CUDAHooksInterface {
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return Guard().deviceCount(); }
};

constexpr c10::DispatchKeySet kCuda(c10::DispatchKey::CUDA);

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(Guard().getDevice()));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &arena, kCuda,
                                   dtype.value_or(at::kFloat), format);
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(Guard().getDevice()));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), &arena, kCuda,
                                           dtype.value_or(at::kFloat));
}

Tensor on_cpu(const Tensor& x) {
  if (!x.defined() || !x.is_cuda()) return x;
  if (!x.numel()) return at::empty(x.sizes(), at::TensorOptions(x.scalar_type()));
  return at::from_blob(const_cast<void*>(x.const_data_ptr()), x.sizes(), x.strides(),
                       at::TensorOptions(x.scalar_type()));
}

Tensor on_cuda(const Tensor& x) {
  Tensor to =
      at::detail::empty_strided_generic(x.sizes(), x.strides(), &arena, kCuda, x.scalar_type());
  if (x.numel()) std::memcpy(to.mutable_data_ptr(), x.const_data_ptr(), to.storage().nbytes());
  return to;
}

void by_cpu(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t given = schema.arguments().size(), returned = schema.returns().size();
  bool view = false;
  for (const auto& value : schema.returns()) {
    view = view || (value.alias_info() != nullptr && !value.alias_info()->isWrite());
  }
  if (view) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    return;
  }
  std::vector<Tensor> before;
  std::vector<Tensor> after;
  const auto moved = [&](const Tensor& x) {
    before.push_back(x);
    after.push_back(on_cpu(x));
    return after.back();
  };
  for (auto value = stack->end() - given; value != stack->end(); ++value) {
    if (value->isTensor()) *value = moved(value->toTensor());
    if (value->isDevice()) *value = Device(c10::kCPU);
    if (value->isTensorList()) {
      std::vector<Tensor> list;
      for (const Tensor& x : value->toTensorVector()) list.push_back(moved(x));
      *value = list;
    }
  }
  op.callBoxed(stack);
  for (auto value = stack->end() - returned; value != stack->end(); ++value) {
    if (!value->isTensor() || !value->toTensor().defined()) continue;
    const Tensor x = value->toTensor();
    Tensor found;
    for (size_t i = 0; i < after.size(); ++i) {
      if (after[i].is_same(x)) found = before[i];
    }
    if (found.defined() && found.sizes() != x.sizes()) {  // resized
      auto* impl = found.unsafeGetTensorImpl();
      impl->set_storage_keep_dtype(on_cuda(x).storage());
      impl->set_sizes_and_strides(x.sizes(), x.strides());
    }
    *value = found.defined() ? found : on_cuda(x);
  }
}

}  // namespace

// In place of torch's, if this library is loaded first (LD_PRELOAD): autograd asks them.
namespace at::detail {
const CUDAHooksInterface& getCUDAHooks() {
  static const Hooks hooks;
  return hooks;
}
}  // namespace at::detail
namespace at::accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::kCUDA; }
}  // namespace at::accelerator

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_cpu>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&by_cpu>());
}
TORCH_LIBRARY(fake_cuda, m) {
  m.def("to(Tensor x) -> Tensor", [](const Tensor& x) { return on_cuda(x); });
}

extern "C" {
int64_t fake_device() { return device_now; }
void fake_set_device(int64_t index) { device_now = index; }
int64_t fake_stream(int64_t device) { return stream_number.load() + device; }
void fake_set_stream(int64_t number) { stream_number = number; }
// Where the allocation begins that an address is in; 0 outside of the arena.
int64_t fake_base_of(int64_t address) { return arena.base_of(address); }
}
