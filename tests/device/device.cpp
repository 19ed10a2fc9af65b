// A second device for a machine that has none. Its memory is host memory behind addresses that no code can read (bit 62
// is set: whoever dereferences one gets SIGSEGV). Its operations are the CPU's kernels, which see that memory by its
// real address, so the bits that they compute are the CPU's. Tensors of two devices in one operation are refused.
//
// Built twice: with -DSIM_KEY=PrivateUse1, a device type that no library has heard of ("sim"); and with -DSIM_KEY=CUDA
// and -DSIM_IS_CUDA, "cuda" itself, whose dispatch key is empty in a CPU-only build of torch.
//
// It has no caching allocator, no streams, no fused kernels and no graphs, and says nothing about speed.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/CPUFallback.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>
#include <string>

namespace {

constexpr auto TYPE = c10::DeviceType::SIM_KEY;
constexpr auto KEY = c10::DispatchKey::SIM_KEY;
constexpr int DEVICES = 2;
constexpr uintptr_t TAG = uintptr_t(1) << 62;
void* tagged(void* p) { return p ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(p) | TAG) : nullptr; }
void* real(const void* p) { return reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(p) & ~TAG); }

// Bytes, each block rounded up to the 512 of CUDA's allocator.
struct Memory {
  int64_t live = 0, peak = 0;
};
int64_t rounded(int64_t bytes) { return (bytes + 511) / 512 * 512; }
std::mutex mutex;
Memory memory[DEVICES];
thread_local int current = 0;

struct Block {
  void* memory;
  int64_t bytes;
  int device;
};

void release(void* context) {
  std::lock_guard<std::mutex> lock(mutex);
  auto* block = static_cast<Block*>(context);
  memory[block->device].live -= rounded(block->bytes);
  std::free(block->memory);
  delete block;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override { return make(n, current); }
  static c10::DataPtr make(size_t n, int device) {
    if (n == 0) return {nullptr, nullptr, &release_nothing, c10::Device(TYPE, device)};
    std::lock_guard<std::mutex> lock(mutex);
    auto& m = memory[device];
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 512, n) == 0);
    std::memset(p, 0xCB, n);  // what nobody wrote is no zero
    m.live += rounded(n);
    m.peak = std::max(m.peak, m.live);
    return {tagged(p), new Block{p, int64_t(n), device}, &release, c10::Device(TYPE, device)};
  }
  static void release_nothing(void*) {}
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* dest, const void* src, std::size_t n) const override { std::memcpy(real(dest), real(src), n); }
};
Allocator allocator;
const bool is_set = [] { c10::SetAllocator(TYPE, &allocator, 1); return true; }();

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = TYPE;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device d) const override {
    c10::Device old(TYPE, current);
    setDevice(d);
    return old;
  }
  c10::Device getDevice() const override { return {TYPE, c10::DeviceIndex(current)}; }
  void setDevice(c10::Device d) const override {
    if (!d.has_index()) return;
    TORCH_CHECK(d.index() >= 0 && d.index() < DEVICES, "sim: no device ", d);
    current = d.index();
  }
  void uncheckedSetDevice(c10::Device d) const noexcept override {
    if (d.has_index()) current = d.index();
  }
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, resolved(d)); }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, resolved(d)); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getStream(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return getStream(s.device()); }
  static c10::Device resolved(c10::Device d) {
    return d.has_index() ? d : c10::Device(TYPE, c10::DeviceIndex(current));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(1);
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
static ::c10::impl::DeviceGuardImplRegistrar guard_registered(TYPE, new Guard());

// ---- random generators: a CPU's, of their own state ----

struct GeneratorImpl : at::CPUGeneratorImpl {
  explicit GeneratorImpl(c10::DeviceIndex index) {
    device_ = c10::Device(TYPE, index);
    key_set_ = c10::DispatchKeySet(KEY);
  }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
};
at::Generator& default_generator(int device) {
  static std::vector<at::Generator> made = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < DEVICES; i++) made.push_back(at::make_generator<GeneratorImpl>(c10::DeviceIndex(i)));
    return made;
  }();
  return made[device < 0 ? current : device];
}

