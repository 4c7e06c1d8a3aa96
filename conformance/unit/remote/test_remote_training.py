"""Training across two processes: the whole model's bits, each step once, and on from checkpoints."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ariadne
from ariadne.errors import (
    StepError,
)
from conformance.unit.remote_kit import CE, served, whole_losses

SGD = "sgd:lr=0.05,momentum=0.9"


def seeded(i: int) -> torch.Generator:
    return torch.Generator().manual_seed(i)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.more = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.drop = nn.Dropout(0.3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(torch.relu(self.mix(self.embed(tokens))))
        hidden = self.drop(torch.relu(self.more(hidden)))
        return (hidden @ self.embed.weight.t()).flatten(0, 1)


class TiedThrice(Tied):
    """The prefix uses the tied weight twice, the suffix once: three addends, whose order rounds."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.embed(tokens.flip(1)) * 0.3
        hidden = self.drop(torch.relu(self.mix(hidden)))
        return (self.more(hidden) @ self.embed.weight.t()).flatten(0, 1)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm, self.last = (
            nn.Linear(5, 8),
            nn.LSTM(8, 8, 2, dropout=0.4, batch_first=True),
            nn.Linear(8, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.lstm(torch.relu(self.first(x)))[0][:, -1])


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.2), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)),
        *(nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(8 * 16, 10)),
    )


def images(i: int) -> tuple[Any, Any]:
    return torch.randn(6, 3, 8, 8, generator=seeded(i)), torch.randint(0, 10, (6,), generator=seeded(i))


def sequences(i: int) -> tuple[Any, Any]:
    return torch.randn(4, 6, 5, generator=seeded(i)), torch.randint(0, 3, (4,), generator=seeded(i))


def tokens(i: int) -> tuple[Any, Any]:
    return torch.randint(0, 20, (4, 7), generator=seeded(i)), torch.randint(0, 20, (28,), generator=seeded(i))


def saved(model: nn.Module, x: Any, split: str, folder: Path) -> ariadne.Half:
    """Both halves as files in a folder, and the prefix."""
    runtime = ariadne.prepare_split(model.train(), (x,), split=split)
    for side in ("prefix", "suffix"):
        runtime.save(folder / side, side=side)
    return ariadne.load(folder / "prefix", plain=True)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01, betas=(0.8, 0.95))


def same(state: Any, half: nn.Module) -> None:
    mine = half.state_dict()
    assert mine
    assert [n for n, t in mine.items() if not torch.equal(t, state[n])] == []


def suffix_at(folder: Path, remote: ariadne.Remote, optimizer: Any) -> tuple[ariadne.Half, Any]:
    """The server's half and optimizer, as its checkpoint of the present step has them."""
    from ariadne.remote import checkpoint  # noqa: PLC0415 - past the door, to look at what lies on the disk

    half = ariadne.load(folder / "suffix", plain=True)
    own = optimizer(half)
    remote.save()
    checkpoint.restore(folder / "run" / f"{remote.run}-{remote.at:012d}.safetensors", half, own)
    return half, own


CASES: list[tuple[Callable[[], nn.Module], Any, str, str, Any]] = [
    (convolutions, images, "after:3", SGD, sgd),
    (convolutions, images, "after:3", "adamw:lr=0.01,betas=(0.8,0.95)", adamw),
    (Recurrent, sequences, "after:first", SGD, sgd),
    (Tied, tokens, "after:mix", SGD, sgd),
    (TiedThrice, tokens, "after:mix", SGD, sgd),
]
NAMES = ("batchnorm_and_dropout", "adamw", "lstm", "tied", "tied_thrice")


