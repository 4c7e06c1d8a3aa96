"""A model that was changed after its split was prepared: a call gives what the model gives now, or an error that says why not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ariadne import SplitRuntime, SplitSpec
from ariadne.errors import AriadneError, ModuleError
from conformance.unit.refusing import prepare_split

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


class Scale:
    def __init__(self) -> None:
        self.k = 2.0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l, self.bn, self.d, self.flag = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.bn(self.l(x))) if self.flag else x


class Model(nn.Module):
    """One of each thing that a forward may read: parts, lists of parts, parameters, buffers, containers, objects, arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = Block(), Block(), nn.Linear(2, 2)
        self.parts, self.rnn = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), nn.LSTM(4, 4, batch_first=True)
        self.held = {"q": [1.0, 2.0], "o": Scale(), "arr": np.ones(3), "n": {"z": 3}}
        self.s, self.t, self.names = 1.5, ([1, 2], 3), {1, 2}
        self.w = nn.ParameterDict({"w": nn.Parameter(torch.ones(4))})
        self.register_buffer("buf", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x) * self.held["q"][1] + self.held["o"].k  # type: ignore[index, attr-defined]
        x = x * float(self.held["arr"][0]) + self.held["n"]["z"]  # type: ignore[index]
        for part in self.parts:
            x = part(x)
        x = x * self.s * self.w["w"] + self.buf + self.t[0][1] + len(self.names)
        return self.b(self.rnn(x.unsqueeze(1))[0].squeeze(1))


# What is done to the model `m`, as a person would write it. Most of it breaks something that the plan relies on.
CHANGES = """
m.held.clear(); m.held = 7; m.held = None; del m.held; m.held = type('D', (dict,), {})(m.held)
m.held['q'].clear(); m.held['q'].pop(); m.held['q'][1] = 5.0; m.held['q'] = 5; m.held['n'].clear(); m.held['n']['z'] = 4
m.held['n'] = []; m.held['o'] = None; m.held['o'] = 3; del m.held['o'].k; m.held['o'].k = 2
m.held['arr'] = None; m.held['arr'][0] = 9; m.held['arr'] = np.ones(2)
m.s = None; m.s = torch.tensor(1.5); m.s = np.ones(4); del m.s; m.t = 3; m.t = (); m.t[0].clear(); m.t[0][1] = 7
m.names.clear(); m.names = None
del m.b; m.b = None; m.b = nn.ReLU(); m.b = Block().train(m.training); m.b = m.a; m.b.c = m.a; del m.b.d
del m.a; m.a = None; m.a.c = nn.ReLU(); m.c = nn.ReLU(); del m.a.l; m.a.l = None; m.a.l = nn.Identity(); del m.a.flag
m.a.__class__ = nn.Identity; m.unused = None; m.__dict__['_modules'] = dict(); m.a.l.__dict__['_parameters'] = dict()
m.a.l._parameters.clear(); m.b.l._parameters.clear(); m.a.bn._buffers.clear(); m.a.bn.running_mean = None
del m.a.l.weight; m.a.l.weight = None; m.a.l.bias = None; m.a.l.weight = nn.Parameter(torch.randn(4, 3)); del m.rnn.weight_hh_l0
m.a.l.weight = nn.Parameter(torch.ones(4, 4)); m.a.l.weight.data.zero_(); m.a.l.register_buffer('more', torch.ones(1))
del m.buf; m.buf = None; m.buf = torch.zeros(4); m.double(); m.to('meta'); m.requires_grad_(False); m.train(not m.training)
m.parts.pop(1); m.parts.append(nn.Linear(4, 4)); m.parts = None; m.parts._modules.clear(); m.parts[0] = m.parts[1]
m.w.clear(); del m.w['w']; m.w = None; m.rnn = None; m.rnn._flat_weights = []; m.rnn.hidden_size = 5
m.a.register_forward_hook(lambda *a: None); m.a.register_forward_pre_hook(lambda *a: (a[1][0] * 2,))
"""


def forward(split: SplitRuntime) -> torch.Tensor:
    torch.manual_seed(1)
    found: torch.Tensor = split.run_suffix(split.run_prefix(X))
    return found


def training(split: SplitRuntime) -> torch.Tensor:
    torch.manual_seed(1)
    split.model.zero_grad()
    boundary = split.run_training_prefix(X)
    loss, gradients = split.train_suffix(boundary, loss_fn=lambda output, _: output.sum())
    split.backward_prefix(boundary, gradients)
    return shown(split.model, loss)


def itself(model: nn.Module, trains: bool) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.set_grad_enabled(trains):
        output: torch.Tensor = model(X)
    if not trains:
        return output
    model.zero_grad()
    output.sum().backward()
    return shown(model, output.sum())


def shown(model: nn.Module, loss: torch.Tensor) -> torch.Tensor:
    """The loss and every gradient, in one tensor."""
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat([loss.detach().reshape(1), *gradients])


def told(run: Callable[[], torch.Tensor]) -> torch.Tensor | tuple[type, str] | None:
    """What a call gives; the type and words of the error that it raises, or None where that is one of Ariadne's own."""
    try:
        return run().detach()
    except AriadneError:
        return None
    except Exception as error:
        return type(error), str(error)


def same(found: Any, expected: Any) -> bool:
    if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
        return torch.equal(found, expected)
    return isinstance(found, tuple) and isinstance(expected, tuple) and found == expected


@pytest.mark.parametrize("trains", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("change", sorted(c.strip() for line in CHANGES.strip().splitlines() for c in line.split("; ")))
def test_a_changed_model_gives_what_it_gives_now_or_an_error_of_its_own(change: str, trains: bool) -> None:
    torch.manual_seed(0)
    model = Model().train(trains)
    spec = SplitSpec(boundary="after:a", dynamic_batch=(1, 8), trainable=trains)
    split = prepare_split(model, (X[:2],), split=spec)
    exec(change, {"m": model, "nn": nn, "np": np, "torch": torch, "Block": Block})
    run = training if trains else forward
    ways: dict[str, Callable[[], Any]] = {
        "as it is": lambda: run(split),
        "resplit": lambda: run(split.resplit("percent:30")),
        "copied": lambda: run(copy.deepcopy(split)),
    }
    for name, way in ways.items():
        before = copy.deepcopy(model.state_dict())
        expected = told(lambda: itself(copy.deepcopy(model), trains))
        found = told(way)
        assert found is None or same(found, expected), f"{name}: {found}; the model itself: {expected}"
        model.load_state_dict(before, strict=False)
    split.prefix_parameters(), split.suffix_parameters(), split.shared_parameters(), repr(split), split.prefix_source


def test_a_change_inside_a_list_that_stands_among_other_things_is_named() -> None:
    model = Model().eval()
    split = prepare_split(model, (X[:2],), split="after:a")
    model.held["q"][1] = 5.0  # type: ignore[index]
    with pytest.raises(ModuleError, match=r"held\['q'\].*was \[1.0, 2.0\].*now it is \[1.0, 5.0\]"):
        split.run_prefix(X[:2])
