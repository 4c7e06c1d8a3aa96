"""Steps by gradients that lie in two processes: scaled, clipped, added up, in flight, at a moving rate; the whole model's bits."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ariadne
from ariadne.errors import SpecError, StepError, TrainingError
from ariadne.remote import Server, Training, checkpoint, together
from ariadne.remote.plain import scheduler as named_scheduler
from ariadne.remote.trained import Trained
from conformance.unit.remote.test_remote_training import Recurrent, TiedThrice, same, saved, sequences, tokens
from conformance.unit.remote_kit import CE, beside, served

LR = "steplr:step_size=2,gamma=0.5"
Batches = Any


class Mixed(nn.Module):
    """Parameters of both sides lie alternately in the whole model's order, two dtypes among them."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.first, self.wide = nn.Linear(16, 3), nn.Linear(5, 8), nn.Linear(8, 16).double()
        self.norm, self.mid = nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.norm(self.mid(torch.relu(self.first(x)))))
        return self.last(torch.relu(self.wide(hidden.double())).float())


def rows(i: int) -> tuple[Any, Any]:
    drawn = torch.Generator().manual_seed(i)
    return torch.randn(6, 5, generator=drawn), torch.randint(0, 3, (6,), generator=drawn)


class Late(nn.Module):
    """The suffix alone draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(5, 8), nn.Dropout(0.4), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.first(x))))


class Early(nn.Module):
    """The prefix alone draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(5, 8), nn.Dropout(0.4), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(self.drop(x))))


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, betas=(0.8, 0.95))


def scaler_of(first: float = 2.0**16) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=first, growth_interval=3)


