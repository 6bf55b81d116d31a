/* Repeats a recorded call: checks the inputs, allocates outputs, launches kernels or a graph.

   The results equal those of the Python path (Contents.glance, Plan.run, Replays.run) bit by bit,
   for calls that are like the recorded one. For any other call, it returns None before it launches
   anything. Runs change the state of the Python path, one run at a time: the run that has taken the
   arena. While the interpreter's lock is released, only state that this run owns is accessed.

   Tensors are read through torch's C exchange table (DLPack), and the size of their storage through
   torch's stable C shim. */

#include "runner_glance.h"
#include "runner_graphs.h"

enum { MAX_SLOTS = 1 << 15 };

/* Whether this thread is registered as one that runs programs. */
static _Thread_local int is_known;

/* ------------------------------------------------------------ steps */
static int call_status(const Step *step) {
  void *const *a = step->given;
  if (step->arguments == 1) return ((int (*)(void *))step->function)(a[0]);
  return ((int (*)(void *, void *, void *, void *))step->function)(a[0], a[1], a[2], a[3]);
}

/* Raises the error of a step with the same text as the Python path. */
static void explain_error(Steady *self, PyObject *closure) {
  PyObject *type, *error, *trace;
  PyErr_Fetch(&type, &error, &trace);
  PyErr_NormalizeException(&type, &error, &trace);
  if (trace) PyException_SetTraceback(error, trace);
  PyObject *arguments[] = {error, closure};
  PyObject *none = PyObject_Vectorcall(self->explain, arguments, 2, NULL);
  if (none) { /* it always raises */
    Py_DECREF(none);
    PyErr_SetObject(type, error);
  }
  Py_XDECREF(type);
  Py_XDECREF(error);
  Py_XDECREF(trace);
}

static int run_steps(Steady *self, PyObject *slots, const uint64_t *known) {
  int i = 0;
  while (i < self->steps) {
    PyObject *closure = self->step[i].closure;
    if (closure) {
      PyObject *none = PyObject_CallOneArg(closure, slots);
      if (!none) {
        explain_error(self, closure);
        return -1;
      }
      Py_DECREF(none);
      i++;
      continue;
    }
    int end = i, status = 0;
    for (; end < self->steps && !self->step[end].closure; end++) {
      Step *step = &self->step[end];
      for (int k = 0; k < step->moving; k++)
        if (find_address(slots, known, step->slots[k], &step->words[step->params[k]])) return -1;
    }
    /* A CPU kernel may take long, and the driver may wait for space in its queue. */
    PyThreadState *state = PyEval_SaveThread();
    for (; i < end && !status; i++) status = call_status(&self->step[i]);
    PyEval_RestoreThread(state);
    if (status) { /* `fail` raises, unless its own launch succeeds */
      PyObject *number = PyLong_FromLong(status);
      PyObject *none = number ? PyObject_CallOneArg(self->step[i - 1].fail, number) : NULL;
      Py_XDECREF(number);
      if (!none) return -1;
      Py_DECREF(none);
    }
  }
  return 0;
}

/* ------------------------------------------------------------ a call */
static int is_here(const Steady *self) {
  PyObject *simulated = NULL;
  if (PyContextVar_Get(self->context, Py_None, &simulated)) return -1;
  Py_DECREF(simulated);
  if (simulated != self->simulated) return 0;
  PyObject *level = PyDict_GetItemWithError(self->levels, self->level);
  if (!level || !PyLong_Check(level) || PyLong_AsLong(level) >= 0) return 0;
  PyObject *mode = modes(NULL, NULL);
  if (!is_object(mode, Py_False)) return 0;
  if (self->current_device) {
    PyObject *number = PyObject_CallNoArgs(self->current_device);
    if (!number) return -1;
    long device = PyLong_AsLong(number);
    Py_DECREF(number);
    if (device != self->device) return 0;
  }
  if (self->device >= 0) {
    void *stream;
    if (torch_api->current_stream(2, (int32_t)self->device, &stream)) return -1;
    if (stream != self->stream) return 0;
  }
  if (self->capturing) {
    PyObject *found = PyObject_CallNoArgs(self->capturing);
    if (!found) return -1;
    if (!is_object(found, Py_False)) return 0;
  }
  if (!is_known) {
    PyObject *none = PyObject_CallNoArgs(self->enter);
    if (!none) return -1;
    Py_DECREF(none);
    is_known = 1;
  }
  return 1;
}

