"""A graph before the cut, the model's own Python after it: equal to the model, the prefix also from a file."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ariadne
from ariadne import BoundaryPayload, MixedSplit, SplitRuntime, SplitSpec, prepare_split
from ariadne.compare import difference
from ariadne.errors import HalfError, InputError, SpecError, UnsupportedError, VerificationError
from ariadne.stopped import noted
from ariadne.stopped.gate import Awaited
from ariadne.stopped.mixed import up_to

X = torch.linspace(-1, 1, 12).view(3, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.middle, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.norm, self.calls = nn.BatchNorm1d(8), 0

    def forward(self, x: Tensor) -> Tensor:
        first = self.norm(self.encoder(x)).relu()
        h = self.middle(first)
        self.calls += 1
        return self.head(h + first * len(x) if h.sum() > 0 else h - first)  # type: ignore[no-any-return]


def mixed(net: nn.Module, **options: Any) -> MixedSplit:
    spec = SplitSpec("after:middle", max_paths=1, **options)
    made = prepare_split(net, (X,), split=spec, fallback="python-suffix")
    assert isinstance(made, MixedSplit)
    return made


def total(out: Tensor, _: Any = None) -> Tensor:
    return (out * torch.arange(out.numel()).view(out.shape).cos()).sum()


@pytest.mark.parametrize("batch", [3, 5])
def test_it_gives_what_the_model_gives_at_other_batches_from_bytes_and_from_a_file(batch: int, tmp_path: Path) -> None:
    net = Net().eval()
    runtime = mixed(net)
    runtime.save(tmp_path / "edge.safetensors", side="prefix")
    half = ariadne.load(tmp_path / "edge.safetensors")
    for scale in (1.0, -4.0):
        x = scale * torch.randn(batch, 4)
        with torch.no_grad():
            theirs = net(x)
        calls = net.calls
        boundary = runtime.run_prefix(x)
        for one in (boundary, boundary, BoundaryPayload.from_bytes(half.run_prefix(x).to_bytes())):
            assert torch.equal(theirs, runtime.run_suffix(one))
        assert net.calls == calls + 3  # counted after the cut


def test_a_prefix_runs_while_another_thread_waits_for_the_cut_in_the_suffix() -> None:
    net = Net().eval()
    runtime = mixed(net)
    awaited = Awaited(runtime.python.module, 1, lambda output: output)  # which stands on the module meanwhile
    try:
        boundary = BoundaryPayload.from_bytes(runtime.run_prefix(X).to_bytes())
    finally:
        awaited.close()
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(boundary), net(X))


class Draws(Net):
    """Draws before the cut, where `early`, and after it."""

    early = False

    def forward(self, x: Tensor) -> Tensor:
        if self.early:
            x = x * random.random()
        return super().forward(x) + 0 * random.random()


def test_what_another_thread_draws_meanwhile_is_not_taken_for_forwards(monkeypatch: pytest.MonkeyPatch) -> None:
    net, over, finish = Draws().eval(), threading.Event(), noted.Noting.finish
    runtime = mixed(net)

    def draws(self: noted.Noting, output: Any) -> Any:
        random.random()  # as another thread may, until forward reaches the cut
        return finish(self, output)

    monkeypatch.setattr(noted.Noting, "finish", draws)
    other = threading.Thread(target=over.wait)
    other.start()
    try:
        x = torch.cat([X, X])
        with torch.no_grad():
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), net(x))
        net.early = True
        with pytest.raises(UnsupportedError, match="it changes 'random' before it"):
            runtime._before(4, False)
    finally:
        over.set()
        other.join()


@pytest.mark.parametrize("sent", [False, True])
def test_it_trains_as_the_model_does(sent: bool) -> None:
    net, twin = Net(), Net()
    runtime = mixed(net, trainable=True)
    ours = [torch.optim.AdamW(ps, lr=0.01) for ps in (runtime.prefix_parameters(), runtime.suffix_parameters())]
    theirs = torch.optim.AdamW(twin.parameters(), lr=0.01)
    for x in (X, X + 0.3, X * 2):
        theirs.zero_grad()
        loss = total(twin(x))
        loss.backward()
        theirs.step()
        boundary = runtime.run_training_prefix(x)
        payload = BoundaryPayload.from_bytes(boundary.to_bytes()) if sent else boundary
        found, gradients = runtime.train_suffix(payload, loss_fn=total, optimizer=ours[1])
        runtime.backward_prefix(boundary, gradients, optimizer=ours[0])
        assert torch.equal(loss.detach(), found)
        assert difference(twin.state_dict(), net.state_dict()) is None
    assert runtime.shared_parameters() == []
    assert net.calls == twin.calls


def test_a_model_that_a_graph_holds_is_a_graph_on_both_sides() -> None:
    found = prepare_split(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (X,), split="after:0", fallback="python-suffix")
    assert isinstance(found, SplitRuntime)


def test_the_suffix_has_no_file_and_what_it_has_not_is_named(tmp_path: Path) -> None:
    runtime = mixed(Net().eval())
    with pytest.raises(HalfError, match="runs the model's own Python"):
        runtime.save(tmp_path / "x.safetensors", side="suffix")
    with pytest.raises(SpecError, match="this split has no 'suffix_source'"):
        _ = runtime.suffix_source
    assert "encoder" in runtime.prefix_source
    assert repr(runtime).startswith("MixedSplit(Net, after:middle")
    with pytest.raises(SpecError, match="leave dynamic out"):
        mixed(Net().eval(), dynamic={"x": {1: "W"}})


def test_a_prefix_that_can_not_be_a_graph_is_refused() -> None:
    class Counts(Net):
        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            h = self.middle(self.encoder(x))
            return self.head(h * self.calls if h.sum() > 0 else h)  # type: ignore[no-any-return]

    class Reads(Net):
        def forward(self, x: Tensor) -> Tensor:
            h = self.middle(self.encoder(x)[: int((x > 0).sum())])
            return self.head(h + 1 if h.sum() > 0 else h)  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedError, match=r"can't be captured up to the cut: it changes 'calls' before it"):
        mixed(Counts().eval())
    runtime = mixed(Reads().eval())
    boundary = runtime.run_prefix(X.repeat(2, 1))
    with pytest.raises(UnsupportedError, match="reads numbers out of a tensor"):
        runtime.run_suffix(boundary)


def test_another_cut_is_another_split() -> None:
    net = Net().eval()
    runtime = mixed(net).resplit("after:norm")
    with torch.no_grad():
        assert torch.equal(net(X), runtime.run_suffix(runtime.run_prefix(X)))


def test_a_crossing_value_in_anothers_place_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: of what a place in Python makes, the first is taken for all."""
    monkeypatch.setattr(noted, "place_of_call", lambda depth: None)
    with pytest.raises(
        (VerificationError, UnsupportedError), match=r"differs|in another way where forward is captured"
    ):
        mixed(Net().eval())


