"""Ranks find and watch one another: launchers, messages, shared memory.

Question: how do ranks talk about what they do, and who notices that one is missing?
Imports: `fuser.support`.
Files, in reading order:

- `launcher`: the environment of each launcher.
- `bounded_wait`: a wait that ends, and the ledger of calls; teams.
- `shared_page`: memory that the ranks of a host share.
- `deadlock_detector`: which rank waits in which call, and circles of waits.
- `control_channel`: messages between ranks; the words of calls.
- `rank_monitor`: a process that names the rank which a signal has killed.
"""
