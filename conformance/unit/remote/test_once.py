"""Nothing is lost or done twice: steps by number, answers given again, checkpoints that belong to one step."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ariadne
from ariadne.errors import (
    BusyError,
    CheckpointError,
    ConsumedError,
    DeadlineError,
    RemoteError,
    SpecError,
    StepError,
)
from ariadne.remote import Server, Training
from ariadne.remote.trained import Trained
from conformance.unit.remote_kit import CE, ROOT, Proxy, Served, beside, cut_after, served, whole_losses

STEPS = 8


def net() -> nn.Module:
    """Without draws: client and server are threads of one process here."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
    )


def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(i)
    return torch.randn(5, 6, generator=drawn), torch.randint(0, 4, (5,), generator=drawn)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("halves")
    runtime = ariadne.prepare_split(net().train(), (batch(0)[0],), split="after:2")
    for side in ("prefix", "suffix"):
        runtime.save(folder / side, side=side)
    return folder


@pytest.fixture(scope="module")
def whole() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model = net().train()
    losses = whole_losses(model, sgd(model), batch, STEPS)
    return losses, model.state_dict()


def trainer(files: Path, **options: Any) -> Server:
    half = ariadne.load(files / "suffix")
    given: dict[str, Any] = {"optimizer": sgd(half), "loss_fn": CE, **options}
    return Server(half, listen="127.0.0.1:0", log=None, **given)


def same(expected: dict[str, torch.Tensor], *halves: nn.Module) -> None:
    mine = {n: t for half in halves for n, t in half.state_dict().items()}
    assert mine
    assert [n for n, t in mine.items() if not torch.equal(t, expected[n])] == []


def trained_with_lost_answers(files: Path) -> tuple[list[torch.Tensor], list[nn.Module], list[str]]:
    """All steps, with the answers to three of them lost."""
    with beside(trainer(files)) as server:
        proxy, edge = Proxy(server.address), ariadne.load(files / "prefix")
        optimizer = sgd(edge)
        with cut_after(server, proxy, ("train",), 3) as cut, ariadne.connect(proxy.address, edge, timeout=30) as remote:
            losses = [remote.train_step(batch(i)[0], targets=batch(i)[1], optimizer=optimizer) for i in range(STEPS)]
        proxy.close()
        return losses, [edge, server.half], cut


def test_a_step_whose_answer_was_lost_is_asked_for_again_and_done_once(files: Path, whole: Any) -> None:
    losses, halves, cut = trained_with_lost_answers(files)
    assert len(cut) == 3
    assert all(map(torch.equal, losses, whole[0]))
    same(whole[1], *halves)


def test_a_planted_step_that_is_done_twice_is_noticed(files: Path, whole: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    numbered = Trained.numbered

    def forgetful(self: Trained, header: Any, do: Any) -> Any:
        if header["number"] == self.at:
            self.at -= 1
            self.answers.clear()
        return numbered(self, header, do)

    monkeypatch.setattr(Trained, "numbered", forgetful)
    _losses, halves, cut = trained_with_lost_answers(files)
    assert cut
    with pytest.raises(AssertionError):
        same(whole[1], *halves)


def test_a_planted_answer_of_the_step_before_is_noticed(
    files: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbered, kept = Trained.numbered, list[Any]()

    def stale(self: Trained, header: Any, do: Any) -> Any:
        kept.append(numbered(self, header, do))
        return kept[-1] if len(kept) < 3 else kept[-2]

    monkeypatch.setattr(Trained, "numbered", stale)
    losses, _, _ = trained_with_lost_answers(files)
    assert not all(map(torch.equal, losses, whole[0]))


@pytest.mark.planted
def test_a_planted_generator_that_does_not_come_back_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 4)).train()
    runtime = ariadne.prepare_split(model, (batch(0)[0],), split="after:1")
    for side in ("prefix", "suffix"):
        runtime.save(tmp_path / side, side=side)
    ends = []
    for planted in (False, True):
        if planted:
            monkeypatch.setattr("ariadne.remote.client.set_generators", lambda states: None)
        edge = ariadne.load(tmp_path / "prefix")
        with served(tmp_path / "suffix", optimizer="sgd:lr=0.1,momentum=0.9", loss_fn="cross_entropy") as process:
            torch.manual_seed(3)
            with ariadne.connect(process.address, edge, timeout=60) as remote:
                optimizer = sgd(edge)
                for i in range(2):
                    loss = remote.train_step(batch(i)[0], targets=batch(i)[1], optimizer=optimizer)
        ends.append((loss, torch.get_rng_state()))
    torch.manual_seed(3)
    optimizer = sgd(model)
    for i in range(2):
        optimizer.zero_grad()
        loss = CE(model(batch(i)[0]), batch(i)[1])
        loss.backward()
        optimizer.step()
    expected = loss.detach(), torch.get_rng_state()
    assert all(map(torch.equal, ends[0], expected))
    assert not any(map(torch.equal, ends[1], expected))


