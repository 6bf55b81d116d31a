"""Passes that make a sharded fusion into one of local ops and reshardings.

Question: which rewrites does a sharded fusion undergo?
Imports: `multidevice.sharding`.
Files, in reading order:

- `pipeline`: the list of passes, in order.
- `decompose`: an op whose operands are cut differently becomes reshardings and a local op.
- `partial_sums`: sums that each device has a part of.
- `overlap_candidates`: communications and products that may run side by side.
- `merged_streams`: a merged axis cut by streams, as several cuts.
- `communication_layout`: the memory order that a communication demands.
- `finalize`: cuts in allocation and loop domains.
- `localize`: the fusion of one device's shards.
- `provenance`: the reason of each cut and communication.
"""
