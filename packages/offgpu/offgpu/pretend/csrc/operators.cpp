// A CUDA device for PyTorch's CPU build, in the host's memory. Its tensors are ordinary tensors with `device == cuda:0`, and
// autograd runs on the device's own thread. Operators without a composite kernel come to `run`, which checks their arguments as
// CUDA's wrappers check them and runs them on CPU tensors of the same memory.
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

#include <unordered_set>

#include "graph.h"
// NO_DEVICE_CHECK: operators that take 0-dim tensors of the CPU, as native_functions.yaml says
#include "no_device_check.h"

namespace pretend {

REGISTER_ALLOCATOR(DeviceType::CUDA, &memory)
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// no kernel of the device
static const std::unordered_set<std::string> NO_KERNEL = {
    "aten::as_strided", "aten::view", "aten::_reshape_alias", "aten::unfold", "aten::view_as_real", "aten::view_as_complex",
    "aten::resize_", "aten::empty.memory_format", "aten::empty_strided", "aten::detach", "aten::alias"};
// the host waits for what they find
static const std::unordered_set<std::string> WAITING = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::nonzero.out", "aten::equal", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::bincount", "aten::masked_select.out", "aten::unique_dim_consecutive"};

static bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

static bool is_index_put(const std::string& name) {
  return starts_with(name, "aten::index_put") || starts_with(name, "aten::_index_put_impl_");
}

static bool is_index(const std::string& name) {
  return is_index_put(name) || starts_with(name, "aten::index.Tensor") || starts_with(name, "aten::_unsafe_index");
}

static std::string full_name(const c10::OperatorHandle& op) {
  const auto& name = op.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

// the one device of all arguments
static Device check_devices(const std::string& name, const torch::jit::Stack& args, const c10::FunctionSchema& schema) {
  const bool takes_numbers = NO_DEVICE_CHECK.count(name), index = is_index(name);
  std::optional<Device> device;
  std::string first;
  for (size_t i = 0; i < args.size(); i++) {
    const auto& argument = schema.arguments()[i].name();
    if (args[i].isDevice() && args[i].toDevice().is_cuda() && !device.has_value()) device = cuda(args[i].toDevice().index());
    each_tensor(args[i], [&](const at::Tensor& t) {
      if (t.device().is_cpu() && index && argument == "indices") return wait_for_device("h2d", name + " with indices on the CPU");
      if (t.device().is_cpu() && t.dim() == 0 && takes_numbers) return;
      TORCH_CHECK(!device.has_value() || t.device() == *device, "Expected all tensors to be on the same device, but got ", argument,
          " is on ", t.device(), ", different from other tensors on ", *device, " (when checking argument in method ", name,
          first.empty() ? "" : ", first ", first, ")");
      device = t.device();
      first = argument;
    });
  }
  TORCH_CHECK(!index || is_on_device(args[0].toTensor()),
      "indices should be either on cpu or on the same device as the indexed tensor (", args[0].toTensor().device(), ")");
  return device.value_or(cuda());
}

static void check_waits(const std::string& name, const torch::jit::Stack& args) {
  if (WAITING.count(name) || (name == "aten::repeat_interleave.Tensor" && args[1].isNone())) wait_for_device("value", name);
  if (!is_index(name)) return;
  // to put one number at a mask's places is `masked_fill`
  if (is_index_put(name) && args[2].toTensor().numel() == 1 && args[2].toTensor().device().is_cpu() &&
      args[1].toOptionalTensorList().size() == 1) return;
  each_tensor(args[1], [&](const at::Tensor& t) {
    if (t.scalar_type() == at::kBool || t.scalar_type() == at::kByte) wait_for_device("value", name + " with a mask");
  });
}

static bool is_optional_generator(const c10::Argument& argument) {
  return argument.type()->kind() == c10::TypeKind::OptionalType &&
      argument.type()->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

static IValue host_argument(const IValue& value, const c10::Argument& argument, Aliases& aliases, Device device) {
  if (value.isDevice()) return value.toDevice().is_cuda() ? IValue(CPU) : value;
  if (value.isNone() && is_optional_generator(argument)) {
    return dynamic_cast<Generator*>(default_generator(device.index()).unsafeGetGeneratorImpl())->inner;
  }
  if (value.isGenerator()) {
    auto* generator = dynamic_cast<Generator*>(value.toGenerator().unsafeGetGeneratorImpl());
    TORCH_CHECK(generator, "Expected a 'cuda' device type for generator but found '", value.toGenerator().device().type(), "'");
    return generator->inner;
  }
  return map_tensors(value, [&](const at::Tensor& t) { return aliases.host(t); });
}

static void run(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const std::string name = full_name(op);
  const auto first_argument = stack->end() - schema.arguments().size();
  torch::jit::Stack args(first_argument, stack->end());
  const Device device = check_devices(name, args, schema);
  check_waits(name, args);
  if (!NO_KERNEL.count(name)) count("OP " + name);
  stack->erase(first_argument, stack->end());
  Aliases aliases(device);
  for (size_t i = 0; i < args.size(); i++) stack->push_back(args[i] = host_argument(args[i], schema.arguments()[i], aliases, device));
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  const auto first_result = stack->end() - schema.returns().size();
  if (capturing && !NO_KERNEL.count(name)) record_operator(op, args, torch::jit::Stack(first_result, stack->end()));
  aliases.settle();
  for (auto result = first_result; result != stack->end(); ++result)
    *result = map_tensors(*result, [&](const at::Tensor& t) { return aliases.device(t); });
}

// ---- what can't come that way
static at::Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(cuda(device.value_or(cuda()).index()));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, DispatchKeySet(DispatchKey::CUDA),
      c10::dtype_or_default(dtype), format);
}

