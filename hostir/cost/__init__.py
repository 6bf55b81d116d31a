"""Predicts how long host programs take, without running them.

Question: how long will a host program take, and where should communication and computation overlap?
Imports: `hostir.ir`, `hostir.analysis`, `hostir.lowering`, and the packages that they may import.
Files, in reading order:

- `machine_model`: the speeds and latencies of a machine, as a JSON file.
- `op_costs`: the time of each op when nothing else runs.
- `simulator`: the times at which ops begin and end when they share a GPU and its links.
- `traffic`: the bytes that ranks send to one another.
- `report`: the predicted times of a program, and the text of `python -m hostir cost`.
- `rank_program`: `program_for`: a program with memory, bytes and time, for a mesh of any size.
- `overlap_search`: decides which communications are divided into steps that overlap with matmuls.
- `calibrate`: measures a machine and writes its JSON file.
"""
