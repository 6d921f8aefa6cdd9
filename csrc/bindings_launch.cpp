// launch(kernel, grid, *args, **constants): a Triton kernel that was launched before goes to the
// driver from here; kernels/triton_launch.py [Note: launches again] says what "before" means.
//
// [Note: no CUDA header] The driver's library is the one that Triton has loaded. Two of its
// functions are called, and one that describes tiles of memory; their C interface is stable since
// CUDA 12.
//
// [Note: names by address] A key holds addresses of Python objects (kernel, dtypes, names,
// layouts). Its entry owns these objects, so that no other object can get the same address.
#include <dlfcn.h>

#include <array>
#include <cstring>
#include <string_view>
#include <unordered_map>

#include "bindings.h"

namespace fastpar {
namespace {

constexpr int kMostArguments = 64, kMostTiles = 8, kMostDims = 5;
constexpr size_t kMostEntries = 8192;  // integers that never repeat must not fill the memory

using Status = int;
struct Driver {
  Status (*get_context)(void**) = nullptr;
  Status (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                   void*, void**, void**) = nullptr;
  Status (*encode_tile)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*,
                        const uint32_t*, const uint32_t*, int, int, int, int) = nullptr;
  Status (*error_name)(Status, const char**) = nullptr;
} driver;

// How an argument reaches the kernel: not at all, as the low bytes of its value, as a descriptor.
enum class Kind : int { none, value, tile };

// A descriptor without its address, as cuTensorMapEncodeTiled takes it: the last dimension first.
struct Tile {
  int type = 0, swizzle = 0;
  uint32_t rank = 0;
  std::array<uint64_t, kMostDims> sizes{}, strides_bytes{}, strides{};
  std::array<uint32_t, kMostDims> box{};
};

struct Entry {
  std::string key;
  std::vector<py::object> owned;  // see [Note: names by address]
  std::vector<Kind> kinds;
  std::vector<Tile> tiles;
  void* function = nullptr;  // none: it goes through Triton
  unsigned threads = 0, shared_bytes = 0;
  py::object get_stream, device;
};

// What Python passes once; never destroyed, because Python may end before.
struct State {
  py::object tensor, parameter, first_time, through_triton, settings, data_ptr, dtype, get_device,
      calls, pre_run_hooks;
  std::vector<py::object> hooks;
  std::unordered_map<uint64_t, Entry> entries;
};
State* state = nullptr;
thread_local int paused = 0;  // launches are recorded

struct Text {
  std::array<char, 2048> bytes;
  size_t size = 0;
  bool ok = true;

