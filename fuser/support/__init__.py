"""Services that every room uses and that know nothing of tensor programs.

Question: which facts and helpers do all rooms share?
Imports: nothing of this project but this room.
Files, in reading order:

- `version`: the version of the package and of nvFuser's interface.
- `record`: frozen records that declare fast.
- `errors`: every error type, and the text of user code lines and of unsupported cases.
- `arguments`: checks of the arguments of public calls, from their annotations.
- `inputs`: the kinds of values that a call accepts, and their names in messages.
- `device`: what a device is: limits, sizes of caches, vector width.
- `kernel_source`: the text of a kernel with its parameters, as the runtime takes it.
- `torch_calls`: calls of torch that differ between its versions or devices.
- `locks`, `lru`: locks that survive a fork, and a pause of Python's garbage collection; a bounded
  cache.
- `options`, `dumps`: the environment variables, in one typed table; what FUSER_DUMP prints, and
  where to.
- `progress`: the line of a long compilation on a terminal.
- `text_cursor`: a position in a text that is parsed.
"""