def test_a_deadline_that_passed_leaves_the_step_to_be_asked_for_again(files: Path, whole: Any) -> None:
    with beside(trainer(files)) as server:
        edge = ariadne.load(files / "prefix")
        optimizer, train = sgd(edge), server._run.train
        with ariadne.connect(server.address, edge, timeout=30) as remote:
            losses = []
            for i in range(STEPS):
                x, y = batch(i)
                boundary = edge.run_training_prefix(x)
                if i == 2:

                    def slow(*given: Any) -> Any:
                        time.sleep(0.4)
                        return train(*given)

                    server._run.train = slow  # type: ignore[method-assign]
                    with pytest.raises(DeadlineError, match="a training step may be asked for again"):
                        remote.train_suffix(boundary, y, timeout=0.1)
                    server._run.train = train  # type: ignore[method-assign]
                    with pytest.raises(StepError, match="step 3 has no answer yet, and another one was asked for"):
                        remote.train_suffix(ariadne.BoundaryPayload.from_bytes(boundary.to_bytes()), y)
                loss, gradients = remote.train_suffix(boundary, y)
                remote.backward_prefix(boundary, gradients, optimizer=optimizer)
                with pytest.raises(ConsumedError):
                    remote.train_suffix(boundary, y)
                losses.append(loss)
        assert all(map(torch.equal, losses, whole[0]))
        same(whole[1], edge, server.half)


def test_an_error_in_a_step_is_its_answer_and_is_not_repeated(files: Path) -> None:
    ran = []

    def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ran.append(len(targets))
        if len(ran) == 1:
            raise ValueError("no such label")
        return CE(output, targets)

    with beside(trainer(files, loss_fn=loss)) as server:
        proxy, edge = Proxy(server.address), ariadne.load(files / "prefix")
        with cut_after(server, proxy, ("train",), 1), ariadne.connect(proxy.address, edge, timeout=30) as remote:
            x, y = batch(0)
            with pytest.raises(RemoteError, match="on the server: ValueError: no such label"):
                remote.train_step(x, targets=y)
            assert (len(ran), remote.at, server._run.at) == (1, 1, 1)
            remote.train_step(x, targets=y)
        proxy.close()
    assert len(ran) == 2


def test_a_second_client_can_t_disturb_a_run_and_may_begin_when_it_has_ended(files: Path, tmp_path: Path) -> None:
    with beside(trainer(files, checkpoints=tmp_path)) as server:
        first, second = (ariadne.load(files / "prefix") for _ in range(2))
        x, y = batch(0)
        one = ariadne.connect(server.address, first, timeout=30)
        two = ariadne.connect(server.address, second, timeout=30)
        loss = one.train_step(x, targets=y, optimizer=sgd(first))
        with pytest.raises(BusyError, match=r"this server trains another client's run \(\w{8}, step 1\)"):
            two.train_step(x, targets=y)
        one.close()
        second = ariadne.load(files / "prefix")
        two.half = second
        assert torch.equal(two.train_step(x, targets=y, optimizer=sgd(second)), loss)  # from the start again
        two.close()


def test_a_server_without_checkpoints_can_t_begin_again_and_says_so(files: Path) -> None:
    with beside(trainer(files)) as server:
        edge, (x, y) = ariadne.load(files / "prefix"), batch(0)
        with ariadne.connect(server.address, edge, timeout=30) as remote:
            remote.train_step(x, targets=y)
            with pytest.raises(CheckpointError, match="started without a folder for checkpoints"):
                remote.save()
        remote = ariadne.connect(server.address, ariadne.load(files / "prefix"), timeout=30)
        with remote, pytest.raises(StepError, match="has no checkpoint of that step"):
            remote.train_step(x, targets=y)