def rate(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


class Both:
    """A model, its twin in one process, and its halves with the server's in a process of its own."""

    def __init__(self, model: nn.Module, folder: Path, batches: Batches, split: str) -> None:
        self.folder, self.twin = folder, copy.deepcopy(model).train()
        self.edge = saved(model, batches(0)[0], split, folder)
        self.here, self.one = adamw(self.edge), adamw(self.twin)

    @contextmanager
    def serving(self, **options: Any) -> Iterator[ariadne.Remote]:
        """The suffix on a server: in a process of its own where the model draws, else in a thread."""
        given = {
            "optimizer": "adamw:lr=0.01,betas=(0.8,0.95)",
            "loss_fn": "cross_entropy",
            "checkpoints": str(self.folder / "run"),
            **options,
        }
        draws = any(isinstance(m, (nn.Dropout, nn.LSTM)) for m in self.twin.modules())
        file = self.folder / "suffix"
        server = served(file, **given) if draws else beside(Server(file, listen="127.0.0.1:0", log=None, **given))
        with server as it, ariadne.connect(it.address, self.edge, timeout=60) as remote:
            yield remote

    def suffix(self, remote: ariadne.Remote, **beside: Any) -> tuple[ariadne.Half, Any]:
        """The server's half and optimizer, as its checkpoint of the present step has them."""
        half = ariadne.load(self.folder / "suffix", plain=True)
        own = adamw(half)
        remote.save()
        checkpoint.restore(self.folder / "run" / f"{remote.run}-{remote.at:012d}.safetensors", half, own, beside)
        return half, own

    def hold(self, suffix: ariadne.Half, there: torch.optim.Optimizer) -> None:
        """Both sides are as the twin: parameters, buffers, moments."""
        names = {id(p): n for n, p in self.twin.named_parameters()}
        moments = {names[id(p)]: state for p, state in self.one.state.items()}
        assert moments
        for half, own in ((self.edge, self.here), (suffix, there)):
            same(self.twin.state_dict(), half)
            for name, p in half.named_parameters():
                assert own.state[p].keys() == moments[name].keys()
                assert all(torch.equal(own.state[p][k], v) for k, v in moments[name].items())
        assert {g["lr"] for g in self.one.param_groups} == {g["lr"] for o in (self.here, there) for g in o.param_groups}


def whole_step(
    both: Both, parts: list[Any], scaler: Any, most: float | None, norm_type: float = 2.0
) -> tuple[Any, Any]:
    """One step of the twin, as torch's documentation has it; the losses and the norm."""
    both.one.zero_grad()
    losses, norm = [], None
    for x, y in parts:
        loss = CE(both.twin(x), y)
        (loss if scaler is None else scaler.scale(loss)).backward()
        losses.append(loss.detach())
    if most is not None:
        if scaler is not None:
            scaler.unscale_(both.one)
        norm = torch.nn.utils.clip_grad_norm_(both.twin.parameters(), most, norm_type)
    if scaler is None:
        both.one.step()
    else:
        scaler.step(both.one)
        scaler.update()
    return losses, norm


CASES = [
    (Mixed, rows, "after:mid"),
    (Recurrent, sequences, "after:first"),
    (TiedThrice, tokens, "after:mix"),
]
NAMES = ("two_dtypes", "lstm", "tied_thrice")


@pytest.mark.parametrize(
    ("make", "batches", "split", "scaled", "most"),
    [
        *((*case, True, 0.5) for case in CASES),
        (*CASES[0], True, None),
        (*CASES[0], False, 0.5),
        (*CASES[0], False, None),
        (*CASES[2], False, None),
    ],
    ids=[*NAMES, "scaled_alone", "clipped_alone", "scheduled_alone", "tied_and_scheduled"],
)
def test_scaled_and_clipped_steps_are_those_of_the_whole_model(
    tmp_path: Path, make: Any, batches: Batches, split: str, scaled: bool, most: float | None
) -> None:
    torch.manual_seed(0)
    both = Both(make(), tmp_path, batches, split)
    here, one = (scaler_of() if scaled else None for _ in range(2))
    rates = rate(both.here)
    with both.serving(scheduler=LR) as remote:
        torch.manual_seed(7)
        losses, norms = [], []
        for i in range(8):
            x, y = batches(i)
            how = {"optimizer": both.here, "scaler": here, "max_norm": most, "scheduler": rates}
            losses.append(remote.train_step(x, targets=y, **how))
            norms.append(remote.norm)
        suffix, there = both.suffix(remote, scheduler=rate(adamw(ariadne.load(tmp_path / "suffix", plain=True))))
    torch.manual_seed(7)
    rates = rate(both.one)
    for i, loss in enumerate(losses):
        (expected,), norm = whole_step(both, [batches(i)], one, most)
        rates.step()
        assert torch.equal(loss, expected)
        assert (norms[i] is None) == (norm is None)
        assert norm is None or torch.equal(norms[i], norm)
    both.hold(suffix, there)
    if scaled:
        assert here.state_dict() == one.state_dict()


@pytest.mark.parametrize("norm_type", [1.0, float("inf")])
def test_other_norms_clip_as_over_the_whole_model(tmp_path: Path, norm_type: float) -> None:
    torch.manual_seed(0)
    both = Both(Mixed(), tmp_path, rows, "after:mid")
    with both.serving() as remote:
        for i in range(3):
            x, y = rows(i)
            remote.train_step(x, targets=y, optimizer=both.here, max_norm=0.1, norm_type=norm_type)
            _, norm = whole_step(both, [(x, y)], None, 0.1, norm_type)
            assert remote.norm is not None
            assert torch.equal(remote.norm, norm)
        both.hold(*both.suffix(remote))


class Overflows(nn.Module):
    """In one batch a gradient of the prefix alone is not finite: the weights that a large number meets are zero, and stay so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 8), nn.Linear(8, 3)
        with torch.no_grad():
            self.first.weight[:, 0] = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


def overflowing(i: int) -> tuple[Any, Any]:
    x, y = rows(i)
    x[:, 0] = 0.0
    if i == 2:
        x[0, 0] = 3e38
    if i == 5:
        x[:, 1] = 1e37  # and of both sides
    return x, y


def skipping(folder: Path) -> Both:
    """Eight steps on both sides and in one process, two of which are to be skipped."""
    torch.manual_seed(0)
    both = Both(Overflows(), folder, overflowing, "after:first")
    here, one = scaler_of(2.0**10), scaler_of(2.0**10)
    rates, whole = rate(both.here), rate(both.one)
    with both.serving(scheduler=LR) as remote:
        for i in range(8):
            x, y = overflowing(i)
            how = {"optimizer": both.here, "scaler": here, "max_norm": 0.1, "scheduler": rates}
            loss = remote.train_step(x, targets=y, **how)
            (expected,), _ = whole_step(both, [(x, y)], one, 0.1)
            whole.step()
            assert torch.equal(loss, expected)
            assert here.state_dict() == one.state_dict()
        assert here.get_scale() == 2.0**8
        both.hold(*both.suffix(remote, scheduler=rate(adamw(ariadne.load(folder / "suffix", plain=True)))))
    return both


def test_both_sides_skip_where_either_is_not_finite_and_the_scale_moves_once(tmp_path: Path) -> None:
    both = skipping(tmp_path)
    assert [int(s["step"]) for s in both.here.state.values()] == [6, 6]


def _all_finite(scaler: Any, optimizer: Any, found: Any) -> None:
    together.step(scaler, optimizer, None)


def _own_alone(norms: Any, norm_type: float) -> torch.Tensor:
    return together.total_norm({i: row for i, row in norms.items() if i < 2}, norm_type)


@pytest.mark.planted
@pytest.mark.parametrize(
    ("where", "planted"),
    [
        ("ariadne.remote.trained.step_by", _all_finite),
        ("ariadne.remote.steps.total_norm", _own_alone),
        ("ariadne.remote.trained.clip", lambda *_: None),
    ],
    ids=["a_step_that_is_skipped_here_alone", "the_norm_of_one_side", "clipped_here_alone"],
)
def test_a_planted_step_that_is_not_one_step_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, planted: Any
) -> None:
    monkeypatch.setattr(where, planted)
    with pytest.raises(AssertionError):
        skipping(tmp_path)


@pytest.mark.parametrize(("make", "batches", "split"), CASES, ids=NAMES)
def test_gradients_that_add_up_are_scaled_and_clipped_once(
    tmp_path: Path, make: Any, batches: Batches, split: str
) -> None:
    torch.manual_seed(0)
    both = Both(make(), tmp_path, batches, split)
    here, one = scaler_of(), scaler_of()
    with both.serving() as remote:
        torch.manual_seed(7)
        losses = []
        for i in range(3):
            both.here.zero_grad()
            for j in range(3):
                x, y = batches(3 * i + j)
                boundary = both.edge.run_training_prefix(x)
                loss, gradients = remote.train_suffix(boundary, y, accumulate=True, scaler=here)
                remote.backward_prefix(boundary, gradients)
                losses.append(loss)
            remote.step(both.here, scaler=here, max_norm=1.0)
        suffix, there = both.suffix(remote)
    torch.manual_seed(7)
    for i in range(3):
        expected, _ = whole_step(both, [batches(3 * i + j) for j in range(3)], one, 1.0)
        assert all(map(torch.equal, losses[3 * i :], expected))
    both.hold(suffix, there)
    assert here.state_dict() == one.state_dict()


# --- what is refused ----------------------------------------------------------------------------------------------------


def test_a_scale_that_changes_within_a_step_and_half_scaled_sums_are_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    both = Both(Overflows(), tmp_path, rows, "after:first")
    (x, y), scaler = rows(0), scaler_of()
    with both.serving() as remote:
        boundary = both.edge.run_training_prefix(x)
        with pytest.raises(SpecError, match="whether a scaled step is skipped hangs on both sides"):
            remote.train_suffix(boundary, y, scaler=scaler)
        remote.backward_prefix(boundary, remote.train_suffix(boundary, y, accumulate=True, scaler=scaler)[1])
        with pytest.raises(StepError, match="gradients that were scaled, and some that were not"):
            remote.train_suffix(both.edge.run_training_prefix(x), y, accumulate=True)
        with pytest.raises(StepError, match=r"the scale was 65536.0 and is 8.0 now"):
            remote.train_suffix(both.edge.run_training_prefix(x), y, accumulate=True, scaler=scaler_of(8.0))
        with pytest.raises(StepError, match="these gradients are scaled: pass scaler="):
            remote.step(both.here)
        with pytest.raises(SpecError, match="a scaler unscales the gradients of an optimizer"):
            remote.step(scaler=scaler)
        fused = torch.optim.AdamW(both.edge.parameters(), fused=True)
        odd = scaler_of(3.0)
        with pytest.raises(TrainingError, match=r"a fused optimizer divides by the scale itself, and 3\.0"):
            remote.step(fused, scaler=odd)
        order = both.edge.__dict__["_data"].pop("order")
        with pytest.raises(SpecError, match="this half's file does not say where its parameters stand"):
            remote.step(both.here, scaler=scaler, max_norm=1.0)
        both.edge.__dict__["_data"]["order"] = order
        with pytest.raises(SpecError, match="started without a scheduler"):
            remote.step(both.here, scaler=scaler, scheduler=rate(both.here))
        with pytest.raises(StepError, match="this step was begun with another scaler or norm"):
            remote.step(both.here, scaler=scaler, max_norm=1.0)
        remote.step(both.here, scaler=scaler)
        with pytest.raises(SpecError, match=r"there is no scheduler 'stplr'.*near: 'steplr'"):
            named_scheduler("stplr", both.here)


# --- rates --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("cosineannealinglr:T_max=6", lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6)),
        ("multisteplr:milestones=[2,4]", lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4])),
        ("onecyclelr:max_lr=0.1,total_steps=9", lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 9)),
    ],
)
def test_both_rates_move_together_and_come_back_from_checkpoints(tmp_path: Path, text: str, make: Any) -> None:
    torch.manual_seed(0)
    both = Both(Late(), tmp_path, rows, "after:first")
    here, one = scaler_of(), scaler_of()
    with both.serving(scheduler=text) as remote:
        torch.manual_seed(7)
        how = {"scaler": here, "scheduler": make(both.here), "max_norm": 1.0}
        training = Training(both.edge, remote, both.here, checkpoints=tmp_path / "here", every=3, **how)
        losses = dict(training.run(5, rows))
        for path in sorted((tmp_path / "here").glob("*.safetensors"))[-1:]:
            path.rename(tmp_path / "kept")  # the checkpoint of step 5
        (tmp_path / "kept").rename(path)
        edge = ariadne.load(tmp_path / "prefix", plain=True)  # as after a kill
        both.edge, both.here, here = edge, adamw(edge), scaler_of()
        torch.manual_seed(0)
        how = {"scaler": here, "scheduler": make(both.here), "max_norm": 1.0}
        training = Training(edge, remote, both.here, checkpoints=tmp_path / "here", every=3, **how)
        losses |= dict(training.run(8, rows))
        suffix, there = both.suffix(remote, scheduler=make(adamw(ariadne.load(tmp_path / "suffix", plain=True))))
    torch.manual_seed(7)
    rates = make(both.one)
    for i in range(8):
        (expected,), _ = whole_step(both, [rows(i)], one, 1.0)
        rates.step()
        assert torch.equal(losses[i], expected)
    both.hold(suffix, there)
    assert here.state_dict() == one.state_dict()
    assert how["scheduler"].state_dict()["last_epoch"] == rates.state_dict()["last_epoch"] == 8


def test_a_rate_that_follows_a_metric_moves_on_both_sides(tmp_path: Path) -> None:
    torch.manual_seed(0)
    both = Both(Overflows(), tmp_path, rows, "after:first")

    def make(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

    with both.serving(scheduler="reducelronplateau:patience=0,factor=0.5") as remote:
        rates, whole = make(both.here), make(both.one)
        for i in range(5):
            x, y = rows(i)
            remote.train_step(x, targets=y, optimizer=both.here)
            whole_step(both, [(x, y)], None, None)
            remote.schedule(rates, 1.0)
            whole.step(1.0)
        suffix, there = both.suffix(remote, scheduler=make(adamw(ariadne.load(tmp_path / "suffix", plain=True))))
    both.hold(suffix, there)
    assert both.one.param_groups[0]["lr"] < 0.01


@pytest.mark.planted
def test_a_planted_rate_that_moves_on_one_side_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trained, "schedule", lambda self, bodies, most: ({}, []))
    with pytest.raises(AssertionError):
        test_a_rate_that_follows_a_metric_moves_on_both_sides(tmp_path)
