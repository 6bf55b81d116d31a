"""Services that every package uses. They know nothing of tensor programs.

Question: which facts and helpers do all packages share?
Imports: nothing of this project but this package.
Files, in reading order:

- `version`: the version of the package and of nvFuser's interface.
- `record`: frozen records that are fast to declare.
- `errors`: every error type; the user's line in messages.
- `arguments`: checks of the arguments of public calls, from their annotations.
- `inputs`: the inputs of a run as a flat list, and their device.
- `device`: the properties of a device: limits, sizes of caches, vector width.
- `kernel_source`: the text of a kernel with its parameters, as the runtime takes it.
- `torch_calls`: calls of torch that differ between its versions or devices.
- `locks`, `lru`: locks that survive a fork, and a pause of Python's garbage collection; a bounded
  cache.
- `options`, `dumps`: the environment variables, in one typed table; the output of FUSER_DUMP.
- `progress`: the line of a long compilation on a terminal.
- `text_cursor`: a position in a text that is parsed.
"""
