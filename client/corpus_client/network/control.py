"""Questions to a server beside those for batches: descriptions and plans; no I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Generic, TypeVar

from corpus_client import errors
from corpus_client.network import chain, wire
from corpus_client.network.layout import ITEM_BYTES
from corpus_client.network.options import TRAINED_STEP_HEADER

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Question(Generic[T]):
    """A request of the control plane.

    parse: makes something of the response's headers and body, or raises `ResponseCorrupt`.
    body: what is posted, as JSON; None: it is a GET, or another method.
    headers: more of them.
    """

    path: str
    parse: Callable[[wire.Headers, bytes], T]
    body: bytes | None = None
    method: str = "GET"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardDescription:
    """One shard of a plan's corpora: `file` is a posix path in the corpus folder, `data_offset` its byte."""

    corpus: str
    name: str
    file: str
    num_tokens: int
    dtype: str
    data_offset: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StageDescription:
    """A stage of a plan; `first_step` is a training step, None where training skips the whole stage."""

    first_step: int | None
    global_batch_size: int
    seq_len: int
    from_step: int = 0  # plan step
    number: int | None = None  # among the stages of its plan; None: its place in the list
    weights_65536: Mapping[str, int] = field(default_factory=dict, hash=False)  # exact shares, by corpus

    @property
    def shape(self) -> chain.Shape:
        """Rows of a step, inputs of a row."""
        return self.global_batch_size, self.seq_len


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundPlan:
    """A plan with the fingerprints of its corpora: what its id stands for."""

    plan_id: str
    document: dict[str, Any]  # canonical, without decisions; posting it gives the same id or a refusal
    dtype: str  # numpy name of the tokens in responses
    shards: tuple[ShardDescription, ...]  # the list that the shard numbers of `/v1/indices` count
    stages: tuple[
        StageDescription, ...
    ]  # of neighbouring ones of one shape only the first, and the last of all
    eot_id: int | None  # that the server knows of every source; None if it does not, or they differ
    num_steps: int | None = None  # training steps of the plan; None: it has no end
    epoch_rows: int | None = None  # of a plan of one corpus whose order has epochs
    order_repeats: bool = False  # whether every epoch has the same order; older servers do not say
    vocab_size: int | None = None  # of the largest tokenizer among the sources; None: the server knows none
    indices: str = "windows"  # what `/v1/indices` says of rows: their windows, or the pieces that they join
    largest_id: int | None = None  # the largest token id that the server saw in a sample of the sources
    sources: tuple[str, ...] = ()  # names of the corpora, as a batch's sources number them
    is_masked: bool = False  # whether shards of a source have loss masks
    fills_ends: bool = False  # whether rows may hold end-of-text tokens of no document
    eot_first: bool | None = False  # whether documents begin with end-of-text; None: of some sources
    mask_dtype: str = "uint8"  # of loss masks in responses; "float16" if one of them holds weights
    views: tuple[
        str, ...
    ] = ()  # the sources that are views: of their corpora the server shows no other tokens
    warnings: tuple[str, ...] = ()  # what the server says of the plan that its author should know
    chain: chain.Chain = ()  # decisions, by which the document was continued

    @property
    def has_weights(self) -> bool:
        """Whether a loss mask of a source holds weights, and not 0 and 1 alone."""
        return self.mask_dtype != "uint8"

    @property
    def whole(self) -> dict[str, Any]:
        """The document with its decisions: all that a server needs to know."""
        if not self.chain:
            return self.document
        return {
            **self.document,
            chain.DECISIONS: "\n".join(line for part in self.chain for line in part.lines),
        }


def get(path: str) -> Question[dict[str, Any]]:
    """Ask for the JSON object at a path of the server."""
    return Question(path, partial(_object, path))


def post_plan(plan: Mapping[str, Any]) -> Question[BoundPlan]:
    """Make the plan known; idempotent, since a plan's id is its content."""
    return Question("/v1/plans", partial(_described_plan, None, None), json_text(plan))


def post_decisions(plan: BoundPlan, lines: Sequence[str]) -> Question[BoundPlan]:
    """Make known what continues a plan, which the server must know; idempotent, too."""
    part = chain.Part(plan.plan_id, plan.stages[-1].shape, tuple(lines))
    posted = chain.posted(part, plan.sources, plan.document["seq_len"])
    return Question("/v1/plans", partial(_described_plan, plan, posted), json_text(posted))


