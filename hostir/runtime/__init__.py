"""Running host programs: once, recorded and again.

Question: how does a host program run?
Imports: every other room of `hostir` but `cost`, `profiling` and `tools`.
Files, in reading order:

- `evaluator`: `HostIrEvaluator`: a program on one rank, its plans and caches.
- `context`, `frame`: what a device and a rank offer to a run; the state of one run.
- `inputs`, `output_buffers`: checks and symbols of inputs; buffers that callers lend.
- `run_signature`: the text by which ranks agree on a program.
- `execute`, `torch_ops`: each op carried out; tensor ops through torch.
- `kernels`: executors of kernels, also of the blocks of a loop.
- `communication`: communication ops as calls of a transport.
- `streams`: execution streams of CUDA and of the CPU.
- `recorder`, `steps`, `plan`: the steps that a run records; their kinds; the plan that repeats
  them.
- `dry_run`, `symbolic_plan`: a plan without a run; a plan for other sizes.
- `cuda_graphs`, `native_runner`: plans as CUDA graphs; plans run by C code.
"""
