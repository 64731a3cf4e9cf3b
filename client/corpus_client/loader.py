"""The loader: what a training loop sees."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Never

import torch

from corpus_client import errors
from corpus_client.batch import Batch, Origin
from corpus_client.network import control
from corpus_client.network.given import Servers
from corpus_client.network.options import Network, path
from corpus_client.observe import progress
from corpus_client.observe.attribution import LoaderStats
from corpus_client.observe.recorder import Recorder, write_trace
from corpus_client.plan import receipts
from corpus_client.plan.document import (
    MAX_STEP,
    AmountsArgument,
    CorpusArgument,
    OrderArgument,
    PlanArgument,
    given_stage,
    integer,
    next_stage,
)
from corpus_client.plan.hints import check_groups, hint
from corpus_client.plan.iteration import NumSteps, PlanLoader, lets_go_on_error
from corpus_client.plan.world import Placement, check_dealt_out
from corpus_client.prepared import PlanOptions, PreparedPlan
from corpus_client.recording.losses import LossRecorder
from corpus_client.staging.options import Staging
from corpus_client.staging.pipeline import Pipeline
from corpus_client.staging.ring import open_stager
from corpus_client.staging.session import DeviceSession
from corpus_client.staging.slots import Slot
from corpus_client.staging.stager import Stager, Stored, Views, shifted

GROUPS: Mapping[str, type[Any]] = {"network": Network, "staging": Staging, "placement": Placement}
"""Classes of options, by the argument that takes them."""


class CorpusLoader(PlanLoader[Batch]):
    """Yield the batches of a plan, step after step, for ever (or up to `num_steps`).

    One thread iterates; a background thread fetches ahead of it. After a `break` a new `for` goes on with
    the next step; after the end it is an error, since a new pass would silently repeat the data: `seek(0)`
    asks for that. `close` the loader, use it as a context manager, or drop it.

    Args:
        urls: `http://host:port` of the server, `uds:///path/of.sock` on its own host, or several of replicas.
            Or a path, for which a server is started: `/data/web`, `./web.bin`, `hf://...`, a `corpus.toml`,
            or several by name, `{"web": "/data/web"}`. The loaders of a host share it, and read the tokens
            from the files themselves; it ends with the last.
        corpus, seq_len, global_batch_size, seed, order, rows: the plan, which the server's documentation
            explains; seq_len is in tokens, global_batch_size in rows over all ranks.
        family: the documents that the run leaves out, and has twice, as one of many runs:
            `{"seed": 7, "leave_out": 0.15, "double": 0.1, "member": 3}`.
        epochs, tokens: instead of `corpus`, how often the run sees each one, `{"web": 1, "code": 2}`, or how
            many tokens of it. The run ends when they are over. The plan in a state does not say where: with
            `plan=` give `num_steps`.
        plan: a whole plan document instead of these (`make_plan` writes one), or the path of its JSON file.
        device: default `cuda` where there is one, else another accelerator, else `cpu`. Without an index,
            the current device if one was set, else the one of LOCAL_RANK.
        dtype: of the batches, `torch.int64` or `torch.int32`; None: as stored (see `Batch.inputs`).
        num_steps: the run has the steps `[0, num_steps)`, wherever it is resumed; None: those that `epochs`
            or `tokens` come to, or those of the plan, or it has no end.
            `"epoch"`: exactly one pass over the plan's corpus. Rows of its last batch that would begin the
            next epoch are left out (a rank may have none); with `ignore_index` the shape stays, and the
            targets of these rows are that.
        reiterable: every `for` begins with step 0 again, as an evaluation wants it.
        eot_id: the token that ends a document; for the document structure and for `ignore_index`. None takes
            the one that the server knows of the plan's corpora.
        ignore_index: put into `targets` where `Batch.loss_mask` is False, so that the loss leaves them out
            (-100 for torch's cross entropy); None: targets stay as they are.
        sources: bring `Batch.sources`, the source of each row; `record` needs them.
        loss_mask: whether masks of the corpora come with the tokens, as part of `Batch.loss_mask`; None: if
            there are any. If they hold weights, `Batch.loss_mask` does, and `ignore_index` is refused.
        record_dir: folder for the losses that `record` gets, as Parquet files of each rank. Give it to one of
            the processes that have the same rows. It brings `sources`, and needs pyarrow.
        run: name of the run, by which the server's page, metrics and log group what it asks for; 1 to 64
            letters, digits, `.`, `_` or `-`. It decides nothing.
        network, staging, placement: see `Network`, `Staging` and `Placement`.

    Raises:
        InvalidArgument: the arguments cannot work, or not with this plan.
        ServerError: the server refuses the plan.
        DeadlineExceeded: no server answered in time.
    """

    @lets_go_on_error
    def __init__(
        self,
        urls: Servers,
        *,
        corpus: CorpusArgument | None = None,
        epochs: AmountsArgument | None = None,
        tokens: AmountsArgument | None = None,
        seq_len: int | None = None,
        global_batch_size: int | None = None,
        seed: int = 0,
        order: OrderArgument = "shuffle",
        rows: OrderArgument = "windows",
        family: Mapping[str, Any] | None = None,
        tokenizers: str | None = None,
        plan: PlanArgument | None = None,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = torch.int64,
        num_steps: NumSteps = None,
        reiterable: bool = False,
        eot_id: int | None = None,
        ignore_index: int | None = None,
        sources: bool = False,
        loss_mask: bool | None = None,
        record_dir: str | os.PathLike[str] | None = None,
        run: str | None = None,
        network: Network | None = None,
        staging: Staging | None = None,
        placement: Placement | None = None,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise TypeError(hint(unknown, inspect.signature(CorpusLoader).parameters, GROUPS))
        parts: dict[str, Any] = {
            "seq_len": seq_len,
            "global_batch_size": global_batch_size,
            "order": order,
            "rows": rows,
        }
        groups = zip(GROUPS.items(), (network, staging, placement), strict=True)
        check_groups({name: (kind, given) for (name, kind), given in groups})
        network, staging, placement = network or Network(), staging or Staging(), placement or Placement()
        super().__init__(urls, network, num_steps, run, reiterable=reiterable)
        parts |= {"epochs": epochs, "tokens": tokens, "seed": seed, "family": family}
        parts["tokenizers"] = tokenizers
        document = self._requested(plan, corpus, **parts)
        self._placement = placement
        place, stride = placement.find(), placement.step_stride
        self.place = place[:2]
        path("record_dir", record_dir, "a folder")
        sources = sources or record_dir is not None
        self._stager = open_stager(device, context=place.context, timed=staging.trace_steps > 0)
        self._session = DeviceSession(self._stager)
        wishes = (dtype, eot_id, ignore_index, sources, loss_mask)
        options = PlanOptions(self._connect, place, stride, *wishes, network, staging, self._session)
        self._make = partial(self._stager.make, dtype)
        if staging.nvtx and not torch.cuda.is_available():
            raise errors.InvalidArgument("nvtx=True needs a CUDA device, torch sees none; leave it out")
        self._recorder = Recorder(staging.trace_steps, torch.cuda.nvtx if staging.nvtx else None)
        self.declared = False  # whether an integration that knows the ranks made it, or compared the place
        self._in_call = False  # whether the loop's thread is within a call that uses the device
        self._num_batches = self._num_tokens = 0
        self.prepared: PreparedPlan  # to be read only
        self._use(PreparedPlan.prepare(document, options))
        self._settle_end()
        self._losses = LossRecorder(self._stager, record_dir, self.place) if sources else None

    def __next__(self) -> Batch:
        """Return the next step's batch.

        Raises:
            CorpusClientError: what stopped the background thread, with its traceback. The step is not
                lost: calling again starts over from it.
            FetchFailed: the background thread met an error that is not the client's own; chained from it.
            SecondThread: another thread iterates over this loader.
        """
        return self._take(self._make)

    def next_into(self, inputs: torch.Tensor, targets: torch.Tensor) -> Batch:
        """Fill tensors of the caller with the next step's batch.

        For a captured CUDA graph, which reads the same memory at each replay: call this, then replay, on one
        stream.

        Args:
            inputs, targets: `(rows, seq_len)` on the loader's device, of an integer type that holds every
                token of the plan's type, and `targets` the `ignore_index`, too.

        Returns the batch, whose `inputs` and `targets` are these tensors.

        Raises:
            InvalidArgument: the tensors do not fit the batch, which remains the next one.
            StopIteration: the last step was yielded; and what `next` raises.
        """
        if self._origin.context.by_document:
            raise errors.InvalidArgument(
                "next_into copies the same columns of each row, and context_order='documents' takes others; "
                "take the batch by next(loader)"
            )
        ignored = self.prepared.options.ignore_index
        return self._take(partial(self._stager.fill, inputs, targets, ignored=ignored))

    def peek(self, step: int) -> Batch:
        """Return the batch of any step, on the device; the loader stays where it is, and may be closed.

        By a connection of its own, and a copy that blocks: to look at batches, not to train on them.
        """
        steps, context = self.prepared.steps, self.prepared.options.place.context
        request, body = self._receive_step(step, steps.step_ranges, steps.beside)
        _, rows, window = request.shape
        shape = rows, window
        slot = Slot(memoryview(body), torch.frombuffer(body, dtype=torch.uint8))
        tokens = slot.batches(0, 1, shape, steps.dtype)
        (stored,) = shifted(tokens, context, slot.beside(steps.beside, 0, 1, 1, shape, steps.dtype))
        make = Stager(self._stager.location, context=context).make
        return self._batch_of(step, make(self.prepared.options.dtype, stored))

    @property
    def waiting(self) -> bool:
        """Whether the training loop stands still for a batch right now.

        A signal handler that finds it True may raise (`KeyboardInterrupt`, `SystemExit`): `next` ends with
        that, the step is not lost, and `state_dict` is that of the batches yielded.
        """
        pipeline = self._session.pipeline
        return pipeline is not None and pipeline.waiting

    def _take(self, make: Callable[[Stored], Views]) -> Batch:
        """Return the next step's batch, of what `make` makes of its views."""
        self._check_thread()
        self._stager.check_not_capturing()
        self._in_call = True
        try:
            pipeline = self._session.pipeline or self._start()
            step, tensors = pipeline.take(make)
            batch = self._batch_of(step, tensors)
            if self._losses is not None:
                self._losses.yielded(self._bound, step, batch.sources)
            self._num_batches += 1
            self._num_tokens += tensors[0].numel()
            self._step, self._used = step + self.prepared.options.step_stride, True
            self._recorder.yielded_step = step
        except StopIteration:
            self._used = True
            self._tell_end()
            raise
        except BaseException:
            # An interrupt (Ctrl-C), too: it may fall between taking a batch and counting it.
            self._release() if self._session.stopped else self._stop()
            raise
        finally:
            self._in_call = False
        return batch

    def _batch_of(self, step: int, tensors: Views) -> Batch:
        if self._epoch_rows is not None:
            tensors = self._of_epoch(step, tensors)
        batch = Batch(tensors, step, self._origin)
        if self._origin.context.by_document:
            batch = batch.of_documents()
        if (ignore_index := self.prepared.options.ignore_index) is not None:
            batch.targets.masked_fill_(~batch.loss_mask, ignore_index)
        return batch

    def _of_epoch(self, step: int, tensors: Views) -> Views:
        """Leave out, or mask, the rows of the last batch that would begin the next epoch."""
        rows = self._rows_left(step, num_rows := len(tensors.inputs))
        if rows == num_rows:
            return tensors
        if (ignore_index := self.prepared.options.ignore_index) is not None:
            tensors.targets[rows:] = ignore_index
            return tensors
        return tensors.changed(lambda _, tensor: tensor[:rows])

    def _use(self, prepared: PreparedPlan) -> None:
        self.prepared, self._bound = prepared, prepared.bound
        options = prepared.options
        self._origin = Origin(
            self._bound,
            options.step_stride,
            prepared.eot_id,
            options.place.context,
            self._bound.fills_ends,
            self._bound.eot_first,
        )

    @property
    def first_free_step(self) -> int:
        """The first step that was neither yielded nor asked for ahead: where a decision can still begin."""
        pipeline = self._session.pipeline
        return self._step if pipeline is None else max(self._step, pipeline.queues.asked_until)

    def extend(
        self,
        stage: Mapping[str, Any] | None = None,
        *,
        at_step: int | None = None,
        mixture: Mapping[str, float] | None = None,
        global_batch_size: int | None = None,
        seq_len: int | None = None,
        exclude: Mapping[str, Sequence[Sequence[int]]] | None = None,
    ) -> str:
        """Go on by a plan that continues this one with one stage more.

        Every rank calls it at the same step with the same arguments, and comes to the same plan.

        Args:
            stage: `{"mixture": {name: weight}}`, and where they change `"global_batch_size"`,
                `"seq_len"` and `"exclude": {name: [[start, stop], ...]}`, ranges of tokens that are out from
                then on; or pass these by name.
            at_step: training step at which the stage begins. Nothing that was fetched ahead is dropped, so
                it is refused if that step was asked for already. None: the loader's next step; what was
                fetched ahead is dropped, and some of the steps yielded are checked to be unchanged.

        Returns:
            The id of the new plan. After an error the old one goes on.

        Raises:
            InvalidArgument: `at_step` is too early, the message names the first that is free; or the stage
                has other fields, or does not divide over the ranks.
            HistoryChanged: by the new plan an earlier step has other tokens.
        """
        self._check_thread()
        named = {"mixture": mixture, "global_batch_size": global_batch_size, "seq_len": seq_len}
        stage = given_stage(stage, {**named, "exclude": exclude})
        if self._epoch_rows is not None:
            raise errors.InvalidArgument("extend is not for num_steps='epoch', whose plan has one stage")
        old, step = self._bound, self._step if at_step is None else integer("at_step", at_step, 0, MAX_STEP)
        if at_step is not None:
            self._check_free(step)
        with self._connect(plan=old) as replicas:
            skips = old.document.get("skip_steps")
            from_step = replicas.ask(control.plan_step(old.plan_id, step)) if skips else step
            prepared = self.prepared.extended(replicas, next_stage(old, from_step, stage))
            if at_step is None:
                receipts.check_history(replicas, old, prepared.bound, step)
        pipeline = self._session.pipeline
        if at_step is None or pipeline is None or prepared.steps != self.prepared.steps:
            self._stop()  # the next batch is fetched anew, and so is what was fetched ahead
        elif not pipeline.queues.follow(prepared.bound, step):
            self._check_free(step)
            self._stop()
        self._use(prepared)
        return self.plan_id

    def _check_free(self, step: int) -> None:
        if step < (free := self.first_free_step):
            raise errors.InvalidArgument(
                f"at_step must be {free} or later, got {step}: earlier steps were asked for by now; decide "
                "further ahead, or lower Staging(prefetch_bytes=)"
            )

    def record(self, step: int, losses: Any) -> None:
        """Take the loss of each row of a batch: for `stats().losses`, and the files of `record_dir`.

        Never waits: what lies on a device is copied in the order of the current stream, and looked at some
        steps later. What cannot be kept is counted in `stats().num_lost_rows`.

        Args:
            step: `batch.step` of one of the last 64 batches; each is recorded once.
            losses: `(rows,)`, a tensor of any floating type on any device, a NumPy array or a list. NaN for a
                row without a target: it is written, and is in no mean.

        Raises:
            InvalidArgument: the loader brings no sources, the step was not yielded, or the losses are not one
                number for each row.
        """
        self._check_thread()
        if self._losses is None:
            raise errors.InvalidArgument(
                "record needs the sources of rows; pass sources=True to CorpusLoader"
            )
        self._in_call = True
        try:
            self._losses.record(step, losses)
        finally:
            self._in_call = False

    def seek(self, step: int) -> None:
        """Go to a training step, which the next batch will have. Another thread may iterate from then on."""
        before = self._step
        super().seek(step)
        if self._losses is not None and self._step != before:
            self._losses.begin()

    def stats(self) -> LoaderStats:
        """Return the counters since the loader was made, and the state of its slots; from any thread.

        What only the device knows (losses, seconds of copies and stalls) is as the loop's thread saw it last:
        in a call of this method, at most a second ago in other calls.
        """
        is_own = self._owner.thread is threading.current_thread()
        if is_own and not self._in_call and not self._session.stopped:
            self._session.measure()
            if self._losses is not None:
                self._losses.measure()
        figures = self._session.figures()
        return replace(
            self._recorder.stats(copies_on_host=self._stager.copies_on_host),
            num_batches=self._num_batches,
            num_tokens=self._num_tokens,
            num_slots=self.prepared.sizes.num_slots if figures["slot_bytes"] else 0,
            **figures,
            **({} if self._losses is None else self._losses.stats()),
        )

    def progress(self) -> Iterator[Batch]:
        """Yield the same batches, with one line about the loader on stderr: by tqdm if it is installed."""
        total = None if self._end_step is None else self._end_step - self._step
        return progress.shown(iter(self), self.stats, total)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write what happened in the last `Staging.trace_steps` steps, for ui.perfetto.dev or chrome://tracing.

        Called by the loop's thread: it asks the device when copies ran.
        """
        self._owner.check()
        write_trace(path, self._recorder)

    def close(self) -> None:
        """Stop fetching, write what was recorded, release everything, and tell the server the last step.

        Idempotent. From another thread than the loop's, while that one runs, it stops fetching and wakes the
        loop. The memory, and losses on their way, are left to the loop's thread, which sees to them in its
        next call and raises `LoaderClosed`; when that thread has ended, another `close` does.
        """
        self._session.stop()
        if not self._in_call and self._owner.takes_over():
            self._release()
            self._tell_end()

    def _release(self) -> None:
        self._session.end()
        if self._losses is not None:
            self._losses.close()
        self._session.release()
        self._let_go()

    def _describe_device(self) -> str:
        return f", device {self._stager.location}"

    def _check_thread(self) -> None:
        # Asked twice a step. Each call that is spared costs 1 us, because its code has left the caches.
        stopped = self._session.stopped
        owner = self._owner
        if owner.thread is not threading.current_thread() or owner.pid != os.getpid() or stopped:
            owner.check_process()
            mine = owner.takes_over()
            if self._session.stopped:  # not `stopped`: who closes may have become the owner meanwhile
                if mine:
                    self._release()
                raise errors.LoaderClosed("the loader is closed; make a new one and load its state")
            if not mine:
                owner.refuse_thread()

    def _start(self) -> Pipeline:
        self._recorder.ask()
        self._placement.check(self.prepared.options.place)
        if not self._num_batches and not self.declared:
            check_dealt_out(self.prepared.options.place.world_size)
        pipeline = self._session.start(
            self.prepared.sizes,
            lambda slots: self.prepared.start(
                slots, self._stager, self._recorder, self._step, self._end_step
            ),
        )
        self._recorder.get(None)
        return pipeline

    def _stop(self) -> None:
        self._session.end()
