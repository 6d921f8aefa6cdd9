// CUDA calls of the ops of this folder: Python plans and launches the first one of a kind, the next
// ones are repeated from here.
//
// [Note: recipes] On a GPU an op is a Python function: it checks, allocates, chooses tiles and
// launches Triton kernels, which takes longer than a small op. All of that depends on the kind of
// the call only: on the op, the context of the driver, every number, and of every tensor dtype,
// sizes, strides, the address modulo 16 and where it lies in memory that it shares with another
// argument. So the second call of a kind runs under a recorder (shapes that never come back cost no
// recorder). Its recipe is what was allocated and what was launched: for each parameter of a kernel
// a number, or a distance from an argument's address or from new memory. A later call allocates and
// launches that, on the current stream, without Python and its lock. An address is never kept, a
// number is always part of the kind: the key of a dropout is a tensor.
//
// A call has no recipe, and stays in Python, if it did anything else: ran an op of torch that
// computes, wrote or returned memory that is neither new nor an argument, launched what
// kernels/triton_launch.py does not know to repeat. Recipes pause while Triton's launches are
// watched, and are forgotten when who serves or a tile changes (kernels/choice.py
// forget_recipes()).
#include <ATen/Context.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string_view>
#include <unordered_map>

#include "node.h"

namespace fastpar::nodes {
namespace recipes {

constexpr size_t kMostRecipes = 8192, kMostParameters = 96, kMostDims = 5;
constexpr int kMostTiles = 8;

// The driver by name: the same library runs without a GPU.
using Status = int;
struct Driver {
  Status (*get_context)(void**) = nullptr;
  Status (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   void*, void**, void**) = nullptr;
  Status (*encode_tile)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*,
                        const uint32_t*, const uint32_t*, int, int, int, int) = nullptr;
  Status (*error_name)(Status, const char**) = nullptr;

  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return;
    const auto find = [library](auto* function, const char* name) {
      *function = reinterpret_cast<std::decay_t<decltype(*function)>>(dlsym(library, name));
    };
    find(&get_context, "cuCtxGetCurrent");
    find(&launch, "cuLaunchKernel");
    find(&encode_tile, "cuTensorMapEncodeTiled");
    find(&error_name, "cuGetErrorName");
  }
  bool is_open() const { return get_context && launch && encode_tile && error_name; }
};

// The driver's stream. Before torch 2.11 a stream does not tell it: calls stay in Python.
template <class Stream>
constexpr bool kHasHandle = requires(const Stream& stream) { stream.native_handle(); };
template <class Stream>
void* handle_of(const Stream& stream) {
  if constexpr (kHasHandle<Stream>) return stream.native_handle();
  return nullptr;
}

// CUDA is initialized when there is a CUDA tensor.
const Driver& driver() {
  static const Driver found;
  return found;
}

// A descriptor without its address, as cuTensorMapEncodeTiled takes it: the last dimension first.
struct Tile {
  int type = 0, swizzle = 0;
  uint32_t rank = 0;
  std::array<uint64_t, kMostDims> sizes{}, strides_bytes{}, strides{};
  std::array<uint32_t, kMostDims> box{};
};

// What a kernel gets: a number's bits, the address of a tensor plus bytes, a descriptor of it.
enum class Kind : int64_t { number, pointer, tile };
struct Parameter {
  Kind kind;
  uint64_t value;     // the number, or bytes from the tensor's address
  size_t tensor = 0;  // of those that are given, then those that are made
  Tile tile{};
};

struct Launch {
  void* function;
  std::array<unsigned, 3> grid;
  unsigned threads, shared_bytes;
  std::vector<Parameter> parameters;
};

struct Made {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
};

struct Recipe {
  std::string why;            // not empty: such calls stay in Python
  std::vector<Made> made;     // the outputs, then memory of the call's own
  std::vector<bool> outputs;  // false: an undefined tensor
  std::vector<Launch> launches;
};

struct Entry {
  std::string key, op;
  std::shared_ptr<const Recipe> recipe;  // none: seen once
};

struct Table {
  std::shared_mutex lock;
  std::unordered_map<uint64_t, Entry> entries;
  uint64_t times_forgotten = 0;
};
Table& table() {
  static auto* const only = new Table;  // threads may outlive static objects
  return *only;
}
std::atomic<int64_t> paused{0};
std::atomic<bool> watched{false};

bool share(const c10::Storage& a, const c10::Storage& b) {
  return a.unsafeGetStorageImpl() == b.unsafeGetStorageImpl();
}

char* address_of(const Tensor& x) {
  const auto* start = static_cast<const char*>(x.storage().data());
  return const_cast<char*>(start) + x.storage_offset() * static_cast<int64_t>(x.itemsize());
}

