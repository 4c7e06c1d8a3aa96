"""Parts of a model in one process: equal to the model, forward and backward, under its own names."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import prepare_split, tree
from ariadne.boundary import BoundaryPayload
from ariadne.compare import difference
from ariadne.errors import AriadneError, BatchError, FrontierError, HalfError, SpecError, TrainingError
from ariadne.pipeline import Pipeline, draws, load_part, prepare_pipeline
from ariadne.pipeline.message import Message, Room, packed
from ariadne.pipeline.micro import merged
from conformance.unit.pipeline.nets import CASES, SkipOverTwo, TiedEmbedding
from conformance.unit.pipeline.ranks import made


@pytest.mark.parametrize("parts", [2, 3, 5])
@pytest.mark.parametrize("case", CASES)
def test_parts_in_one_process_equal_the_model_forward_and_backward(case: str, parts: int) -> None:
    net, pipeline = made(case, parts)
    whole = copy.deepcopy(net)
    for batch in (4, 3, 2):
        g = torch.Generator().manual_seed(batch)
        inputs, target = CASES[case].inputs(batch, g), CASES[case].target(batch, g)
        torch.manual_seed(5)
        output, flights = pipeline.forward(*inputs)
        pipeline.backward(flights, CASES[case].loss(output, target))
        torch.manual_seed(5)
        expected = whole(*inputs)
        CASES[case].loss(expected, target).backward()
        assert difference(bare(expected), bare(output)) is None
        for (name, p), q in zip(whole.named_parameters(), net.parameters(), strict=True):
            assert difference(p.grad, q.grad) is None, name
        assert difference(whole.state_dict(), net.state_dict()) is None


def bare(value: Any) -> Any:
    return tree.map_leaves(lambda t: t.detach() if isinstance(t, torch.Tensor) else t, value)


def test_values_that_skip_a_part_pass_through_it_once() -> None:
    cuts = ["after:layers.2", "after:layers.4", "after:layers.6"]
    pipeline = prepare_pipeline(SkipOverTwo(), (torch.randn(4, 6),), boundaries=cuts)
    boundaries = [pipeline.parts[0](torch.randn(4, 6))]
    for part in pipeline.parts[1:-1]:
        boundaries.append(part(boundaries[-1]))
    assert [len(b.labels) for b in boundaries] == [3, 3, 3]
    assert len({*boundaries[0].labels} & {*boundaries[1].labels} & {*boundaries[2].labels}) == 2


def test_parts_keep_the_models_names_and_share_its_tensors() -> None:
    net, pipeline = made("norm", 3)
    names = [name for part in pipeline.parts for name in part.state_dict()]
    assert sorted(names) == sorted(net.state_dict())
    for part in pipeline.parts:
        for name, p in part.named_parameters():
            assert p is net.get_parameter(name)


def test_a_tied_parameter_has_its_first_name_in_each_part_that_uses_it() -> None:
    net, pipeline = made("tied", 3)
    assert pipeline.tied == {"embed.weight": (0, 2)}
    assert isinstance(net, TiedEmbedding)
    assert pipeline.parts[2].tied["embed.weight"] is net.embed.weight
    assert pipeline.parts[0].owned == {"embed.weight"}
    assert not pipeline.parts[2].owned


def test_boundaries_are_cut_where_they_are_named() -> None:
    torch.manual_seed(0)
    pipeline = prepare_pipeline(SkipOverTwo(), (torch.randn(4, 6),), boundaries=["after:layers.1", "after:layers.5"])
    assert [cut.after for cut in pipeline.cuts] == ["layers.1", "layers.5"]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({}, SpecError, "either parts="),
        ({"parts": 2, "boundaries": ["50%"]}, SpecError, "either parts="),
        ({"parts": 1}, SpecError, "2 or more"),
        ({"parts": True}, SpecError, "2 or more"),
        ({"parts": 400}, FrontierError, "not enough for 400 parts"),
        ({"boundaries": []}, SpecError, "names no cut"),
        ({"boundaries": ["after:layers.5", "after:layers.1"]}, FrontierError, "must ascend"),
        ({"boundaries": ["after:nothing"]}, FrontierError, "calls no module"),
        ({"parts": 2, "draws": "other"}, SpecError, "'whole' or 'seeded'"),
    ],
)
def test_what_can_not_be_cut_so_is_told(options: dict[str, Any], error: type[AriadneError], words: str) -> None:
    with pytest.raises(error, match=words):
        prepare_pipeline(SkipOverTwo(), (torch.randn(4, 6),), **options)


class TwiceCounted(nn.Module):
    """A buffer that two layers write."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.layers[0](x))
        for layer in self.layers[1:]:
            x = layer(x)
        return self.norm(x)


