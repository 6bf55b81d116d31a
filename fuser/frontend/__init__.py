"""The user's API: definitions, their execution, caches, profiles, Python text.

Question: how does a user's call find the compiled program that runs?
Imports: everything.
Files, in reading order:

- `definition`: `FusionDefinition`.
- `executor_cache`: finds or compiles the program for the inputs of a call.
- `program_cache`: the cached programs of the process, and what is cached for inputs of one
  signature.
- `fusion_cache`: lets equal definitions share their programs, within bounds.
- `implicit_inputs`: seeds, CPU scalars and tensors with gradients.
- `planned_job`: the job and the inputs for which `hostir.program_for` lowers.
- `uneven_shards`: pads shards that are shorter than those of other ranks.
- `dtensors`: torch's DTensors as inputs and outputs.
- `validation`: comparison of results with torch's, with tolerances.
- `python_printer`: a definition as Python: `repr`, schedules, scripts that reproduce an error.
- `inspection`, `profiler`: texts and statistics of compiled programs; profiles of runs.
- `manual_kernels`: a kernel with a schedule that the user wrote.
"""
