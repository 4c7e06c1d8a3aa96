"""Generators of the model's own that forward seeds, puts back or asks: no op shows it; model and split run from elsewhere, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import ariadne.runtime.proof
from ariadne import prepare_split
from ariadne.errors import UnsupportedError

Draws = Callable[["Noisy", torch.Tensor], torch.Tensor]


class Noisy(nn.Module):
    """Two layers, with what `draws` adds between them."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.draws = nn.Linear(4, 8), nn.Linear(8, 3), draws
        self.own, self.held = torch.Generator().manual_seed(7), {"own": torch.Generator().manual_seed(1)}
        self.stood = self.own.get_state()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 4) -> (batch, 3)."""
        return self.b(self.draws(self, self.a(x).relu()))


def _seeds(m: Noisy, h: torch.Tensor) -> torch.Tensor:
    m.own.manual_seed(7)
    return h + torch.randn(h.shape, generator=m.own)


def _seeds_in_eval(m: Noisy, h: torch.Tensor) -> torch.Tensor:
    if not m.training:
        m.own.manual_seed(7)
    return h + torch.randn(h.shape, generator=m.own)


def _puts_a_state(m: Noisy, h: torch.Tensor) -> torch.Tensor:
    m.own.set_state(m.stood)
    return h + torch.randn(h.shape, generator=m.own)


def _puts_back(m: Noisy, h: torch.Tensor) -> torch.Tensor:
    state = m.own.get_state()
    h = h + torch.randn(h.shape, generator=m.own)
    m.own.set_state(state)
    return h


def _seeds_as_before(m: Noisy, h: torch.Tensor) -> torch.Tensor:
    m.own.manual_seed(m.own.initial_seed())
    return h + torch.randn(h.shape, generator=m.own)


def _seeds_one_in_a_dict(m: Noisy, h: torch.Tensor) -> torch.Tensor:
    m.held["own"].manual_seed(1)
    return h + torch.rand(h.shape, generator=m.held["own"])


def _asks_for_the_seed(m: Noisy, h: torch.Tensor) -> torch.Tensor:
    return h * float(m.own.initial_seed() % 997)


def _asks_for_the_state(m: Noisy, h: torch.Tensor) -> torch.Tensor:
    return h + m.own.get_state().sum() % 7


def _draws(m: Noisy, h: torch.Tensor) -> torch.Tensor:
    return h + torch.randn(h.shape, generator=m.own) + torch.rand(h.shape, generator=m.held["own"])


SEEDING = (
    _asks_for_the_seed,
    _asks_for_the_state,
    _puts_a_state,
    _puts_back,
    _seeds,
    _seeds_as_before,
    _seeds_in_eval,
    _seeds_one_in_a_dict,
)


def _differs(draws: Draws) -> bool:
    """Whether one of three calls gives something else than the whole model's; between them the user may seed anew."""
    whole, split = Noisy(draws).eval(), Noisy(draws).eval()
    runtime = prepare_split(split, (torch.randn(2, 4),), split="after:a")
    x, unlike = torch.randn(3, 4), False
    for call in range(3):
        for m in (whole, split) if call == 2 else ():
            m.own.manual_seed(9)
        with torch.no_grad():
            unlike |= not torch.equal(whole(x), runtime.run_suffix(runtime.run_prefix(x)))
        unlike |= not torch.equal(whole.own.get_state(), split.own.get_state())
    return unlike


@pytest.mark.parametrize("draws", SEEDING)
def test_a_generator_that_forward_seeds_is_refused(draws: Draws, monkeypatch: pytest.MonkeyPatch) -> None:
    """And would give other numbers, were it not."""
    with pytest.raises(
        UnsupportedError, match=r"seeds a torch.Generator of its own, puts it back or asks how it stands"
    ):
        _differs(draws)
    monkeypatch.setattr(ariadne.runtime.proof, "_refuse_seeding", lambda *given: None)
    assert _differs(draws)


def test_a_generator_that_forward_draws_from_is_followed() -> None:
    """It stands after preparing as before, and goes on from where the user puts it."""
    model = Noisy(_draws).eval()
    stood = model.own.get_state(), model.held["own"].get_state()
    prepare_split(model, (torch.randn(2, 4),), split="after:a")
    assert all(map(torch.equal, stood, (model.own.get_state(), model.held["own"].get_state())))
    assert not _differs(_draws)
