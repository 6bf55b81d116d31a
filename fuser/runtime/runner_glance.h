/* `Contents.glance` in C, for calls that the runner does not repeat: calls on several ranks, which
   agree on each call, and calls that draw random numbers. */

#pragma once

#include "runner_tensors.h"

#include <stddef.h>
#include <structmember.h>

/* Returns `places` for inputs like the recorded ones, else the result of `otherwise`. */
typedef struct {
  PyObject_HEAD vectorcallfunc call;
  PyObject *places, *otherwise;
  uint64_t mask;
  int inputs;
  Row *rows;
} Glance;

/* Whether all inputs are like the recorded ones. */
static int are_like(const Glance *self, PyObject *given) {
  int is_list = PyList_CheckExact(given), alike = 1;
  if (!is_list && !PyTuple_CheckExact(given)) return 0;
  PyObject *mode = modes(NULL, NULL);
  if (!is_object(mode, Py_False)) return 0;
  /* Another thread, or code of a tensor subclass, may change a list during the check. */
  PyObject *inputs = is_list ? PyList_AsTuple(given) : Py_NewRef(given);
  if (!inputs) {
    PyErr_Clear();
    return 0;
  }
  if (PyTuple_GET_SIZE(inputs) != self->inputs) alike = 0;
  uint64_t address;
  for (int i = 0; alike && i < self->inputs; i++)
    alike = is_like(&self->rows[i], self->mask, PyTuple_GET_ITEM(inputs, i), &address);
  Py_DECREF(inputs);
  return alike;
}

static PyObject *call_glance(PyObject *object, PyObject *const *given, size_t flags,
                             PyObject *names) {
  Glance *self = (Glance *)object;
  if (PyVectorcall_NARGS(flags) != 1 || names) {
    PyErr_SetString(PyExc_TypeError, "a glance takes one argument, the inputs");
    return NULL;
  }
  if (!self->otherwise) Py_RETURN_NONE; /* the garbage collector has cleared it */
  if (are_like(self, given[0])) return Py_NewRef(self->places);
  return PyObject_CallOneArg(self->otherwise, given[0]);
}

static int traverse_glance(PyObject *object, visitproc visit, void *arg) {
  Glance *self = (Glance *)object;
  Py_VISIT(self->places);
  Py_VISIT(self->otherwise);
  for (int i = 0; self->rows && i < self->inputs; i++) Py_VISIT(self->rows[i].type);
  return 0;
}

static int clear_glance(PyObject *object) {
  Glance *self = (Glance *)object;
  Py_CLEAR(self->otherwise);
  return 0;
}

static void free_glance(PyObject *object) {
  Glance *self = (Glance *)object;
  PyObject_GC_UnTrack(object);
  clear_glance(object);
  Py_CLEAR(self->places);
  for (int i = 0; self->rows && i < self->inputs; i++) {
    Py_CLEAR(self->rows[i].type);
    Py_CLEAR(self->rows[i].number);
  }
  PyMem_Free(self->rows);
  Py_TYPE(object)->tp_free(object);
}

static PyObject *make_glance(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  PyObject *inputs, *places, *otherwise;
  unsigned long long mask;
  if (names || !PyArg_ParseTuple(arguments, "O!KO!O", &PyTuple_Type, &inputs, &mask, &PyTuple_Type,
                                 &places, &otherwise))
    return NULL;
  if (!torch_api) {
    PyErr_SetString(PyExc_RuntimeError, "setup must be called first");
    return NULL;
  }
  Glance *self = (Glance *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->call = call_glance;
  self->mask = mask;
  self->places = Py_NewRef(places);
  self->otherwise = Py_NewRef(otherwise);
  self->rows = PyMem_Calloc(PyTuple_GET_SIZE(inputs) + 1, sizeof(Row));
  int failed = !self->rows;
  for (; !failed && self->inputs < PyTuple_GET_SIZE(inputs); self->inputs++)
    failed = make_row(&self->rows[self->inputs], mask, PyTuple_GET_ITEM(inputs, self->inputs));
  if (!failed) return (PyObject *)self;
  if (!PyErr_Occurred()) PyErr_NoMemory();
  Py_DECREF(self);
  return NULL;
}

static PyMemberDef glance_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Glance, call), READONLY, NULL}, {NULL}};

static PyTypeObject glance_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fuser_runner.Glance",
    .tp_doc = "Returns the alignments of inputs like the recorded ones; calls a function for others.",
    .tp_basicsize = sizeof(Glance),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = make_glance,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Glance, call),
    .tp_members = glance_members,
    .tp_dealloc = free_glance,
    .tp_traverse = traverse_glance,
    .tp_clear = clear_glance,
};