  template <class T>
  void put(char kind, T value) {
    ok = ok && size + 1 + sizeof(T) <= bytes.size();
    if (!ok) return;
    bytes[size] = kind;
    std::memcpy(&bytes[size + 1], &value, sizeof(T));
    size += 1 + sizeof(T);
  }
  uint64_t hash() const { return std::hash<std::string_view>{}({bytes.data(), size}); }
};

// A call, read: its key, and the values that kernel and driver get.
struct Call {
  Text key;
  std::array<uint64_t, kMostArguments> values;
  PyObject* first = nullptr;  // tensor
};

// The result of a call as an integer; false where there is none.
bool integer_of(PyObject* result, uint64_t* out) {
  if (result == nullptr) return false;
  *out = PyLong_AsUnsignedLongLongMask(result);
  Py_DECREF(result);
  return true;
}

bool call_for_integer(PyObject* object, const py::object& method, uint64_t* out) {
  return integer_of(PyObject_CallMethodNoArgs(object, method.ptr()), out);
}

bool is_tensor(PyObject* x) {
  return Py_TYPE(x) == reinterpret_cast<PyTypeObject*>(state->tensor.ptr()) ||
         Py_TYPE(x) == reinterpret_cast<PyTypeObject*>(state->parameter.ptr());
}

// Each returns false for what goes through Triton; a Python error may be set.
bool read_tensor(PyObject* x, Call* call, uint64_t* address) {
  PyObject* dtype = PyObject_GetAttr(x, state->dtype.ptr());
  if (dtype == nullptr || !call_for_integer(x, state->data_ptr, address)) {
    Py_XDECREF(dtype);
    return false;
  }
  call->key.put(*address % 16 == 0 ? 't' : 'u', dtype);
  Py_DECREF(dtype);  // dtypes are never freed
  if (call->first == nullptr) call->first = x;
  return true;
}

bool read_argument(PyObject* x, Call* call, uint64_t* value) {
  *value = 0;
  if (x == Py_None) {
    call->key.put('n', char{});
  } else if (is_tensor(x)) {
    return read_tensor(x, call, value);
  } else if (PyLong_CheckExact(x)) {
    int overflow = 0;
    const long long integer = PyLong_AsLongLongAndOverflow(x, &overflow);
    call->key.put('i', integer);
    *value = static_cast<uint64_t>(integer);
    return overflow == 0;
  } else if (PyFloat_CheckExact(x)) {
    const auto narrow = static_cast<float>(PyFloat_AS_DOUBLE(x));
    call->key.put('f', char{});
    std::memcpy(value, &narrow, sizeof(narrow));
  } else if (PyBool_Check(x)) {
    *value = x == Py_True;
    call->key.put('b', x);
  } else if (PyTuple_Check(x) && PyTuple_GET_SIZE(x) == 2 && is_tensor(PyTuple_GET_ITEM(x, 0))) {
    call->key.put('d', PyTuple_GET_ITEM(x, 1));
    return read_tensor(PyTuple_GET_ITEM(x, 0), call, value);
  } else {
    return false;
  }
  return true;
}

void read_constant(PyObject* name, PyObject* x, Call* call) {
  call->key.put('k', name);
  int overflow = 0;
  if (PyLong_CheckExact(x)) {
    call->key.put('i', PyLong_AsLongLongAndOverflow(x, &overflow));
    if (overflow == 0) return;
  }
  call->key.put('o', x);
}

// args: the kernel, the grid, its arguments, its constants.
bool read(PyObject* const* args, Py_ssize_t n, PyObject* names, Call* call) {
  void* context = nullptr;
  if (driver.launch == nullptr || paused != 0 || n > kMostArguments ||
      driver.get_context(&context) != 0 || context == nullptr) {
    return false;
  }
  call->key.put('c', context);
  call->key.put('k', args[0]);
  for (Py_ssize_t i = 2; i < n; ++i) {
    if (!read_argument(args[i], call, &call->values[i - 2])) return false;
  }
  uint64_t device = 0;
  if (call->first == nullptr || !call_for_integer(call->first, state->get_device, &device)) {
    return false;
  }
  call->key.put('g', device);
  const Py_ssize_t constants = names == nullptr ? 0 : PyTuple_GET_SIZE(names);
  for (Py_ssize_t i = 0; i < constants; ++i) {
    read_constant(PyTuple_GET_ITEM(names, i), args[n + i], call);
  }
  return call->key.ok;
}

// Whether a setting is off: None, False or an empty list of hooks.
bool is_quiet(PyObject* setting) {
  if (setting == Py_None || setting == Py_False) return true;
  PyObject* list = PyObject_GetAttr(setting, state->calls.ptr());
  if (list == nullptr) PyErr_Clear();
  const bool quiet = list != nullptr && PyList_CheckExact(list) && PyList_GET_SIZE(list) == 0;
  Py_XDECREF(list);
  return quiet;
}

bool is_watched(PyObject* kernel) {
  PyObject* hooks = PyObject_GetAttr(kernel, state->pre_run_hooks.ptr());
  bool quiet = hooks != nullptr && PyList_CheckExact(hooks) && PyList_GET_SIZE(hooks) == 0;
  Py_XDECREF(hooks);
  for (const py::object& name : state->hooks) {
    PyObject* setting = quiet ? PyObject_GetAttr(state->settings.ptr(), name.ptr()) : nullptr;
    quiet = setting != nullptr && is_quiet(setting);
    Py_XDECREF(setting);
  }
  PyErr_Clear();
  return !quiet;
}

// An integer of a grid; -1 where there is none.
long long size_of(PyObject* grid, Py_ssize_t i) {
  return i < PyTuple_GET_SIZE(grid) ? PyLong_AsLongLong(PyTuple_GET_ITEM(grid, i)) : 1;
}

void encode(const Tile& tile, uint64_t address, void* out) {
  constexpr std::array<uint32_t, kMostDims> steps = {1, 1, 1, 1, 1};
  constexpr int kNoInterleave = 0, kPromotion128Bytes = 2, kZeros = 0;
  const Status status = driver.encode_tile(
      out, tile.type, tile.rank, at<void>(address), tile.sizes.data(), tile.strides_bytes.data(),
      tile.box.data(), steps.data(), kNoInterleave, tile.swizzle, kPromotion128Bytes, kZeros);
  if (status != 0) {
    throw std::runtime_error(concat("launch: the driver refused a descriptor with error ", status,
                                    "; set FASTPAR_BACKEND=torch"));
  }
}

// The kernel's parameters: addresses of the values, and of each tile's descriptor, sizes and
// strides.
struct Parameters {
  alignas(128) std::array<std::array<char, 128>, kMostTiles> maps;
  std::array<std::array<int32_t, kMostDims>, kMostTiles> sizes;
  std::array<void*, kMostArguments + kMostTiles * 2 * kMostDims + 2> at;
  size_t n = 0;
  uint64_t no_scratch = 0;

