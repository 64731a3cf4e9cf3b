"""The example trains the same run on any number of ranks, and goes on with it after whatever ended it."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
import torch

from corpus_client import Batch, errors
from corpus_server.recordings import open_recording, sum_losses
from corpus_server.work import Budget
from tests.corpora import some_tokens, write_raw
from tests.examples.running import (
    EVAL_EVERY,
    EVAL_STEPS,
    NUM_STEPS,
    RUN,
    SAVE_EVERY,
    VOCABULARY,
    Finished,
    command,
    environment,
    run,
)
from tests.serving import ROOT, RunningServer

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_EXITS = int(os.environ.get("CORPUS_EXITS", "0")) // 10
EXAMPLE = ROOT / "client" / "examples" / "train.py"


@pytest.fixture(scope="module")
def train() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("example_train", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("examples")
    paths = {
        name: write_raw(folder / f"{name}.bin", some_tokens(20_000, vocabulary=VOCABULARY, seed=seed))
        for seed, name in enumerate(("train", "other"))
    }
    with RunningServer(paths, folder) as server:
        yield server.url


@pytest.fixture(scope="module")
def undisturbed(url: str, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The whole run by one process."""
    finished = run(url, tmp_path_factory.mktemp("undisturbed"))
    assert finished.code == 0, finished.errors
    assert list(finished.batches) == list(finished.losses) == list(range(NUM_STEPS))
    return finished


def test_every_evaluation_sees_the_same_batches(undisturbed: Finished) -> None:
    first, second = undisturbed.evaluated[:EVAL_STEPS], undisturbed.evaluated[EVAL_STEPS:]
    assert first == second
    assert [step for step, _ in first] == list(range(EVAL_STEPS))
    assert list(undisturbed.other_losses) == [EVAL_EVERY - 1, NUM_STEPS - 1]


def test_a_killed_rank_ends_four_and_two_go_on_with_the_same_run(
    url: str, undisturbed: Finished, tmp_path: Path
) -> None:
    """SIGKILL in step 8 of a run that saved before step 6; the second run accumulates gradients, too.

    It records the losses of rows, whose means are the losses that it prints.
    """
    killed = run(url, tmp_path, ranks=4, KILL_AT="2 8")
    assert killed.code != 0
    assert killed.batches == {step: undisturbed.batches[step] for step in range(9)}
    assert killed.losses == pytest.approx({step: undisturbed.losses[step] for step in range(8)}, abs=2e-4)

    resumed = run(url, tmp_path, "--accumulate", "2", "--record", str(tmp_path / "losses"), ranks=2)
    # A thread of gloo may still work when the interpreter ends.
    assert (resumed.code, "complete" in resumed.output) == (0, True), resumed.errors
    assert "at step 6" in resumed.output
    assert resumed.batches == {step: undisturbed.batches[step] for step in range(6, NUM_STEPS)}
    assert resumed.losses == pytest.approx(
        {step: undisturbed.losses[step] for step in range(6, NUM_STEPS)}, abs=2e-4
    )
    assert resumed.evaluated == undisturbed.evaluated[EVAL_STEPS:]
    recording = open_recording(tmp_path / "losses", Budget())
    assert recording.steps == (6, NUM_STEPS)
    sums = sum_losses(recording, 6, NUM_STEPS, NUM_STEPS, Budget())
    assert sums.counts.tolist() == [[8] * (NUM_STEPS - 6)]
    assert sums.means()[0] == pytest.approx(list(resumed.losses.values()), abs=2e-4)
    last = NUM_STEPS - 1
    assert resumed.other_losses[last] == pytest.approx(undisturbed.other_losses[last], abs=2e-4)