// The kind of a call, in bytes.
class Call {
 public:
  Call(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    put('o', &op.schema());
    const size_t given = op.schema().arguments().size();
    for (auto value = stack.end() - given; usual_ && value != stack.end(); ++value) put(*value);
    usual_ = usual_ && kHasHandle<c10::Stream> && !tensors_.empty() && driver().is_open();
    if (!usual_) return;
    put('d', tensors_[0]->device().index());
    put('a', at::globalContext().deterministicAlgorithms());
  }
  // A thread without a context gets one by Triton.
  void put_context() {
    void* context = nullptr;
    usual_ = driver().get_context(&context) == 0 && context != nullptr;
    put('c', context);
  }
  bool is_usual() const { return usual_; }
  c10::Device device() const { return tensors_[0]->device(); }
  std::string_view key() const { return {bytes_.data(), size_}; }
  const auto& tensors() const { return tensors_; }

 private:
  template <class T>
  void put(char kind, T value) {
    usual_ = usual_ && size_ + 1 + sizeof(T) <= bytes_.size();
    if (!usual_) return;
    bytes_[size_] = kind;
    std::memcpy(&bytes_[size_ + 1], &value, sizeof(T));
    size_ += 1 + sizeof(T);
  }

  void put(const c10::IValue& value) {
    if (value.isTensor()) {
      put(value.toTensor());
    } else if (value.isNone()) {
      put('n', char{});
    } else if (value.isInt()) {
      put('i', value.toInt());
    } else if (value.isBool()) {
      put('b', value.toBool());
    } else if (value.isDouble()) {
      put('f', value.toDouble());
    } else if (value.isString()) {
      for (const char letter : value.toStringRef()) put('s', letter);
      put('e', char{});
    } else if (value.isIntList()) {
      for (const int64_t number : value.toIntVector()) put('l', number);
      put('e', char{});
    } else {
      usual_ = false;
    }
  }

  void put(const Tensor& x) {
    if (!x.defined()) return put('u', char{});
    usual_ = usual_ && x.is_cuda() && is_dense(x) && x.has_storage() &&
             (tensors_.empty() || x.device() == device());
    if (!usual_) return;
    const auto address = reinterpret_cast<uintptr_t>(x.numel() ? address_of(x) : nullptr);
    put('m', static_cast<char>(address % 16));  // whole: also that of a place within x follows
    put('t', x.scalar_type());
    put('r', x.dim());
    for (const int64_t size : x.sizes()) put('z', size);
    for (const int64_t stride : x.strides()) put('y', stride);
    for (size_t i = 0; i < tensors_.size(); ++i) {
      if (!share(x.storage(), tensors_[i]->storage())) continue;
      put('w', i);
      put('v', address_of(x) - address_of(*tensors_[i]));
      break;
    }
    tensors_.push_back(&x);
  }

  std::array<char, 4096> bytes_;
  size_t size_ = 0;
  bool usual_ = true;
  c10::SmallVector<const Tensor*, 16> tensors_;
};

// What the Python function of a call allocates and launches, in its thread.
class Recorder;
thread_local Recorder* recorder = nullptr;

// Allocates or gives another shape: nothing that a device does. What such an op computes
// nevertheless, it does by another op.
bool is_idle(std::string_view name) {
  static const std::vector<std::string_view> names = {
      "alias",     "as_strided", "chunk",   "contiguous", "detach",         "expand",
      "flatten",   "narrow",     "permute", "reshape",    "select",         "slice",
      "squeeze",   "to",         "unbind",  "unflatten",  "view",           "transpose",
      "unsqueeze", "split",      "t",       "view_as",    "_reshape_alias", "_unsafe_view"};
  constexpr std::string_view kAten = "aten::", kOwn = "fastpar::_";
  if (name.substr(0, kOwn.size()) == kOwn) return true;  // this file's
  if (name.substr(0, kAten.size()) != kAten) return false;
  return std::find(names.begin(), names.end(), name.substr(kAten.size())) != names.end();
}
bool allocates(std::string_view name) {
  return name.substr(0, 11) == "aten::empty" || name.substr(0, 15) == "aten::new_empty";
}

class Recorder {
 public:
  explicit Recorder(const Call& call) {
    for (const Tensor* x : call.tensors()) given_.push_back(*x);
    recorder = this;
    handle_ =
        at::addThreadLocalCallback(at::RecordFunctionCallback(&Recorder::begin, &Recorder::end)
                                       .needsOutputs(true)
                                       .scopes({at::RecordScope::FUNCTION}));
  }
  ~Recorder() {
    at::removeCallback(handle_);
    recorder = nullptr;
  }
  Recorder(const Recorder&) = delete;
  Recorder& operator=(const Recorder&) = delete;

