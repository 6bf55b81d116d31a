"""Passes that rewrite a sharded fusion into local ops and reshardings.

Question: which rewrites does a sharded fusion undergo?
Imports: `multidevice.sharding`.
Files, in reading order:

- `pipeline`: the list of passes, in order.
- `decompose`: an op whose operands are cut differently becomes reshardings and a local op.
- `partial_sums`: reductions of which each device computes a part.
- `overlap_candidates`: communications and matrix products that may run at the same time.
- `merged_streams`: a merged stream axis, rewritten as several cuts.
- `communication_layout`: the memory order that a communication needs.
- `finalize`: cuts in allocation and loop domains.
- `localize`: the fusion of one device's shards.
- `provenance`: the reason of each cut and communication.
"""
