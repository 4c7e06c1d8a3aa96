"""Sizes beside the batch: symbols of one plan where torch's shapes allow, else a plan for each; always what the model gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ariadne
from ariadne import BoundaryPayload, SplitRuntime, SplitSpec, prepare_split
from ariadne.capture import Example
from ariadne.compare import difference
from ariadne.errors import BoundaryError, InputError, SpecError
from ariadne.plan import Size

IMAGE = {"x": {2: "H", 3: "W"}}


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(3, 4, 3, padding=1)


class Swapping(Conv):
    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        return self.c(x).transpose(2, 3).reshape(x.shape[0], 4 * width, height) + height - 2 * width


class Branching(Conv):
    def forward(self, x: Tensor) -> Tensor:
        y = self.c(x)
        return y.relu() if x.shape[2] > 12 else y.tanh()


class OfSquares(Conv):
    def forward(self, x: Tensor) -> Tensor:
        y = self.c(x)
        return y.relu() if x.shape[2] == x.shape[3] else y.tanh()


class AsLargeAsTheBatch(Conv):
    def forward(self, x: Tensor) -> Tensor:
        y = self.c(x)
        return y.relu() if x.shape[2] == x.shape[0] else y * x.shape[2]


class Resizing(nn.Module):
    """Strides, pools, views and interpolations, all with sizes that are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.pool, self.out = nn.Conv2d(3, 4, 5, stride=3), nn.AdaptiveAvgPool2d((3, 3)), nn.Linear(36, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.c(x)
        z = F.interpolate(y, size=(x.shape[2] // 2, x.shape[3]), mode="bilinear")
        return self.out(self.pool(y).flatten(1)), F.max_pool2d(y, 2, ceil_mode=True), z.view(x.shape[0], 4, -1)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.b, self.up = nn.Conv2d(8, 16, 3, padding=1), nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.norm(self.a(x)).relu()
        return self.out(torch.cat([self.up(self.b(F.max_pool2d(a, 2)).relu()), a], 1))


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places, self.out = nn.Embedding(10, 8), nn.Embedding(16, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = (self.words(ids) + self.places(torch.arange(ids.shape[1]))) * mask[:, :, None]
        return self.out((h @ h.transpose(1, 2)).softmax(-1) @ h)


class Counting(Conv):
    def forward(self, x: Tensor) -> Tensor:
        return self.c(x) * torch.tensor([x.shape[2], x.shape[3]]).sum()


class Looping(Conv):
    def forward(self, x: Tensor) -> Tensor:
        y = self.c(x)
        return torch.stack([y[:, :, row].sum(-1) for row in range(x.shape[2])], 1)


def prepared(model: nn.Module, *inputs: Tensor, cut: str = "50%", **options: Any) -> SplitRuntime:
    torch.manual_seed(0)
    options = {"dynamic": IMAGE, **options}
    return prepare_split(model.eval(), inputs, split=SplitSpec(cut, **options))


def images(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def words(batch: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, 10, (batch, length), generator=generator), torch.rand(batch, length, generator=generator)


def same(runtime: SplitRuntime, *inputs: Tensor) -> bool:
    with torch.no_grad():
        whole = runtime.model(*inputs)
    return difference(whole, runtime.run_suffix(runtime.run_prefix(*inputs))) is None


def over_sizes(runtime: SplitRuntime) -> bool:
    """Whether one plan serves them all, apart from those of size 1."""
    return runtime.plan.over == tuple(dict.fromkeys(s.symbol for s in runtime.plan.sizes))


def test_one_plan_serves_every_height_and_width_and_does_not_take_one_for_the_other() -> None:
    runtime = prepared(Swapping(), images(2, 3, 8, 8))  # equal at capture
    assert over_sizes(runtime)
    for sizes in ((2, 3, 8, 8), (2, 3, 9, 7), (2, 3, 7, 9), (5, 3, 3, 2), (4, 3, 4, 4), (3, 3, 3, 3), (1, 3, 5, 6)):
        assert same(runtime, images(*sizes)), sizes
    assert len(runtime.plans) == 1


def test_a_size_of_1_gets_a_plan_of_its_own() -> None:
    runtime = prepared(Swapping(), images(2, 3, 8, 6))
    for sizes in ((2, 3, 1, 6), (2, 3, 8, 1), (1, 3, 1, 1)):
        assert same(runtime, images(*sizes)), sizes
    assert len(runtime.plans) == 4
    assert same(runtime, images(2, 3, 9, 9)), "the first plan serves again"


def test_a_branch_on_a_size_is_a_condition() -> None:
    runtime = prepared(Branching(), images(2, 3, 8, 8))
    assert over_sizes(runtime)
    assert not runtime.plan.unmet({"B": 2, "H": 12, "W": 5})
    assert runtime.plan.unmet({"B": 2, "H": 13, "W": 5})
    for height in (12, 13, 40, 2):
        assert same(runtime, images(3, 3, height, 5)), height
    assert len(runtime.plans) == 2


def test_a_branch_at_the_very_size_of_the_example() -> None:
    runtime = prepared(Branching(), images(2, 3, 12, 9))
    assert over_sizes(runtime)
    assert all(same(runtime, images(2, 3, height, 9)) for height in (12, 13, 11))


def test_squares_that_go_another_way() -> None:
    runtime = prepared(OfSquares(), images(2, 3, 8, 8))
    for sizes in ((8, 8), (9, 9), (8, 9), (9, 8), (6, 7)):
        assert same(runtime, images(2, 3, *sizes)), sizes
    assert len(runtime.plans) == 3, "a plan for each square, one for all others"


class TwiceAsWide(Conv):
    def forward(self, x: Tensor) -> Tensor:
        y = self.c(x)
        return y.relu() * x.shape[3] if 2 * x.shape[2] == x.shape[3] else y.tanh()


def test_one_size_that_is_twice_another() -> None:
    runtime = prepared(TwiceAsWide(), images(2, 3, 7, 14), sizes={"H": (2, 64), "W": (2, 64, 4)})
    for sizes in ((7, 14), (9, 18), (7, 18), (11, 22), (8, 14)):
        assert same(runtime, images(2, 3, *sizes)), sizes


def test_a_size_as_large_as_the_batch() -> None:
    runtime = prepared(AsLargeAsTheBatch(), images(2, 3, 8, 8))
    for sizes in ((8, 3, 8, 8), (4, 3, 4, 9), (9, 3, 8, 8), (2, 3, 2, 2)):
        assert same(runtime, images(*sizes)), sizes


def test_a_size_as_large_as_the_channels() -> None:
    runtime = prepared(Swapping(), images(2, 3, 3, 4))
    assert over_sizes(runtime)
    assert all(same(runtime, images(2, 3, *sizes)) for sizes in ((3, 4), (4, 3), (3, 3), (7, 2)))


def test_sizes_that_are_computed() -> None:
    runtime = prepared(Resizing(), images(2, 3, 32, 32))
    assert over_sizes(runtime)
    for sizes in ((2, 3, 32, 32), (2, 3, 37, 41), (3, 3, 11, 64), (1, 3, 50, 30)):
        assert same(runtime, images(*sizes)), sizes


def test_an_image_that_is_too_small_raises_what_the_model_raises() -> None:
    runtime = prepared(Resizing(), images(2, 3, 32, 32))
    with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
        runtime.run_prefix(images(2, 3, 4, 32))


def test_steps() -> None:
    runtime = prepared(UNet(), images(2, 3, 8, 8), sizes={"H": (4, 64, 4), "W": (4, 64, 4)})
    assert over_sizes(runtime)
    assert all(same(runtime, images(3, 3, *sizes)) for sizes in ((8, 8), (12, 4), (64, 20)))
    assert len(runtime.plans) == 1
    with pytest.raises(InputError, match=r"dim 2 of 'x' is the size H, declared as 4 to 64 in steps of 4; found 10\."):
        runtime.run_prefix(images(2, 3, 10, 8))
    with pytest.raises(InputError, match=r"dim 3 of 'x' is the size W, declared as 4 to 64 in steps of 4; found 68\."):
        runtime.run_prefix(images(2, 3, 8, 68))


def test_steps_that_are_not_declared() -> None:
    runtime = prepared(UNet(), images(2, 3, 32, 32))
    assert over_sizes(runtime)
    assert all(same(runtime, images(3, 3, *sizes)) for sizes in ((8, 8), (34, 6)))
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        runtime.run_suffix(runtime.run_prefix(images(2, 3, 33, 32)))


def test_inputs_share_a_length() -> None:
    runtime = prepared(Language(), *words(2, 8), dynamic={"ids": {1: "L"}, "mask": {1: "L"}})
    assert over_sizes(runtime)
    for batch, length in ((2, 8), (3, 5), (1, 7), (4, 16), (8, 8), (2, 1)):
        assert same(runtime, *words(batch, length)), (batch, length)
    with pytest.raises(InputError, match="dim 1 of 'ids' and dim 1 of 'mask' share the size L; found 6 and 7"):
        runtime.run_prefix(words(2, 6)[0], words(2, 7)[1])


def test_a_length_beyond_the_table_raises_what_the_model_raises() -> None:
    runtime = prepared(Language(), *words(2, 8), dynamic={"ids": {1: "L"}, "mask": {1: "L"}})
    with pytest.raises(IndexError, match="index out of range in self"):
        runtime.run_suffix(runtime.run_prefix(*words(2, 17)))


@pytest.mark.parametrize("kind", [Counting, Looping])
def test_where_no_symbol_serves_each_size_has_its_plan(kind: type[nn.Module]) -> None:
    runtime = prepared(kind(), images(2, 3, 6, 5))
    assert runtime.plan.over == ()
    assert "symbolic in H, W" in dict(runtime.plan.not_captured_by)
    assert all(same(runtime, images(3, 3, *sizes)) for sizes in ((6, 5), (7, 5), (6, 5), (5, 7)))
    assert len(runtime.plans) == 3
    with pytest.raises(InputError, match="What may change is the batch, and what SplitSpec"):
        runtime.run_prefix(images(2, 4, 6, 5))


def test_training_steps_at_many_sizes() -> None:
    torch.manual_seed(0)
    whole, half = UNet(), UNet()
    half.load_state_dict(whole.state_dict())
    spec = SplitSpec("after:a", dynamic=IMAGE, sizes={"H": (4, 64, 4), "W": (4, 64, 4)}, trainable=True)
    runtime = prepare_split(half.train(), (images(2, 3, 8, 8),), split=spec)
    mine, theirs = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (half, whole.train()))
    for sizes in ((2, 3, 8, 8), (4, 3, 12, 8), (3, 3, 8, 16), (2, 3, 16, 16)):
        x = images(*sizes)
        theirs.zero_grad()
        (expected := whole(x).square().mean()).backward()
        theirs.step()
        mine.zero_grad()
        boundary = runtime.run_training_prefix(x)
        loss, gradients = runtime.train_suffix(boundary, None, loss_fn=lambda out, _: out.square().mean())
        runtime.backward_prefix(boundary, gradients)
        mine.step()
        assert torch.equal(loss, expected)
        assert difference(whole.state_dict(), half.state_dict()) is None
    assert len(runtime.plans) == 1


@pytest.mark.parametrize("mode", ["generated_eager", "debug_interpreter"])
def test_every_cut_serves_every_size(mode: Any) -> None:
    runtime = prepared(Resizing(), images(2, 3, 32, 32))
    for cut in (c for c in runtime.candidates if c.safe):
        again = runtime.resplit(cut, mode=mode)
        assert same(again, images(3, 3, 20, 47)), cut.split_id
        # Before 2.13, torch asks of a resize by which strides it is made, and these sizes answer otherwise.
        assert len(again.plans) == 1 + (torch.__version__ < "2.13")


def test_boundaries_travel_at_every_size() -> None:
    runtime = prepared(Resizing(), images(2, 3, 32, 32), sizes={"H": (16, 64), "W": (16, 64)})
    x = images(3, 3, 20, 47)
    boundary = BoundaryPayload.from_bytes(runtime.run_prefix(x).to_bytes())
    with torch.no_grad():
        assert difference(runtime.model(x), runtime.run_suffix(boundary)) is None


def test_a_boundary_of_a_size_that_is_not_served_is_refused() -> None:
    runtime = prepared(Swapping(), images(2, 3, 32, 32), sizes={"H": (16, 64), "W": (16, 64)}, cut="after:c")
    boundary = runtime.run_prefix(images(2, 3, 20, 47))
    raw = tuple(images(2, 4, 100, 47) if isinstance(v, Tensor) else 100 if v == 20 else v for v in boundary.raw)
    lie = BoundaryPayload(boundary.split_id, boundary.plan_signature, 2, (*boundary.labels,), raw)
    with pytest.raises(BoundaryError, match="the boundary's size H is 100; the suffix serves 16 to 64"):
        runtime.run_suffix(lie)


def test_halves_know_the_sizes(tmp_path: Any) -> None:
    runtime = prepared(Branching(), images(2, 3, 8, 8), sizes={"H": (4, 64), "W": (4, 64)}, cut="after:c")
    for side in ("prefix", "suffix"):
        runtime.save(tmp_path / side, side=side)
    prefix, suffix = (ariadne.load(tmp_path / side) for side in ("prefix", "suffix"))
    x = images(3, 3, 12, 7)
    with torch.no_grad():
        assert torch.equal(runtime.model(x), suffix(prefix(x)))
    with pytest.raises(InputError, match="no plan in this half's file serves batch 3, H 13, W 7 without gradients"):
        prefix(images(3, 3, 13, 7))
    with pytest.raises(InputError, match="dim 2 of 'x' is the size H, declared as 4 to 64; found 65"):
        prefix(images(3, 3, 65, 7))


def test_the_plan_says_what_it_serves() -> None:
    runtime = prepared(Branching(), images(2, 3, 8, 8), sizes={"H": (4, 64), "W": (4, 8, 2)})
    assert "# size H in 4 to 64\n# size W in 4 to 8 in steps of 2\n# size where not (H > 12)\n" in str(runtime.plan)
    assert runtime.cache_key.non_batch_shapes == (("B", 3, "H", "W"),)
    assert runtime.plan.to_json()["sizes"][0] == [0, 2, "H", 4, 65, 1]
    assert runtime.plan.signature != prepared(Branching(), images(2, 3, 8, 8)).plan.signature


def test_weights_are_those_of_the_examples_sizes() -> None:
    fixed, free = (
        prepared(Branching(), images(2, 3, 8, 6), cut="after:c", dynamic=dynamic) for dynamic in (None, IMAGE)
    )
    assert free.candidate.boundary_bytes == fixed.candidate.boundary_bytes == 4 * 8 * 6 * 4


def test_a_dim_0_that_is_as_large_as_the_batch_by_accident() -> None:
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Linear(4, 4)

        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            return self.f(x)[:, None] + places[None, :, None]

    runtime = prepared(Places(), images(3, 4), images(3), dynamic={"places": {0: "N"}})
    assert over_sizes(runtime)
    assert all(same(runtime, images(batch, 4), images(n)) for batch, n in ((3, 3), (2, 7), (5, 2), (4, 1)))


def test_nested_inputs_go_by_their_path() -> None:
    class Nested(Conv):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return self.c(batch["image"]).flatten(2)

    torch.manual_seed(0)
    given = {"image": images(2, 3, 8, 8)}
    runtime = prepare_split(
        Nested().eval(), (given,), split=SplitSpec("after:c", dynamic={"batch_image": {2: "H"}}, sizes={"H": (2, 99)})
    )
    other = {"image": images(5, 3, 11, 8)}
    with torch.no_grad():
        assert torch.equal(runtime.model(other), runtime.run_suffix(runtime.run_prefix(other)))
    assert len(runtime.plans) == 1


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"dynamic": {"x": ["H"]}}, "dynamic says which sizes may change"),
        ({"dynamic": {"x": {-1: "H"}}}, "dynamic says which sizes may change"),
        ({"dynamic": {"x": {2: "B"}}}, "dynamic calls a size by a Python identifier such as 'H'"),
        ({"dynamic": {"x": {2: "max"}}}, "dynamic calls a size by a Python identifier such as 'H'"),
        ({"dynamic": {"x": {2: "H"}}, "sizes": {"W": (1, 2)}}, "sizes has a range for 'W'"),
        ({"sizes": {"W": (1, 2)}}, "sizes has a range for 'W'"),
        ({"dynamic": {"x": {2: "H"}}, "sizes": {"H": (8, 4)}}, r"sizes\['H'\] must be \(smallest, largest\)"),
        ({"dynamic": {"x": {2: "H"}}, "sizes": {"H": (8, 64, 0)}}, r"sizes\['H'\] must be \(smallest, largest\)"),
        ({"dynamic": {"y": {2: "H"}}}, "dynamic names an input 'y'; the tensors that forward is given are x"),
        ({"dynamic": {"x": {4: "H"}}}, "dynamic names dim 4 of 'x', which has dims 0 to 3"),
        ({"dynamic": {"x": {0: "H"}}}, "dim 0 of 'x', the first input, is the batch"),
    ],
)
def test_what_can_not_be_declared(options: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told):
        prepared(Swapping(), images(2, 3, 8, 8), **{"dynamic": None, **options})


