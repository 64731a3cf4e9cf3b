"""Plans over views, by brute force: epochs of windows and packed rows, look-ups, exclusions, differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import accumulate, pairwise, permutations
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest

from corpus_server.catalog import Catalog
from corpus_server.corpus.corpus import Corpus
from corpus_server.corpus.index import index
from corpus_server.corpus.views import View
from corpus_server.corpus.views.places import Places
from corpus_server.corpus_spec import CorpusSpec
from corpus_server.errors import InvalidPlan, UnknownDocument
from corpus_server.pieces import NO_SHARD
from corpus_server.plan import Plan
from corpus_server.plan.questions.diff import compare
from corpus_server.plan.questions.lookup import look_up
from corpus_server.read.bound_plan import BoundPlan
from corpus_server.read.reading import RangeReading, WindowReading, num_bytes
from corpus_server.tools.viewing.make import make_view
from corpus_server.work import Budget
from tests.corpora import megatron_index, spec, write_llmc, write_megatron
from tests.second import SecondPlan
from tests.views import laid_out, viewed_catalog, write_corpus

DRAW = np.random.default_rng(5)
SHARDS = [DRAW.integers(1, 40, size).tolist() for size in (300, 40, 270)]
NUM_DOCUMENTS = sum(map(len, SHARDS))
COUNTS = DRAW.choice([0, 1, 1, 1, 2, 3], NUM_DOCUMENTS).tolist()
STARTS = [0, *accumulate(length for lengths in SHARDS for length in lengths)]
VIEWED = np.concatenate(
    [np.arange(STARTS[n], STARTS[n + 1]) for its in laid_out(SHARDS, COUNTS) for n in its]
)
SEQ_LEN = 16
LAYOUTS: dict[str, Any] = {
    "windows": {},
    "documents": {"rows": {"documents": {"block_documents": 64}}},
    "bounded": {"order": {"shuffle": {"block_windows": 8, "group_blocks": 3}}},
    "sequential": {"order": "sequential"},
}


@pytest.fixture(scope="module")
def catalog(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Catalog]:
    views = {"hq": COUNTS, "all": [1] * NUM_DOCUMENTS, "less": [*COUNTS[:-9], *[0] * 9]}
    with viewed_catalog(tmp_path_factory.mktemp("corpora"), SHARDS, views) as catalog:
        yield catalog


def bound(catalog: Catalog, mixture: dict[str, float], layout: str = "windows", **more: Any) -> BoundPlan:
    stage = {"from_step": 0, "global_batch_size": 4, "mixture": mixture, **more}
    document = {"seq_len": SEQ_LEN, "seed": 7, "stages": [stage], **LAYOUTS[layout]}
    return catalog.bind(Plan.from_json(document), Budget())


def reading_of(plan: BoundPlan, step: int) -> WindowReading:
    return WindowReading(plan, Budget(), step=step, count=1, rank=0, rows=4)


def epoch_rows(plan: BoundPlan, number: int = 0) -> tuple[list[list[list[int]]], np.ndarray]:
    """The rows of an epoch of a plan of one source: the corpus's tokens of each piece; what is served."""
    (size,) = plan.sampler.num_windows.tolist()
    steps = range(size * number // 4, -(-size * (number + 1) // 4))
    served = np.concatenate([reading_of(plan, s).read(0, 4) for s in steps])
    first = np.array(plan.corpora[plan.plan.sources[0]].base.starts)
    rows = []
    for step in steps:
        pieces, borders = plan.sampler.pieces(step, range(4))
        for low, high in pairwise(borders.tolist()):
            its = [(first[shard] + at, count) for shard, at, count in pieces[low:high].tolist()]
            rows.append([list(range(at, at + count)) for at, count in its])
    skipped = size * number - 4 * steps.start
    return rows[skipped : skipped + size], served[skipped : skipped + size]


@pytest.mark.parametrize("layout", ["windows", "bounded", "sequential"])
def test_windows_run_over_the_chosen_documents(catalog: Catalog, layout: str) -> None:
    tokens = np.where(np.isin(VIEWED + 1, STARTS), 0, VIEWED + 1)
    windows, first = Counter[tuple[int, ...]](), 0
    for its in laid_out(SHARDS, COUNTS):
        size = sum(STARTS[n + 1] - STARTS[n] for n in its)
        shard = tokens[first : first + size].tolist()
        windows.update(tuple(shard[k : k + SEQ_LEN + 1]) for k in range(0, size - SEQ_LEN, SEQ_LEN))
        first += size
    for number in range(2):
        rows, served = epoch_rows(bound(catalog, {"hq": 1}, layout), number)
        assert Counter(map(tuple, served.tolist())) == windows
        for row, its in zip(rows, served.tolist(), strict=True):
            places = np.array([each for piece in row for each in piece])
            assert np.where(np.isin(places + 1, STARTS), 0, places + 1).tolist() == its


@pytest.mark.parametrize("number", [0, 1])
def test_packed_rows_predict_each_token_as_often_as_its_document_comes(catalog: Catalog, number: int) -> None:
    predicted = Counter(
        token for row in epoch_rows(bound(catalog, {"hq": 1}, "documents"), number)[0] for piece in row
        for token in piece[1:]
    )  # fmt: skip
    expected = Counter(
        {
            token: COUNTS[n]
            for n, (start, stop) in enumerate(pairwise(STARTS))
            for token in range(start + 1, stop)
        }
    )
    assert predicted == +expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_look_up_finds_every_row_of_a_document_of_the_corpus(catalog: Catalog, layout: str) -> None:
    plan = bound(catalog, {"hq": 1}, layout)
    rows, _ = epoch_rows(plan)
    for document in (0, 5, 77, 299, 300, NUM_DOCUMENTS - 1, COUNTS.index(0), COUNTS.index(3)):
        start, stop = STARTS[document : document + 2]
        found = look_up(plan.sampler, "hq", start, stop, Budget(), epochs=1)
        flat = [[token for piece in row for token in piece] for row in rows]
        expected = {
            number: next(at for at, token in enumerate(row) if start <= token < stop)
            for number, row in enumerate(flat)
            if any(start <= token < stop for token in row)
        }
        if layout == "documents" and stop - start == 1:
            expected = {}  # nothing to predict
        assert {4 * each.plan_step + each.row: each.offset for each in found.rows} == expected
        assert found.num_found == len(expected)
        starts = plan.corpora["hq"].base.starts
        for each in found.rows:
            assert starts[each.shard] + each.start == flat[4 * each.plan_step + each.row][0]


@pytest.mark.parametrize("layout", ["windows", "documents", "bounded"])
def test_an_exclusion_in_the_corpus_s_tokens_takes_all_copies_out(catalog: Catalog, layout: str) -> None:
    document = COUNTS.index(3)
    start, stop = STARTS[document : document + 2]
    rows, _ = epoch_rows(bound(catalog, {"hq": 1}, layout, exclude={"hq": [[start, stop]]}))
    tokens = {token for row in rows for piece in row for token in piece}
    assert not tokens & set(range(start, stop))
    one, other = (
        bound(catalog, {"hq": 0.5, "code": 0.5}, layout, **more)
        for more in ({}, {"exclude": {"hq": [[start, stop]]}})
    )
    for step in range(60):
        a, b = (reading_of(each, step).read(0, 4) for each in (one, other))
        is_code = (a >= 50_000).any(axis=1)
        assert (a[is_code] == b[is_code]).all()


def test_an_exclusion_beyond_the_corpus_is_refused(catalog: Catalog) -> None:
    with pytest.raises(InvalidPlan, match=f"the corpus has {STARTS[-1]}"):
        bound(catalog, {"hq": 1}, exclude={"hq": [[0, STARTS[-1] + 1]]})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_view_of_the_whole_corpus_under_its_name_has_its_rows(catalog: Catalog, layout: str) -> None:
    """Keys follow from names, so other names would shuffle otherwise."""
    view = catalog.corpora["all"]
    assert isinstance(view, View)
    its = spec(view.shards[0].path.parent, "web", dtype="uint32", view=str(view.file.file.path))
    with Catalog.open([its]) as other:
        plans = bound(catalog, {"web": 1}, layout), bound(other, {"web": 1}, layout)
        assert (plans[0].sampler.num_windows == plans[1].sampler.num_windows).all()
        for step in range(0, 200, 7):
            a, b = (reading_of(each, step).read(0, 4) for each in plans)
            assert (a == b).all()


def test_plans_of_two_views_are_compared_by_the_corpus_s_tokens(catalog: Catalog) -> None:
    """In file order they are equal up to the documents that only one of them holds."""
    one, other = (bound(catalog, {name: 1}, "sequential") for name in ("hq", "less"))
    found = compare(one.sampler, other.sampler, Budget(), num_steps=1)
    rows = [epoch_rows(each)[0] for each in (one, other)]
    first = next(n for n, (a, b) in enumerate(zip(*rows, strict=False)) if a != b)
    assert found.first_step == first // 4


def test_a_row_whose_pieces_are_all_excluded_is_end_of_text(tmp_path: Path) -> None:
    """Also of a view with more tokens than its corpus, where the row's place in the view lies beyond that."""
    lengths = [9] * 6 + [13] * 2
    counts = [5] * 6 + [1] * 2
    with viewed_catalog(tmp_path, [lengths], {"hq": counts}) as catalog:
        document = {"seq_len": 12, "seed": 7, "rows": {"documents": {"block_documents": 99}}}
        stage = {"from_step": 0, "global_batch_size": 1, "mixture": {"hq": 1}, "exclude": {"hq": [[54, 80]]}}
        plan = catalog.bind(Plan.from_json({**document, "stages": [stage]}), Budget())
        size = int(plan.sampler.num_windows[0])
        readings = [WindowReading(plan, Budget(), step=step, count=1, rank=0, rows=1) for step in range(size)]
        served = np.concatenate([each.read(0, 1) for each in readings])
    assert np.count_nonzero((served == 0).all(axis=1)) == 2


def test_plans_of_corpora_of_one_name_are_compared_by_their_content(tmp_path: Path) -> None:
    """A corpus that grew has its name, and what it held before has another content or number of shards."""
    folders = [write_corpus(tmp_path / name, shards, first=first) for name, shards, first in (
        ("a", [[5] * 40], 1), ("b", [[5] * 40], 1000), ("c", [[5] * 40, [5] * 40], 5000),
    )]  # fmt: skip
    plans = []
    with ExitStack() as opened:
        for folder in folders:
            catalog = opened.enter_context(Catalog.open([spec(folder, "web", dtype="uint32")]))
            plans.append(bound(catalog, {"web": 1}))
        for one, other in permutations(plans, 2):
            found = compare(one.sampler, other.sampler, Budget(), num_steps=3)
            assert (found.first_step, [each.num_rows for each in found.steps]) == (0, [4, 4, 4])


def test_rows_of_documents_over_a_view_of_documents_of_several_sequences(tmp_path: Path) -> None:
    """In Megatron's format a document may be several sequences; a view has documents."""
    sequences = [[*range(10 * n + 1, 10 * n + 8), 0] for n in range(8)]
    path = write_megatron(tmp_path / "m", sequences)
    index = megatron_index([8] * 8, documents=[0, 3, 4, 8])
    path.with_suffix(".idx").write_bytes(index)
    view = tmp_path / "v.view"
    with Corpus.open(CorpusSpec.parse(f"m={path},eot=0")) as corpus:
        assert corpus.num_documents == 3
        make_view(corpus, np.array([1, 0, 2], dtype=np.uint16), view, made={})
    with Catalog.open([CorpusSpec.parse(f"m={path},eot=0"), CorpusSpec.parse(f"v=m?view={view}")]) as catalog:
        plan = bound(catalog, {"v": 1}, "documents")
        served = WindowReading(plan, Budget(), step=0, count=4, rank=0, rows=4).read(0, 16)
    assert not {31, 32, 33, 34, 35, 36, 37} & set(served.ravel().tolist())
    assert {1, 27, 41, 77} <= set(served.ravel().tolist())


def test_shards_are_those_of_the_pieces_of_rows(catalog: Catalog) -> None:
    """Also where rows join documents, and where windows of other shards stand in for excluded ones."""
    excluded = {"exclude": {"hq": [[STARTS[200], STARTS[330]]]}}
    for layout in LAYOUTS:
        plan = bound(catalog, {"hq": 0.5, "less": 0.5}, layout, **excluded)
        which, shards = plan.sampler.shards(3, range(1, 4), count=25)
        pieces = plan.sampler.pieces(3, range(1, 4), count=25).without_empty()
        expected = {*zip(pieces.each_once().tolist(), pieces.places[:, 0].tolist(), strict=True)}
        found = list(zip(which.tolist(), shards.tolist(), strict=True))
        assert (found, set(found)) == (sorted(found), expected)


def test_a_document_that_a_view_holds_very_often_is_looked_up(tmp_path: Path) -> None:
    """Its copies come apart, each between two others. Looking at pairs of them would take minutes."""
    times, lengths = 40_000, [5, 6, 7]
    with viewed_catalog(tmp_path, [lengths], {"hq": [times] * 3}) as catalog:
        for layout in ("windows", "documents"):
            plan = bound(catalog, {"hq": 1}, layout)
            found = look_up(plan.sampler, "hq", 5, 11, Budget(), epochs=1, limit=3)
            assert len(found.rows) == 3
            if layout == "documents":
                assert found.num_found >= times // 3  # up to three fit into a row
            else:
                assert found.num_found == int(plan.sampler.num_windows[0])


def test_a_range_of_a_view_has_a_size_before_anything_is_looked_for(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = catalog.corpora["hq"]
    reading = RangeReading(view, catalog.gatherer("hq"), start=7, stop=view.num_tokens)
    expected = np.where(np.isin(VIEWED + 1, STARTS), 0, VIEWED + 1)
    for most in (10, 1000):
        read = [
            reading.read(at, min(most, reading.num_units - at)) for at in range(0, reading.num_units, most)
        ]
        assert np.concatenate(read).tolist() == expected[7:].tolist()
    monkeypatch.setattr(Places, "pieces", lambda *_: pytest.fail("it was looked for"))
    assert num_bytes(RangeReading(view, catalog.gatherer("hq"), start=0, stop=1000)) == 4000


def test_a_document_before_the_first_one_that_a_view_holds_is_unknown(tmp_path: Path) -> None:
    with viewed_catalog(tmp_path, [[3] * 600], {"hq": [0] * 300 + [1] * 300}) as catalog:
        view = catalog.corpora["hq"]
        assert isinstance(view, View)
        assert (view.own_document(300), view.own_document(599)) == (0, 299)
        for number in (0, 255, 256, 299):
            with pytest.raises(UnknownDocument, match="one that view 'hq' holds"):
                view.own_document(number)


def random_plans(seed: int) -> tuple[list[list[int]], list[int], list[dict[str, Any]]]:
    """Lengths of documents, their multiplicities, and a document of a plan with and without exclusions."""
    draw = Random(seed)
    shards = [
        [draw.randint(1, draw.choice([4, 8, 19])) for _ in range(draw.choice([5, 25, 300]))]
        for _ in range(draw.randint(1, 3))
    ]
    total = sum(map(sum, shards))
    counts = [1, *(draw.choice([0, 1, 1, 2, 3]) for _ in range(sum(map(len, shards)) - 1))]
    stages: list[dict[str, Any]] = []
    for number in range(draw.randint(1, 3)):
        starts = [draw.randrange(total) for _ in range(draw.randint(0, 3))]
        excluded = [[start, min(total, start + draw.randint(1, 15))] for start in starts]
        mixture = draw.choice([{"hq": 1}, {"hq": 0.5, "lq": 0.5}, {"hq": 0.3, "code": 0.7}])
        stage = {"from_step": 8 * number, "global_batch_size": draw.randint(1, 5), "mixture": mixture}
        stages.append({**stage, "exclude": {"hq": excluded}} if excluded and "hq" in mixture else stage)
    document: dict[str, Any] = {
        "seq_len": draw.choice([1, 3, 7, 12]),
        "seed": draw.randint(0, 5),
        "order": draw.choice(["shuffle", "sequential", {"shuffle": {"block_windows": 3, "group_blocks": 2}}]),
        "rows": {"documents": {"block_documents": draw.choice([1, 3, 8, 99])}},
    }
    plain = [{field: value for field, value in stage.items() if field != "exclude"} for stage in stages]
    return shards, counts, [{**document, "stages": each} for each in (stages, plain)]


class Viewed(NamedTuple):
    """A source of random plans in the second implementation: by hand, a token at a time."""

    shard_tokens: list[int]
    documents: list[tuple[int, int]]
    tokens: list[int]
    """Of the corpus, in the order of the source."""

    @classmethod
    def of(cls, shards: list[list[int]], counts: list[int]) -> Viewed:
        lengths = [length for shard in shards for length in shard]
        firsts, laid = list(accumulate(lengths, initial=0)), laid_out(shards, counts)
        tokens = [token for shard in laid for n in shard for token in range(firsts[n], firsts[n + 1])]
        chosen = [lengths[n] for shard in laid for n in shard]
        sizes = [sum(lengths[n] for n in shard) for shard in laid]
        return cls(sizes, list(zip(accumulate(chosen, initial=0), chosen, strict=False)), tokens)

    def excluded(self, ranges: list[list[int]]) -> list[list[int]]:
        """Return the source's tokens that are those of ranges of the corpus, each as a range."""
        inside = {token for start, stop in ranges for token in range(start, stop)}
        return [[at, at + 1] for at, token in enumerate(self.tokens) if token in inside]


def second_plans(
    shards: list[list[int]], counts: list[int], documents: list[dict[str, Any]]
) -> tuple[Viewed, list[SecondPlan]]:
    """Return the view `hq`, and random plans over it, with its exclusions in its own tokens."""
    code = Viewed([200], [(0, 200)], [])
    made = {"hq": Viewed.of(shards, counts), "lq": Viewed.of(shards, [1] * len(counts)), "code": code}
    plans = []
    for document in documents:
        stages = [
            {**each, "exclude": {"hq": made["hq"].excluded(each["exclude"]["hq"])}}
            if "exclude" in each
            else each
            for each in document["stages"]
        ]
        sizes, lengths = ({name: its[k] for name, its in made.items()} for k in (0, 1))
        plans.append(SecondPlan({**document, "stages": stages}, sizes, lengths))
    return made["hq"], plans


Place = tuple[int, int]
"""Plan step, row of the global batch."""
STEPS = 60


def rows_of(view: Viewed, plans: list[SecondPlan]) -> dict[Place, list[tuple[set[int], bool]]]:
    """Return the rows of two epochs of `hq`: of each piece its tokens, and whether it is a substitute.

    That is a piece which the row would not hold so often if nothing was excluded, as in the second plan.
    """
    end, before = 2 * plans[0].rows["hq", plans[0].window_seq_len].n, plans[0].first_shards["hq"]
    first = list(accumulate(view.shard_tokens, initial=0))
    rows = {}
    for step in range(STEPS):
        for row in range(plans[0].global_batch_size(step)):
            _, name, position = plans[0].position(step, row)
            if name != "hq" or position >= end:
                continue
            held, otherwise = (Counter(plan.pieces(step, row)) for plan in plans)
            pieces = []
            for piece, number in held.items():
                shard, start, size = piece
                at = first[shard - before] + start
                pieces.append((set(view.tokens[at : at + size]), number > otherwise[piece]))
            rows[step, row] = pieces
    return rows


@pytest.mark.parametrize("seed", range(24))
def test_a_look_up_says_of_packed_rows_whether_a_piece_is_a_substitute(tmp_path: Path, seed: int) -> None:
    shards, counts, documents = random_plans(seed)
    with viewed_catalog(tmp_path, shards, {"hq": counts, "lq": [1] * len(counts)}) as catalog:
        try:
            sampler = catalog.bind(Plan.from_json(documents[0]), Budget()).sampler
        except InvalidPlan:  # nothing is left
            return
        rows, total = rows_of(*second_plans(shards, counts, documents)), sum(map(sum, shards))
        for start in range(0, total, max(1, total // 7)):
            wanted = set(range(start, min(start + 6, total)))
            expected = {}
            for place, pieces in rows.items():
                if touching := [is_substitute for tokens, is_substitute in pieces if tokens & wanted]:
                    expected[place] = any(touching)
            found = look_up(sampler, "hq", start, min(start + 6, total), Budget(), epochs=2)
            assert expected == {
                (each.plan_step, each.row): each.substitute for each in found.rows if each.plan_step < STEPS
            }


def test_a_view_of_documents_that_begin_with_end_of_text(tmp_path: Path) -> None:
    """Each document that it holds is predicted as often as it comes, also what a cut shard has of one."""
    eot, stream, random = 50_256, list[int](), np.random.default_rng(2)
    while len(stream) < 2000:
        stream += [eot, *range(len(stream), len(stream) + int(random.integers(1, 60)))]
    shards = [stream[:900], stream[900:-3]]
    folder = tmp_path / "web"
    folder.mkdir()
    for number, shard in enumerate(shards):
        write_llmc(folder / f"{number}.bin", shard)
    index(spec(folder, eot=eot))
    with Corpus.open(spec(folder)) as corpus:
        assert corpus.num_documents is not None
        counts = random.integers(0, 3, corpus.num_documents).astype(np.uint16)
        counts[[corpus.document_starts[1], -1]] = 2  # open ones
        ranges = [corpus.document_range(number) for number in range(corpus.num_documents)]
        make_view(corpus, counts, tmp_path / "some.view", made={})
    tokens, expected = [*shards[0], *shards[1]], Counter[tuple[int, int]]()
    for (start, stop), count in zip(ranges, counts.tolist(), strict=True):
        for pair in pairwise([*tokens[start:stop], eot]):
            expected[pair] += count
    stages = [{"global_batch_size": 1, "mixture": {"some": 1}}]
    plan = Plan.from_json({"seq_len": 32, "rows": "documents", "stages": stages})
    text = f"some=web?view={tmp_path / 'some.view'}"
    with Catalog.open([spec(folder, "web"), CorpusSpec.parse(text)]) as catalog:
        bound, seen = catalog.bind(plan, Budget()), Counter[tuple[int, int]]()
        for row in range(int(bound.sampler.num_windows[0])):
            its = list[int]()
            for number, start, count in bound.pieces(row, range(1)).places.tolist():
                its += [start] * count if number == NO_SHARD else shards[number][start : start + count]
            twice = [one == other == eot for one, other in pairwise(its)]
            for pair, *filled in zip(pairwise(its), [False, *twice], twice, strict=False):
                if pair[0] != eot or not any(filled):
                    seen[pair] += 1
    assert seen == +expected


@pytest.mark.parametrize("lengths", [[400], [200, 200], [150] * 9, [3] * 300])
def test_the_groups_of_a_bounded_shuffle_hold_its_rows(tmp_path: Path, lengths: list[int]) -> None:
    """Which is where they are read ahead; also where the first document of a shard is in one."""
    with viewed_catalog(tmp_path, [lengths], {"all": [1] * len(lengths)}) as catalog:
        plan = bound(catalog, {"all": 1}, "bounded")
        held = np.zeros(sum(lengths), dtype=bool)
        for number in range(-(-int(plan.sampler.num_windows[0]) // 24)):
            for _, start, stop in plan.sampler.group_extents(0, number):
                held[start:stop] = True
        rows, _ = epoch_rows(plan)
        assert held[[token for row in rows for piece in row for token in piece]].all()
