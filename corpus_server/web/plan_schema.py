"""The body of `POST /v1/plans`, as the API describes itself."""

from __future__ import annotations

from typing import Any

from corpus_server.plan.document import (
    MAX_GLOBAL_BATCH_SIZE,
    MAX_SEED,
    MAX_SEQ_LEN,
    MAX_SOURCES,
    MAX_STAGES,
    MAX_STEP,
    MAX_STRIDE,
    VERSIONS,
)
from corpus_server.plan.orders import (
    MAX_BLENDED,
    MAX_BLOCK_WINDOWS,
    MAX_GROUP_BLOCKS,
    MAX_NUM_SAMPLES,
    ORDERS,
    PARTS,
)


def _integers(low: int, high: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


_RANGES = {
    "type": "array",
    "items": {"type": "array", "items": _integers(0, 2**63 - 1), "minItems": 2, "maxItems": 2},
    "description": "Half-open ranges, ascending.",
}
_BOUNDED = {"block_windows": _integers(1, MAX_BLOCK_WINDOWS), "group_blocks": _integers(1, MAX_GROUP_BLOCKS)}

_MEGATRON = {
    "num_samples": _integers(1, MAX_NUM_SAMPLES) | {"description": "Rows of the whole run."},
    "blend": {"type": "array", "maxItems": MAX_BLENDED, "uniqueItems": True, "items": {"type": "string"}},
    "weights": {"type": "array", "minItems": 1, "items": {"type": "number", "exclusiveMinimum": 0}},
    "split": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "number", "minimum": 0}},
    "part": {"enum": list(PARTS)},
    "documents": {"type": "object", "additionalProperties": {"type": "string"}},
}


def _object(required: list[str], **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": False,
    }


_STAGE = _object(
    ["global_batch_size", "mixture"],
    from_step=_integers(0, MAX_STEP) | {"description": "Plan step; 0 in the first stage, then rising."},
    global_batch_size=_integers(1, MAX_GLOBAL_BATCH_SIZE),
    seq_len={
        "anyOf": [_integers(1, MAX_SEQ_LEN), {"type": "null"}],
        "description": "A divisor of the plan's, which holds where this is left out or null. "
        "global_batch_size is a multiple of the plan's seq_len divided by this one.",
    },
    mixture={
        "type": "object",
        "minProperties": 1,
        "maxProperties": MAX_SOURCES,
        "additionalProperties": {"type": "number", "exclusiveMinimum": 0},
        "description": "Weight by corpus name.",
    },
    exclude={"type": "object", "additionalProperties": _RANGES},
)
PLAN_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": _object(
                    ["seq_len", "stages"],
                    version={"enum": list(VERSIONS)},
                    seq_len=_integers(1, MAX_SEQ_LEN),
                    stride=_integers(1, MAX_STRIDE),
                    seed=_integers(0, MAX_SEED),
                    order={
                        "anyOf": [
                            {"enum": list(ORDERS)},
                            _object(["shuffle"], shuffle=_object([*_BOUNDED], **_BOUNDED)),
                            _object(["megatron"], megatron=_object(["num_samples"], **_MEGATRON)),
                        ]
                    },
                    stages={"type": "array", "minItems": 1, "maxItems": MAX_STAGES, "items": _STAGE},
                    skip_steps=_RANGES,
                    fingerprints={"type": "object", "additionalProperties": {"type": "string"}},
                )
            }
        },
    }
}
"""What `POST /v1/plans` takes, as far as a schema can say; `corpus_server.plan.document` parses it."""
