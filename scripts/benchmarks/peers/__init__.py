"""Compare ours with peers: each file holds one, its server and its consumer.

Every server is a process of its own, `python -m scripts.benchmarks.peers KIND CORPUS ADDRESS_FILE`, over
the same corpus; every consumer delivers one batch of windows after another as a `Contender`.
"""
