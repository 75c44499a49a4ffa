// A CUDA device that computes on the CPU.
//
// Every operation that has a kernel for CUDA, or for the CPU, gets this file's for CUDA: it shows the operation the same
// memory as CPU tensors, calls it, and says of the results that they lie on the GPU. What a card forbids or is slow at is
// noticed on the way: tensors of two devices in one operation, waiting for results (a copy to the CPU, a number read), and what a
// captured graph cannot hold. `extern "C"` functions at the end are called from Python through ctypes.

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

namespace {

using c10::Device;
using c10::DeviceType;
using c10::Storage;
using c10::Stream;
using torch::jit::Stack;

const Device gpu(DeviceType::CUDA, 0);
const Device cpu(DeviceType::CPU);

// Memory: of the CPU, called the GPU's.

std::atomic<size_t> allocated = 0, largest = 0;

struct Block {
  c10::DataPtr memory;  // or
  Storage storage;      // which holds it
  size_t bytes;
};

void release(void* block) {
  auto* held = static_cast<Block*>(block);
  allocated -= held->bytes;
  delete held;
}

c10::DataPtr counted(void* data, Block* block) {
  allocated += block->bytes;
  largest = std::max(largest.load(), allocated.load());
  return {data, block, &release, gpu};
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto memory = c10::GetCPUAllocator()->allocate(bytes);
    void* data = memory.get();
    return counted(data, new Block{std::move(memory), {}, bytes});
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

Allocator allocator;

// Streams and devices: there is one of each, and all work is done in the order in which it is asked for.

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return gpu; }
  Device getDevice() const override { return gpu; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, device); }
  Stream exchangeStream(Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

Guard guard;

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return &allocator; }
  Device getDeviceFromPtr(void*) const override { return gpu; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(cpu);
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
  bool compiledWithCuDNN() const override { return false; }
  bool hasCuDNN() const override { return false; }
  bool hasMAGMA() const override { return false; }
  long versionCuDNN() const override { return 0; }
  long versionRuntimeCuDNN() const override { return 0; }
  long versionCUDART() const override { return 13000; }
  bool hasCUDART() const override { return true; }
  std::string showConfig() const override { return "the stand-in device"; }
};

const bool are_ours = [] {  // before libtorch_cuda registers its own, which then gives way
  at::CUDAHooksRegistry()->Register(
      "CUDAHooks", [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> { return std::make_unique<Hooks>(); },
      c10::REGISTRY_PREFERRED);
  return true;
}();

// Tensors of the CPU on the memory of those of the GPU, and back.

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

void forget(void* storage) { delete static_cast<Storage*>(storage); }

Storage on_cpu(const Storage& storage) {
  c10::DataPtr memory(storage.mutable_data(), new Storage(storage), &forget, cpu);
  return Storage(
      Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), c10::GetCPUAllocator(), /*resizable=*/true);
}

Storage on_gpu(const Storage& storage) {
  auto memory = counted(storage.mutable_data(), new Block{{}, storage, storage.nbytes()});
  return Storage(Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), &allocator, /*resizable=*/true);
}

at::Tensor laid(const Storage& storage, const at::Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), c10::DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (like.is_neg()) made._set_neg(true);
  if (like.is_conj()) made._set_conj(true);
  return made;
}

struct Twins {  // the arguments of one call, as the GPU and as the CPU has them
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;
  std::vector<std::pair<Storage, Storage>> storages;

  at::Tensor to_cpu(const at::Tensor& tensor) {
    if (!is_ours(tensor)) return tensor;
    for (auto& [ours, seen] : pairs)
      if (ours.is_same(tensor)) return seen;
    pairs.emplace_back(tensor, laid(twin(tensor.storage()), tensor, c10::DispatchKey::CPU));
    return pairs.back().second;
  }

  Storage twin(const Storage& storage) {
    for (auto& [ours, seen] : storages)
      if (ours.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return seen;
    storages.emplace_back(storage, on_cpu(storage));
    return storages.back().second;
  }

  Storage original(const Storage& storage) {
    for (auto& [ours, seen] : storages)
      if (seen.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) return ours;
    storages.emplace_back(on_gpu(storage), storage);
    return storages.back().first;
  }

  at::Tensor to_gpu(const at::Tensor& result) {
    if (!result.defined() || result.is_cuda()) return result;
    for (auto& [ours, seen] : pairs)
      if (seen.is_same(result)) return ours;
    return laid(original(result.storage()), result, c10::DispatchKey::CUDA);
  }

  void keep_changes() {  // an `out=` that grew has other memory and other sizes now, after set_ another storage
    for (auto& [ours, seen] : storages) {
      if (seen.data() == ours.data()) continue;
      auto moved = on_gpu(on_cpu(seen));
      ours.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(moved.unsafeGetStorageImpl()->mutable_data_ptr()));
      ours.unsafeGetStorageImpl()->set_nbytes(seen.nbytes());
    }
    for (auto& [ours, seen] : pairs) {
      auto* impl = ours.unsafeGetTensorImpl();
      const auto storage = original(seen.storage());
      if (storage.unsafeGetStorageImpl() != ours.storage().unsafeGetStorageImpl()) impl->set_storage_keep_dtype(storage);
      if (ours.sizes() != seen.sizes() || ours.strides() != seen.strides() ||
          ours.storage_offset() != seen.storage_offset())
        impl->set_sizes_and_strides(seen.sizes(), seen.strides(), seen.storage_offset());
    }
  }
};

