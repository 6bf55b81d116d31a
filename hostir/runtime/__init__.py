"""Running host programs: once, recorded and again.

Question: how does a host program run?
Imports: every other room of `hostir` but `cost`, `profiling` and `tools`.
Files, in reading order:

- `evaluator`: `ProgramEvaluator`: a program on one rank, made of the parts below. Users have its
  subclass with `trace()`, `HostIrEvaluator`, of `hostir.profiling.tracer`.
- `plan_cache`: what is remembered of inputs: signatures, plans, patterns, arenas.
- `context`, `frame`: inputs bound to a run, what a device and a rank offer to it; its state.
- `inputs`: kind, dtype, device and layout of inputs; `fuser.ir.binding` does their sizes.
- `output_buffers`: buffers that callers lend.
- `agreement`: the ranks agree before a run: where they meet, what each claims to run.
- `execute`, `torch_ops`: a walk over a program: the steps of each op, carried out at once; tensor
  ops through torch.
- `kernels`: executors of kernels, also of the blocks of a loop.
- `communication`: communication ops as calls of a transport.
- `streams`: execution streams of CUDA and of the CPU.
- `recorder`, `steps`, `plan`: the steps of a walk, kept; their kinds; the plan that repeats them.
- `dry_run`, `size_generic_plan`: a plan without a run; a plan for other sizes.
- `cuda_graphs`: after how many runs a plan becomes a CUDA graph, and what new addresses change.
- `native_runner`: plans described for the C code that runs them.
"""