#define HOOKS_BODY                                                                                              \
  bool isBuilt() const override { return true; }                                                                \
  bool isAvailable() const override { return true; }                                                            \
  void init() const override {}                                                                                 \
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }                                      \
  c10::DeviceIndex deviceCount() const override { return DEVICES; }                                             \
  void setCurrentDevice(c10::DeviceIndex d) const override { current = d; }                                     \
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current); }                      \
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override {                                          \
    auto old = current;                                                                                         \
    if (d >= 0) current = d;                                                                                    \
    return c10::DeviceIndex(old);                                                                               \
  }                                                                                                             \
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }         \
  const at::Generator& getDefaultGenerator(c10::DeviceIndex d) const override { return default_generator(d); }  \
  at::Generator getNewGenerator(c10::DeviceIndex d) const override {                                            \
    return at::make_generator<GeneratorImpl>(d < 0 ? c10::DeviceIndex(current) : d);                            \
  }                                                                                                             \
  bool isPinnedPtr(const void*) const override { return false; }

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  int device = storage->device().index() < 0 ? current : storage->device().index();
  auto data = Allocator::make(bytes, device);
  auto kept = std::min(bytes, storage->nbytes());
  if (kept) std::memcpy(real(data.get()), real(storage->data()), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(bytes);
}

#ifdef SIM_IS_CUDA
}  // namespace
// torch asks its registry for a class of this name.
struct CUDAHooks : at::CUDAHooksInterface {
  CUDAHooks() = default;
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  HOOKS_BODY
  bool hasCUDA() const override { return true; }
  c10::DeviceIndex current_device() const override { return c10::DeviceIndex(current); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return at::getCPUAllocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  int getNumGPUs() const override { return DEVICES; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  at::Device getDeviceFromPtr(void*) const override { return {TYPE, 0}; }
};
namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}
namespace {
#else
struct Hooks : at::PrivateUse1HooksInterface {
  HOOKS_BODY
  at::Device getDeviceFromPtr(void*) const override { return {TYPE, 0}; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};
const bool hooked = [] { at::RegisterPrivateUse1HooksInterface(new Hooks()); return true; }();
#endif

// ---- memory ----

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(KEY), c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(KEY),
                                           c10::dtype_or_default(dtype));
}

at::Tensor on_host(const at::Tensor& t) {
  if (t.device().type() != TYPE) return t;
  void* p = t.numel() ? real(t.const_data_ptr()) : nullptr;
  return at::from_blob(p, t.sizes(), t.strides(), at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
}

at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool) {
  at::AutoDispatchBelowADInplaceOrView no_autograd;
  auto target = on_host(dst);
  target.copy_(on_host(src));
  return dst;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  copy_from(src.sizes() == self.sizes() ? src : src.expand(self.sizes()), self, non_blocking);
  return self;
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() == size) return self;
  impl->set_sizes_contiguous(size);
  size_t bytes = (self.numel() + self.storage_offset()) * self.itemsize();
  if (self.numel() && bytes > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), bytes);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  resize_(dst, src.sizes(), std::nullopt);
  return copy_from(src, dst, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) { return on_host(self).item(); }

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) { return at::native::view(self, size); }
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
at::Tensor unfold(const at::Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return at::native::unfold(self, dim, size, step);
}
at::Tensor& set_layout(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size,
                       c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() == nullptr || stride.size() != size.size()) impl->set_sizes_contiguous(size);
  else impl->set_sizes_and_strides(size, stride);
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage storage) {
  int64_t n = storage.nbytes() / self.itemsize();
  return set_layout(self, std::move(storage), 0, {n}, {1});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_layout(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  return set_layout(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, &allocator, true), 0, {0}, {1});
}

// ---- everything else: the CPU's kernels ----

// What CUDA allows to lie on the CPU beside tensors of the device: indices, and numbers.
const std::set<std::string> takes_indices{"aten::index", "aten::index_put", "aten::index_put_",
                                          "aten::_index_put_impl_", "aten::_unsafe_index"};

void check_devices(const c10::OperatorHandle& op, const std::vector<at::Tensor>& tensors) {
  const auto& name = op.schema().name();
  if (takes_indices.count(name) || name.rfind("aten::_fused", 0) == 0 || name.rfind("aten::_foreach", 0) == 0) return;
  std::optional<at::Device> first;
  for (const auto& t : tensors) {
    if (!t.defined()) continue;
    if (t.dim() == 0 && t.is_cpu()) continue;
    if (first && *first != t.device())
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *first,
                  " and ", t.device(), "! (", name, ")");
    first = t.device();
  }
}

// CUDA multiplies half and returns the float32 that it sums in; no CPU kernel does.
at::Tensor mm_dtype(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) {
  auto made = empty({a.size(0), b.size(1)}, dtype, std::nullopt, a.device(), std::nullopt, std::nullopt);
  auto target = on_host(made);
  target.copy_(on_host(a).to(at::kFloat).mm(on_host(b).to(at::kFloat)));
  return made;
}