@pytest.mark.zoo
@pytest.mark.parametrize(
    ("name", "at"),
    [
        pytest.param("faster", "after:backbone", marks=pytest.mark.variants),
        pytest.param("retina", "after:backbone.fpn.layer_blocks.0", marks=pytest.mark.variants),
    ],
)
def test_a_detectors_prefix_is_a_file_and_its_boxes_are_python(name: str, at: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = getattr(pytest.importorskip("conformance.unit.stopped.detectors"), name)().eval()
    images = [torch.rand(3, 40, 60), torch.rand(3, 50, 50)]
    runtime = prepare_split(model, (images,), split=at, fallback="python-suffix")
    assert isinstance(runtime, MixedSplit)
    runtime.save(tmp_path / "edge.safetensors", side="prefix")
    half, holder = ariadne.load(tmp_path / "edge.safetensors"), getattr(model, "roi_heads", model)
    counts = set()
    for threshold in (0.0, 2.0):
        holder.score_thresh = threshold
        images = [torch.rand_like(image) for image in images]
        with torch.no_grad():
            theirs = model(images)
        payload = BoundaryPayload.from_bytes(half.run_prefix(images).to_bytes())
        assert difference(theirs, runtime.run_suffix(payload)) is None
        counts |= {len(found["boxes"]) for found in theirs}
        if "layer_blocks" in at:
            assert (
                len(payload.tensors) == 3
            )  # of a pyramid of four or five: what is made of the last follows after the cut
    assert {0, 5} <= counts


class Spectrum(Net):
    """The gradient of what crosses has a stride of 2, which the sum of the bias' gradient follows."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.fft(self.middle(x))
        self.calls += 1
        return self.head(z.real)  # type: ignore[no-any-return]


def test_gradients_cross_in_the_layout_of_the_whole_model() -> None:
    net, twin = Spectrum(), Spectrum()
    net.middle, twin.middle = nn.Linear(4, 8), nn.Linear(4, 8)
    twin.load_state_dict(net.state_dict())
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    total(twin(x)).backward()
    split = mixed(net)
    boundary = split.run_training_prefix(x)
    _, gradients = split.train_suffix(boundary, loss_fn=total)
    split.backward_prefix(boundary, gradients)
    assert [g.stride() for g in gradients.values() if g is not None] == [(16, 2)]
    for name, p in net.named_parameters():
        assert difference(p.grad, twin.get_parameter(name).grad) is None, name


def test_a_tensor_for_the_suffix_that_the_capture_makes_elsewhere_is_refused() -> None:
    place = test_gradients_cross_in_the_layout_of_the_whole_model.__code__, 0
    prefix = up_to(Net(), "middle", 1, [("call", 0, 0)], {("call", 0, 0): (place, 0)})
    with pytest.raises(UnsupportedError, match="can't be captured up to the cut: a tensor from before it"):
        prefix(X)


class Pyramid(nn.Module):
    """Three tensors made at one place: at the cut Python holds the second and the third, and a graph the first, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.calls = nn.ModuleList(nn.Linear(4, 4) for _ in range(3)), 0
        self.middle, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        levels = {}
        for i, block in enumerate(self.blocks):
            x = block(x).relu()
            if i == 1:
                levels[i] = x
        h = self.middle(x)
        self.calls += 1
        return self.head(h + levels[1])  # type: ignore[no-any-return]


def test_what_a_graph_alone_holds_does_not_cross_in_training() -> None:
    net, twin = Pyramid(), Pyramid()
    split = mixed(net, trainable=True)
    assert len(split.crossing) == 2
    total(twin(X)).backward()
    boundary = split.run_training_prefix(X)
    _, gradients = split.train_suffix(boundary, loss_fn=total)
    split.backward_prefix(boundary, gradients)
    for name, p in net.named_parameters():
        assert difference(p.grad, twin.get_parameter(name).grad) is None, name


class OfAPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, pair: Any = None) -> torch.Tensor:
        h = self.a(x)
        y: torch.Tensor = self.b(h * float(h.detach().sum()))
        return y if pair is None else y + 1  # which the suffix asks of the example's


