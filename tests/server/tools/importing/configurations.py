"""Configurations of runs that several files import, and what is said of them."""

from __future__ import annotations

from typing import Any

from corpus_server.plan import Plan
from corpus_server.tools.importing import Imported, Trainer, import_plan


def imported(trainer: Trainer, text: str, **fields: Any) -> Imported:
    found = import_plan(trainer, text, **fields)
    Plan.from_json(found.document)
    return found


def document(mixture: dict[str, float], size: int, **fields: Any) -> dict[str, Any]:
    stage = {"from_step": 0, "global_batch_size": size, "mixture": mixture}
    return {"order": "shuffle", **fields, "stages": [stage]}


OWN_ORDER = "the order: a plan shuffles by a permutation of its own"
OF_DISJOINT = "a sample's last token is a target only: samples of L tokens are rows of seq_len L - 1"
PYTHIA = """
{
  "pipe-parallel-size": 1,
  "seq-length": 2048,
  "max-position-embeddings": 2048,
  "attention-config": [[["flash"], 6]],

  # batch size (trained on 32 gpus)
  "train_micro_batch_size_per_gpu": 32,
  "gas": 1,
  "data-impl": "mmap",
  "train-iters": 143000,
  "train-data-paths": ["/fsx/pile/pile_20B_tokenizer_text_document"],
  "valid-data-paths": ["/fsx/pile/pile_20B_tokenizer_text_document"],
  "test-data-paths": ["/fsx/pile/pile_20B_tokenizer_text_document"],
  "deepspeed_slurm": true,
}
"""
"""What is of data in `models/70M/pythia-70m.yml` of EleutherAI/pythia, and some more."""
RUN_OF_CORE: dict[str, Any] = {
    "dataset": {
        "_CLASS_": "olmo_core.data.numpy_dataset.NumpyFSLDatasetConfig",
        "paths": ["/d/b/part-0.npy", "/d/a/part-10.npy", "/d/a/part-9.npy", "/d/b/part-0.npy"],
        "sequence_length": 4096,
        "max_target_sequence_length": 8192,
        "generate_doc_lengths": True,
        "instance_filter_config": {"repetition_max_period": 13},
        "tokenizer": {"vocab_size": 100278, "eos_token_id": 100257, "pad_token_id": 100277},
    },
    "data_loader": {"global_batch_size": 4096 * 256, "seed": 34521, "work_dir": "/tmp/work"},
    "trainer": {"max_duration": {"value": 2, "unit": "epochs"}, "callbacks": {"lm": {"_CLASS_": "a.B"}}},
}
FIRST_OLMO = """
seed: 6198
model:
  max_sequence_length: 2048
  vocab_size: 50280
  eos_token_id: 50279
global_train_batch_size: 2048
max_duration: 2ep
data:
  drop_last: true
  generate_attention_mask: true
  paths:
    - s3://ai2-llm/preprocessed/part-0.npy
    - s3://ai2-llm/preprocessed/part-1.npy
"""
