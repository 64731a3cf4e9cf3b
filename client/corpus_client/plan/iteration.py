"""A place in a plan: what every loader does that iterates over one, and whose state it saves."""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial, wraps
from operator import length_hint
from typing import Any, Final, Generic, Literal, NoReturn, ParamSpec, Self, TypeVar

from corpus_client import errors
from corpus_client.network import control
from corpus_client.network.asking import tell
from corpus_client.network.control import BoundPlan
from corpus_client.network.given import Servers, resolved
from corpus_client.network.layout import Beside
from corpus_client.network.options import Network, boolean
from corpus_client.network.own_server import Hold, OwnServer
from corpus_client.network.replicas import Replicas
from corpus_client.network.wire import ArrayRequest
from corpus_client.observe.recorder import Recorder
from corpus_client.plan import receipts
from corpus_client.plan.document import MAX_STEP, CorpusArgument, PlanArgument, integer, requested_plan
from corpus_client.plan.owner import Owner
from corpus_client.plan.requests import StepRequests
from corpus_client.plan.schedule import StepRange, shape_of
from corpus_client.plan.state import check_state, make_state

MAX_LENGTH = 2**31

END_SECONDS: Final = 0.5
"""What an end may wait for a server that is told of it; that takes milliseconds."""

B = TypeVar("B")
S = TypeVar("S")
log = logging.getLogger("corpus_client")

P = ParamSpec("P")

NumSteps = int | Literal["epoch"] | None
"""As a loader takes it: a number of steps, exactly one pass over the corpus, or no end."""

EPOCH: Final = "epoch"


def check_asker(loader: Any) -> None:
    """Raise `StateMismatch` if Lightning calls the `state_dict` that calls this, and holds a batch ahead.

    Lightning holds one batch that it has not trained on, unless the loader has a length. The state would
    count that batch as done, and a resumed run would leave it out. Only who asks tells: nothing else of
    Lightning reaches a loader.
    """
    asker = sys._getframe(2).f_globals.get("__name__", "")
    if asker.startswith(("lightning.pytorch.", "pytorch_lightning.")) and length_hint(loader, -1) < 0:
        raise errors.StateMismatch(
            f"Lightning iterates over this {type(loader).__name__} and holds a batch that it has not "
            "trained on, which the state would count as done: a resumed run would leave it out. Pass "
            "datamodule=corpus_client.integrations.lightning.CorpusDataModule(...) to fit, or give the "
            "loader a length by num_steps=, with which Lightning holds none"
        )


class Steps(Iterator[S]):
    """What a `for` iterates over: another object than the loader; after an error it may be asked again.

    No `iter(function, sentinel)`, which compares: a batch of arrays is equal to nothing, or to everything.
    """

    def __init__(self, take: Callable[[], S]) -> None:
        self._take = take

    def __next__(self) -> S:
        return self._take()


def lets_go_on_error(make: Callable[P, None]) -> Callable[P, None]:
    """Let the server of a path end if a loader's `__init__` fails: the traceback keeps the loader.

    A server that has files as they were, and that no other loader holds, is replaced: the loaders before this
    one were closed a moment ago.
    """

    @wraps(make)
    def made(*arguments: P.args, **options: P.kwargs) -> None:
        loader: PlanLoader[Any] = arguments[0]  # type: ignore[assignment]
        try:
            make(*arguments, **options)
        except BaseException as error:
            servers = None if loader._hold is None else loader._hold.server
            loader._let_go()
            if servers is None or not isinstance(error, errors.LocalCopyMismatch) or not servers.has_ended():
                _leave_frames_out(error)
                raise
        else:
            return
        try:
            make(*arguments, **options)
        except BaseException as error:
            loader._let_go()
            _leave_frames_out(error)
            raise

    return made


def _leave_frames_out(error: BaseException | None) -> None:
    """Leave the frames of this package out of the traceback of an error whose message says all."""
    if isinstance(error, errors.CorpusClientError) and not isinstance(error, errors.FetchFailed):
        while error is not None:
            error = error.with_traceback(None).__cause__


