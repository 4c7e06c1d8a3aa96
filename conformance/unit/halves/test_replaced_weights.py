"""The digest of weights that a half is given anew: of which model they are is known where they are all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import ariadne
from ariadne.errors import BoundaryError, HalfError
from conformance.suite.halves_fuzz import Tied, closed, opened

X = torch.randn(3, 4)


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.enter, self.norm, self.leave = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.register_buffer("rates", torch.ones(8), persistent=False)
        self.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.norm(self.enter(x)) * self.rates)


def save(folder: Path, model: nn.Module, x: torch.Tensor = X, split: str = "after:norm", **options: Any) -> Path:
    folder.mkdir()
    runtime = ariadne.prepare_split(model, (x[:2],), split=split)
    for side in ("prefix", "suffix"):
        runtime.save(folder / side, side=side, **options)
    return folder


def halves(folder: Path, **options: Any) -> list[ariadne.Half]:
    return [ariadne.load(folder / side, **options) for side in ("prefix", "suffix")]


def run(prefix: ariadne.Half, suffix: ariadne.Half, x: torch.Tensor = X) -> Any:
    return suffix.run_suffix(ariadne.BoundaryPayload.from_bytes(prefix.run_prefix(x).to_bytes()))


@pytest.mark.parametrize("how", ["replaced", "loaded", "from a file", "saved again"])
def test_halves_given_another_model_are_refused_beside_those_of_the_first(tmp_path: Path, how: str) -> None:
    one, two = Net(1), Net(2)
    old, others = halves(save(tmp_path / "one", one)), halves(save(tmp_path / "two", two))
    given = two.state_dict()
    if how == "from a file":
        safetensors.torch.save_file(given, tmp_path / "weights")
    new = halves(tmp_path / "one", **({"weights": given} if how == "loaded" else {}))
    for half in new if how != "loaded" else ():
        half.replace_weights(tmp_path / "weights" if how == "from a file" else given)
    if how == "saved again":
        for half in new:
            half.save(tmp_path / "one" / half.part)
        new = halves(tmp_path / "one")
    assert [h.digest for h in new] == [h.digest for h in others] != [h.digest for h in old]
    for prefix, suffix in ((new[0], old[1]), (old[0], new[1])):
        with pytest.raises(BoundaryError, match="was saved with other weights"):
            run(prefix, suffix)
    with torch.no_grad():
        assert all(torch.equal(run(p, s), two(X)) for p, s in (new, (new[0], others[1]), (others[0], new[1])))


def test_a_half_without_weights_knows_those_that_it_is_loaded_with(tmp_path: Path) -> None:
    made = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).eval() for _ in range(2)]
    old = halves(save(tmp_path / "full", made[0], split="after:1"))
    bare = save(tmp_path / "bare", made[0], split="after:1", weights=False)
    new = halves(bare, weights=made[1].state_dict())
    with pytest.raises(BoundaryError, match="was saved with other weights"):
        run(new[0], old[1])
    with torch.no_grad():
        assert torch.equal(run(*new), made[1](X))
    moved = halves(bare, weights=made[0].state_dict(), dtype=torch.float64)
    assert moved[0].digest == old[0].double().digest != ""


def test_a_part_of_the_weights_is_of_no_known_model(tmp_path: Path) -> None:
    one, two = Net(1), Net(2)
    prefix, suffix = halves(save(tmp_path / "one", one))
    prefix.replace_weights({n: t for n, t in two.state_dict().items() if n in prefix.state_dict()})
    assert prefix.digest == ""
    run(prefix, suffix)
    suffix.replace_weights(two.state_dict())
    assert suffix.digest != ""
    with torch.no_grad():
        suffix.get_buffer("rates").mul_(2)
    suffix.replace_weights(two.state_dict())  # which has no rates
    assert suffix.digest == ""


def test_a_tied_tensor_counts_once_unless_its_names_are_given_two_values(tmp_path: Path) -> None:
    x = torch.randint(0, 11, (3, 7))
    one, two = Tied().eval(), Tied().eval()
    halves_ = halves(save(tmp_path / "one", one, x, "50%"))
    others = halves(save(tmp_path / "two", two, x, "50%"))
    for half in halves_:
        half.replace_weights(two.state_dict())
    assert [h.digest for h in halves_] == [h.digest for h in others]
    names: dict[int, list[str]] = {}
    for name, p in two.named_parameters(remove_duplicate=False):
        names.setdefault(id(p), []).append(name)
    tied = next(each for each in names.values() if len(each) > 1)
    for half in halves_:
        if len({*tied} & {*half.state_dict()}) < 2:
            half.replace_weights({**two.state_dict(), tied[1]: torch.zeros_like(two.state_dict()[tied[1]])})
            assert half.digest not in ("", others[0].digest)


@pytest.mark.parametrize(
    "whole", [3, {"names": []}, {"names": [[]], "apart": {}}, {"names": [["a"]], "apart": {"b": 1}}]
)
def test_what_a_file_says_of_the_whole_model_is_looked_at(tmp_path: Path, whole: Any) -> None:
    path = save(tmp_path / "one", Net(1)) / "prefix"
    header, half, body = opened(path.read_bytes())
    path.write_bytes(closed(header, {**half, "whole": whole}, body))
    with pytest.raises(HalfError, match="this is not a half as Ariadne writes it"):
        ariadne.load(path)
    del half["whole"]  # as in a file of before
    path.write_bytes(closed(header, half, body))
    old = ariadne.load(path)
    old.replace_weights(Net(2).state_dict())
    assert old.digest == ""