// CUDA's softmax takes half and returns float32 at once.
at::Tensor on_device(const at::Tensor& found, const at::Tensor& like) {
  auto made = empty(found.sizes(), found.scalar_type(), std::nullopt, like.device(), std::nullopt, std::nullopt);
  on_host(made).copy_(found);
  return made;
}
at::Tensor softmax(const at::Tensor& self, int64_t dim, bool to_float) {
  auto x = on_host(self).contiguous();
  return on_device(at::_softmax(to_float ? x.to(at::kFloat) : x, dim, false), self);
}
at::Tensor log_softmax(const at::Tensor& self, int64_t dim, bool to_float) {
  auto x = on_host(self).contiguous();
  return on_device(at::_log_softmax(to_float ? x.to(at::kFloat) : x, dim, false), self);
}
at::Tensor softmax_backward(const at::Tensor& g, const at::Tensor& out, int64_t dim, at::ScalarType dtype) {
  return on_device(at::_softmax_backward_data(on_host(g), on_host(out), dim, g.scalar_type()).to(dtype), g);
}
at::Tensor log_softmax_backward(const at::Tensor& g, const at::Tensor& out, int64_t dim, at::ScalarType dtype) {
  return on_device(at::_log_softmax_backward_data(on_host(g), on_host(out), dim, g.scalar_type()).to(dtype), g);
}

// There is neither cuDNN nor MIOpen.
bool uses_no_library_for_ctc(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t) {
  return false;
}

bool uses_no_library_for_ctc_lengths(const at::Tensor&, const at::Tensor&, at::IntArrayRef, at::IntArrayRef, int64_t) {
  return false;
}

// CUDA counts integers, a CPU does not.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  auto values = on_host(self);
  bool is_int = at::isIntegralType(self.scalar_type(), false);
  auto found = at::histc(is_int ? values.to(at::kFloat) : values, bins, low, high).to(self.scalar_type());
  auto made = empty(found.sizes(), self.scalar_type(), std::nullopt, self.device(), std::nullopt, std::nullopt);
  on_host(made).copy_(found);
  return made;
}

// CUDA's kernels of these want weights in the input's dtype; a CPU's take float32 ones with half inputs.
void check_dtypes(const std::string& name, torch::jit::Stack* stack, size_t n) {
#ifndef SIM_IS_CUDA
  return;
#endif
  bool is_layer = name == "aten::native_layer_norm", is_group = name == "aten::native_group_norm";
  if (!is_layer && !is_group) return;
  auto args = torch::jit::last(*stack, n);
  auto given = args[0].toTensor().scalar_type();
  for (size_t i : {size_t(is_layer ? 2 : 1), size_t(is_layer ? 3 : 2)})
    if (args[i].isTensor() && args[i].toTensor().defined())
      TORCH_CHECK(args[i].toTensor().scalar_type() == given, "expected scalar type ", given, " but found ",
                  args[i].toTensor().scalar_type());
}

// torch's fallback puts results where the first tensor lies, and that may be a number.
void run_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack, bool is_ours, int device) {
  at::native::cpu_fallback(op, stack, false);
  if (!is_ours) return;
  const auto& returns = op.schema().returns();
  for (size_t i = 0; i < returns.size(); i++) {
    auto& value = const_cast<c10::IValue&>(torch::jit::peek(*stack, i, returns.size()));
    if (returns[i].alias_info() == nullptr && value.isTensor() && value.toTensor().defined() && value.toTensor().is_cpu())
      value = value.toTensor().to(at::Device(TYPE, c10::DeviceIndex(device)));
  }
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto n = schema.arguments().size();
  check_dtypes(schema.name(), stack, n);
  std::vector<at::Tensor> tensors;
  for (const auto& value : torch::jit::last(*stack, n)) {
    if (value.isTensor()) tensors.push_back(value.toTensor());
    else if (value.isTensorList())
      for (const at::Tensor& t : value.toTensorList()) tensors.push_back(t);
    else if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
        if (t) tensors.push_back(*t);
  }
  check_devices(op, tensors);
  int device = current;
  bool is_ours = false;
  for (const auto& t : tensors)
    if (t.defined() && t.device().type() == TYPE) device = t.device().index(), is_ours = true;
  const c10::DeviceGuard guard(c10::Device(TYPE, c10::DeviceIndex(device)));
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return run_on_cpu(op, stack, is_ours, device);
  // The CPU's kernels draw from the CPU's generator: give it the state of the device's for the while.
  at::Generator ours = default_generator(device);
  for (auto& value : torch::jit::last(*stack, n))
    if (value.isGenerator()) {
      if (value.toGenerator().device().type() == TYPE) ours = value.toGenerator();
      const_cast<c10::IValue&>(value) = c10::IValue();
    }
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  auto state_of = [](const at::Generator& g) { return at::Tensor(g.unsafeGetGeneratorImpl()->get_state()); };
  at::Tensor kept = state_of(cpu);
  cpu.unsafeGetGeneratorImpl()->set_state(*state_of(ours).unsafeGetTensorImpl());
  try {
    run_on_cpu(op, stack, is_ours, device);
  } catch (...) {
    cpu.unsafeGetGeneratorImpl()->set_state(*kept.unsafeGetTensorImpl());
    throw;
  }
  ours.unsafeGetGeneratorImpl()->set_state(*state_of(cpu).unsafeGetTensorImpl());
  cpu.unsafeGetGeneratorImpl()->set_state(*kept.unsafeGetTensorImpl());
}