def test_state_that_one_part_writes_and_another_uses_is_refused() -> None:
    with pytest.raises(FrontierError, match=r"norm\..* is written by part 0 and used by part 1"):
        prepare_pipeline(TwiceCounted(), (torch.randn(4, 6),), boundaries=["after:layers.1"])


def test_cuts_that_are_chosen_leave_the_state_of_one_part_to_it() -> None:
    net, x = TwiceCounted(), torch.randn(4, 6)
    whole = copy.deepcopy(net)
    pipeline = prepare_pipeline(net, (x,), parts=2)
    assert [cut.cut for cut in pipeline.cuts] == [1]
    output, flights = pipeline.forward(x)
    pipeline.backward(flights, output.square().mean())
    whole(x).square().mean().backward()
    assert difference(whole.state_dict(), net.state_dict()) is None
    assert difference([p.grad for p in whole.parameters()], [p.grad for p in net.parameters()]) is None
    with pytest.raises(FrontierError, match="has 1 cut"):
        prepare_pipeline(net, (x,), parts=3)


def test_a_loss_that_reaches_parameters_of_other_parts_is_refused() -> None:
    net, pipeline = made("skip", 2)
    output, flights = pipeline.forward(torch.randn(4, 6))
    loss = output.square().mean() + sum(p.square().sum() for p in net.parameters())
    with pytest.raises(TrainingError, match="reaches parameters that only other parts use"):
        pipeline.backward(flights, loss)


def test_a_batch_smaller_than_the_number_of_micro_batches_is_told() -> None:
    _, pipeline = made("skip", 2)
    with pytest.raises(BatchError, match="a batch of 3 can't be parted in 4 micro-batches"):
        pipeline.parted((torch.randn(3, 6),), {}, 4)


def test_inputs_are_parted_along_the_batch_alone_and_outputs_joined_again() -> None:
    _, pipeline = made("integers", 2)
    micro = pipeline.parted((torch.arange(42.0).view(7, 6), 0.5), {}, 3)
    assert [args[0].shape[0] for args, _ in micro] == [3, 2, 2]
    assert {args[1] for args, _ in micro} == {0.5}
    out = merged([{"y": args[0], "n": 3, "loss": args[0].sum()} for args, _ in micro], [3, 2, 2])
    assert torch.equal(out["y"], torch.arange(42.0).view(7, 6))
    assert out["n"] == 3
    assert len(out["loss"]) == 3


def test_inputs_are_parted_and_outputs_joined_along_the_dim_that_is_the_batch() -> None:
    net, pipeline = made("time_first", 2)
    x, scale = torch.randn(4, 12, 6), torch.rand(6)
    micro = pipeline.parted((x, scale), {}, 3)
    assert [args[0].shape for args, _ in micro] == [(4, 4, 6)] * 3
    with torch.no_grad():
        outputs = [pipeline(*args) for args, _ in micro]
        whole = [net(*args) for args, _ in micro]
    out = merged(outputs, [4, 4, 4], [pipeline.plan])
    assert torch.equal(out["h"], torch.cat([o["h"] for o in whole], 1))
    assert torch.equal(out["means"], torch.cat([o["means"] for o in whole], 1))
    assert len(out["table"]) == 3, "a table has no batch, though it has as many rows as a micro-batch"
    with pytest.raises(SpecError, match="these inputs have another form than the example"):
        pipeline.parted((x,), {"scale": scale}, 3)


