"""A simulation of large jobs on replicas of corpus-server, and its check against real processes.

measured    service times, with the result that each comes from
model       the simulation: ranks, replicas, faults
scenarios   what docs/scale.md asks of it
check       the same job with real servers and workers, predicted and measured
"""