/* Returns the slots of a call like the recorded one; NULL without an error for other calls. */
static PyObject *look(const Steady *self, PyObject *inputs, uint64_t *known) {
  int is_list = PyList_CheckExact(inputs);
  if (!is_list && !PyTuple_CheckExact(inputs)) return NULL;
  if ((is_list ? PyList_GET_SIZE(inputs) : PyTuple_GET_SIZE(inputs)) != self->inputs) return NULL;
  PyObject *slots = PyList_New(self->size);
  if (!slots) return NULL;
  /* All inputs are referenced before any is checked. */
  for (int i = 0; i < self->size; i++) {
    PyObject *x = i >= self->inputs ? PyList_GET_ITEM(self->rest, i - self->inputs)
                  : is_list         ? PyList_GET_ITEM(inputs, i)
                                    : PyTuple_GET_ITEM(inputs, i);
    PyList_SET_ITEM(slots, i, Py_NewRef(x));
  }
  for (int i = 0; i < self->inputs; i++)
    if (!is_like(&self->rows[i], self->mask, PyList_GET_ITEM(slots, i), &known[i])) {
      Py_DECREF(slots);
      return NULL;
    }
  return slots;
}

/* Takes the arena, as Arenas.take does, if no run uses it and the plan is still bound to it. */
static int take(Steady *self) {
  Py_ssize_t i = PyList_GET_SIZE(self->spare) - 1;
  while (i >= 0 && PyList_GET_ITEM(self->spare, i) != self->arena) i--;
  if (i < 0 || PyDict_GetItemWithError(self->bound_here, self->plan) != self->bound) return 0;
  return PyList_SetSlice(self->spare, i, i + 1, NULL) ? -1 : 1;
}

static int give(Steady *self) {
  return PyList_GET_SIZE(self->spare) < self->max_spare ? PyList_Append(self->spare, self->arena)
                                                        : 0;
}

/* Allocates outputs. Returns 1, or 0 without memory: Python tries again, and raises the error. */
static int make_all(const Steady *self, PyObject *slots, uint64_t *known) {
  for (int i = 0; i < self->makings; i++) {
    const Making *making = &self->made[i];
    View view;
    PyObject *made = PyObject_Vectorcall(making->function, making->arguments, 3, NULL);
    if (!made) {
      if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return -1;
      PyErr_Clear();
      return 0;
    }
    if (PyList_SetItem(slots, making->slot, made) || torch_api->look(made, &view)) return -1;
    known[making->slot] = address_of(&view);
  }
  return 1;
}

/* Runs a call without a graph for its tensors: captures one now, or repeats its steps. */
static int run_others(const Steady *self, PyObject *slots) {
  PyObject *none = PyObject_CallOneArg(self->others, slots);
  Py_XDECREF(none);
  return none ? 1 : -1;
}

static PyObject *not_mine(Steady *self) {
  if (PyErr_Occurred()) return NULL;
  self->declined++;
  return Py_NewRef(Py_None);
}

static PyObject *repeat(Steady *self, PyObject *const *given, size_t flags, PyObject *names) {
  if (PyVectorcall_NARGS(flags) != 4 || names) {
    PyErr_SetString(PyExc_TypeError, "a call takes inputs, a device and two lists of options");
    return NULL;
  }
  if (given[1] != Py_None || given[2] != self->no_options || given[3] != self->no_options ||
      !self->given)
    return not_mine(self);
  if (is_here(self) != 1) return not_mine(self);
  uint64_t known[self->size + 1];
  memset(known, 0, sizeof known);
  PyObject *slots = look(self, given[0], known);
  if (!slots) return not_mine(self);
  if (take(self) != 1) {
    Py_DECREF(slots);
    return not_mine(self);
  }
  int status = make_all(self, slots, known);
  if (status == 1) {
    if (self->replays) {
      status = run_graph(self, slots, known);
      if (!status) status = run_others(self, slots);
    }
    else if (run_steps(self, slots, known))
      status = -1;
  }
  PyObject *outputs = NULL;
  /* After an error, pending work may write into the arena, so no other run may take it. */
  if (status >= 0 && give(self)) status = -1;
  if (status == 1 && (outputs = PyList_New(self->outputs)))
    for (int i = 0; i < self->outputs; i++)
      PyList_SET_ITEM(outputs, i, Py_NewRef(PyList_GET_ITEM(slots, self->output[i])));
  Py_DECREF(slots);
  if (status == 0) return not_mine(self);
  if (outputs) {
    self->runs++;
    self->declined = 0;
  }
  return outputs;
}

static int clear(PyObject *object);

