"""Training boundaries in flight: gradients of several at once, in the order of one process, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ariadne
from ariadne.errors import DeadlineError, StepError
from ariadne.remote import Server
from conformance.unit.remote.test_remote_steps import Both, Early, Late, Mixed, adamw, rows, whole_step
from conformance.unit.remote_kit import beside


@pytest.mark.parametrize(
    ("make", "read"), [(Mixed, "last first"), (Late, "last first"), (Late, "in order"), (Early, "in order")]
)
def test_boundaries_in_flight_train_as_one_after_the_other(tmp_path: Path, make: Any, read: str) -> None:
    torch.manual_seed(0)
    both = Both(make(), tmp_path, rows, "after:mid" if make is Mixed else "after:first")
    with both.serving() as remote:
        torch.manual_seed(7)
        losses = []
        for i in range(3):
            both.here.zero_grad()
            sent = []
            for j in range(4):
                x, y = rows(4 * i + j)
                boundary = both.edge.run_training_prefix(x)
                sent.append((boundary, remote.submit_training(boundary, y)))
            found = [p.result() for _, p in (sent if read == "in order" else sent[::-1])]
            found = found if read == "in order" else found[::-1]
            with pytest.raises(StepError, match="4 training boundaries were sent and not walked back from"):
                remote.step(both.here)
            with pytest.raises(StepError, match="an earlier boundary has not been walked back from yet"):
                remote.backward_prefix(sent[1][0], found[1][1])
            for (boundary, _), (loss, gradients) in zip(sent, found, strict=True):
                remote.backward_prefix(boundary, gradients)
                losses.append(loss)
            remote.step(both.here, max_norm=0.7)
        drawn = torch.get_rng_state()
        suffix, there = both.suffix(remote)
    torch.manual_seed(7)
    for i in range(3):
        expected, _ = whole_step(both, [rows(4 * i + j) for j in range(4)], None, 0.7)
        assert all(map(torch.equal, losses[4 * i :], expected))
    assert torch.equal(drawn, torch.get_rng_state())
    both.hold(suffix, there)


def test_boundaries_in_flight_are_not_lost_where_the_connection_breaks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    both = Both(Mixed(), tmp_path, rows, "after:mid")
    half = ariadne.load(tmp_path / "suffix")
    there = adamw(half)
    with beside(Server(half, listen="127.0.0.1:0", log=None, optimizer=there, loss_fn="cross_entropy")) as server:
        reply, lost = server._reply, list[int]()

        def losing(request: Any, answer: Any, start: float) -> None:
            if request.header.get("number") in (2, 3) and len(lost) < 3:
                lost.append(request.header["number"])
            else:
                reply(request, answer, start)

        server._reply = losing
        with ariadne.connect(server.address, both.edge, timeout=30) as remote:
            both.here.zero_grad()
            sent = []
            for j in range(4):
                boundary = both.edge.run_training_prefix(rows(j)[0])
                sent.append((boundary, remote.submit_training(boundary, rows(j)[1])))
            losses = []
            for boundary, pending in sent:
                while True:
                    try:
                        loss, gradients = pending.result(timeout=0.3)
                        break
                    except DeadlineError:
                        pass  # asked for again
                remote.backward_prefix(boundary, gradients)
                losses.append(loss)
            remote.step(both.here)
    assert len(lost) == 3
    expected, _ = whole_step(both, [rows(j) for j in range(4)], None, None)
    assert all(map(torch.equal, losses, expected))
    both.hold(half, there)


def test_draws_that_one_process_would_make_otherwise_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = tmp_path / "late"
    folder.mkdir()
    both = Both(Late(), folder, rows, "after:first")
    x, y = rows(0)
    with both.serving() as remote:
        remote.submit_training(both.edge.run_training_prefix(x), y)
        torch.rand(3)
        with pytest.raises(StepError, match="random numbers were drawn here while boundaries were in flight"):
            remote.submit_training(both.edge.run_training_prefix(x), y)
    model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    both = Both(model, tmp_path, rows, "after:1")
    with both.serving() as remote, pytest.raises(StepError, match="both sides draw random numbers"):
        remote.submit_training(both.edge.run_training_prefix(x), y)
