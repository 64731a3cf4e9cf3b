"""Losses of rows that a run recorded: Parquet files that the client's `record_dir` wrote."""

from corpus_server.recordings.losses import Spike, Sums, find_spikes, sum_losses
from corpus_server.recordings.parts import Part, Recording, Recordings, open_recording

__all__ = ["Part", "Recording", "Recordings", "Spike", "Sums", "find_spikes", "open_recording", "sum_losses"]