  void refuse(std::string why) {
    if (why_.empty()) why_ = std::move(why);
  }

  void note(Launch launch) {
    const auto is_tile = [](const Parameter& x) { return x.kind == Kind::tile; };
    const auto& all = launch.parameters;
    if (all.size() > kMostParameters ||
        std::count_if(all.begin(), all.end(), is_tile) > kMostTiles) {
      refuse("a kernel of too many parameters");
    }
    launches_.push_back(std::move(launch));
  }

  // Of the tensors given and made, which one holds x, and at which distance.
  Parameter pointer_to(const Tensor& x) {
    if (x.numel() == 0) return {Kind::number, 0};
    for (size_t i = 0; i < given_.size(); ++i) {
      if (share(x.storage(), given_[i].storage())) return distance(x, address_of(given_[i]), i);
    }
    for (size_t i = 0; i < made_.size(); ++i) {
      if (share(x.storage(), made_[i])) {
        written_[i] = true;
        return distance(x, static_cast<const char*>(made_[i].data()), given_.size() + i);
      }
    }
    refuse("memory that outlives the call");
    return {Kind::number, 0};
  }

  std::shared_ptr<const Recipe> finish(const torch::jit::Stack& stack, size_t returned) {
    auto recipe = std::make_shared<Recipe>();
    std::vector<size_t> place(made_.size(), made_.size());  // in the recipe
    for (auto value = stack.end() - returned; value != stack.end(); ++value) {
      if (!value->isTensor()) {
        refuse("a result that is no tensor");
        break;
      }
      const Tensor& x = value->toTensor();
      recipe->outputs.push_back(x.defined());
      if (x.defined()) add_output(x, recipe.get(), &place);
    }
    for (size_t i = 0; i < made_.size(); ++i) {
      if (!written_[i] || place[i] != made_.size()) continue;
      place[i] = recipe->made.size();
      recipe->made.push_back({{static_cast<int64_t>(made_[i].nbytes())}, {1}, at::kByte});
    }
    for (Launch& launch : launches_) {
      for (Parameter& x : launch.parameters) {
        if (x.kind != Kind::number && x.tensor >= given_.size()) {
          x.tensor = given_.size() + place[x.tensor - given_.size()];
        }
      }
    }
    recipe->launches = std::move(launches_);
    recipe->why = why_;
    return recipe;
  }

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& op) {
    const std::string_view name = op.name();
    if (recorder != nullptr && !allocates(name) && !is_idle(name)) recorder->refuse(op.name());
    return nullptr;
  }
  static void end(const at::RecordFunction& op, at::ObserverContext*) {
    if (recorder == nullptr || !allocates(op.name())) return;
    for (const c10::IValue& value : op.outputs()) {
      if (value.isTensor()) recorder->add_made(value.toTensor());
    }
  }

  void add_made(const Tensor& x) {
    if (!x.defined() || !x.has_storage()) return;
    for (const c10::Storage& known : made_) {
      if (share(x.storage(), known)) return;
    }
    made_.push_back(x.storage());  // kept: no other tensor of the call gets this memory
    written_.push_back(false);
  }

  static Parameter distance(const Tensor& x, const char* from, size_t tensor) {
    return {Kind::pointer, static_cast<uint64_t>(address_of(x) - from), tensor};
  }

  void add_output(const Tensor& x, Recipe* recipe, std::vector<size_t>* place) {
    if (x.numel()) {
      size_t i = 0;
      while (i < made_.size() && !share(x.storage(), made_[i])) ++i;
      const auto bytes = at::detail::computeStorageNbytes(x.sizes(), x.strides(), x.itemsize());
      const bool whole = i < made_.size() && x.storage_offset() == 0 &&
                         made_[i].nbytes() == bytes && (*place)[i] == made_.size();
      if (!whole || !written_[i]) {
        return refuse(whole ? "a result that no kernel of its own writes"
                            : "a result in memory that is not its own");
      }
      (*place)[i] = recipe->made.size();
    }
    recipe->made.push_back({x.sizes().vec(), x.strides().vec(), x.scalar_type()});
  }

  std::vector<Tensor> given_;
  std::vector<c10::Storage> made_;
  std::vector<bool> written_;
  std::vector<Launch> launches_;
  std::string why_;
  at::RecordFunctionGuard enabled_;
  at::CallbackHandle handle_;
};