class PlanLoader(Generic[B]):
    """A place in a plan, used by one thread at a time. A loader sets `_bound`, makes batches, can `_stop`."""

    _bound: BoundPlan
    _recorder: Recorder  # of the requests for batches
    place: tuple[int, int]  # rank and world size
    _hold: Hold | None = None  # on the server of a path; between two connections, too

    def __init__(
        self,
        urls: Servers,
        network: Network,
        num_steps: NumSteps,
        run: str | None,
        *,
        reiterable: bool = False,
    ) -> None:
        boolean("reiterable", reiterable)
        servers = resolved(urls, network)
        self._hold = servers.hold() if isinstance(servers, OwnServer) else None
        self._connect = partial(Replicas, servers, network.named(run))
        self._epoch_rows: int | None = None  # rows of the pass of `num_steps="epoch"`
        self._end_step = None if num_steps in (None, EPOCH) else integer("num_steps", num_steps, 0, MAX_STEP)
        self._is_epoch = num_steps == EPOCH
        self._reiterable = reiterable
        self._step = 0
        self._told_step: int | None = None  # the last one, as the server was told at an end
        self._used = False  # whether a batch, or the end, was yielded since the last `seek`
        self._owner = Owner()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        end = "" if self._end_step is None else f" of {self._end_step}"
        sources = ", ".join(sorted(self._bound.sources))
        rank, world_size = self.place
        return (
            f"{type(self).__name__}(plan {self.plan_id[:12]} of {sources} as {self._bound.dtype}, "
            f"step {self._step}{end}, rank {rank} of {world_size}{self._describe_device()})"
        )

    def _describe_device(self) -> str:
        return ""

    def _settle_end(self) -> None:
        """Let the run end where its plan does, or with one pass if `num_steps="epoch"` asks for that."""
        plan = self._bound
        if not self._is_epoch:
            if self._end_step is None:
                self._end_step = plan.num_steps
            elif plan.num_steps is not None and self._end_step > plan.num_steps:
                raise errors.InvalidArgument(
                    f"num_steps must be at most {plan.num_steps}, where the plan ends, got {self._end_step}"
                )
            else:
                self._tell_of_passes(self._end_step)
            return
        if plan.epoch_rows is None or len(plan.stages) != 1:
            raise errors.InvalidArgument(
                f"num_steps={EPOCH!r} needs a plan of one stage and one corpus whose order has epochs, got "
                f"{len(plan.stages)} stages of {', '.join(plan.sources)}; give a number of steps"
            )
        self._epoch_rows = plan.epoch_rows
        self._end_step = -(-plan.epoch_rows // plan.stages[0].global_batch_size)

    def _tell_of_passes(self, num_steps: int) -> None:
        """Log that a run of so many steps has more than one pass: an evaluation would count rows twice."""
        plan = self._bound
        if plan.epoch_rows is None or len(plan.stages) != 1:
            return
        batch_rows = plan.stages[0].global_batch_size
        if num_steps * batch_rows > plan.epoch_rows:
            # Evaluations have an order that repeats; training goes on with another one.
            level = logging.WARNING if plan.order_repeats else logging.INFO
            log.log(
                level,
                "a pass over %s ends in step %d of %d, then rows come again; num_steps='epoch' is one pass",
                *(plan.sources[0], plan.epoch_rows // batch_rows, num_steps),
            )

    def _rows_left(self, step: int, num_rows: int) -> int:
        """Return how many of this rank's rows of a step belong to the epoch; all of them without one."""
        if self._epoch_rows is None or step + 1 != self._end_step:
            return num_rows
        first = step * self._bound.stages[0].global_batch_size + self.place[0] * num_rows
        return min(max(self._epoch_rows - first, 0), num_rows)

    def __getitem__(self, _: object) -> NoReturn:
        self.refuse_dataloader()

    @classmethod
    def refuse_dataloader(cls) -> NoReturn:
        """Say what to do in place of `DataLoader(loader)`."""
        raise errors.InvalidArgument(
            f"a {cls.__name__} has no items; iterate over it: it fetches ahead by itself and needs no "
            "DataLoader. If there must be one: DataLoader(CorpusIterableDataset(...), batch_size=None)"
        )

    def __iter__(self) -> Iterator[B]:
        """Return an iterator that goes on with step `step`; `RunComplete` if the last one was yielded."""
        if self._reiterable and self._used:
            self.seek(0)
        if self._used and self._end_step is not None and self._step >= self._end_step:
            # A new pass would repeat the data in silence.
            raise errors.RunComplete(
                f"all steps before num_steps={self._end_step} were yielded; to go over them again call "
                "loader.seek(0) or make it with reiterable=True, for more steps make a "
                "loader with a larger num_steps; epochs are no passes: "
                "num_steps counts the steps of all of them"
            )
        # Not the loader itself: a loop that takes the first batch with `next` iterates over its iterator.
        return Steps(self.__next__)

    def __next__(self) -> B:
        raise NotImplementedError

    def __bool__(self) -> bool:
        return True  # Python would ask for the length, which a run without an end has not

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"cannot pickle a {type(self).__name__}: its connections stay in this process; make it in the "
            "process that iterates over it, or give a DataLoader a CorpusIterableDataset"
        )

    def __len__(self) -> int:
        """Return `num_steps`, the steps of the whole run, whatever was yielded already."""
        if self._end_step is None:
            raise TypeError("a loader without num_steps= has no length")
        if self._end_step > MAX_LENGTH:  # `list` would take memory for so many batches at once
            raise TypeError(f"a loader of more than {MAX_LENGTH} steps has no length")
        return self._end_step

    @property
    def step(self) -> int:
        """The step that the next batch will have."""
        return self._step

    @property
    def plan(self) -> dict[str, Any]:
        """A copy of the canonical plan, with the fingerprints of its corpora and the decisions since."""
        return copy.deepcopy(self._bound.whole)

    @property
    def plan_id(self) -> str:
        """64 hex digits that stand for plan and corpora."""
        return self._bound.plan_id

    @property
    def last_stage_step(self) -> int | None:
        """The training step at which the plan's last stage begins; None if training skips all of it.

        A run that is resumed or replayed has decided on everything up to there.
        """
        return self._bound.stages[-1].first_step

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the plan's corpora; `batch.sources` has their numbers here."""
        return self._bound.sources

    @property
    def is_masked(self) -> bool:
        """Whether corpora of the plan have loss masks."""
        return self._bound.is_masked

    @property
    def vocab_size(self) -> int | None:
        """A vocabulary that holds every token of the plan, as far as the server knows: a model's default.

        The size of the sources' largest tokenizer; one more than the largest token id of a sample, where that
        is larger or no source has a tokenizer. None if the server knows neither.
        """
        largest = self._bound.largest_id
        known = [self._bound.vocab_size, None if largest is None else largest + 1]
        return max((size for size in known if size is not None), default=None)

    def check_vocab_size(self, vocab_size: int) -> None:
        """Raise `InvalidArgument` if tokens of the plan do not fit a model of this vocabulary.

        Compared with the largest id of a sample: a tokenizer may hold ids that no corpus uses. Torch says
        `IndexError`, and on a GPU it ends the process by a device-side assert.
        """
        largest = self._bound.largest_id
        if largest is not None and vocab_size <= largest:
            raise errors.InvalidArgument(
                f"vocab_size must be above {largest}, the largest token id that the server saw in a sample "
                f"of the plan's corpora, got {vocab_size}; loader.vocab_size is {self.vocab_size}"
            )

    def set_epoch(self, epoch: int) -> None:
        """Refuse every epoch but 0: steps go on over the epochs of the plan, each in an order of its own."""
        if integer("epoch", epoch, 0, MAX_STEP):
            raise errors.InvalidArgument(
                f"epoch must be 0, got {epoch}: a loader yields the steps of the whole run in one pass, and "
                "every epoch of the corpus has an order of its own already; leave set_epoch out, let "
                "num_steps count all epochs, or take a CorpusIterableDataset, which has passes"
            )

    def seek(self, step: int) -> None:
        """Go to a training step, which the next batch will have. Another thread may iterate from then on."""
        step = integer("step", step, 0, MAX_STEP)
        if self._end_step is not None and step > self._end_step:
            raise errors.InvalidArgument(
                f"step must be at most num_steps={self._end_step}, where the run ends, got {step}"
            )
        self._check_thread()
        if step != self._step:
            self._stop()
        self._step, self._used, self._recorder.yielded_step = step, False, None
        self._told_step = self._owner.thread = None

    def state_dict(self, *, receipt: bool = False) -> dict[str, Any]:
        """Return `{"plan", "plan_id", "next_step"}` as of the batches yielded so far; asks no server.

        A training loop that fetches one batch before it trains on the last one (nanoGPT) must not save this
        state: it counts the held batch as done. Such a loop saves `batch.state_after()` of the batch it
        trained on, or `state_at(loader.step - 1)`.

        Args:
            receipt: add `next_batch`, the server's checksum of the next global batch, which `load_state_dict`
                compares. Costs a request. If no server answers within two seconds, `next_batch` is left out
                and a warning is logged.

        Raises:
            StateMismatch: Lightning asks, and holds a batch ahead.
        """
        check_asker(self)
        return self.state_at(self._step, receipt=receipt)

    def state_at(self, step: int, *, receipt: bool = False) -> dict[str, Any]:
        """Return the state of a run whose next training step is `step`; the rest as `state_dict`."""
        plan, step = self._bound, integer("step", step, 0, MAX_STEP)
        return make_state(plan, step, receipts.receipt_soon(self._connect, plan, step) if receipt else None)

    def load_state_dict(self, saved: Mapping[str, Any], *, trained_steps: int | None = None) -> None:
        """Go on at the state's next step, before the first batch or in mid-run.

        World size, device, local copy and prefetching may differ from the run that made the state. Asks the
        server only if the state has a receipt.

        Args:
            trained_steps: how many steps the trainer has trained by its own count; compared with the state's.

        Raises:
            StateMismatch: the state is of another plan or corpus, every differing field is named; or it
                goes on at another step than the trainer; or the server has other tokens for its next batch.
        """
        step, next_batch = check_state(saved, self._bound)
        if self._end_step is not None and step > self._end_step:
            raise errors.StateMismatch(
                f"the state goes on at step {step}, and this loader ends at num_steps={self._end_step}; "
                "make it with a larger num_steps"
            )
        if trained_steps is not None and integer("trained_steps", trained_steps, 0, MAX_STEP) != step:
            kind = "skip" if step > trained_steps else "repeat"
            raise errors.StateMismatch(
                f"the state goes on at step {step}, but the trainer has trained {trained_steps} steps: "
                f"the run would {kind} {abs(step - trained_steps)}; save batch.state_after() of the batch "
                f"trained on last, or state_at({trained_steps})"
            )
        if next_batch is not None:
            with self._connect(plan=self._bound) as replicas:
                receipts.check_next(replicas, self._bound, step, next_batch)
        self.seek(step)

    def close(self) -> None:
        """Stop fetching and release everything; tell the server the last step. Idempotent."""
        self._stop()
        self._tell_end()
        self._let_go()

    def _tell_end(self) -> None:
        """Tell the server that no more is asked for, and the last step that was yielded, for its Live page.

        The server of a path ends itself.
        """
        step, (servers, network) = self._recorder.yielded_step, self._connect.args
        if step is None or step == self._told_step or not self._owner.is_here:
            return
        if not isinstance(servers, OwnServer):
            self._told_step = step
            urls = (servers,) if isinstance(servers, str) else servers
            question = control.end_of(self._bound.plan_id, step, self.place)
            tell(urls, question, network, seconds=END_SECONDS)

    def _let_go(self) -> None:
        """Let the server of a path end, unless another loader holds it."""
        if self._hold is not None:
            self._hold.close()

    def _requested(
        self, plan: PlanArgument | None, corpus: CorpusArgument | None, **parts: Any
    ) -> Mapping[str, Any]:
        """Return the plan that the arguments ask for; the only corpus of a server need not be named."""
        names_none = all(each is None for each in (plan, corpus, parts.get("epochs"), parts.get("tokens")))
        if names_none:
            with self._connect() as replicas:
                names = [each["name"] for each in replicas.ask(control.get("/v1/corpora"))["corpora"]]
            if len(names) > 1:
                raise errors.InvalidArgument(
                    f"corpus must be one of {', '.join(names)}, or give weights by name, got None"
                )
            corpus = str(names[0])
        return requested_plan(plan, corpus=corpus, **parts)

    def _stop(self) -> None:
        """Drop what was fetched ahead; the next batch starts fetching again."""
        raise NotImplementedError

    def _step_requests(self, beside: Sequence[Beside], recorder: Recorder | None = None) -> StepRequests:
        rank, world_size = self.place
        replicas = self._connect(plan=self._bound, recorder=recorder)
        return StepRequests(replicas, self._bound, rank=rank, world_size=world_size, beside=beside)

    def _receive_step(
        self, step: int, step_ranges: Sequence[StepRange], beside: Sequence[Beside]
    ) -> tuple[ArrayRequest, bytearray]:
        """Receive any step over a connection of its own; return the request, and the body it describes."""
        self._owner.check_process()
        step = integer("step", step, 0, MAX_STEP)
        with closing(self._step_requests(beside)) as requests:
            exchange = requests.begin(step, 1, shape_of(step_ranges, step))
            received = bytearray(exchange.request.num_bytes)
            requests.finish(exchange, memoryview(received))
        return exchange.request, received

    def _check_thread(self) -> None:
        """Refuse a thread that may not use the loader."""
        self._owner.check()
