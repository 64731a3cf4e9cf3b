"""Service times of one worker process, each from a result of this repository.

All come from two shared cores of one virtual machine. Cores of a real server are faster, so the replicas that
follow from these figures are more than will be needed.
"""

from __future__ import annotations

REQUEST_BYTES = 2 * 16 * 1025
"""32.8 kB: the body of the responses that the next figure was measured with."""

REQUEST_CPU_SECONDS = 18.39e-9 * 16 * 1025
"""0.30 ms of the server's CPU for a response of 16 x 1,025 uint16: results/2026-11-23-bench-paced.md,
`ours, in step`, 18.39 CPU s / 10^9 tokens."""

BYTE_SECONDS = 1 / (2 * 663e6)
"""0.75 ns a byte: results/2026-11-22-bench-growth.md, 663 M uint16 tokens/s of one process, 512 x 2,049,
64 connections."""

SPREAD = 0.51
"""Sigma of a lognormal service time: results/2026-11-23-bench-latency.md, `ours`, p99 / p50 = 1.116 ms /
0.338 ms; the 99th percentile of the normal distribution lies 2.33 sigma from its middle."""

COLD_BYTES_PER_SECOND = 53_762 * 2 * 2049
"""220 MB/s of useful bytes, full shuffle from this machine's disk: results/2026-11-22-bench-cold.md,
53,762 windows/s of 2,049 uint16."""

MAX_CONCURRENT_ANSWERS = 2048
"""Of a worker process: the default of the setting."""

RETRY_AFTER_SECONDS = 1.0
"""What a refused request is told: corpus_server.errors.Overloaded."""

STALL_SECONDS = 1.0
"""Of the client, corpus_client.network: when a silent replica is given up for another one."""

NUM_SLOTS, IN_FLIGHT, MAX_REQUEST_BYTES = 4, 2, 16 << 20
"""Of a loader: slots that its budget is cut into, requests on the wire at a time, largest request."""


def request_seconds(num_bytes: int) -> float:
    """Return the CPU time of one response."""
    return REQUEST_CPU_SECONDS + BYTE_SECONDS * (num_bytes - REQUEST_BYTES)
