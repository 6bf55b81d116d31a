/* Launches the graphs of a plan, with the current addresses of tensors: `Replays.run` in C. Graphs
   that Python captured are looked up, and updated, in Python's own dictionary. */

#pragma once

#include <stddef.h>

#include "runner_tensors.h"

enum { MAX_ENTRIES = 64 };

static PyObject *number_zero, *text_places, *text_misses, *text_launch, *text_update;

/* A tensor to allocate: `function(*arguments)`. */
typedef struct {
  int slot;
  PyObject *function, *arguments[3];
} Making;

/* A step: a launch by the address of a C function, or a Python closure. */
typedef struct {
  PyObject *closure, *fail;
  int arguments, moving;
  void *function, *given[4];
  uint64_t *words;
  int *params, *slots;
} Step;

/* A captured kernel of one graph. */
typedef struct {
  PyObject *object;
  Py_buffer words;
  void *handle, *params;
} Node;

typedef struct {
  uint64_t *key;
  PyObject *choices, *captured, *graph;
  Node *nodes;
  int (*launch)(void *graph, void *stream);
  int (*set_params)(void *graph, void *node, void *params);
  void *handle;
} Entry;

/* A kernel that occurs in all graphs: its launch call, and the words of its arguments. */
typedef struct {
  PyObject *call;
  Py_buffer words;
} Kernel;

typedef struct {
  int kernel, param;
  int64_t nbytes;
} Reader;

typedef struct {
  PyObject_HEAD vectorcallfunc call;
  /* The description. It owns all objects that are borrowed below. */
  PyObject *given;
  PyObject *no_options, *context, *simulated, *levels, *level, *current_device, *capturing, *enter;
  PyObject *explain, *others, *plan, *bound, *arena, *spare, *bound_here, *rest;
  PyObject *replays, *graphs, *choices, *views, *nothing;
  Py_ssize_t max_spare;
  uint64_t mask;
  long device;
  void *stream;
  int inputs, size, makings, steps, outputs, keys, moving, kernels, entries, next, latest;
  Row *rows;
  Making *made;
  Step *step;
  int *output, *key, *moved, *readers;
  Reader **reader;
  Kernel *kernel;
  Entry *entry;
  long long runs, declined;
  /* The number of active calls, and whether to drop everything after them. */
  int busy, is_dropped;
} Steady;

/* Stores the address of the tensor in a slot. The addresses of inputs and outputs are cached. */
static int find_address(PyObject *slots, const uint64_t *known, int slot, uint64_t *out) {
  if (known[slot]) {
    *out = known[slot];
    return 0;
  }
  View view;
  if (torch_api->look(PyList_GET_ITEM(slots, slot), &view)) return -1;
  *out = address_of(&view);
  return 0;
}

/* ------------------------------------------------------------ graphs */
static void drop_entry(Steady *self, Entry *entry) {
  for (int i = 0; entry->nodes && i < self->kernels; i++) {
    if (entry->nodes[i].words.obj) PyBuffer_Release(&entry->nodes[i].words);
    Py_CLEAR(entry->nodes[i].object);
  }
  PyMem_Free(entry->nodes);
  PyMem_Free(entry->key);
  Py_CLEAR(entry->choices);
  Py_CLEAR(entry->captured);
  Py_CLEAR(entry->graph);
  memset(entry, 0, sizeof *entry);
}

/* Fills a node: the words of a captured kernel and, for launches by address, the driver's node. */
static int fill_node(Entry *entry, Node *node, const Kernel *kernel, PyObject *captured) {
  PyObject *words = PyObject_GetAttrString(captured, "words");
  node->object = PyObject_GetAttrString(captured, "node");
  int status = words && node->object ? PyObject_GetBuffer(words, &node->words, PyBUF_WRITABLE) : -1;
  Py_XDECREF(words);
  if (!status && node->words.len != kernel->words.len) {
    PyErr_SetString(PyExc_ValueError, "the words belong to another kernel");
    status = -1;
  }
  if (status || !entry->launch) return status;
  unsigned long long handle = 0, params = 0;
  PyObject *raw = PyObject_CallMethod(entry->graph, "raw_node", "OO", node->object, kernel->call);
  if (!raw) return -1;
  status = PyArg_ParseTuple(raw, "KK", &handle, &params) ? 0 : -1;
  Py_DECREF(raw);
  node->handle = (void *)(uintptr_t)handle;
  node->params = (void *)(uintptr_t)params;
  return status;
}