class Pairs(nn.Module):
    """How near each sample is to each other one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.second(self.first(x).tanh())
        return h @ h.t(), h.repeat(2, 1)


@pytest.mark.parametrize("sizes", [[4, 4], [4, 3]])
def test_outputs_of_all_pairs_of_samples_are_listed_not_joined(sizes: list[int]) -> None:
    torch.manual_seed(0)
    pipeline = prepare_pipeline(Pairs(), (torch.randn(4, 6),), parts=2)
    outputs = [pipeline(torch.randn(n, 6)) for n in sizes]
    near, twice = merged(outputs, sizes, [pipeline.plan])
    assert [t.shape[1] for t in near] == sizes
    assert len(twice) == 2


def test_a_boundary_of_another_cut_is_refused() -> None:
    _, pipeline = made("skip", 4)
    boundary = pipeline.parts[0](torch.randn(4, 6))
    with pytest.raises(AriadneError, match="made by another split"):
        pipeline.parts[2](boundary)
    with pytest.raises(SpecError, match="takes the boundary that part 0 gave"):
        pipeline.parts[1](torch.randn(4, 6))


TENSORS = {
    "plain": lambda: torch.randn(3, 4),
    "channels last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(3, 4).t(),
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "with gaps": lambda: torch.randn(3, 8)[:, ::2],
    "at an odd address": lambda: torch.randn(13)[1:],
    "empty": lambda: torch.randn(0, 4),
    "a number": lambda: torch.tensor(3.0),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "bool": lambda: torch.tensor([True, False]),
    "bytes": lambda: torch.arange(7, dtype=torch.uint8)[3:],
    "half": lambda: torch.randn(5, dtype=torch.bfloat16),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_message_lays_tensors_out_as_they_were(kind: str) -> None:
    t = TENSORS[kind]()
    header, memory = packed(Message(("beside it", None, 3, 0.5), {"t": t}))
    room = Room(header, torch.device("cpu"))
    for into, data in zip(room.memory, memory, strict=True):
        into.copy_(data)
    found = room.message()
    assert found.data == ("beside it", None, 3, 0.5)
    assert difference(t.resolve_conj(), found.tensors["t"]) is None
    if t.numel() and kind != "conjugate":
        assert found.tensors["t"].data_ptr() % 64 == t.data_ptr() % 64


def test_what_draws_is_foreseen_or_seeded() -> None:
    _, pipeline = made("dropout", 3)
    assert pipeline.draws == "whole"
    _, pipeline = made("dropout", 3, draws="seeded")
    assert pipeline.draws == "seeded"
    _, pipeline = made("skip", 3, draws="seeded")
    assert pipeline.draws == "seeded"  # a loss may draw, where nothing else does


class Attention(nn.Module):
    """Attention over four rows, which could drop some, and does not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.view(x.shape[0], 1, 4, -1)
        return nn.functional.scaled_dot_product_attention(rows, rows, rows).view(x.shape)


def test_what_draws_at_probability_0_is_not_computed_to_be_foreseen() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), Attention(), nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 6))
    pipeline = prepare_pipeline(net, (torch.randn(4, 6),), boundaries=["after:0"])
    plan, nodes = pipeline.drawing(pipeline.plan.signature)
    before = torch.get_rng_state()
    found = draws.moving(plan, nodes, 4, draws.Generators(torch.device("cpu")))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(nodes) == 2
    assert found == nodes[1:]