std::string name_of(const c10::OperatorHandle& op) {
  return op.schema().name().substr(sizeof("fastpar::") - 1);
}

void encode(const Tile& tile, char* address, void* out, const c10::OperatorHandle& op) {
  constexpr std::array<uint32_t, kMostDims> steps = {1, 1, 1, 1, 1};
  constexpr int kNoInterleave = 0, kPromotion128Bytes = 2, kZeros = 0;
  const Status status = driver().encode_tile(
      out, tile.type, tile.rank, address, tile.sizes.data(), tile.strides_bytes.data(),
      tile.box.data(), steps.data(), kNoInterleave, tile.swizzle, kPromotion128Bytes, kZeros);
  TORCH_CHECK(status == 0, name_of(op), ": the driver refused a descriptor with error ", status,
              "; set FASTPAR_BACKEND=torch");
}

// The parameters of one launch, as the driver takes them: the address of each. A descriptor is
// followed by its sizes and strides.
struct Parameters {
  alignas(128) std::array<std::array<char, 128>, kMostTiles> maps;
  std::array<std::array<int32_t, kMostDims>, kMostTiles> sizes;
  std::array<uint64_t, kMostParameters> values;
  std::array<void*, kMostParameters + kMostTiles * 2 * kMostDims + 2> at;
  uint64_t no_scratch = 0;

  Parameters(const Launch& launch, char* const* addresses, const c10::OperatorHandle& op) {
    size_t n = 0, tiles = 0;
    for (size_t i = 0; i < launch.parameters.size(); ++i) {
      const Parameter& x = launch.parameters[i];
      if (x.kind != Kind::tile) {
        values[i] = x.value;
        if (x.kind == Kind::pointer) {
          values[i] += reinterpret_cast<uint64_t>(addresses[x.tensor]);
        }
        at[n++] = &values[i];
        continue;
      }
      encode(x.tile, addresses[x.tensor] + x.value, maps[tiles].data(), op);
      at[n++] = maps[tiles].data();
      for (uint32_t d = x.tile.rank; d-- > 0;) {
        sizes[tiles][d] = static_cast<int32_t>(x.tile.sizes[d]);
        at[n++] = &sizes[tiles][d];
      }
      for (uint32_t d = x.tile.rank; d-- > 0;) at[n++] = const_cast<uint64_t*>(&x.tile.strides[d]);
      ++tiles;
    }
    at[n++] = &no_scratch;  // memory that none of our kernels asks Triton for
    at[n++] = &no_scratch;
  }
};

void repeat(const Recipe& recipe, const Call& call, const c10::OperatorHandle& op,
            torch::jit::Stack* stack) {
  c10::SmallVector<Tensor, 8> made;
  c10::SmallVector<char*, 24> addresses;
  for (const Tensor* x : call.tensors()) addresses.push_back(address_of(*x));
  for (const Made& x : recipe.made) {
    made.push_back(
        at::empty_strided(x.sizes, x.strides, at::TensorOptions(x.dtype).device(call.device())));
    addresses.push_back(address_of(made.back()));
  }
  const c10::impl::VirtualGuardImpl device(c10::kCUDA);
  void* const stream = handle_of(device.getStream(call.device()));
  for (size_t i = 0; i < recipe.launches.size(); ++i) {
    const Launch& x = recipe.launches[i];
    Parameters parameters(x, addresses.data(), op);
    const Status status = driver().launch(x.function, x.grid[0], x.grid[1], x.grid[2], x.threads, 1,
                                          1, x.shared_bytes, stream, parameters.at.data(), nullptr);
    if (status == 0) continue;
    const char* text = nullptr;
    driver().error_name(status, &text);
    TORCH_CHECK(false, name_of(op), ": the driver refused kernel ", i + 1, " of ",
                recipe.launches.size(), " with error ", status, " (",
                text == nullptr ? "unknown" : text,
                "); the cause may be a kernel before it: repeat with CUDA_LAUNCH_BLOCKING=1");
  }
  torch::jit::drop(*stack, op.schema().arguments().size());
  size_t next = 0;
  for (const bool defined : recipe.outputs) {
    stack->emplace_back(defined ? std::move(made[next++]) : Tensor());
  }
}