// Captured graphs: calls on the memory that they had, which are made again.

struct Call {
  std::optional<c10::OperatorHandle> op;  // none: a kernel of Triton, which Python launches
  Stack arguments, results;
};

using Graph = std::vector<Call>;
std::vector<std::unique_ptr<Graph>> graphs;
Graph* captured = nullptr;

// What is noticed.

std::vector<std::string> waits;  // operations whose result the CPU waited for
bool may_wait = true;            // else such an operation is an error
bool is_paused = false;          // while Triton's interpreter moves a kernel's operands about
std::atomic<size_t> launches = 0;             // operations that are no views
std::string text;                // what the last `extern "C"` call gave

const std::unordered_set<std::string> reads_numbers = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2",
    "aten::unique_dim", "aten::unique_consecutive", "aten::is_set_to_", "aten::_assert_async_"};

void wait_for(const std::string& what) {
  if (is_paused) return;
  TORCH_CHECK(captured == nullptr, "operation not permitted when stream is capturing: the CPU waits in ", what);
  TORCH_CHECK(may_wait, "the CPU waits for the GPU in ", what, ", where it was promised not to");
  waits.push_back(what);
}

// Calls as the CPU makes them.

// What a card has and the CPU has not; whether it is that.
bool run_what_a_card_has(const std::string& name, Stack* stack) {
  const auto given = [stack](size_t place, size_t count) { return stack->at(stack->size() - count + place); };
  if (name == "aten::histc" && at::isIntegralType(given(0, 4).toTensor().scalar_type(), true)) {
    const at::Tensor numbers = given(0, 4).toTensor();
    const at::Tensor found = at::histc(
        numbers.to(at::kDouble), given(1, 4).toInt(), given(2, 4).toScalar(), given(3, 4).toScalar());
    torch::jit::drop(*stack, 4);
    stack->push_back(found.to(numbers.scalar_type()));
    return true;
  }
  if (name == "aten::_conv_depthwise2d") {
    const at::Tensor values = given(0, 7).toTensor(), weight = given(1, 7).toTensor();
    const auto bias = given(3, 7).toOptional<at::Tensor>();
    const at::Tensor found = at::conv2d(values, weight, bias, given(4, 7).toIntVector(), given(5, 7).toIntVector(),
                                        given(6, 7).toIntVector(), values.size(1));
    torch::jit::drop(*stack, 7);
    stack->push_back(found);
    return true;
  }
  return false;
}

void run(const c10::OperatorHandle& op, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard without(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  if (!run_what_a_card_has(op.schema().name(), stack)) op.callBoxed(stack);
}

void repeat(const Call& call) {
  Stack stack = call.arguments;
  run(*call.op, &stack);
  for (size_t i = 0; i < call.results.size(); ++i) {
    if (!call.results[i].isTensor() || !call.results[i].toTensor().defined()) continue;
    const auto &place = call.results[i].toTensor(), &now = stack[i].toTensor();
    if (!place.is_alias_of(now)) place.copy_(now);
  }
}

// While a graph is captured nothing is written: what would have been is put back.
std::vector<std::pair<at::Tensor, at::Tensor>> written(const c10::FunctionSchema& schema, const Stack& arguments) {
  std::vector<std::pair<at::Tensor, at::Tensor>> found;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite() && arguments[i].isTensor())
      found.emplace_back(arguments[i].toTensor(), arguments[i].toTensor().clone());
  }
  return found;
}

// One call.

bool names_cpu(const c10::IValue& value) { return value.isDevice() && value.toDevice().is_cpu(); }

template <class Change>
c10::IValue changed(const c10::IValue& value, Change change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector()) made.push_back(change(tensor));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      made.push_back(tensor ? std::optional<at::Tensor>(change(*tensor)) : std::nullopt);
    return made;
  }
  return value;
}

void check_devices(const c10::OperatorHandle& op, const Stack& arguments) {
  if (op.schema().name() == "aten::copy_" || op.schema().name() == "aten::_to_copy") return;
  bool on_gpu = false;
  at::Tensor elsewhere;
  auto look = [&](const at::Tensor& tensor) {
    if (is_ours(tensor)) on_gpu = true;
    else if (tensor.defined() && tensor.dim() > 0) elsewhere = tensor;
    return tensor;
  };
  const bool indexes = op.schema().name().rfind("aten::index", 0) == 0 ||
      op.schema().name().rfind("aten::_index_put", 0) == 0;  // lists of indices may lie on the CPU
  for (const auto& value : arguments)
    if (!indexes || !value.isOptionalTensorList()) changed(value, look);
  TORCH_CHECK(!on_gpu || !elsewhere.defined(), "Expected all tensors to be on the same device, but found at least "
      "two devices, cuda:0 and cpu, in ", op.schema().name());
}