static at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(cuda(device.value_or(cuda()).index()));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
      DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// between devices too
static at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.is_same(source)) return self;
  if (self.numel() != 0) {
    if (!is_on_device(self) || !is_on_device(source)) {
      const char* kind = is_on_device(self) ? "h2d" : "d2h";
      if (non_blocking) count(std::string("OP ") + kind + " copy_, non_blocking");
      else wait_for_device(kind, "copy_");
    }
    count("OP aten::copy_");
  }
  const auto to = host(self), from = host(source);
  const Step step = [to, from] {
    c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset);
    const_cast<at::Tensor&>(to).copy_(from);
  };
  step();
  record(step);
  return self;
}

static at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "Attempted to set the storage of a tensor on device \"", self.device(),
      "\" to a storage on different device \"", source.device(), "\".");
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const bool dense = stride.data() == nullptr || (stride.empty() && !size.empty());
  const auto strides = dense ? at::detail::defaultStrides(sizes) : C10_AS_INTARRAYREF_SLOW(stride).vec();
  impl->set_sizes_and_strides(sizes, strides, offset.expect_int());
  return self;
}

static at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto n = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {n}, {});
}

static at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sym_sizes(), source.sym_strides());
}

static at::Tensor& set_nothing(at::Tensor& self) { return set_tensor(self, at::empty({0}, self.options())); }

static void record_stream(at::Tensor&, at::Stream) {}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("record_stream", &record_stream);
  // composite ones that choose a kernel of the device inside, and ones that are one kernel on CUDA
  for (const char* name : {"convolution", "convolution_backward", "_convolution", "index.Tensor", "repeat_interleave.Tensor"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run>());
}

// what Python calls and what may raise
TORCH_LIBRARY(pretend, m) {
  m.def("host(Tensor x) -> Tensor", &host);
  m.def("device(Tensor x) -> Tensor", [](const at::Tensor& x) { return to_device(x, cuda()); });
  m.def("synchronize(str what) -> ()", [](const std::string& what) { wait_for_device("synchronize", what); });
  m.def("default_generator(int device) -> Generator?", [](int64_t index) { return default_generator(index); });
  m.def("begin_capture() -> int", &begin_capture);
  m.def("end_capture(int graph) -> ()", &end_capture);
  m.def("replay(int graph) -> ()", &replay);
}

}  // namespace pretend

namespace at::native {
static int64_t choose_math(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}
REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose_math)
}  // namespace at::native
