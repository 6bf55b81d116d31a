"""Launchers, messages and shared memory through which ranks find and watch each other.

Question: how do ranks exchange messages about their calls, and detect that a rank is missing?
Imports: `fuser.support`.
Files, in reading order:

- `launcher`: the environment of each launcher.
- `bounded_wait`: a wait with a deadline; the ledger of calls; teams.
- `shared_page`: memory that the ranks of a host share.
- `deadlock_detector`: the wait-for graph: which rank waits in which call, and cycles of waits.
- `control_channel`: messages between ranks; call tokens.
- `rank_monitor`: a process that reports which rank was killed by a signal.
"""