class Poisson(nn.Module):
    """Draws more where numbers are larger."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).sigmoid() * 30
        return x + torch.poisson(x.detach())


def test_draws_that_follow_from_data_get_a_seed_for_each_micro_batch() -> None:
    torch.manual_seed(0)
    assert prepare_pipeline(Poisson(), (torch.randn(4, 6),), parts=2).draws == "seeded"


def test_a_part_is_saved_and_loaded_without_the_model(tmp_path: Path) -> None:
    net, pipeline = made("tied", 3)
    for i in range(3):
        pipeline.save_part(i, tmp_path / f"{i}.safetensors")
    parts = [load_part(tmp_path / f"{i}.safetensors") for i in range(3)]
    tokens = torch.randint(11, (5, 3))
    value: Any = tokens
    for part in parts:
        value = part(value)
        assert part.index == 2 or isinstance(value, BoundaryPayload)
    with torch.no_grad():
        assert difference(net(tokens), value) is None
    assert parts[2].shared == {"embed.weight": (0, 2)}
    assert "embed.weight" in parts[2].state_dict()
    assert not {*parts[1].state_dict()} & {*parts[0].state_dict()}


def test_a_half_is_not_taken_for_a_part(tmp_path: Path) -> None:
    prepare_split(SkipOverTwo(), (torch.randn(4, 6),), split="50%").save(tmp_path / "half", side="suffix")
    with pytest.raises(HalfError, match="not a part of a pipeline"):
        load_part(tmp_path / "half")
    _, pipeline = made("skip", 2)
    with pytest.raises(SpecError, match="there is no part 2"):
        pipeline.save_part(2, tmp_path / "part")


def test_a_pipeline_needs_torch_distributed_for_stages_alone() -> None:
    _, pipeline = made("skip", 2)
    assert isinstance(pipeline, Pipeline)
    assert len(pipeline) == 2
    with pytest.raises(SpecError, match="init_process_group"):
        pipeline.schedule("GPipe", microbatches=2)


class NamedLikeAPart(nn.Module):
    """Its layers are called as attributes of a part are."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.index, self.tied = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(torch.relu(self.tied(self.shared(torch.tanh(self.index(self.shared(x)))))))


def test_a_models_layers_may_be_called_as_a_parts_attributes_are() -> None:
    net = NamedLikeAPart()
    whole, pipeline, x = copy.deepcopy(net), prepare_pipeline(net, (torch.randn(4, 6),), parts=3), torch.randn(3, 6)
    output, flights = pipeline.forward(x)
    pipeline.backward(flights, output.sum())
    whole(x).sum().backward()
    assert pipeline.parts[0].get_parameter("shared.weight") is net.shared.weight
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(whole.parameters(), net.parameters(), strict=True))


class OtherInEval(nn.Module):
    """Without gradients it is another plan, which draws as the one with gradients does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x) if torch.is_grad_enabled() else self.a(x) * 1
        return self.b(nn.functional.dropout(torch.relu(h), 0.5))


def test_what_draws_and_is_another_plan_without_gradients_is_prepared() -> None:
    net = OtherInEval()
    pipeline, x = prepare_pipeline(net, (torch.randn(4, 6),), parts=2), torch.randn(3, 6)
    torch.manual_seed(1)
    found = pipeline(x)
    torch.manual_seed(1)
    with torch.no_grad():
        assert torch.equal(found, net(x))


class Rounded(torch.autograd.Function):
    """Draws nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Jittered(Rounded):
    """Draws."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class WithFunction(nn.Module):
    def __init__(self, function: type[Rounded]) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Linear(6, 6), nn.Linear(6, 6), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.function.apply(torch.tanh(self.a(x)))))


@pytest.mark.parametrize(("function", "rule"), [(Rounded, "whole"), (Jittered, "seeded")])
def test_a_function_of_pythons_that_draws_nothing_changes_no_rule(function: type[Rounded], rule: str) -> None:
    assert prepare_pipeline(WithFunction(function), (torch.randn(4, 6),), boundaries=["after:a"]).draws == rule


def test_a_weight_of_two_parts_under_autocast_is_refused_with_its_cache_and_equal_without_it() -> None:
    net, pipeline = made("images", 2)
    whole, case = copy.deepcopy(net), CASES["images"]
    g = torch.Generator().manual_seed(3)
    inputs, target = case.inputs(4, g), case.target(4, g)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(TrainingError, match=r"parameter 'depthwise\.bias' once"),
    ):
        pipeline.forward(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        output, flights = pipeline.forward(*inputs)
        pipeline.backward(flights, case.loss(output, target))
        case.loss(whole(*inputs), target).backward()
    for name, p in net.named_parameters():
        assert difference(p.grad, whole.get_parameter(name).grad) is None, name