  Parameters(Entry& entry, Call& call) {
    size_t tiles = 0;
    for (size_t i = 0; i < entry.kinds.size(); ++i) {
      if (entry.kinds[i] == Kind::none) continue;
      if (entry.kinds[i] != Kind::tile) {
        at[n++] = &call.values[i];
        continue;
      }
      Tile& tile = entry.tiles[tiles];
      encode(tile, call.values[i], maps[tiles].data());
      at[n++] = maps[tiles].data();
      for (uint32_t d = tile.rank; d-- > 0;) {
        sizes[tiles][d] = static_cast<int32_t>(tile.sizes[d]);
        at[n++] = &sizes[tiles][d];
      }
      for (uint32_t d = tile.rank; d-- > 0;) at[n++] = &tile.strides[d];
      ++tiles;
    }
    at[n++] = &no_scratch;  // memory that none of our kernels asks Triton for
    at[n++] = &no_scratch;
  }
};

void launch_again(Entry& entry, Call& call, PyObject* grid) {
  const long long x = size_of(grid, 0), y = size_of(grid, 1), z = size_of(grid, 2);
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  if (x * y * z == 0) return;
  Parameters parameters(entry, call);
  uint64_t stream = 0;
  if (!integer_of(PyObject_CallOneArg(entry.get_stream.ptr(), entry.device.ptr()), &stream)) {
    throw py::error_already_set();
  }
  void* const function = entry.function;  // without the GIL, the entry may be removed
  const unsigned threads = entry.threads, shared_bytes = entry.shared_bytes;
  Status status = 0;
  {
    const py::gil_scoped_release unlocked;
    status = driver.launch(function, static_cast<unsigned>(x), static_cast<unsigned>(y),
                           static_cast<unsigned>(z), threads, 1, 1, shared_bytes, at<void>(stream),
                           parameters.at.data(), nullptr);
  }
  if (status != 0) {
    const char* text = nullptr;
    if (driver.error_name != nullptr) driver.error_name(status, &text);
    throw std::runtime_error(
        concat("launch: the driver refused a kernel with error ", status, " (",
               text == nullptr ? "unknown" : text,
               "); the cause may be a kernel before it: repeat with CUDA_LAUNCH_BLOCKING=1"));
  }
}

void open_driver() {
  void* const library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) return;
  const auto find = [library](auto* function, const char* name) {
    *function = reinterpret_cast<std::decay_t<decltype(*function)>>(dlsym(library, name));
    return *function != nullptr;
  };
  Driver found;
  find(&found.error_name, "cuGetErrorName");
  if (find(&found.get_context, "cuCtxGetCurrent") && find(&found.launch, "cuLaunchKernel") &&
      find(&found.encode_tile, "cuTensorMapEncodeTiled")) {
    driver = found;
  }
}

template <size_t N, class T>
std::array<T, N> padded(const py::handle& values) {
  std::array<T, N> result{};
  size_t i = 0;
  for (const T value : py::cast<std::vector<T>>(values)) result.at(i++) = value;
  return result;
}

// tile: (type, swizzle, sizes, strides_bytes, strides, box) of kernels/triton_launch.py.
Tile tile_of(const py::tuple& t) {
  return {py::cast<int>(t[0]),
          py::cast<int>(t[1]),
          static_cast<uint32_t>(py::len(t[2])),
          padded<kMostDims, uint64_t>(t[2]),
          padded<kMostDims, uint64_t>(t[3]),
          padded<kMostDims, uint64_t>(t[4]),
          padded<kMostDims, uint32_t>(t[5])};
}