static PyObject *call_steady(PyObject *object, PyObject *const *given, size_t flags,
                             PyObject *names) {
  Steady *self = (Steady *)object;
  self->busy++;
  PyObject *outputs = repeat(self, given, flags, names);
  if (!--self->busy && self->is_dropped && self->given) {
    PyObject *type, *error, *trace;
    PyErr_Fetch(&type, &error, &trace);
    clear(object);
    PyErr_Restore(type, error, trace);
  }
  return outputs;
}

/* Drops the memory and graphs. No run uses them, but a call may still be checking its inputs. */
static PyObject *drop_steady(PyObject *object, PyObject *nothing) {
  Steady *self = (Steady *)object;
  self->is_dropped = 1;
  if (!self->busy && self->given) clear(object);
  Py_RETURN_NONE;
}

/* ------------------------------------------------------------ construction */
/* Returns an attribute as a borrowed reference: its owner lives as long as the runner. */
static PyObject *borrow(PyObject *given, const char *name) {
  PyObject *found = PyObject_GetAttrString(given, name);
  Py_XDECREF(found);
  return found;
}

static PyObject *borrow_optional(PyObject *given, const char *name) {
  PyObject *found = borrow(given, name);
  return found == Py_None ? NULL : found;
}

/* Allocates an array for a tuple. Returns its length, or -1 if the attribute is no tuple. */
static int count(PyObject *given, const char *name, size_t nbytes, void *array, PyObject **items) {
  *items = borrow(given, name);
  if (!*items) return -1;
  if (!PyTuple_CheckExact(*items)) {
    PyErr_Format(PyExc_TypeError, "%s must be a tuple", name);
    return -1;
  }
  *(void **)array = PyMem_Calloc(PyTuple_GET_SIZE(*items) + 1, nbytes);
  if (*(void **)array) return (int)PyTuple_GET_SIZE(*items);
  PyErr_NoMemory();
  return -1;
}

static int is_slot(const Steady *self, int slot) {
  if (slot >= 0 && slot < self->size) return 1;
  PyErr_Format(PyExc_ValueError, "slot %d is out of range: there are %d", slot, self->size);
  return 0;
}

/* Copies a tuple of slots to an array. Returns its length, or -1 on an error. */
static int fill_slots(const Steady *self, PyObject *given, const char *name, int **slots) {
  PyObject *items;
  int n = count(given, name, sizeof **slots, slots, &items);
  for (int i = 0; i < n; i++) {
    (*slots)[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(items, i));
    if (PyErr_Occurred() || !is_slot(self, (*slots)[i])) return -1;
  }
  return n;
}

static int fill_step(Steady *self, Step *step, PyObject *given) {
  PyObject *arguments, *moving;
  unsigned long long function, words;
  if (!PyTuple_CheckExact(given)) {
    step->closure = given;
    return 0;
  }
  if (!PyArg_ParseTuple(given, "KO!KO!O", &function, &PyTuple_Type, &arguments, &words,
                        &PyTuple_Type, &moving, &step->fail))
    return -1;
  step->function = (void *)(uintptr_t)function;
  step->words = (uint64_t *)(uintptr_t)words;
  step->arguments = (int)PyTuple_GET_SIZE(arguments);
  step->moving = (int)PyTuple_GET_SIZE(moving);
  step->params = PyMem_Calloc(step->moving + 1, sizeof(int));
  step->slots = PyMem_Calloc(step->moving + 1, sizeof(int));
  if (!step->params || !step->slots || (step->arguments != 1 && step->arguments != 4)) {
    PyErr_SetString(PyExc_ValueError, "a launch takes one argument or four");
    return -1;
  }
  for (int i = 0; i < step->arguments; i++)
    step->given[i] = PyLong_AsVoidPtr(PyTuple_GET_ITEM(arguments, i));
  for (int i = 0; i < step->moving; i++)
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(moving, i), "ii", &step->params[i], &step->slots[i]) ||
        !is_slot(self, step->slots[i]))
      return -1;
  return PyErr_Occurred() ? -1 : 0;
}

