"""`corpus-client doctor`: is everything as it should be, and is data the bottleneck?

findings.py    one check: status, what was found, what to do
servers.py     each server, and whether replicas agree
speed.py       latency, and where the time of a request goes
delivery.py    what a loader brings
host.py        cores, memory, page-locking, GPUs
bottleneck.py  demand against delivery; the cause and the fix
command.py     the command: runs them in order, prints
"""
