/* Reads tensors for the compiled runner: through torch's C exchange table (DLPack) and, for the
   size of a storage, through torch's stable C shim. Nothing in this file owns a tensor. */

#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* ------------------------------------------------------------ DLPack's C exchange table, v1 */
typedef struct {
  void *data;
  struct {
    int32_t type, id;
  } device;
  int32_t ndim;
  struct {
    uint8_t code, bits;
    uint16_t lanes;
  } dtype;
  int64_t *shape, *strides;
  uint64_t byte_offset;
} View;

typedef struct {
  struct {
    uint32_t major, minor;
  } version;
  void *previous;
  void *allocate, *from_object, *to_object;
  int (*look)(void *object, View *out);
  int (*current_stream)(int32_t device_type, int32_t device_id, void **out);
} Exchange;

enum { COMPLEX = 5, MAX_AXES = 16 };

/* ------------------------------------------------------------ set by `setup` */
static const Exchange *torch_api;
static PyGetSetDef *requires_grad, *raw_tensor;
static PyMethodDef *is_lazy;
static PyCFunction modes;
/* Functions of the C shim. Their argument points to a tensor's only member, the address of its
   implementation. */
static int (*storage_nbytes)(void **tensor, int64_t *out);
static int (*storage_offset)(void **tensor, int64_t *out);

/* The description of one input of repeated calls: a tensor's properties, or a number. It owns the
   number and the type, never a tensor. */
typedef struct {
  PyTypeObject *type;
  PyObject *number, *requires_grad;
  View view;
  int64_t sizes[2 * MAX_AXES], nbytes, itemsize;
  uint64_t place;
} Row;

/* ------------------------------------------------------------ checks of inputs */
static uint64_t address_of(const View *view) {
  return (uint64_t)(uintptr_t)view->data + view->byte_offset;
}

static int is_number(PyObject *x) {
  return PyFloat_CheckExact(x) || PyLong_CheckExact(x) || PyBool_Check(x);
}

static int is_same_number(PyObject *a, PyObject *b) {
  if (a == b) return 1;
  if (Py_TYPE(a) != Py_TYPE(b)) return 0;
  if (PyFloat_CheckExact(a)) {
    double x = PyFloat_AS_DOUBLE(a), y = PyFloat_AS_DOUBLE(b);
    return memcmp(&x, &y, sizeof x) == 0;
  }
  return PyLong_CheckExact(a) && PyObject_RichCompareBool(a, b, Py_EQ) == 1;
}

/* Whether a storage is large enough for its tensor; it may have been resized. */
static int has_room(const Row *row, PyObject *x) {
  PyObject *number = raw_tensor->get(x, raw_tensor->closure);
  void *tensor = number ? PyLong_AsVoidPtr(number) : NULL;
  int64_t nbytes, offset;
  Py_XDECREF(number);
  if (!tensor) {
    PyErr_Clear();
    return 0;
  }
  if (storage_nbytes(&tensor, &nbytes) || storage_offset(&tensor, &offset)) return 0;
  return nbytes >= row->nbytes + offset * row->itemsize;
}

static int is_object(PyObject *found, PyObject *expected) {
  if (!found) PyErr_Clear();
  Py_XDECREF(found);
  return found == expected; /* True and False are never freed */
}

/* Whether an input matches a row. Stores its address. */
static int is_like(const Row *row, uint64_t mask, PyObject *x, uint64_t *address) {
  View view;
  if (row->number) return is_same_number(row->number, x);
  if (Py_TYPE(x) != row->type) return 0;
  if (torch_api->look(x, &view)) {
    PyErr_Clear();
    return 0;
  }
  size_t nbytes = (size_t)row->view.ndim * sizeof(int64_t);
  if (memcmp(&view.device, &row->view.device, sizeof view.device) || view.ndim != row->view.ndim ||
      memcmp(&view.dtype, &row->view.dtype, sizeof view.dtype) ||
      memcmp(view.shape, row->view.shape, nbytes) ||
      memcmp(view.strides, row->view.strides, nbytes))
    return 0;
  *address = address_of(&view);
  if (row->nbytes && (!view.data || (*address & mask) != row->place)) return 0;
  if (!is_object(requires_grad->get(x, requires_grad->closure), row->requires_grad)) return 0;
  if (!is_object(is_lazy->ml_meth(x, NULL), Py_False)) return 0;
  return !row->nbytes || has_room(row, x);
}