def introductions(plan: BoundPlan) -> list[Callable[[], Question[str]]]:
    """Return what makes a plan known to a server, in order; each response is an id.

    Where a server knows what one of them continues, those before it need not be asked.
    """

    def post(part: chain.Part | None) -> Question[str]:
        document = (
            plan.document if part is None else chain.posted(part, plan.sources, plan.document["seq_len"])
        )
        return Question(
            "/v1/plans", lambda *response: str(_object("/v1/plans", *response).get("id")), json_text(document)
        )

    return [partial(post, part) for part in (None, *plan.chain)]


def json_text(plan: Mapping[str, Any]) -> bytes:
    """Return what is posted, as JSON."""
    try:
        return json.dumps(plan, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError) as error:
        raise errors.InvalidArgument(
            f"plan must hold JSON values alone (NumPy numbers: .item()), got one that does not: {error}"
        ) from error


def _described_plan(
    parent: BoundPlan | None, posted: Mapping[str, Any] | None, headers: wire.Headers, content: bytes
) -> BoundPlan:
    response = _object("/v1/plans", headers, content)
    try:
        sources = response["sources"].values()
        eot_ids = {source.get("eot") for source in sources}
        firsts = {source.get("eot_first") is True for source in sources}
        shards, stages = _described(ShardDescription, response["shards"]), response["stages"]
        described = _described(
            StageDescription,
            [{"from_step": 0, "number": None, "weights_65536": {}, **each} for each in stages],
        )
        plan = BoundPlan(
            plan_id=str(response["id"]),
            document=dict(response["plan"]),
            dtype=str(response["dtype"]),
            shards=shards,
            stages=described,
            eot_id=eot_ids.pop() if len(eot_ids) == 1 else None,
            num_steps=response["num_steps"],
            epoch_rows=_epoch_rows(list(sources)),
            order_repeats=response.get("order_repeats") is True,
            indices=str(response.get("indices", "windows")),
            vocab_size=_largest(source.get("vocab_size") for source in sources),
            largest_id=_largest(source.get("largest_id") for source in sources),
            sources=tuple(response["sources"]),
            is_masked=any(source.get("num_masks") for source in sources),
            mask_dtype=_mask_dtype(response.get("loss_mask_dtype", "uint8")),
            fills_ends=response.get("fills_ends") is True,
            eot_first=None if len(firsts) > 1 else True in firsts,
            warnings=tuple(map(str, response.get("warnings", ()))),
            views=tuple(name for name, each in response["sources"].items() if each.get("view")),
        )
        if parent is None or posted is None:
            return plan
        first = response["num_stages"] - len(stages)
        numbered = (replace(each, number=number) for number, each in enumerate(described, first))
        added = replace(plan, stages=tuple(numbered))
        return _continued(parent, added, posted, [each["weights_65536"] for each in stages])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise errors.ResponseCorrupt(f"not the description of a plan: {str(response)[:2000]}") from error


def _mask_dtype(name: object) -> str:
    if name not in ("uint8", "float16"):
        raise ValueError(f"loss_mask_dtype must be uint8 or float16, got {name!r}")
    return str(name)


def _continued(
    parent: BoundPlan, added: BoundPlan, posted: Mapping[str, Any], units: Sequence[Mapping[str, int]]
) -> BoundPlan:
    """Return a plan that continues another one, of the description of what it adds."""
    if len(added.stages) != len(posted["stages"]) or not set(parent.sources) <= set(added.sources):
        raise ValueError("the response is about other stages")
    lines, kept, names = [], list(parent.stages), list(parent.sources)
    for described, stage, shares in zip(added.stages, posted["stages"], units, strict=True):
        new = [name for name in shares if name not in names]
        # The server says both of what was posted last; what was posted before has both.
        more = {
            field: {name: its[name] for name in new if name in its}
            for field in ("fingerprints", "lengths")
            if (its := {**posted.get(field, {}), **added.document.get(field, {})})
        }
        lines.append(chain.line_of(stage, shares, described.shape, kept[-1].shape, names, more))
        names += sorted(new)
        # The last one stays only for as long as it is the last.
        if len(kept) > 1 and kept[-1].shape == kept[-2].shape and kept[-2].first_step is not None:
            kept.pop()
        kept.append(described)
    part = chain.Part(parent.plan_id, parent.stages[-1].shape, tuple(lines))
    return replace(
        added,
        document=parent.document,
        shards=parent.shards + added.shards,
        stages=tuple(kept),
        chain=chain.appended(parent.chain, part),
    )