// ---- for Python ----

std::vector<int64_t> allocated(int64_t d) {
  std::lock_guard<std::mutex> lock(mutex);
  return {memory[d].live, memory[d].peak};
}
void reset_peak(int64_t d) {
  std::lock_guard<std::mutex> lock(mutex);
  memory[d].peak = memory[d].live;
}
// Kernels for any backend stand before a fallback, and compute otherwise than those that the CPU has beside them.
void as_on_cpu(std::vector<std::string> names) {
  static torch::Library library(torch::Library::IMPL, "aten", std::make_optional(KEY), __FILE__, __LINE__);
  for (const auto& name : names) library.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
at::Tensor get_state(int64_t d) {
  return at::Tensor(default_generator(d).unsafeGetGeneratorImpl()->get_state());
}
void set_state(const at::Tensor& state, int64_t d) {
  default_generator(d).unsafeGetGeneratorImpl()->set_state(*state.unsafeGetTensorImpl());
}
void seed(int64_t s, int64_t d) { default_generator(d).set_current_seed(s); }
int64_t current_device() { return current; }
void set_device(int64_t d) { current = int(d); }

}  // namespace

TORCH_LIBRARY(simdev, m) {
  m.def("allocated(int d) -> int[]", &allocated);
  m.def("reset_peak(int d) -> ()", &reset_peak);
  m.def("as_on_cpu(str[] names) -> ()", &as_on_cpu);
  m.def("get_state(int d) -> Tensor", &get_state);
  m.def("set_state(Tensor s, int d) -> ()", &set_state);
  m.def("seed(int s, int d) -> ()", &seed);
  m.def("current_device() -> int", &current_device);
  m.def("set_device(int d) -> ()", &set_device);
}

TORCH_LIBRARY_IMPL(aten, SIM_KEY, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("copy_", &copy_);
  m.impl("resize_", &resize_);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("unfold", &unfold);
  m.impl("set_.source_Storage_storage_offset", &set_layout);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_nothing);
  m.impl("mm.dtype", &mm_dtype);
  m.impl("histc", &histc);
  m.impl("_use_cudnn_ctc_loss.Tensor", &uses_no_library_for_ctc);
  m.impl("_use_cudnn_ctc_loss", &uses_no_library_for_ctc_lengths);
  m.impl("_use_miopen_ctc_loss", &uses_no_library_for_ctc_lengths);
  m.impl("_use_miopen_ctc_loss.Tensor", &uses_no_library_for_ctc);
  m.impl("_softmax", &softmax);
  m.impl("_log_softmax", &log_softmax);
  m.impl("_softmax_backward_data", &softmax_backward);
  m.impl("_log_softmax_backward_data", &log_softmax_backward);
}

TORCH_LIBRARY_IMPL(_, SIM_KEY, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

#ifndef SIM_IS_CUDA
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  using namespace at::autocast;
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
}
#endif

// bitsandbytes has kernels in plain torch for devices that it does not know; those of the CPU give the CPU's bits.
TORCH_LIBRARY_IMPL(bitsandbytes, SIM_KEY, m) {
  for (const char* name : {"int8_linear_matmul", "int8_vectorwise_quant", "int8_vectorwise_dequant", "int8_mm_dequant",
                           "int8_scaled_mm", "dequantize_4bit", "quantize_4bit", "gemm_4bit", "gemv_4bit",
                           "dequantize_blockwise", "quantize_blockwise"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}
