// What is counted: operators, copies and waits of the host for the device, by name.
#pragma once
#include <c10/util/Exception.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>

namespace pretend {

using Listener = void (*)(const char* kind, const char* detail);

inline std::mutex mutex;
inline std::map<std::string, long> counts;
inline std::atomic<bool> counting{false};
inline std::atomic<long> allocations{0};
inline Listener listener = nullptr;

// a graph is being captured; it became invalid by what a capture refuses
inline std::atomic<bool> capturing{false}, invalidated{false};

inline void count(const std::string& name) {
  if (!counting) return;
  std::lock_guard<std::mutex> guard(mutex);
  counts[name]++;
}

// the host waits for the device; `kind` is value (an operator whose result decides sizes or Python's way), d2h, h2d or synchronize
inline void wait_for_device(const char* kind, const std::string& detail) {
  if (capturing) {
    invalidated = true;
    TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing (", kind, ": ", detail, ")");
  }
  if (!counting) return;
  count(std::string("SYNC ") + kind + " " + detail);
  if (listener) listener(kind, detail.c_str());
}

}  // namespace pretend

extern "C" {
void pretend_counting(int on) { pretend::counting = on; }
void pretend_listen(pretend::Listener listener) { pretend::listener = listener; }
long pretend_allocations() { return pretend::allocations; }
void pretend_reset() {
  std::lock_guard<std::mutex> guard(pretend::mutex);
  pretend::counts.clear();
  pretend::allocations = 0;
}
// a line "number<tab>name" for each name
const char* pretend_counts() {
  static std::string text;
  std::lock_guard<std::mutex> guard(pretend::mutex);
  text.clear();
  for (auto& [name, n] : pretend::counts) text += std::to_string(n) + "\t" + name + "\n";
  return text.c_str();
}
}