static int fill_graph(Steady *self, PyObject *graph) {
  PyObject *items;
  self->replays = borrow(graph, "replays");
  self->graphs = borrow(graph, "graphs");
  self->choices = borrow_optional(graph, "choices");
  self->views = borrow(graph, "views");
  self->nothing = borrow(graph, "nothing");
  if (PyErr_Occurred() || (self->keys = fill_slots(self, graph, "keys", &self->key)) < 0 ||
      (self->moving = fill_slots(self, graph, "moving", &self->moved)) < 0)
    return -1;
  int n = count(graph, "kernels", sizeof(Kernel), &self->kernel, &items);
  for (; self->kernels < n; self->kernels++) {
    Kernel *kernel = &self->kernel[self->kernels];
    PyObject *words;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(items, self->kernels), "OO", &kernel->call, &words) ||
        PyObject_GetBuffer(words, &kernel->words, PyBUF_WRITABLE))
      return -1;
  }
  if (n < 0 || count(graph, "readers", sizeof(Reader *), &self->reader, &items) != self->moving)
    return -1;
  self->readers = PyMem_Calloc(self->moving + 1, sizeof(int));
  if (!self->readers) return -1;
  for (int i = 0; i < self->moving; i++) {
    PyObject *found = PyTuple_GET_ITEM(items, i);
    self->readers[i] = (int)PyTuple_GET_SIZE(found);
    self->reader[i] = PyMem_Calloc(self->readers[i] + 1, sizeof(Reader));
    for (int k = 0; k < self->readers[i]; k++) {
      Reader *r = &self->reader[i][k];
      long long nbytes;
      if (!PyArg_ParseTuple(PyTuple_GET_ITEM(found, k), "iiL", &r->kernel, &r->param, &nbytes))
        return -1;
      r->nbytes = nbytes;
      if (r->kernel < 0 || r->kernel >= self->kernels || r->param < 0 ||
          8 * (r->param + 1) > self->kernel[r->kernel].words.len) {
        PyErr_SetString(PyExc_ValueError, "a reader names a parameter that its kernel lacks");
        return -1;
      }
    }
  }
  self->entry = PyMem_Calloc(MAX_ENTRIES + 1, sizeof(Entry));
  return self->entry && PyTuple_CheckExact(self->views) && PyDict_CheckExact(self->nothing) ? 0
                                                                                            : -1;
}

static int fill(Steady *self, PyObject *given, PyObject *inputs) {
  PyObject *items;
  self->no_options = borrow(given, "no_options");
  self->context = borrow(given, "context");
  self->simulated = borrow(given, "simulated");
  self->levels = borrow(given, "levels");
  self->level = borrow(given, "level");
  self->current_device = borrow_optional(given, "current_device");
  self->capturing = borrow_optional(given, "capturing");
  self->enter = borrow(given, "enter");
  self->explain = borrow(given, "explain");
  self->others = borrow(given, "others");
  self->plan = borrow(given, "plan");
  self->bound = borrow(given, "bound");
  self->arena = borrow(given, "arena");
  self->spare = borrow(given, "spare");
  self->bound_here = borrow(given, "bound_here");
  self->rest = borrow(given, "rest");
  PyObject *numbers = borrow(given, "numbers");
  unsigned long long stream;
  if (PyErr_Occurred() ||
      !PyArg_ParseTuple(numbers, "KlKn", &self->mask, &self->device, &stream, &self->max_spare))
    return -1;
  self->stream = (void *)(uintptr_t)stream;
  if (!PyList_CheckExact(self->spare) || !PyDict_CheckExact(self->bound_here) ||
      !PyDict_Check(self->levels) || !PyList_CheckExact(self->rest)) {
    PyErr_SetString(PyExc_TypeError, "the description belongs to another version of the runner");
    return -1;
  }
  self->rows = PyMem_Calloc(PyTuple_GET_SIZE(inputs) + 1, sizeof(Row));
  if (!self->rows) return -1;
  self->inputs = (int)PyTuple_GET_SIZE(inputs);
  self->size = self->inputs + (int)PyList_GET_SIZE(self->rest);
  if (self->size > MAX_SLOTS) {
    PyErr_SetString(PyExc_ValueError, "too many slots");
    return -1;
  }
  for (int i = 0; i < self->inputs; i++)
    if (make_row(&self->rows[i], self->mask, PyTuple_GET_ITEM(inputs, i))) return -1;
  if ((self->makings = count(given, "makes", sizeof(Making), &self->made, &items)) < 0) return -1;
  for (int i = 0; i < self->makings; i++) {
    Making *m = &self->made[i];
    PyObject **a = m->arguments;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(items, i), "iOOOO", &m->slot, &m->function, a, a + 1,
                          a + 2) ||
        !is_slot(self, m->slot))
      return -1;
  }
  if ((self->outputs = fill_slots(self, given, "outputs", &self->output)) < 0) return -1;
  if ((self->steps = count(given, "steps", sizeof(Step), &self->step, &items)) < 0) return -1;
  for (int i = 0; i < self->steps; i++)
    if (fill_step(self, &self->step[i], PyTuple_GET_ITEM(items, i))) return -1;
  PyObject *graph = borrow_optional(given, "graph");
  return PyErr_Occurred() || (graph && fill_graph(self, graph)) ? -1 : 0;
}