void call(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  Stack arguments(stack->end() - count, stack->end());
  check_devices(op, arguments);
  torch::jit::drop(*stack, count);
  Twins twins;
  bool to_cpu = false, has_bool_index = false, copies_to_cpu = false;
  bool from_cpu = false;
  if (schema.name() == "aten::copy_") {
    copies_to_cpu = arguments[0].toTensor().is_cpu();
    from_cpu = arguments[1].toTensor().is_cpu() && arguments[1].toTensor().dim() > 0;
  }
  for (auto& value : arguments) {
    to_cpu |= names_cpu(value);
    if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor>& index : value.toOptionalTensorList())
        has_bool_index |= index && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
    if (value.isDevice() && value.toDevice().is_cuda()) value = cpu;
    if (value.isStorage() && value.toStorage().device() == gpu) value = twins.twin(value.toStorage());
    value = changed(value, [&](const at::Tensor& tensor) { return twins.to_cpu(tensor); });
  }
  if (copies_to_cpu || has_bool_index || reads_numbers.count(schema.name())) wait_for(schema.name());
  const bool is_recorded = captured != nullptr && !is_paused;
  if (is_recorded && schema.name() == "aten::copy_" && from_cpu)
    TORCH_CHECK(false, "operation not permitted when stream is capturing: a copy from the CPU's memory");
  const auto before = is_recorded ? written(schema, arguments) : decltype(written(schema, arguments)){};
  for (auto& value : arguments) stack->push_back(value);
  run(op, stack);
  for (const auto& [place, value] : before) place.copy_(value);
  if (is_recorded) captured->push_back({op, arguments, Stack(stack->end() - schema.returns().size(), stack->end())});
  twins.keep_changes();
  bool views = false;
  const size_t results = schema.returns().size();
  for (size_t i = 0; i < results; ++i) {
    auto& value = (*stack)[stack->size() - results + i];
    const auto* alias = schema.returns()[i].alias_info();
    views |= alias != nullptr && !alias->isWrite();
    if (!to_cpu) value = changed(value, [&](const at::Tensor& tensor) { return twins.to_gpu(tensor); });
  }
  launches += !views && !is_paused;
}

// Fused attention of PyTorch's own is for cards; the plain form is chosen.
int64_t plain_attention(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
    std::optional<double>, bool) {
  return 0;
}

// Switched on and off.

std::vector<c10::RegistrationHandleRAII> registered;
const c10::impl::DeviceGuardImplInterface* former_guard = nullptr;

}  // namespace

extern "C" {

// From now on CUDA is this device.
void standin_on() {
  auto& dispatcher = c10::Dispatcher::singleton();
  const std::unordered_set<std::string> besides = {"aten::copy_", "aten::_local_scalar_dense", "aten::resize_"};
  for (const auto& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema()) continue;
    const auto has = [&](c10::DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    if (!has(c10::DispatchKey::CUDA) && !has(c10::DispatchKey::CPU) && !besides.count(name.name)) continue;
    const auto kernel = name.name == "aten::_fused_sdp_choice"
        ? c10::KernelFunction::makeFromUnboxedRuntimeFunction(&plain_attention)
        : c10::KernelFunction::makeFromBoxedFunction<&call>();
    registered.push_back(dispatcher.registerImpl(
        name, c10::DispatchKey::CUDA, kernel, std::nullopt, nullptr, "the stand-in device"));
  }
  c10::SetAllocator(DeviceType::CUDA, &allocator, /*priority=*/255);
  auto& place = c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)];
  former_guard = place.exchange(&guard);
}

// Until it is called with `false`: nothing is noticed. What ran meanwhile counts as one launch.
void standin_pause(bool pause) {
  if (pause && !is_paused) ++launches;
  is_paused = pause;
}

// A graph is captured, until `standin_capture_end` gives its number.
void standin_capture_begin() {
  graphs.push_back(std::make_unique<Graph>());
  captured = graphs.back().get();
}
size_t standin_capture_end() {
  captured = nullptr;
  return graphs.size() - 1;
}
bool standin_is_capturing() { return captured != nullptr; }
void standin_capture_kernel() { captured->push_back({}); }  // one that Python launches
void standin_forget(size_t graph) { graphs[graph].reset(); }
// Makes a graph's calls from one on: up to the next kernel that Python launches, of which the place is given, or -1.
int64_t standin_replay(size_t graph, size_t from) {
  const auto& calls = *graphs[graph];
  for (size_t i = from; i < calls.size(); ++i) {
    if (!calls[i].op) return static_cast<int64_t>(i);
    repeat(calls[i]);
  }
  return -1;
}

size_t standin_launches() { return launches; }
size_t standin_allocated() { return allocated; }
size_t standin_largest() { return largest; }
void standin_reset_largest() { largest = allocated.load(); }
void standin_may_wait(bool may) { may_wait = may; }
const char* standin_waits() {  // the names so far, separated by blanks, and begins anew
  text.clear();
  for (const auto& what : waits) text += what + " ";
  waits.clear();
  return text.c_str();
}

}