def plan_step(plan_id: str, step: int) -> Question[int]:
    """Ask for the plan step of a training step: the same, but for skipped ones before it."""
    path = f"/v1/plans/{plan_id}/usage?step={step}"

    def parse(headers: wire.Headers, content: bytes) -> int:
        found = _object(path, headers, content).get("plan_step")
        if not isinstance(found, int) or found < step:
            raise errors.ResponseCorrupt(f"plan_step must be {step} or more, got {found!r}")
        return found

    return Question(path, parse)


def end_of(plan_id: str, step: int, place: tuple[int, int]) -> Question[None]:
    """Say that a rank asks for no more, and the step that its loader yielded last."""
    rank, world_size = place
    path = f"/v1/batches?plan={plan_id}&step={step}&rank={rank}&world_size={world_size}"
    headers = {TRAINED_STEP_HEADER: str(step)}
    return Question(path, lambda *_: None, method="HEAD", headers=headers)


def receipt(plan_id: str, step: int) -> Question[str]:
    """Ask for the checksum of a training step's whole global batch, `xxh3-64=<16 hex>`."""
    path = f"/v1/plans/{plan_id}/receipt?step={step}"

    def parse(headers: wire.Headers, content: bytes) -> str:
        response = _object(path, headers, content)
        digest, named = response.get("digest"), (response.get("plan"), response.get("step"))
        if named != (plan_id, step) or not isinstance(digest, str) or not wire.DIGEST.fullmatch(digest):
            raise errors.ResponseCorrupt(f"not the receipt of step {step} of plan {plan_id}: {response}")
        return digest

    return Question(path, parse)


def places(plan_id: str, step: int) -> Question[bytes]:
    """Ask where the rows of a training step lie: the bytes that `/v1/indices` answers."""
    request = wire.steps_request("/v1/indices", (1, 0, 2), "int64", step=step, verify=True, plan=plan_id)

    def parse(headers: wire.Headers, content: bytes) -> bytes:
        wire.check_tag(headers, str(request.identity))
        return wire.checked_array(content)

    return Question(request.path, parse)


def tokens(corpus: str, start: int, count: int) -> Question[tuple[str, bytes]]:
    """Ask for a range of the corpus; the response is (numpy name of the dtype, little-endian bytes)."""
    request = wire.tokens_request(corpus, start, count, "")

    def parse(headers: wire.Headers, content: bytes) -> tuple[str, bytes]:
        dtype = headers.get(wire.DTYPE_HEADER, "")
        if dtype not in ITEM_BYTES:
            raise errors.ResponseCorrupt(f"unknown {wire.DTYPE_HEADER} {dtype!r}")
        wire.check_headers(headers, replace(request, dtype=dtype))
        return dtype, wire.checked_array(content)

    return Question(request.path, parse)


def _object(path: str, headers: wire.Headers, content: bytes) -> dict[str, Any]:
    try:
        response = json.loads(content)
    except (ValueError, RecursionError):  # nested more deeply than Python can read
        response = None
    if not isinstance(response, dict):
        shown = content.decode("utf-8", "replace")[:200]
        kind = headers.get("content-type", "no Content-Type")
        if "json" not in kind:
            raise errors.NotCorpusServer(
                f"{path} must be a JSON object, got {kind}: {shown!r}, so what answers there is no "
                "corpus-server; is the port right, and does a login page stand in between?"
            )
        raise errors.ResponseCorrupt(f"{path} must be a JSON object, got {shown!r}")
    return response


def _described(kind: type[T], found: list[dict[str, Any]]) -> tuple[T, ...]:
    """Return the descriptions in a response, which may have more fields than this client knows.

    A server that names no `file` has one shard in each, of the same name.
    """
    whole = ({"file": given.get("name"), **given} for given in found)
    return tuple(kind(**{each.name: given[each.name] for each in fields(kind)}) for given in whole)  # type: ignore[arg-type]


def _epoch_rows(sources: Sequence[Mapping[str, Any]]) -> int | None:
    if len(sources) != 1 or sources[0].get("steps_per_epoch") is None:
        return None
    rows = sources[0].get("num_windows")
    return rows if isinstance(rows, int) and rows > 0 else None


def _largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)