@pytest.mark.parametrize(("make", "batch", "split", "text", "optimizer"), CASES, ids=NAMES)
def test_a_hundred_steps_over_a_wire_are_those_of_the_whole_model(
    tmp_path: Path, make: Any, batch: Any, split: str, text: str, optimizer: Any
) -> None:
    torch.manual_seed(0)
    model = make()
    twin, steps = copy.deepcopy(model).train(), 100
    edge = saved(model, batch(0)[0], split, tmp_path)
    here, one = optimizer(edge), optimizer(twin)
    options = {"optimizer": text, "loss_fn": "cross_entropy", "checkpoints": str(tmp_path / "run")}
    with served(tmp_path / "suffix", **options) as server, ariadne.connect(server.address, edge, timeout=60) as remote:
        torch.manual_seed(7)
        losses = [remote.train_step(batch(i)[0], targets=batch(i)[1], optimizer=here) for i in range(steps)]
        drawn = torch.get_rng_state()
        suffix, there = suffix_at(tmp_path, remote, optimizer)
    torch.manual_seed(7)
    assert all(map(torch.equal, losses, whole_losses(twin, one, batch, steps)))
    assert torch.equal(drawn, torch.get_rng_state())
    names = {id(p): n for n, p in twin.named_parameters()}
    moments = {names[id(p)]: state for p, state in one.state.items()}
    for half, own in ((edge, here), (suffix, there)):
        same(twin.state_dict(), half)
        for name, p in half.named_parameters():
            assert own.state[p].keys() == moments[name].keys()
            assert all(torch.equal(own.state[p][k], v) for k, v in moments[name].items())


@pytest.mark.parametrize(
    ("make", "batch", "split"), [(Recurrent, sequences, "after:first"), (TiedThrice, tokens, "after:mix")]
)
def test_gradients_add_up_over_a_wire_and_are_used_once(tmp_path: Path, make: Any, batch: Any, split: str) -> None:
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model).train()
    edge = saved(model, batch(0)[0], split, tmp_path)
    here, one = sgd(edge), sgd(twin)
    options = {"optimizer": SGD, "loss_fn": "cross_entropy"}
    with served(tmp_path / "suffix", **options) as server, ariadne.connect(server.address, edge, timeout=60) as remote:
        torch.manual_seed(7)
        losses = []
        for i in range(3):
            here.zero_grad()
            for part in (2 * i, 2 * i + 1):
                x, y = batch(part)
                boundary = edge.run_training_prefix(x)
                loss, gradients = remote.train_suffix(boundary, y, accumulate=True)
                remote.backward_prefix(boundary, gradients)
                losses.append(loss)
            here.step()
            remote.step()
        with pytest.raises(StepError, match="no gradients were added up"):
            remote.step()
    torch.manual_seed(7)
    expected = []
    for i in range(3):
        one.zero_grad()
        for part in (2 * i, 2 * i + 1):
            x, y = batch(part)
            expected.append(CE(twin(x), y))
            expected[-1].backward()
        one.step()
    assert all(map(torch.equal, losses, expected))
    same(twin.state_dict(), edge)


class Logits(nn.Module):
    """A language model as a function from tokens to logits, one row for each."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits.flatten(0, 1)


def resnet() -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    return models.resnet18(num_classes=10)


def vit() -> nn.Module:
    models = pytest.importorskip("torchvision.models.vision_transformer")
    return models.VisionTransformer(32, 8, 4, 2, 32, 64, dropout=0.2, attention_dropout=0.1, num_classes=10)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=20, n_positions=16, n_embd=32, n_layer=4, n_head=4)
    return Logits(transformers.GPT2LMHeadModel(config))


def pictures(i: int) -> tuple[Any, Any]:
    return torch.randn(4, 3, 32, 32, generator=seeded(i)), torch.randint(0, 10, (4,), generator=seeded(i))


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "batch", "split"),
    [(resnet, pictures, "after:layer2"), (vit, pictures, "50%"), (gpt2, tokens, "50%")],
    ids=("resnet18", "vit_with_dropout", "gpt2_tied"),
)
@pytest.mark.variants
def test_real_models_train_over_a_wire_for_a_hundred_steps(tmp_path: Path, make: Any, batch: Any, split: str) -> None:
    torch.manual_seed(0)
    model = make()
    twin, steps = copy.deepcopy(model).train(), int(os.environ.get("ARIADNE_REMOTE_STEPS", "100"))
    edge = saved(model, batch(0)[0], split, tmp_path)
    here, one = sgd(edge), sgd(twin)
    options = {"optimizer": SGD, "loss_fn": "cross_entropy", "checkpoints": str(tmp_path / "run")}
    with served(tmp_path / "suffix", **options) as server, ariadne.connect(server.address, edge, timeout=120) as remote:
        torch.manual_seed(7)
        losses = [remote.train_step(batch(i)[0], targets=batch(i)[1], optimizer=here) for i in range(steps)]
        suffix, _ = suffix_at(tmp_path, remote, sgd)
    torch.manual_seed(7)
    assert all(map(torch.equal, losses, whole_losses(twin, one, batch, steps)))
    for half in (edge, suffix):
        same(twin.state_dict(), half)