def test_an_example_outside_of_its_range_is_refused() -> None:
    with pytest.raises(InputError, match="declared as 16 to 64; found 8"):
        prepared(Swapping(), images(2, 3, 8, 8), sizes={"H": (16, 64)})


def test_an_example_of_other_sizes_keeps_its_layout_and_what_is_one_tensor() -> None:
    laid = images(2, 3, 8, 6).to(memory_format=torch.channels_last)
    size = Size(0, 2, "H", range(1, 99), "x")
    other = Example.of((laid, laid), {}, [size]).of_sizes({"H": 19})
    assert other.leaves[0] is other.leaves[1]
    assert other.leaves[0].shape == (2, 3, 19, 6)
    assert other.leaves[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(
        other.leaves[0], laid[:, :, [*(i for i in range(3) for _ in range(3)), *sorted([*range(3, 8)] * 2)]]
    )


def test_offsets_of_another_size_rise_as_those_of_the_example() -> None:
    """Of bags that end before they begin torch leaves the rows unwritten, and no two runs of the model are the same."""
    ids, offsets = torch.arange(6), torch.tensor([0, 3])
    sizes = [Size(0, 0, "M", range(3, 60), "ids"), Size(1, 0, "N", range(1, 20), "offsets")]
    example = Example.of((ids, offsets), {}, sizes, along={0: None, 1: None})
    for n in (1, 2, 3, 7):
        invented = example.of_sizes({"M": 9, "N": n}).leaves[1].tolist()
        assert (invented[0], invented, len(invented)) == (0, sorted(invented), n)
