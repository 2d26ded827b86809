// CPU tensors on the memory of device tensors, and device tensors on the memory of CPU tensors.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/InferenceMode.h>

#include <unordered_map>
#include <vector>

#include "device.h"

namespace pretend {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::Storage;

inline bool is_on_device(const at::Tensor& t) { return t.defined() && t.device().type() == DeviceType::CUDA; }

inline c10::DataPtr host_memory(const Storage& storage) {
  return c10::DataPtr(const_cast<void*>(storage.data()), new Storage(storage), [](void* s) { delete static_cast<Storage*>(s); }, CPU);
}

inline Storage host_storage(const Storage& storage) {
  return Storage(Storage::use_byte_size_t(), storage.nbytes(), host_memory(storage), c10::GetCPUAllocator(), /*resizable=*/true);
}

inline c10::DataPtr device_memory(const Storage& host, Device device) {
  return Block<Storage>::make(const_cast<void*>(host.data()), host, host.nbytes(), device);
}

inline Storage device_storage(const Storage& host, Device device) {
  return Storage(Storage::use_byte_size_t(), host.nbytes(), device_memory(host, device), &memory, /*resizable=*/true);
}

// a tensor of the shape of `like` on other memory; `base` are the keys of the tensor that it is a view of
inline at::Tensor make_tensor(
    Storage storage, const at::Tensor& like, DispatchKey key, std::optional<DispatchKeySet> base = std::nullopt) {
  // a view of an inference tensor is one, and no other view is
  std::optional<c10::InferenceMode> mode;
  if (base.has_value()) mode.emplace(!base->has_any(c10::autograd_dispatch_keyset));
  auto t = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(key), like.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.is_conj()) t._set_conj(true);
  if (like.is_neg()) t._set_neg(true);
  return t;
}

inline at::Tensor host(const at::Tensor& t) {
  return is_on_device(t) ? make_tensor(host_storage(t.storage()), t, DispatchKey::CPU) : t;
}

inline at::Tensor to_device(const at::Tensor& t, Device device) {
  return is_on_device(t) ? t : make_tensor(device_storage(t.storage(), device), t, DispatchKey::CUDA);
}

// The tensors of one call, from the device and back. What shares memory goes on sharing it, and a tensor that an operator hands
// back is the one that it was given.
class Aliases {
 public:
  explicit Aliases(Device device) : device_(device) {}

  at::Tensor host(const at::Tensor& t) {
    if (!is_on_device(t)) return t;
    auto* impl = t.unsafeGetTensorImpl();
    if (auto found = hosts_.find(impl); found != hosts_.end()) return found->second;
    auto* own = t.storage().unsafeGetStorageImpl();
    if (!host_storages_.count(own)) {
      auto alias = host_storage(t.storage());
      storages_.emplace(alias.unsafeGetStorageImpl(), Origin{t.storage(), t.key_set()});
      host_storages_.emplace(own, alias);
    }
    auto alias = make_tensor(host_storages_.at(own), t, DispatchKey::CPU);
    hosts_.emplace(impl, alias);
    tensors_.emplace(alias.unsafeGetTensorImpl(), t);
    return alias;
  }

  at::Tensor device(const at::Tensor& given) {
    if (!given.defined() || !given.device().is_cpu()) return given;
    // zeros of forward-mode differentiation have no memory
    at::Tensor t = given._is_zerotensor() ? at::zeros(given.sizes(), given.options()) : given;
    if (auto found = tensors_.find(t.unsafeGetTensorImpl()); found != tensors_.end()) return found->second;
    auto* own = t.storage().unsafeGetStorageImpl();
    auto origin = storages_.find(own);
    if (origin == storages_.end()) origin = storages_.emplace(own, Origin{device_storage(t.storage(), device_), std::nullopt}).first;
    auto alias = make_tensor(origin->second.storage, t, DispatchKey::CUDA, origin->second.keys);
    tensors_.emplace(t.unsafeGetTensorImpl(), alias);
    // else another tensor may get its address
    kept_.push_back(t);
    return alias;
  }

  // gives the device's tensors the shapes and memory that an operator has changed
  void settle() {
    for (auto& [impl, alias] : hosts_)
      if (impl->sizes() != alias.sizes() || impl->strides() != alias.strides() || impl->storage_offset() != alias.storage_offset())
        impl->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    for (auto& [impl, alias] : host_storages_) {
      if (impl->data() == alias.data() && impl->nbytes() == alias.nbytes()) continue;
      auto data = alias.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, CPU));
      Storage moved(Storage::use_byte_size_t(), alias.nbytes(), std::move(data), c10::GetCPUAllocator(), /*resizable=*/false);
      impl->set_data_ptr_noswap(device_memory(moved, impl->device()));
      impl->set_nbytes(moved.nbytes());
      // a captured operator writes there again
      alias.unsafeGetStorageImpl()->set_data_ptr_noswap(host_memory(moved));
    }
  }

 private:
  // where the memory of a CPU tensor belongs, with the keys of a tensor on it
  struct Origin { Storage storage; std::optional<DispatchKeySet> keys; };

  Device device_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> hosts_, tensors_;
  std::unordered_map<c10::StorageImpl*, Storage> host_storages_;
  std::unordered_map<c10::StorageImpl*, Origin> storages_;
  std::vector<at::Tensor> kept_;
};

// a value with f(tensor) in place of each tensor in it
template <class F>
IValue map_tensors(const IValue& value, F&& f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    std::vector<at::Tensor> out;
    for (const auto& t : value.toTensorVector()) out.push_back(f(t));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> out;
    for (std::optional<at::Tensor> t : value.toOptionalTensorList())
      out.push_back(t.has_value() && t->defined() ? std::optional<at::Tensor>(f(*t)) : std::nullopt);
    return out;
  }
  return value;
}

// f(tensor) for each tensor in a value
template <class F>
void each_tensor(const IValue& value, F&& f) {
  map_tensors(value, [&](const at::Tensor& t) {
    if (t.defined()) f(t);
    return t;
  });
}

}  // namespace pretend