void serve(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto by_python = [&] { op.redispatchBoxed(kPython, stack); };
  if (recorder != nullptr) recorder->refuse(name_of(op));
  if (recorder != nullptr || paused != 0 || watched) return by_python();
  Call call(op, *stack);
  if (!call.is_usual()) return by_python();
  const c10::DeviceGuard guard(call.device());
  call.put_context();
  if (!call.is_usual()) return by_python();
  const std::string_view key = call.key();
  const uint64_t hash = std::hash<std::string_view>{}(key);
  std::shared_ptr<const Recipe> recipe;
  bool seen = false;
  uint64_t forgotten = 0;
  {
    const std::shared_lock locked(table().lock);
    forgotten = table().times_forgotten;
    const auto found = table().entries.find(hash);
    seen = found != table().entries.end() && found->second.key == key;
    if (seen) recipe = found->second.recipe;
  }
  if (recipe && recipe->why.empty()) return repeat(*recipe, call, op, stack);
  if (recipe) return by_python();
  if (seen) {
    Recorder now(call);
    by_python();
    recipe = now.finish(*stack, op.schema().returns().size());
  } else {
    by_python();
  }
  const std::unique_lock locked(table().lock);
  if (forgotten != table().times_forgotten) return;
  if (table().entries.size() >= kMostRecipes) table().entries.clear();
  table().entries.insert_or_assign(hash, Entry{std::string(key), name_of(op), recipe});
}

// A line for each kind of call: the op, then its number of launches or why it stays in Python.
std::vector<std::string> describe() {
  const std::shared_lock locked(table().lock);
  std::vector<std::string> lines;
  for (const auto& [hash, entry] : table().entries) {
    const auto* recipe = entry.recipe.get();
    lines.push_back(entry.op + ": " +
                    (recipe == nullptr     ? "seen once"
                     : recipe->why.empty() ? "launches " + std::to_string(recipe->launches.size())
                                           : "Python, " + recipe->why));
  }
  return lines;
}

// numbers: of each parameter its kind, then its value (number), nothing (pointer), or type,
// swizzle, rank and by dimension size, stride, box (tile; the last dimension first).
void note_launch(int64_t function, at::IntArrayRef grid, int64_t threads, int64_t shared_bytes,
                 at::IntArrayRef numbers, at::TensorList tensors) {
  if (recorder == nullptr) return;
  Launch launch{reinterpret_cast<void*>(function),
                {1, 1, 1},
                static_cast<unsigned>(threads),
                static_cast<unsigned>(shared_bytes),
                {}};
  for (size_t i = 0; i < grid.size(); ++i) launch.grid.at(i) = static_cast<unsigned>(grid[i]);
  const Tensor* tensor = tensors.begin();
  for (const int64_t* at = numbers.begin(); at != numbers.end();) {
    const auto kind = static_cast<Kind>(*at++);
    if (kind == Kind::number) {
      launch.parameters.push_back({kind, static_cast<uint64_t>(*at++)});
      continue;
    }
    Parameter x = recorder->pointer_to(*tensor);
    if (kind == Kind::tile) {
      if (x.kind == Kind::number) recorder->refuse("a descriptor of no elements");
      x.kind = kind;
      x.tile.type = static_cast<int>(*at++);
      x.tile.swizzle = static_cast<int>(*at++);
      x.tile.rank = static_cast<uint32_t>(*at++);
      for (uint32_t d = 0; d < x.tile.rank; ++d) {
        x.tile.sizes.at(d) = static_cast<uint64_t>(*at++);
        x.tile.strides.at(d) = static_cast<uint64_t>(*at++);
        x.tile.box.at(d) = static_cast<uint32_t>(*at++);
        if (d > 0) x.tile.strides_bytes[d - 1] = x.tile.strides[d] * tensor->itemsize();
      }
    }
    launch.parameters.push_back(x);
    ++tensor;
  }
  recorder->note(std::move(launch));
}

}  // namespace recipes

void serve_cuda(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  recipes::serve(op, stack);
}

void forget_recipes() {
  const std::unique_lock locked(recipes::table().lock);
  recipes::table().entries.clear();
  ++recipes::table().times_forgotten;
}

}  // namespace fastpar::nodes

TORCH_LIBRARY_FRAGMENT(fastpar, m) {
  using namespace fastpar::nodes;
  m.def("_is_recording() -> bool", []() { return recipes::recorder != nullptr; });
  m.def(
      "_note_launch(int function, int[] grid, int threads, int shared_bytes, int[] numbers, "
      "Tensor[] tensors) -> ()",
      &recipes::note_launch);
  m.def("_refuse_recipe(str why) -> ()", [](std::string why) {
    if (recipes::recorder != nullptr) recipes::recorder->refuse(std::move(why));
  });
  m.def("_pause_recipes(int more) -> ()", [](int64_t more) { recipes::paused += more; });
  m.def("_watch_launches(bool on) -> ()", [](bool on) { recipes::watched = on; });
  m.def("_forget_recipes() -> ()", &forget_recipes);
  m.def("_recipes() -> str[]", &recipes::describe);
}
