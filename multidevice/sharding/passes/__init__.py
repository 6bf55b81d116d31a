"""Passes that rewrite a sharded fusion into local ops and reshardings.

A local op needs only the data of one device; a resharding changes how devices share a tensor.

Question: how does a sharded fusion become ops that a device can run alone, and communications?
Imports: `multidevice.sharding`.
Files, in reading order:

- `pipeline`: the list of passes, in order.
- `decompose`: an op whose operands are divided differently over devices becomes reshardings and a
  local op.
- `partial_sums`: reductions of which each device computes a part.
- `deferred_sums`: linear ops on partial sums, whose results are added over devices.
- `device_axes`: axes whose index is the number of a device.
- `masked_lookups`: lookups along a divided axis, which each device makes in its own part.
- `pad_shards`: axes that devices cannot divide evenly are padded.
- `partial_moments`: means and variances along a divided axis, from the moments of the parts.
- `redistribute`: a copy to another division becomes the cheapest sequence of communications.
- `overlap_candidates`: communications and matrix products that may run at the same time.
- `merged_streams`: a loop over several axes merged into one, rewritten as a division of each axis.
- `communication_layout`: the memory order that a communication needs.
- `finalize`: the division over devices, written into allocation and loop domains.
- `localize`: the fusion of one device's shards.
- `provenance`: the reason why each tensor is divided, and of each communication.
"""