/* Fills a row from an input of the recorded call. */
static int make_row(Row *row, uint64_t mask, PyObject *x) {
  if (is_number(x)) {
    row->number = Py_NewRef(x);
    return 0;
  }
  row->type = (PyTypeObject *)Py_NewRef(Py_TYPE(x));
  if (torch_api->look(x, &row->view)) return -1;
  View *view = &row->view;
  int n = view->ndim;
  if (n > MAX_AXES || view->dtype.code == COMPLEX || view->dtype.bits % 8 || (n && !view->strides)) {
    PyErr_SetString(PyExc_ValueError, "inputs of this kind (complex, sub-byte or many axes) are not supported");
    return -1;
  }
  if (n) {
    memcpy(row->sizes, view->shape, n * sizeof(int64_t));
    memcpy(row->sizes + n, view->strides, n * sizeof(int64_t));
  }
  view->shape = row->sizes;
  view->strides = row->sizes + n;
  row->itemsize = view->dtype.bits / 8 * view->dtype.lanes;
  row->nbytes = 1;
  for (int i = 0; i < n; i++) row->nbytes += (view->shape[i] - 1) * view->strides[i];
  row->nbytes *= row->itemsize;
  for (int i = 0; i < n; i++)
    if (!view->shape[i]) row->nbytes = 0;
  row->place = address_of(view) & mask;
  row->requires_grad = requires_grad->get(x, requires_grad->closure);
  if (!row->requires_grad) return -1;
  Py_DECREF(row->requires_grad); /* True or False */
  uint64_t address;
  if (!is_like(row, mask, x, &address)) {
    PyErr_SetString(PyExc_ValueError, "a tensor does not match its own description");
    return -1;
  }
  return 0;
}

/* ------------------------------------------------------------ once per process */
static PyGetSetDef *getter_of(PyObject *x) {
  if (Py_TYPE(x) == &PyGetSetDescr_Type) return ((PyGetSetDescrObject *)x)->d_getset;
  PyErr_SetString(PyExc_TypeError, "an attribute of torch.Tensor has no C getter");
  return NULL;
}

/* Takes torch's table, the getters of requires_grad and _cdata, is_neg, the function that says
   whether a torch function mode is active, and the addresses of two functions of the C shim. */
static PyObject *setup(PyObject *module, PyObject *given) {
  PyObject *table, *gradient, *raw, *lazy, *mode;
  unsigned long long nbytes, offset;
  (void)module;
  if (!PyArg_ParseTuple(given, "OOOOOKK", &table, &gradient, &raw, &lazy, &mode, &nbytes, &offset))
    return NULL;
  const Exchange *found = PyCapsule_GetPointer(table, "dlpack_exchange_api");
  if (!found || !(requires_grad = getter_of(gradient)) || !(raw_tensor = getter_of(raw)))
    return NULL;
  int is_method = Py_TYPE(lazy) == &PyMethodDescr_Type && PyCFunction_CheckExact(mode);
  is_lazy = is_method ? ((PyMethodDescrObject *)lazy)->d_method : NULL;
  if (found->version.major != 1 || !found->look || !found->current_stream || !is_lazy ||
      is_lazy->ml_flags != METH_NOARGS || PyCFunction_GET_FLAGS(mode) != METH_NOARGS) {
    PyErr_SetString(PyExc_TypeError, "this version of torch has other tables than the runner expects");
    return NULL;
  }
  modes = PyCFunction_GET_FUNCTION(mode);
  storage_nbytes = (int (*)(void **, int64_t *))(uintptr_t)nbytes;
  storage_offset = (int (*)(void **, int64_t *))(uintptr_t)offset;
  torch_api = found;
  Py_RETURN_NONE;
}
