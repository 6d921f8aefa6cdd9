// How an eager call of an op continues: kernels/op.py [Note: eager calls]. In Python, checking one
// argument takes as long as a small kernel's launch.
#include <utility>

#include "bindings.h"

namespace fastpar {
namespace {

// What Python passes once; never destroyed, because Python may end before.
struct State {
  PyObject *tensor, *parameter, *peek_transform;
  PyObject* watchers;  // a tuple: each counts what is active of modes and of the tracer
};
State* state = nullptr;
PyObject *is_cuda, *is_cpu, *is_neg, *data_ptr, *requires_grad;

bool is(PyObject* x, PyObject* type) { return reinterpret_cast<PyObject*>(Py_TYPE(x)) == type; }

py::object checked(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

bool attribute(PyObject* x, PyObject* name) {
  return checked(PyObject_GetAttr(x, name)).ptr() == Py_True;
}

bool is_watched() {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(state->watchers); ++i) {
    PyObject* count = PyTuple_GET_ITEM(state->watchers, i);
    if (PyLong_AsLong(checked(PyObject_CallNoArgs(count)).ptr()) != 0) return true;
  }
  return !checked(PyObject_CallNoArgs(state->peek_transform)).is_none();
}

// Not sparse tensors and torch's wrappers, for which torch raises, nor those without memory.
bool has_address(PyObject* x) {
  const auto found = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(x, data_ptr));
  if (!found) PyErr_Clear();
  return found && PyObject_IsTrue(found.ptr()) == 1;
}

// 0: with care; 1: straight to the implementation; 2: the same, and an input requires a gradient.
int look_at_each(PyObject* args) {
  if (is_watched()) return 0;
  int result = 1;
  PyObject *here = is_cuda, *other = is_cpu;  // tensors of a call are mostly in one place
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i) {
    PyObject* x = PyTuple_GET_ITEM(args, i);
    if (x == Py_None || PyLong_Check(x) || PyFloat_Check(x)) continue;
    if (PyTuple_Check(x) || PyList_Check(x)) continue;
    if (is(x, state->tensor) || is(x, state->parameter)) {
      if (!attribute(x, here)) {
        if (!attribute(x, other)) return 0;
        std::swap(here, other);
      }
      if (!has_address(x)) return 0;
      if (checked(PyObject_CallMethodNoArgs(x, is_neg)).ptr() != Py_False) return 0;
      if (result == 1 && attribute(x, requires_grad)) result = 2;
    } else if (PyObject_IsInstance(x, state->tensor) != 0) {
      return 0;
    }
  }
  return result;
}

PyObject* look_at(PyObject*, PyObject* args) {
  if (!PyTuple_Check(args)) {
    PyErr_SetString(PyExc_TypeError, "look_at: expected a tuple of arguments");
    return nullptr;
  }
  try {
    return PyLong_FromLong(look_at_each(args));
  } catch (py::error_already_set& error) {
    error.restore();
  }
  return nullptr;
}

PyMethodDef look_at_method = {"look_at", look_at, METH_O,
                              "How an eager call continues; kernels/op.py look_at()."};

}  // namespace

void bind_eager(py::module_& m) {
  m.def("prepare_eager",
        [](py::object tensor, py::object parameter, py::object peek_transform, py::tuple watchers) {
          const auto keep = [](py::object& x) { return x.release().ptr(); };
          state = new State{keep(tensor), keep(parameter), keep(peek_transform), keep(watchers)};
          is_cuda = PyUnicode_InternFromString("is_cuda");
          is_cpu = PyUnicode_InternFromString("is_cpu");
          is_neg = PyUnicode_InternFromString("is_neg");
          data_ptr = PyUnicode_InternFromString("data_ptr");
          requires_grad = PyUnicode_InternFromString("requires_grad");
        });
  m.attr("look_at") = py::reinterpret_steal<py::object>(PyCFunction_New(&look_at_method, nullptr));
}

}  // namespace fastpar
