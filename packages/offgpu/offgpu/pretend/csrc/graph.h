// CUDA graphs: what a capture saw runs again on the same memory.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include <functional>

#include "aliases.h"

namespace pretend {

using Step = std::function<void()>;
using LaunchAgain = void (*)(long launch);

inline std::map<long, std::vector<Step>> graphs;
inline long captured = 0;
inline LaunchAgain launch_again = nullptr;

inline void record(Step step) {
  if (!capturing) return;
  std::lock_guard<std::mutex> guard(mutex);
  graphs[captured].push_back(std::move(step));
}

// writes an operator's new results where those of the capture are; results in the memory of arguments are there already
inline void overwrite(const IValue& old_value, const IValue& new_value) {
  std::vector<at::Tensor> results;
  each_tensor(new_value, [&](const at::Tensor& t) { results.push_back(t); });
  size_t i = 0;
  each_tensor(old_value, [&](const at::Tensor& t) {
    const auto& result = results[i++];
    if (t.storage().data() != result.storage().data()) const_cast<at::Tensor&>(t).copy_(result);
  });
}

// `arguments` and `results` are on the host
inline void record_operator(const c10::OperatorHandle& op, const torch::jit::Stack& arguments, const torch::jit::Stack& results) {
  record([op, arguments, results] {
    torch::jit::Stack stack = arguments;
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
    for (size_t i = 0; i < results.size(); i++) overwrite(results[i], stack[i]);
  });
}

inline int64_t begin_capture() {
  TORCH_CHECK(!capturing, "CUDA error: a capture is under way already");
  invalidated = false;
  captured++;
  graphs[captured];
  capturing = true;
  return captured;
}

inline void end_capture(int64_t graph) {
  capturing = false;
  if (!invalidated) return;
  graphs.erase(graph);
  TORCH_CHECK(false, "CUDA error: operation failed due to a previous error during capture");
}

inline void replay(int64_t graph) {
  TORCH_CHECK(graphs.count(graph), "Called CUDAGraph::replay without a preceding successful capture.");
  c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset);
  for (auto& step : graphs.at(graph)) step();
}

}  // namespace pretend

extern "C" {
int pretend_is_capturing() { return pretend::capturing; }
void pretend_on_launch_again(pretend::LaunchAgain f) { pretend::launch_again = f; }
void pretend_record_launch(long launch) { pretend::record([launch] { pretend::launch_again(launch); }); }
void pretend_drop_graph(long graph) { pretend::graphs.erase(graph); }
}