static int traverse(PyObject *object, visitproc visit, void *arg) {
  Steady *self = (Steady *)object;
  Py_VISIT(self->given);
  for (int i = 0; self->rows && i < self->inputs; i++) {
    Py_VISIT(self->rows[i].type);
    Py_VISIT(self->rows[i].number);
  }
  for (int i = 0; i < self->entries; i++) {
    Py_VISIT(self->entry[i].captured);
    Py_VISIT(self->entry[i].choices);
    Py_VISIT(self->entry[i].graph);
    for (int k = 0; self->entry[i].nodes && k < self->kernels; k++)
      Py_VISIT(self->entry[i].nodes[k].object);
  }
  return 0;
}

static int clear(PyObject *object) {
  Steady *self = (Steady *)object;
  while (self->entries) drop_entry(self, &self->entry[--self->entries]);
  for (; self->kernels; self->kernels--) PyBuffer_Release(&self->kernel[self->kernels - 1].words);
  for (int i = 0; self->rows && i < self->inputs; i++) {
    Py_CLEAR(self->rows[i].type);
    Py_CLEAR(self->rows[i].number);
  }
  Py_CLEAR(self->given);
  return 0;
}

static void free_steady(PyObject *object) {
  Steady *self = (Steady *)object;
  PyObject_GC_UnTrack(object);
  clear(object);
  for (int i = 0; self->step && i < self->steps; i++) {
    PyMem_Free(self->step[i].params);
    PyMem_Free(self->step[i].slots);
  }
  for (int i = 0; self->reader && i < self->moving; i++) PyMem_Free(self->reader[i]);
  void *arrays[] = {self->rows,  self->made,    self->step,   self->output, self->key,
                    self->moved, self->readers, self->reader, self->kernel, self->entry};
  for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) PyMem_Free(arrays[i]);
  Py_TYPE(object)->tp_free(object);
}

static PyObject *make_steady(PyTypeObject *type, PyObject *arguments, PyObject *names) {
  PyObject *given, *inputs;
  if (names || !PyArg_ParseTuple(arguments, "OO!", &given, &PyTuple_Type, &inputs)) return NULL;
  if (!torch_api) {
    PyErr_SetString(PyExc_RuntimeError, "setup must be called first");
    return NULL;
  }
  Steady *self = (Steady *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->call = call_steady;
  self->given = Py_NewRef(given);
  if (!fill(self, given, inputs)) return (PyObject *)self;
  if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "the description belongs to another version of the runner");
  Py_DECREF(self);
  return NULL;
}

static PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Steady, call), READONLY, NULL},
    {"runs", T_LONGLONG, offsetof(Steady, runs), READONLY, "the number of repeated calls"},
    {"declined", T_LONGLONG, offsetof(Steady, declined), READONLY,
     "the number of calls since the last repeated one"},
    {"is_dropped", T_INT, offsetof(Steady, is_dropped), READONLY, "whether it repeats no more calls"},
    {NULL},
};

static PyMethodDef steady_methods[] = {
    {"drop", drop_steady, METH_NOARGS, "Drops its memory and graphs."}, {NULL}};

static PyTypeObject steady_type = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "fuser_runner.Steady",
    .tp_doc = "Returns the outputs of a call like the recorded one; None for any other call.",
    .tp_basicsize = sizeof(Steady),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_new = make_steady,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Steady, call),
    .tp_members = members,
    .tp_methods = steady_methods,
    .tp_dealloc = free_steady,
    .tp_traverse = traverse,
    .tp_clear = clear,
};

static PyMethodDef functions[] = {{"setup", setup, METH_VARARGS, "Finds torch's tables."}, {NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "fuser_runner", NULL, -1, functions, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit_fuser_runner(void) {
  number_zero = PyLong_FromLong(0);
  text_places = PyUnicode_InternFromString("places");
  text_misses = PyUnicode_InternFromString("_misses");
  text_launch = PyUnicode_InternFromString("launch");
  text_update = PyUnicode_InternFromString("update");
  if (PyType_Ready(&steady_type) || PyType_Ready(&glance_type)) return NULL;
  PyObject *module = PyModule_Create(&definition);
  if (module && (PyModule_AddObjectRef(module, "Steady", (PyObject *)&steady_type) ||
                 PyModule_AddObjectRef(module, "Glance", (PyObject *)&glance_type)))
    Py_CLEAR(module);
  return module;
}