def test_what_a_server_lacks_for_training_is_said_before_anything_moves(files: Path) -> None:
    x, y = batch(0)
    for missing, words in (
        ("loss_fn", "started without a loss"),
        ("optimizer", "started without an optimizer, and its half has 6"),
    ):
        with beside(trainer(files, **{missing: None})) as server:
            before = {n: t.clone() for n, t in server.half.state_dict().items()}
            edge = ariadne.load(files / "prefix")
            with ariadne.connect(server.address, edge, timeout=30) as remote, pytest.raises(SpecError, match=words):
                remote.train_step(x, targets=y)
            same(before, server.half)
            assert server._run.at == 0
    strange = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(SpecError, match="owns parameters that are not this half's"):
        trainer(files, optimizer=strange)
    for text, words in (("sgdd:lr=1", "near: 'sgd'"), ("sgd:lr", "NAME:option=value"), ("sgd:lr=-1", "can't be made")):
        with pytest.raises(SpecError, match=words):
            trainer(files, optimizer=text)
    with pytest.raises(SpecError, match="there is no loss 'entropy'"):
        trainer(files, loss_fn="entropy")


def test_labels_may_stay_on_the_server(files: Path, whole: Any) -> None:
    with beside(trainer(files, labels=lambda step: batch(step)[1])) as server:
        edge = ariadne.load(files / "prefix")
        optimizer = sgd(edge)
        with ariadne.connect(server.address, edge, timeout=30) as remote:
            losses = [remote.train_step(batch(i)[0], targets=i, optimizer=optimizer) for i in range(STEPS)]
    assert all(map(torch.equal, losses, whole[0]))


def test_a_suffix_that_keeps_statistics_runs_once_for_each_request(files: Path) -> None:
    model = net().train()
    with beside(trainer(files)) as server:
        proxy, edge = Proxy(server.address), ariadne.load(files / "prefix")
        with cut_after(server, proxy, ("run",), 2) as cut, ariadne.connect(proxy.address, edge, timeout=30) as remote:
            for i in range(4):
                boundary = edge.run_prefix(batch(i)[0])
                found = remote.run_suffix(boundary)
                with torch.no_grad():
                    assert torch.equal(found, model(batch(i)[0]))
            with pytest.raises(StepError, match="changes its state when it runs"):
                remote.submit(boundary)
        proxy.close()
        assert len(cut) == 2
        same(model.state_dict(), edge, server.half)


def test_other_numbers_of_threads_are_warned_of(files: Path) -> None:
    with beside(trainer(files)) as server:
        edge = ariadne.load(files / "prefix")
        with ariadne.connect(server.address, edge, timeout=30) as remote:
            remote.facts["threads"] += 1
            with pytest.warns(UserWarning, match=r"torch has \d+ thread\(s\) here and \d+ at"):
                remote.begin()


# --- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.variants  # nox -s faults kills at random moments, too
def test_a_run_goes_on_from_the_last_checkpoint_when_either_process_was_killed(
    files: Path, tmp_path: Path, whole: Any
) -> None:
    options = {
        "optimizer": "sgd:lr=0.1,momentum=0.9",
        "loss_fn": "cross_entropy",
        "checkpoints": str(tmp_path / "there"),
    }
    losses: dict[int, torch.Tensor] = {}
    with served(files / "suffix", **options) as process:
        edge = ariadne.load(files / "prefix")
        with ariadne.connect(process.address, edge, timeout=60) as remote:
            training = Training(edge, remote, sgd(edge), checkpoints=tmp_path / "here", every=3)
            for step, loss in training.run(STEPS, batch):
                losses[step] = loss
                if step == 4:
                    break  # the client is gone, two steps after a checkpoint
        edge = ariadne.load(files / "prefix")
        again = []
        with ariadne.connect(process.address, edge, timeout=60) as remote:
            training = Training(edge, remote, sgd(edge), checkpoints=tmp_path / "here", every=3)
            for step, loss in training.run(STEPS, batch):
                again.append(step)
                assert step not in losses or torch.equal(losses[step], loss)
                losses[step] = loss
                if len(again) == 2:  # and now the server, one step later
                    process.kill()
                    later = threading.Timer(0.3, lambda: Served(files / "suffix", listen=process.address, **options))
                    later.start()
            later.join()
    assert again == [3, 4, 3, 4, 5, 6, 7]
    assert all(torch.equal(losses[i], whole[0][i]) for i in range(STEPS))
    same(whole[1], edge)
    kept = sorted(p.name for p in (tmp_path / "there").iterdir())
    assert len(kept) == 3
    assert kept[-1] == "start.safetensors"


