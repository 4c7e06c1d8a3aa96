"""The loss on the edge: three parts, of which the server has the one between; outputs and steps are the whole model's bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ariadne
from ariadne.errors import BoundaryError, HandshakeError, SpecError, TrainingError
from ariadne.remote import Edge, Remote, Server, Training, checkpoint
from conformance.unit.remote_kit import CE, Proxy, beside, cut_after, served, whole_losses


class Tied(nn.Module):
    """One weight in all three parts, dropout in each, statistics."""

    def __init__(self, drop: float = 0.3) -> None:
        super().__init__()
        self.embed, self.mix, self.norm, self.more = (
            nn.Embedding(20, 8),
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 8),
        )
        self.drop = nn.Dropout(drop)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.mix(self.embed(tokens)))
        hidden = self.drop(torch.relu(self.norm(hidden))) @ self.embed.weight[:8] * 0.3
        return self.drop(self.more(hidden)) @ self.embed.weight.t()


def tokens(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(i)
    return torch.randint(0, 20, (6,), generator=drawn), torch.randint(0, 20, (6,), generator=drawn)


def net() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()),
        nn.Linear(8, 4),
    )


def rows(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(i)
    return torch.randn(5, 6, generator=drawn), torch.randint(0, 4, (5,), generator=drawn)


def parted(model: nn.Module, x: Any, cuts: list[str], folder: Path) -> list[Path]:
    """The files of three parts."""
    pipeline = ariadne.prepare_pipeline(model, (x,), boundaries=cuts)
    files = [folder / f"part{i}" for i in range(3)]
    for i, file in enumerate(files):
        pipeline.save_part(i, file)
    return files


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


CASES = [(Tied, tokens, ["after:mix", "after:more"]), (net, rows, ["after:2", "after:5"])]
NAMES = ("tied_in_three", "batchnorm")


@pytest.mark.parametrize(("make", "batch", "cuts"), CASES, ids=NAMES)
@pytest.mark.parametrize("how", ["plain", "scaled and clipped", "added up"])
def test_steps_with_the_loss_on_the_edge_are_those_of_the_whole_model(
    tmp_path: Path, make: Any, batch: Any, cuts: list[str], how: str
) -> None:
    torch.manual_seed(0)
    model = make().train()
    twin = copy.deepcopy(model)
    files = parted(model, batch(0)[0], cuts, tmp_path)
    options = {
        "optimizer": "sgd:lr=0.05,momentum=0.9",
        "checkpoints": str(tmp_path / "run"),
        "scheduler": "steplr:step_size=3",
    }
    scaled, clipped, parts = how != "plain", how != "plain", 3 if how == "added up" else 1
    here, one = (torch.amp.GradScaler("cpu", growth_interval=2) if scaled else None for _ in range(2))
    most = 0.5 if clipped else None
    with served(files[1], **options) as server, ariadne.connect(server.address, timeout=60) as remote:
        edge = Edge(files[0], remote, files[2])
        optimizer = sgd(edge.parameters())
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        torch.manual_seed(7)
        losses = []
        for i in range(6):
            optimizer.zero_grad()
            for j in range(parts):
                x, y = batch(parts * i + j)
                losses.append(edge.accumulate(x, targets=y, loss_fn=CE, scaler=here))
            norm = edge.step(optimizer, scaler=here, max_norm=most, scheduler=rates)
        drawn = torch.get_rng_state()
        middle = ariadne.load(files[1], plain=True)
        there = sgd(middle.parameters())
        remote.save()
        beside_it = {"scheduler": torch.optim.lr_scheduler.StepLR(there, 3)}
        checkpoint.restore(tmp_path / "run" / f"{remote.run}-{remote.at:012d}.safetensors", middle, there, beside_it)
    whole = sgd(twin.parameters())
    rates = torch.optim.lr_scheduler.StepLR(whole, 3)
    torch.manual_seed(7)
    for i in range(6):
        whole.zero_grad()
        for j in range(parts):
            x, y = batch(parts * i + j)
            loss = CE(twin(x), y)
            (loss if one is None else one.scale(loss)).backward()
            assert torch.equal(losses[parts * i + j], loss)
        if one is None:
            whole.step()
        else:
            one.unscale_(whole)
            expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), most)
            one.step(whole)
            one.update()
        rates.step()
    assert torch.equal(drawn, torch.get_rng_state())
    assert one is None or torch.equal(norm, expected)
    state = twin.state_dict()
    for mine in (edge.state_dict(), middle.state_dict()):
        assert mine
        assert [n for n, t in mine.items() if not torch.equal(t, state[n])] == []
    names = dict(twin.named_parameters())
    for own, part in ((optimizer, edge.first), (optimizer, edge.last), (there, middle)):
        for name, p in part.named_parameters():
            assert torch.equal(own.state[p]["momentum_buffer"], whole.state[names[name]]["momentum_buffer"])


def trained(files: list[Path], folder: Path) -> tuple[dict[int, torch.Tensor], Edge]:
    """Eight steps of three parts, where the client goes after the fifth, and the server a step after that."""
    options = {"optimizer": "sgd:lr=0.05,momentum=0.9", "checkpoints": str(folder / "there")}
    losses: dict[int, torch.Tensor] = {}
    with served(files[1], **options) as server:
        torch.manual_seed(7)
        for lives in (5, 1):
            with ariadne.connect(server.address, timeout=60) as remote:
                for _, (step, loss) in zip(range(lives), run_of(files, remote, folder), strict=False):
                    assert torch.equal(losses.setdefault(step, loss), loss)
            torch.manual_seed(lives)  # a process of its own would draw otherwise
    with served(files[1], **options) as server, ariadne.connect(server.address, timeout=60) as remote:
        training = run_of(files, remote, folder)
        for step, loss in training:
            assert torch.equal(losses.setdefault(step, loss), loss)
        edge: Edge = EDGES[-1]
    return losses, edge


EDGES: list[Edge] = []


def run_of(files: list[Path], remote: Remote, folder: Path) -> Iterator[tuple[int, torch.Tensor]]:
    EDGES.append(Edge(files[0], remote, files[2]))
    optimizer = sgd(EDGES[-1].parameters())
    training = Training(EDGES[-1], remote, optimizer, loss_fn=CE, checkpoints=folder / "here", every=3)
    return training.run(8, tokens)


def three(folder: Path) -> tuple[nn.Module, list[Path]]:
    torch.manual_seed(0)
    model = Tied().train()
    return model, parted(model, tokens(0)[0], ["after:mix", "after:norm"], folder)


def test_a_run_of_three_parts_goes_on_from_checkpoints_of_one_step(tmp_path: Path) -> None:
    model, files = three(tmp_path)
    losses, edge = trained(files, tmp_path)
    torch.manual_seed(7)
    expected = whole_losses(model, sgd(model.parameters()), tokens, 8)
    assert all(torch.equal(losses[i], loss) for i, loss in enumerate(expected))
    state = model.state_dict()
    assert [n for n, t in edge.state_dict().items() if not torch.equal(t, state[n])] == []
    remote = edge.remote
    with pytest.raises(SpecError, match=r"the loss of an Edge is taken here: Training\(edge, edge.remote"):
        Training(edge, remote, None)
    with pytest.raises(SpecError, match="with a prefix here the loss is the server's"):
        Training(edge.first.side, remote, None, loss_fn=CE)


@pytest.mark.planted
def test_a_planted_part_that_is_left_out_of_checkpoints_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, files = three(tmp_path)
    monkeypatch.setattr(
        Edge, "_named", lambda self, what: ((f"first.{n}", t) for n, t in getattr(self.first.side, what)())
    )
    with pytest.raises(AssertionError):
        trained(files, tmp_path)


@pytest.mark.parametrize("op", ["forward", "back", "step"])
def test_an_answer_that_was_lost_on_its_way_through_three_parts_is_given_again(tmp_path: Path, op: str) -> None:
    torch.manual_seed(0)
    model = net().train()
    files = parted(model, rows(0)[0], ["after:2", "after:5"], tmp_path)
    middle = ariadne.load(files[1], plain=True)
    server = Server(middle, listen="127.0.0.1:0", log=None, optimizer=sgd(middle.parameters()))
    with beside(server):
        proxy = Proxy(server.address)
        with (
            cut_after(server, proxy, (op,), 2) as cut,
            ariadne.connect(proxy.address, timeout=60) as remote,
        ):
            edge = Edge(files[0], remote, files[2])
            optimizer = sgd(edge.parameters())
            losses = [
                edge.train_step(rows(i)[0], targets=rows(i)[1], loss_fn=CE, optimizer=optimizer) for i in range(4)
            ]
        proxy.close()
    assert cut == [op] * 2
    expected = whole_losses(model, sgd(model.parameters()), rows, 4)
    assert all(map(torch.equal, losses, expected))
    state = model.state_dict()
    for mine in (edge.state_dict(), middle.state_dict()):
        assert [n for n, t in mine.items() if not torch.equal(t, state[n])] == []


def test_three_parts_give_what_the_model_gives_at_any_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = net().eval()
    files = parted(model, rows(0)[0], ["after:2", "after:5"], tmp_path)
    with beside(Server(files[1], listen="127.0.0.1:0", log=None, optimizer="sgd:lr=0.1")) as server:
        with ariadne.connect(server.address, timeout=30) as remote:
            edge = Edge(files[0], remote, files[2])
            for n in (1, 2, 9):
                x = torch.randn(n, 6)
                with torch.no_grad():
                    assert torch.equal(edge(x), model(x))
            boundary = edge.first(x)
            with pytest.raises(SpecError, match="a part between two cuts, which gives no output"):
                remote.run_suffix(boundary)
            with pytest.raises(SpecError, match="a part between two cuts, which gives no output"):
                remote.submit(boundary)
            with pytest.raises(BoundaryError, match="Run the prefix and the suffix of the same split"):
                remote.run_middle(remote.run_middle(boundary))
            with pytest.raises(TrainingError, match="loss_fn must return a tensor with one element that depends on"):
                edge.accumulate(x, targets=None, loss_fn=lambda output, _: output.detach().sum())
        with pytest.raises(HandshakeError, match=r"what is run differs: here part 2 of 3, at .* part 1 of 3"):
            ariadne.connect(server.address, files[2], timeout=30)


def test_parts_that_don_t_go_together_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
    files = parted(net().eval(), rows(0)[0], ["after:2", "after:5"], one)
    others = parted(net().eval(), rows(0)[0], ["after:2", "after:5"], two)
    runtime = ariadne.prepare_split(net().eval(), (rows(0)[0],), split="after:2")
    runtime.save(tmp_path / "prefix", side="prefix")
    with beside(Server(files[1], listen="127.0.0.1:0", log=None)) as server:
        with ariadne.connect(server.address, timeout=30) as remote:
            with pytest.raises(SpecError, match="an edge has the parts 0 and 2 of 3; found 2 of 3 and 0 of 3"):
                Edge(files[2], remote, files[0])
            with pytest.raises(HandshakeError, match="the digest of the weights differs"):
                Edge(others[0], remote, files[2])
            with pytest.raises(HandshakeError, match="the digest of the weights differs"):
                Edge(files[0], remote, others[2])
            edge = Edge(files[0], remote, files[2])
            with pytest.raises(SpecError, match="step takes the scaler that accumulate had"):
                edge.step(scaler=torch.amp.GradScaler("cpu"))
        with pytest.raises(HandshakeError, match=r"what is run differs: here the prefix, at .* part 1 of 3"):
            ariadne.connect(server.address, tmp_path / "prefix", timeout=30)


@pytest.mark.planted
def test_a_planted_share_that_is_lost_on_its_way_through_the_middle_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = Tied(0.0).train()
    files = parted(model, tokens(0)[0], ["after:mix", "after:more"], tmp_path)
    x, y = tokens(1)
    CE(model(x), y).backward()
    back, right = Remote.backward_middle, []
    for planted in (False, True):
        if planted:
            monkeypatch.setattr(Remote, "backward_middle", lambda self, number, g, shares: back(self, number, g, {}))
        server = Server(files[1], listen="127.0.0.1:0", log=None, optimizer="sgd:lr=0.1")
        with beside(server), ariadne.connect(server.address, timeout=30) as remote:
            edge = Edge(files[0], remote, files[2])
            edge.accumulate(x, targets=y, loss_fn=CE)
            right.append(torch.equal(edge.first.get_parameter("embed.weight").grad, model.embed.weight.grad))
    assert right == [True, False]
