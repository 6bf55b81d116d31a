"""Predicting the time of host programs.

Question: how long will this program take, and where would overlap help?
Imports: `hostir.ir`, `hostir.analysis`, `hostir.lowering` and what these may import.
Files, in reading order:

- `machine_model`: the description of a machine.
- `op_costs`: the time of each op.
- `simulator`: the timetable of a program on its resources.
- `report`: when a rank is busy; the report.
- `overlap_search`: which communications are cut into chunks.
- `calibrate`: the description, measured.
"""