/* Fills an entry from the graph that Python captured under a key. */
static int fill_entry(Steady *self, Entry *entry, const uint64_t *key, PyObject *choices,
                      PyObject *captured) {
  entry->captured = Py_NewRef(captured);
  entry->choices = Py_XNewRef(choices);
  entry->key = PyMem_Calloc(self->keys + 1, sizeof *key);
  entry->nodes = PyMem_Calloc(self->kernels + 1, sizeof *entry->nodes);
  entry->graph = PyObject_GetAttrString(captured, "graph");
  if (!entry->key || !entry->nodes || !entry->graph) return -1;
  memcpy(entry->key, key, self->keys * sizeof *key);
  PyObject *raw = PyObject_GetAttrString(entry->graph, "raw");
  if (!raw && !PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
  PyErr_Clear(); /* a graph that only Python can launch */
  unsigned long long launch = 0, set_params = 0, handle = 0;
  int is_read = !raw || PyArg_ParseTuple(raw, "KKK", &launch, &set_params, &handle);
  Py_XDECREF(raw);
  entry->launch = (int (*)(void *, void *))(uintptr_t)launch;
  entry->set_params = (int (*)(void *, void *, void *))(uintptr_t)set_params;
  entry->handle = (void *)(uintptr_t)handle;
  PyObject *nodes = is_read ? PyObject_GetAttrString(captured, "nodes") : NULL;
  int status = nodes ? 0 : -1;
  for (int i = 0; i < self->kernels && !status; i++) {
    PyObject *number = PyLong_FromLong(i);
    PyObject *node = number ? PyObject_GetItem(nodes, number) : NULL;
    status = node ? fill_node(entry, &entry->nodes[i], &self->kernel[i], node) : -1;
    Py_XDECREF(number);
    Py_XDECREF(node);
  }
  Py_XDECREF(nodes);
  return status;
}

static int is_entry(const Steady *self, const Entry *entry, const uint64_t *key,
                    PyObject *choices) {
  if (memcmp(entry->key, key, self->keys * sizeof *key)) return 0;
  return !choices || PyObject_RichCompareBool(entry->choices, choices, Py_EQ) == 1;
}

/* Returns the entry of the graph that Python captured under a key; NULL without an error if there
   is none. */
static Entry *find_entry(Steady *self, const uint64_t *key, PyObject *choices) {
  if (self->latest < self->entries && is_entry(self, &self->entry[self->latest], key, choices))
    return &self->entry[self->latest];
  for (int i = 0; i < self->entries; i++)
    if (is_entry(self, &self->entry[i], key, choices)) {
      self->latest = i;
      return &self->entry[i];
    }
  if (PyErr_Occurred()) return NULL;
  Py_ssize_t more = choices ? PyTuple_GET_SIZE(choices) : 0;
  PyObject *whole = PyTuple_New(self->keys + more), *captured = NULL;
  for (int i = 0; whole && i < self->keys; i++) {
    PyObject *number = PyLong_FromUnsignedLongLong(key[i]);
    if (number)
      PyTuple_SET_ITEM(whole, i, number);
    else
      Py_CLEAR(whole);
  }
  for (Py_ssize_t i = 0; whole && i < more; i++)
    PyTuple_SET_ITEM(whole, self->keys + i, Py_NewRef(PyTuple_GET_ITEM(choices, i)));
  if (whole) captured = PyDict_GetItemWithError(self->graphs, whole);
  Py_XDECREF(whole);
  if (!captured) return NULL;
  self->latest = self->next;
  self->next = (self->next + 1) % MAX_ENTRIES;
  if (self->entries < MAX_ENTRIES) self->entries++;
  Entry *entry = &self->entry[self->latest];
  Py_INCREF(captured);
  drop_entry(self, entry);
  int status = fill_entry(self, entry, key, choices, captured);
  Py_DECREF(captured);
  if (!status) return entry;
  /* An incomplete entry must not be found: the last entry replaces it. */
  drop_entry(self, entry);
  *entry = self->entry[--self->entries];
  if (entry != &self->entry[self->entries]) memset(&self->entry[self->entries], 0, sizeof *entry);
  self->next = self->entries;
  self->latest = 0;
  return NULL;
}

/* Updates the addresses of tensors in the kernels of a graph. */
static int update_entry(Steady *self, Entry *entry, PyObject *slots, const uint64_t *known) {
  char changed[self->kernels + 1];
  int is_changed = 0;
  PyObject *places = PyObject_GetAttr(entry->captured, text_places);
  if (!places) return -1;
  if (!PyList_CheckExact(places) || PyList_GET_SIZE(places) != self->moving) {
    Py_DECREF(places);
    PyErr_SetString(PyExc_ValueError, "the addresses belong to another graph");
    return -1;
  }
  for (int i = 0; i < self->moving; i++) {
    uint64_t place;
    if (find_address(slots, known, self->moved[i], &place)) goto failed;
    if (place == PyLong_AsUnsignedLongLongMask(PyList_GET_ITEM(places, i))) continue;
    if (!is_changed) memset(changed, 0, sizeof changed);
    is_changed = 1;
    for (int k = 0; k < self->readers[i]; k++) {
      Reader *reader = &self->reader[i][k];
      ((uint64_t *)entry->nodes[reader->kernel].words.buf)[reader->param] = place + reader->nbytes;
      changed[reader->kernel] = 1;
    }
    PyObject *number = PyLong_FromUnsignedLongLong(place);
    if (!number || PyList_SetItem(places, i, number)) goto failed;
  }
  for (int i = 0; is_changed && i < self->kernels; i++) {
    if (!changed[i]) continue;
    Node *node = &entry->nodes[i];
    Kernel *kernel = &self->kernel[i];
    memcpy(kernel->words.buf, node->words.buf, node->words.len);
    if (entry->launch && !entry->set_params(entry->handle, node->handle, node->params)) continue;
    PyObject *none =
        PyObject_CallMethodObjArgs(entry->graph, text_update, node->object, kernel->call, NULL);
    if (!none) goto failed;
    Py_DECREF(none);
  }
  Py_DECREF(places);
  return 0;
failed:
  Py_DECREF(places);
  return -1;
}

/* Returns 1 if a graph has repeated the run, 0 if there is none for these tensors, -1 on an
   error. */
static int run_graph(Steady *self, PyObject *slots, const uint64_t *known) {
  uint64_t key[self->keys + 1];
  for (int i = 0; i < self->keys; i++)
    if (find_address(slots, known, self->key[i], &key[i])) return -1;
  PyObject *choices = self->choices ? PyObject_CallNoArgs(self->choices) : NULL;
  if (self->choices && (!choices || !PyTuple_Check(choices))) return -1;
  Entry *entry = find_entry(self, key, choices);
  Py_XDECREF(choices);
  if (!entry) return PyErr_Occurred() ? -1 : 0;
  if (PyObject_SetAttr(self->replays, text_misses, number_zero)) return -1;
  if (update_entry(self, entry, slots, known)) return -1;
  int status = -1;
  if (entry->launch) {
    PyThreadState *state = PyEval_SaveThread();
    status = entry->launch(entry->handle, self->stream);
    PyEval_RestoreThread(state);
  }
  if (status) { /* Python names the error, and handles threads without a CUDA context */
    PyObject *stream = PyLong_FromVoidPtr(self->stream);
    PyObject *none = stream ? PyObject_CallMethodOneArg(entry->graph, text_launch, stream) : NULL;
    Py_XDECREF(stream);
    if (!none) return -1;
    Py_DECREF(none);
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(self->views); i++) {
    PyObject *none = PyObject_CallOneArg(PyTuple_GET_ITEM(self->views, i), slots);
    if (!none) return -1;
    Py_DECREF(none);
  }
  PyObject *slot, *tensor;
  for (Py_ssize_t at = 0; PyDict_Next(self->nothing, &at, &slot, &tensor);)
    if (PyList_SetItem(slots, PyLong_AsLong(slot), Py_NewRef(tensor))) return -1;
  return 1;
}