def test_a_call_of_another_structure_is_refused() -> None:
    x = torch.randn(2, 4)
    spec = SplitSpec("after:a", max_paths=1)
    split = prepare_split(OfAPair().eval(), (x, (x, x)), split=spec, fallback="python-suffix")
    with pytest.raises(InputError, match=r"another structure than at capture.*or with fallback='python'"):
        split.run_prefix(x, None)


class OfKeys(nn.Module):
    """Takes tensors in a dict, and asks after the cut how many; Python draws there."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, past: dict[str, torch.Tensor]) -> torch.Tensor:
        for i, t in enumerate(past.values()):
            x = x + t * (i + 1)
        out: torch.Tensor = self.b(self.a(x)) * len(past) * (1 + 0 * random.random())
        return out


@pytest.mark.parametrize("keys", ["vk", "kvw", "k"])
def test_a_call_with_other_keys_is_refused(keys: str) -> None:
    x = torch.randn(2, 4)
    spec = SplitSpec("after:a", max_paths=1)
    split = prepare_split(OfKeys().eval(), (x, {"k": x, "v": 2 * x}), split=spec, fallback="python-suffix")
    with pytest.raises(InputError, match="another structure than at capture"):
        split.run_suffix(split.run_prefix(x, dict.fromkeys(keys, x)))