// plan: (function, threads, shared_bytes, kinds, tiles, get_stream, device), or None.
void keep(const Call& call, PyObject* const* args, Py_ssize_t n, PyObject* names,
          const py::object& plan) {
  Entry entry;
  entry.key.assign(call.key.bytes.data(), call.key.size);
  const auto own = [&entry](PyObject* x) {
    entry.owned.push_back(py::reinterpret_borrow<py::object>(x));
  };
  own(args[0]);
  for (Py_ssize_t i = 2; i < n; ++i) {
    if (PyTuple_Check(args[i])) own(PyTuple_GET_ITEM(args[i], 1));
  }
  for (Py_ssize_t i = 0; names != nullptr && i < PyTuple_GET_SIZE(names); ++i) {
    own(PyTuple_GET_ITEM(names, i));
    own(args[n + i]);
  }
  if (!plan.is_none()) {
    const auto given = py::cast<py::tuple>(plan);
    entry.function = at<void>(py::cast<Address>(given[0]));
    entry.threads = py::cast<unsigned>(given[1]);
    entry.shared_bytes = py::cast<unsigned>(given[2]);
    for (const auto& kind : given[3]) entry.kinds.push_back(static_cast<Kind>(py::cast<int>(kind)));
    for (const auto& tile : given[4]) entry.tiles.push_back(tile_of(py::cast<py::tuple>(tile)));
    entry.get_stream = given[5];
    entry.device = given[6];
    if (entry.tiles.size() > kMostTiles) entry.function = nullptr;
  }
  if (state->entries.size() >= kMostEntries) state->entries.clear();
  state->entries.insert_or_assign(call.key.hash(), std::move(entry));
}

PyObject* launch_or_raise(PyObject* const* args, Py_ssize_t n, PyObject* names) {
  if (n < 2 || !PyTuple_CheckExact(args[1])) {
    throw py::type_error("launch: expected a kernel and a grid; see kernels/triton_launch.py");
  }
  Call call;
  const bool readable = read(args, n, names, &call);
  PyErr_Clear();  // Triton says what is wrong with an argument
  bool known = false;
  if (readable) {
    const auto found = state->entries.find(call.key.hash());
    known =
        found != state->entries.end() &&
        found->second.key.compare(0, std::string::npos, call.key.bytes.data(), call.key.size) == 0;
    if (known && found->second.function != nullptr && !is_watched(args[0])) {
      launch_again(found->second, call, args[1]);
      return py::none().release().ptr();
    }
  }
  const py::object& other = known ? state->through_triton : state->first_time;
  const auto plan = py::reinterpret_steal<py::object>(
      PyObject_Vectorcall(other.ptr(), args, static_cast<size_t>(n), names));
  if (!plan) throw py::error_already_set();
  if (readable && !known) keep(call, args, n, names, plan);
  if (driver.launch == nullptr) open_driver();
  return py::none().release().ptr();
}

PyObject* launch(PyObject*, PyObject* const* args, Py_ssize_t n, PyObject* names) {
  try {
    return launch_or_raise(args, n, names);
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const py::type_error& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyMethodDef launch_method = {
    "launch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(launch)),
    METH_FASTCALL | METH_KEYWORDS, "Launches a Triton kernel; kernels/triton_launch.py."};

}  // namespace

void bind_launch(py::module_& m) {
  m.def("prepare_launch",
        [](py::object tensor, py::object parameter, py::object first_time,
           py::object through_triton, py::object settings, std::vector<py::object> hooks) {
          const auto name = [](const char* text) {
            return py::reinterpret_steal<py::object>(PyUnicode_InternFromString(text));
          };
          if (state == nullptr) state = new State;
          *state = {tensor,           parameter,
                    first_time,       through_triton,
                    settings,         name("data_ptr"),
                    name("dtype"),    name("get_device"),
                    name("calls"),    name("pre_run_hooks"),
                    std::move(hooks), {}};
        });
  m.def("pause_launches", [](bool pause) { paused += pause ? 1 : -1; });
  m.def("known_launches", [] { return state == nullptr ? 0 : state->entries.size(); });
  m.attr("launch") = py::reinterpret_steal<py::object>(PyCFunction_New(&launch_method, nullptr));
}

}  // namespace fastpar
