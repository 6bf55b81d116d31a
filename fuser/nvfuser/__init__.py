"""Names of nvFuser's interface that have no other place in this project.

Question: where is a name of nvFuser's interface defined?
Imports: every package of `fuser`, `multidevice` and `hostir`.
Files, in reading order:

- `module_aliases`: `fuser.multidevice` and the version under nvFuser's module names.
- `multi_device_executor`: `MultiDeviceExecutor`, which runs a fusion on a mesh without a
  definition.
- `idm`: `IdModel`: the relations of axes in nvFuser's modes.
- `pytorch_utils`: dtypes and retries that nvFuser's scripts import.
- `benchmark_utils`: timing that nvFuser's benchmarks import.
"""
