"""Predicts the time of host programs.

Question: how long will this program take, and where would overlap help?
Imports: `hostir.ir`, `hostir.analysis`, `hostir.lowering`, and the packages that they may import.
Files, in reading order:

- `machine_model`: the description of a machine.
- `op_costs`: the time of each op.
- `simulator`: the simulated schedule of a program on its resources.
- `report`: the busy times of a rank; the text of the report.
- `overlap_search`: decides which communications are divided into pipelined steps.
- `calibrate`: measures a machine and writes its description.
"""
