"""Running host programs: op by op, recorded, and replayed.

Question: how does a host program run, and why are later runs faster than the first?
Imports: every other package of `hostir` but `cost`, `profiling` and `tools`.
Files, in reading order:

- `evaluator`: `ProgramEvaluator`, which runs one program on one rank with the parts below. Users
  have its subclass `HostIrEvaluator` with `trace()`, from `hostir.profiling.tracer`.
- `plan_cache`: the cache of input signatures, plans, size-generic plans and arenas.
- `context`, `frame`: checks and binds the inputs of a run; the state of one run.
- `inputs`: checks kind, dtype, device and layout of inputs; `fuser.ir.binding` checks their sizes.
- `output_buffers`: checks the buffers that a caller provides for results.
- `agreement`: the agreement of ranks before a run on the program, its inputs and options.
- `execute`, `torch_ops`: walks a program and makes the steps of each op; tensor ops run in torch.
- `kernels`: the executors of kernel groups, also for kernels that run in each step of a loop.
- `communication`: turns communication ops into calls of a transport.
- `streams`: execution streams on CUDA and on the CPU.
- `recorder`, `steps`, `plan`: records the steps of a walk; the kinds of steps; the plan that
  replays them.
- `dry_run`, `size_generic_plan`: makes a plan without a run; makes the plans of other sizes.
- `cuda_graphs`: captures a plan as a CUDA graph, and finds the graph for the addresses of a call.
- `native_runner`: describes a plan for the C code that replays it.
"""