def test_a_full_disk_ends_no_run_and_spoils_no_checkpoint(
    files: Path, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with beside(trainer(files, checkpoints=tmp_path / "there")) as server:
        edge, losses = ariadne.load(files / "prefix"), {}
        with ariadne.connect(server.address, edge, timeout=30) as remote:
            training = Training(edge, remote, sgd(edge), checkpoints=tmp_path / "here", every=2)
            losses |= dict(training.run(2, batch))
            before = {p.name: p.read_bytes() for place in ("here", "there") for p in (tmp_path / place).iterdir()}
            monkeypatch.setattr(os, "fsync", full)
            with pytest.raises(CheckpointError, match=r"could not be written: .*No space left on device.*go on"):
                losses |= dict(training.run(STEPS, batch))
            after = {p.name: p.read_bytes() for place in ("here", "there") for p in (tmp_path / place).iterdir()}
            assert before == after
            monkeypatch.setattr(os, "fsync", sync)
            losses |= dict(training.run(STEPS, batch))
    assert training.step == STEPS
    assert all(torch.equal(loss, whole[0][i]) for i, loss in losses.items())
    same(whole[1], edge, server.half)


def test_checkpoints_of_another_half_or_cut_short_are_refused_and_nothing_changes(files: Path, tmp_path: Path) -> None:
    from ariadne.remote import checkpoint  # noqa: PLC0415 - past the door

    edge, suffix = ariadne.load(files / "prefix"), ariadne.load(files / "suffix")
    path = tmp_path / "a.safetensors"
    checkpoint.write(path, edge, sgd(edge), {"step": 1}, {})
    before = {n: t.clone() for n, t in suffix.state_dict().items()}
    with pytest.raises(CheckpointError, match=r"is a checkpoint of another half: '0.bias' is torch.float32"):
        checkpoint.restore(path, suffix, sgd(suffix))
    with pytest.raises(CheckpointError, match="was written with an optimizer"):
        checkpoint.restore(path, edge, None)
    data = path.read_bytes()
    for n in (0, 7, 100, len(data) - 1):
        path.write_bytes(data[:n])
        assert checkpoint.about(path) is None
        with pytest.raises(CheckpointError, match="can't be read"):
            checkpoint.restore(path, edge, sgd(edge))
    same(before, suffix)


def test_a_server_keeps_the_checkpoint_that_the_client_can_go_back_to(
    files: Path, tmp_path: Path, whole: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    def full(training: Training, folder: Path, run: str, at: int) -> None:
        written.append(at)
        if len(written) in (3, 4, 5):  # the start and one more are there, then the disk is full
            raise CheckpointError("the disk is full")
        write(training, folder, run, at)

    write = Training._write
    monkeypatch.setattr(Training, "_write", full)
    with beside(trainer(files, checkpoints=tmp_path / "there")) as server:
        losses: dict[int, torch.Tensor] = {}
        for _ in range(2):
            edge = ariadne.load(files / "prefix")
            with ariadne.connect(server.address, edge, timeout=30) as remote:
                training = Training(edge, remote, sgd(edge), checkpoints=tmp_path / "here", every=1)
                while len(written) < 5 or training.step < STEPS:
                    try:
                        losses |= dict(training.run(STEPS, batch))
                    except CheckpointError:
                        if len(written) == 5:
                            break  # and the client dies
        same(whole[1], edge, server.half)
    assert len(written) > 5
    assert all(torch.equal(loss, whole[0][step]) for step, loss in losses.items())


@pytest.mark.variants
def test_both_sides_killed_at_random_moments_end_with_the_weights_of_a_run_without_faults() -> None:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "conformance.suite.remote_faults",
        os.environ.get("ARIADNE_FAULTS", "15"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all ends equal" in done.stdout