def test_sigterm_stops_all_ranks_after_the_same_step_with_a_checkpoint(
    url: str, undisturbed: Finished, tmp_path: Path
) -> None:
    flags = ("--steps", "1000000", "--save-every", "1000000", "--eval-every", "1000000")
    (tmp_path / "record").mkdir()
    with subprocess.Popen(
        command(url, tmp_path, *flags, ranks=2),
        env=environment(tmp_path / "record"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if len(lines) == 3:
                    process.send_signal(signal.SIGTERM)
            assert process.wait() != 0
        finally:
            if process.poll() is None:
                for each in (*psutil.Process(process.pid).children(recursive=True), process):
                    each.kill()
    stopped = re.fullmatch(r"stopped: the next step is ([\d,]+), the checkpoint .*\n", lines[-1])
    assert stopped
    next_step = int(stopped[1].replace(",", ""))
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["data"]["next_step"] == next_step
    for rank in range(2):
        assert len((tmp_path / "record" / f"{rank}.jsonl").read_text().splitlines()) == next_step


if NUM_EXITS:  # the short form is the end of the two ranks above

    @pytest.mark.timeout(600 + 120 * NUM_EXITS)
    def test_ranks_end_cleanly(url: str, tmp_path: Path) -> None:
        """A thread of gloo may still work when the interpreter ends."""
        for number in range(NUM_EXITS):
            (folder := tmp_path / str(number)).mkdir()
            finished = run(url, folder, ranks=2)
            assert (finished.code, "complete" in finished.output) == (0, True), finished.errors


def test_a_full_gpu_is_met_with_the_flag_to_change_and_that_flag_goes_on_with_the_run(
    train: ModuleType,
    url: str,
    undisturbed: Finished,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whole batches do not fit from step 4 on, halves do."""
    small_enough = train.Trainer.train_step

    def train_step(self: Any, batch: Batch) -> torch.Tensor:
        if batch.step >= 4 and self.args.accumulate == 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        losses: torch.Tensor = small_enough(self, batch)
        return losses

    monkeypatch.setattr(train.Trainer, "train_step", train_step)
    monkeypatch.setattr(train, "catch_signals", list)
    arguments = ["train.py", url, *RUN, "--checkpoint", str(tmp_path / "checkpoint.pt")]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit, match=r"--accumulate 2 [\s\S]*Tried to allocate 2.00 GiB") as full:
        train.main()
    advice = re.search(r"--accumulate \d+", str(full.value))
    assert advice
    monkeypatch.setattr(sys, "argv", [*arguments, *advice[0].split()])
    capsys.readouterr()
    train.main()
    helped = Finished(0, capsys.readouterr().out, "")
    assert helped.losses == pytest.approx(
        {step: undisturbed.losses[step] for step in range(SAVE_EVERY, NUM_STEPS)}, abs=2e-4
    )


def make_trainer(
    train: ModuleType, *flags: str, url: str = "http://127.0.0.1:9", checkpoint: Path | None = None
) -> Any:
    more = [] if checkpoint is None else ["--checkpoint", str(checkpoint)]
    args = train.parse_arguments([url, *RUN, *more, *flags])
    return train.Trainer(args, torch.device("cpu"), 0, 1)


def some_batch(step: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (8, 17), generator=draw)
    return Batch((tokens[:, :-1], tokens[:, 1:]), step)


def gradients(trainer: Any) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of one step, as the optimizer gets them."""
    found: list[torch.Tensor] = []

    def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
        found.extend(p.grad.clone() for group in optimizer.param_groups for p in group["params"])

    with trainer.optimizer.register_step_pre_hook(keep):
        loss = trainer.train_step(some_batch())
    return loss.mean().item(), found


@pytest.mark.parametrize(
    "flags", [["--accumulate", "4"], ["--recompute"], ["--accumulate", "8", "--recompute"]]
)
def test_accumulation_and_recomputation_change_no_gradient(train: ModuleType, flags: list[str]) -> None:
    whole_loss, whole = gradients(make_trainer(train))
    loss, found = gradients(make_trainer(train, *flags))
    assert loss == pytest.approx(whole_loss, abs=1e-5)
    torch.testing.assert_close(found, whole, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_trains_to_about_the_same_loss(train: ModuleType, precision: str) -> None:
    """fp16 with a gradient scaler, whose scale is not left in the gradients."""
    full, mixed = make_trainer(train), make_trainer(train, "--precision", precision)
    assert mixed.scaler.is_enabled() == (precision == "fp16")
    expected, found = (
        [trainer.train_step(some_batch(step)).mean().item() for step in range(8)] for trainer in (full, mixed)
    )
    assert found != expected
    assert found == pytest.approx(expected, abs=0.01)
    assert all(parameter.dtype == torch.float32 for parameter in mixed.model.parameters())


def test_an_overflow_leaves_the_step_out_and_lowers_the_scale(train: ModuleType) -> None:
    trainer = make_trainer(train, "--precision", "fp16")
    trainer.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = [parameter.clone() for parameter in trainer.model.parameters()]
    trainer.train_step(some_batch())
    torch.testing.assert_close(list(trainer.model.parameters()), before, atol=0, rtol=0)
    assert trainer.scaler.get_scale() == 2.0**39


def test_gradients_are_clipped_after_they_were_unscaled(train: ModuleType) -> None:
    for flags in ([], ["--precision", "fp16"]):
        _, found = gradients(make_trainer(train, "--clip", "0.01", *flags))
        norm = torch.linalg.vector_norm(torch.cat([each.flatten() for each in found]))
        assert norm.item() == pytest.approx(0.01, rel=1e-3)


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(
    train: ModuleType, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint.pt"
    trainer = make_trainer(train, url=url, checkpoint=path)
    with trainer.open_loader("train", num_steps=5) as loader:
        trainer.save(loader.state_dict())
        before = path.read_bytes()

        def fill_disk(state: object, file: Any) -> None:
            file.write(b"half of it")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(torch, "save", fill_disk)
        with pytest.raises(OSError, match="No space left"):
            trainer.save(loader.state_dict())
        assert path.read_bytes() == before
        trainer.restore(loader)


def test_a_run_that_is_complete_says_how_to_go_on_and_how_to_begin_anew(
    train: ModuleType,
    url: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(train, "catch_signals", list)
    trainer = make_trainer(train, "--steps", "2", url=url, checkpoint=tmp_path / "c.pt")
    assert train.run(trainer) == 0
    assert "nothing is left" not in capsys.readouterr().out
    assert train.run(trainer) == 0
    said = capsys.readouterr().out
    assert f"going on from {tmp_path / 'c.pt'} at step 2\nnothing is left: a larger --steps goes on" in said


def test_a_checkpoint_of_another_model_or_order_is_refused(
    train: ModuleType, url: str, tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pt"
    trainer = make_trainer(train, url=url, checkpoint=path)
    with trainer.open_loader("train", seed=1) as loader:
        trainer.save(loader.state_dict())
    with (
        trainer.open_loader("train", seed=2) as loader,
        pytest.raises(ValueError, match="seed: the state has 1"),
    ):
        trainer.restore(loader)
    wider = make_trainer(train, "--width", "32", url=url, checkpoint=path)
    with wider.open_loader("train", seed=1) as loader, pytest.raises(SystemExit, match="'width': 16"):
        wider.restore(loader)


def test_a_wrong_name_of_the_other_corpus_shows_at_the_start(
    train: ModuleType, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "catch_signals", list)
    trainer = make_trainer(train, "--eval-corpus", "othre", url=url, checkpoint=tmp_path / "new" / "c.pt")
    with pytest.raises(errors.UnknownCorpus, match="othre"):
        train.run(trainer)


def test_a_vocabulary_below_the_corpus_is_named_at_the_start(
    train: ModuleType, url: str, tmp_path: Path
) -> None:
    trainer = make_trainer(train, url=url, checkpoint=tmp_path / "c.pt")
    trainer.args.vocab_size = 5
    with pytest.raises(errors.InvalidArgument, match=r"vocab_size must be above \d+, the largest token id"):
        trainer.open_loader("train")


@pytest.mark.parametrize(
    ("flags", "world_size", "advice"),
    [
        ([], 1, "--accumulate 2 (it was 1): 4 rows at a time"),
        (["--accumulate", "2"], 2, "--accumulate 4 (it was 2): 1 rows at a time"),
        (["--global-batch-size", "9"], 1, "--accumulate 3 (it was 1): 3 rows at a time"),
        (["--accumulate", "8"], 1, "--precision bf16"),
        (["--accumulate", "8", "--precision", "fp16"], 1, "--recompute"),
        (["--accumulate", "8", "--precision", "bf16", "--recompute"], 1, "smaller --seq-len"),
    ],
)
def test_the_advice_names_what_is_left_to_change(
    train: ModuleType, flags: list[str], world_size: int, advice: str
) -> None:
    args = train.parse_arguments(["http://127.0.0.1:9", *RUN, *flags])
    assert advice in train.out_of_memory_advice(args, world_size)


@pytest.mark.parametrize(
    ("flags", "world_size", "message"),
    [
        (["--data-parallel"], "1", "torch.nn.DataParallel is refused.*torchrun --standalone"),
        (["--accumulate", "3"], "2", r"must be one of \[1, 2, 4\], the divisors of a rank's 4 rows"),
        ([], "3", "8 does not divide over 3 ranks"),
        (["--heads", "3"], "1", "--width must be divisible by --heads, got 16 and 3"),
        (["--device", "mps"], "1", "--device mps is none that torch sees here"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_anything_starts(
    train: ModuleType,
    flags: list[str],
    world_size: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(SystemExit, match="2"):
        train.parse_arguments(["http://127.0.0.1:9", *RUN, *flags])
    assert re.search(message, capsys.readouterr().err, re.DOTALL)


def test_the_model_learns_a_batch_by_heart(train: ModuleType) -> None:
    trainer = make_trainer(train, "--learning-rate", "3e-3", "--steps", "300")
    losses = [trainer.train_step(some_batch()).mean().item() for _ in range(250)]
    assert losses[0] == pytest.approx(4.16, abs=0.3)  # log(64)
    assert losses[-1] < 0.6 * losses[0]


def test_the_model_does_not_look_ahead(train: ModuleType) -> None:
    """The first positions come out the same whatever follows them, and the last ones do not."""
    model = make_trainer(train).model
    inputs = some_batch().inputs.clone()
    heads, tails = [], []
    for following in (0, 1):
        inputs[:, 9:] = following
        hidden: list[torch.Tensor] = []
        with model.norm.register_forward_hook(lambda module, args, out, kept=hidden: kept.append(out)):
            model(inputs, inputs)
        heads.append(hidden[0][:, :9])
        tails.append(hidden[0][:, 9:])
    torch.testing.assert_close(*heads)
    assert not torch.equal(*tails)


def test_the_learning_rate_rises_to_its_peak_and_falls_to_a_tenth(train: ModuleType) -> None:
    flags = ["--learning-rate", "1", "--warmup-steps", "5", "--steps", "100"]
    args = train.parse_arguments(["http://127.0.0.1:9", *RUN, *flags])
    rates = [train.learning_rate_at(step, args) for step in range(101)]
    assert rates[:6] == sorted(rates[:6])
    assert max(rates) == rates[5] == pytest.approx(1.0)
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1)
