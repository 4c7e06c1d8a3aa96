"""Boundaries as users write them: every form is parsed into what it says, and selects the cut that it says."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from ariadne import SplitCandidate, SplitRuntime, SplitSpec, prepare_split
from ariadne.compare import difference
from ariadne.cut import Boundary, parse_boundary
from ariadne.errors import FrontierError, SpecError

names = st.lists(st.text(string.ascii_letters + string.digits + "_", min_size=1), min_size=1).map(".".join)
percents = (
    st.floats(0, 100, exclude_min=True, exclude_max=True).map(lambda p: f"{p:.6f}").filter(lambda p: 0 < float(p) < 100)
)
blanks = st.sampled_from(["", " ", "  "])


class Net(nn.Module):
    """A residual in the middle, a narrow place near each end, and an activation that is called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze, self.widen = nn.Linear(16, 2), nn.Linear(2, 12)
        self.left, self.right = nn.Linear(12, 12), nn.Linear(12, 12)
        self.narrow, self.head = nn.Linear(12, 4), nn.Linear(4, 8)
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(B, 16) -> (B, 8); 13 ops."""
        x = self.act(self.widen(self.squeeze(x)))
        x = x + self.act(self.left(x))
        x = self.act(self.right(x)) + x.tanh()
        return self.head(self.narrow(x)).sigmoid()


X = torch.linspace(-1, 1, 48).reshape(3, 16)


@pytest.fixture(scope="module")
def runtime() -> SplitRuntime:
    torch.manual_seed(0)
    return prepare_split(Net().eval(), (X,), split="50%")


def equals_the_model(split: SplitRuntime) -> bool:
    with torch.no_grad():
        return difference(split.model(X), split.run_suffix(split.run_prefix(X))) is None


# Strings


@given(names, blanks)
def test_after_reads_any_module_path(name: str, blank: str) -> None:
    assert parse_boundary(f"{blank}after:{name}{blank}") == Boundary("after", module=name)


@given(names, st.integers(1, 10**6))
def test_after_reads_any_call_of_a_module(name: str, call: int) -> None:
    assert parse_boundary(f"after:{name}#{call}") == Boundary("after", module=name, call=call)


@given(st.integers(0, 10**9))
def test_cut_reads_any_number(cut: int) -> None:
    assert parse_boundary(f"cut:{cut}") == Boundary("cut", cut=cut)


@given(percents, blanks)
def test_all_ways_to_write_a_percentage_mean_the_same(p: str, blank: str) -> None:
    expected = Boundary("percent", percent=float(p))
    for text in (f"percent:{p}", f"{p}%", f"at:{p}%", f"percent:{p}%"):
        assert parse_boundary(blank + text + blank) == expected


@pytest.mark.parametrize("text", ["percent:50", "50%", "at:50%", "50.0%", "percent: 50"])
def test_fifty_percent_reads_as_fifty(text: str) -> None:
    assert parse_boundary(text) == Boundary("percent", percent=50.0)


def test_auto_reads_as_auto() -> None:
    assert parse_boundary("auto") == Boundary("auto")


@given(st.floats().filter(lambda p: not 0 < p < 100))
def test_no_percentage_outside_the_range_is_read(p: float) -> None:
    for text in (f"percent:{p}", f"{p}%", f"at:{p}%", f"percent:{p:f}"):
        with pytest.raises(SpecError, match=r"must lie between 0 and 100|no boundary reads"):
            parse_boundary(text)


@given(st.one_of(st.text(), st.builds(str.__add__, st.sampled_from(["after:", "cut:", "percent:", "at:"]), st.text())))
@example("cut:²")
@example("cut:" + "1" * 5000)
@example("after:layer#²")
@example("after:layer#" + "1" * 5000)
@example("percent:" + "1" * 5000)
@example("\u0665%")  # an Arabic five
@example("after:#1")
@example("after:layer#1#2")
def test_any_text_is_read_or_refused_as_a_spec_error(text: str) -> None:
    try:
        found = parse_boundary(text)
    except SpecError:
        return
    assert found.kind in ("after", "percent", "auto", "cut")
    assert parse_boundary(text.strip()) == found


# What they select


def test_after_cuts_where_the_module_ends(runtime: SplitRuntime) -> None:
    split = runtime.resplit("after:left")
    assert split.candidate.after == "left"
    assert split.plan.nodes[split.candidate.cut - 1].module == "left"
    assert split.plan.nodes[split.candidate.cut].module != "left"


def test_after_with_a_call_cuts_behind_that_call(runtime: SplitRuntime) -> None:
    cuts = [runtime.resplit(f"after:act#{n}").candidate.cut for n in (1, 2, 3)]
    relus = [i + 1 for i, node in enumerate(runtime.plan.nodes) if node.target == "aten.relu.default"]
    assert cuts == relus
    assert [runtime.candidates[cut - 1].after for cut in cuts] == ["act#1", "act#2", "act#3"]


def test_after_a_container_cuts_behind_its_last_module() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 4), nn.ReLU()), nn.Linear(4, 2))
    split = prepare_split(model, (X,), split="after:0")
    assert split.split_id == "cut:2"
    assert split.candidate.after == "0"


def test_every_cut_is_selected_by_its_number(runtime: SplitRuntime) -> None:
    assert [runtime.resplit(f"cut:{k}").candidate.cut for k in range(1, 13)] == list(range(1, 13))


@given(percent=st.integers(1, 99))
def test_a_percentage_selects_the_cheapest_safe_cut_near_it(runtime: SplitRuntime, percent: int) -> None:
    """Within 5 % of the 13 ops, so among two of them at most; and the nearest where there is none."""
    target = percent / 100 * len(runtime.plan.nodes)
    safe = [c for c in runtime.candidates if c.safe]
    near = [c for c in safe if abs(c.cut - target) <= 0.65]
    found = runtime.resplit(f"{percent}%").candidate
    assert found in (near or safe)
    if near:
        assert found.boundary_bytes == min(c.boundary_bytes for c in near)
    else:
        assert abs(found.cut - target) == min(abs(c.cut - target) for c in safe)


class Blocks(nn.Module):
    """Ten blocks of ten ops, in each a wide part with a residual beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.wide(x).relu().tanh().sigmoid().relu().tanh()
        return (x + self.narrow(y)).tanh().sin()


def test_a_percentage_and_auto_take_the_end_of_a_block_rather_than_the_inside_of_a_layer() -> None:
    split = prepare_split(Blocks(), (X,), split="56%")
    assert len(split.plan.nodes) == 100
    assert split.candidate.after == "blocks.5"  # cut:60, though 56 lies in the middle of it
    assert [split.resplit(text).candidate.after for text in ("52%", "44%", "auto")] == [
        "blocks.4",
        "blocks.3",
        "blocks.0",
    ]
    assert split.candidate.boundary_bytes == 64
    assert split.resplit("cut:56").candidate.boundary_bytes == 64 + 256


def test_a_percentage_passes_over_cuts_that_are_not_safe() -> None:
    split = prepare_split(Overlapping(), (X,), split="25%")
    unsafe = [c.cut for c in split.candidates if not c.safe]
    assert 2 in unsafe  # 25 % of the 8 ops
    assert split.candidate.safe
    assert equals_the_model(split)


class Overlapping(nn.Module):
    """A view and its base cross the second cut, and one is written after it; eight ops."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.first(x)
        view = base.view(-1, 2, 2)
        view.add_(1)
        return (self.last(base).view(-1, 2, 2) + view).relu().tanh()


def best(candidates: tuple[SplitCandidate, ...], cost: Callable[[SplitCandidate], float], share: float) -> set[int]:
    """The cuts of least cost among the safe ones that leave each side its share, found by looking at all."""
    ops = len(candidates) + 1
    inner = {c.cut: cost(c) for c in candidates if c.safe and c.cut >= share * ops and ops - c.cut >= share * ops}
    return {cut for cut, found in inner.items() if found == min(inner.values())}


def test_auto_takes_the_smallest_boundary_that_leaves_each_side_a_tenth_of_the_ops(runtime: SplitRuntime) -> None:
    found = runtime.resplit("auto").candidate
    everywhere = min(c.boundary_bytes for c in runtime.candidates)
    assert runtime.candidates[0].boundary_bytes == everywhere == 8  # after `squeeze`: smaller, but too near the start
    assert found.cut in best(runtime.candidates, lambda c: c.boundary_bytes, 0.1)
    assert found.boundary_bytes == 16  # after `narrow`


@pytest.mark.parametrize(
    ("objective", "cost", "share"),
    [
        ({"boundary_bytes": 1}, lambda c: c.boundary_bytes, 0.1),
        ({"prefix_ops": 1}, lambda c: c.prefix_ops, 0.1),
        ({"suffix_ops": 1}, lambda c: c.suffix_ops, 0.1),
        ({"boundary_bytes": 1, "prefix_ops": 100}, lambda c: c.boundary_bytes + 100 * c.prefix_ops, 0.1),
        ({"min_share": 0.0}, lambda c: c.boundary_bytes, 0.0),
        ({"min_share": 0.4}, lambda c: c.boundary_bytes, 0.4),
        ({"prefix_ops": 1, "max_boundary_bytes": 16}, lambda c: c.prefix_ops + 1e9 * (c.boundary_bytes > 16), 0.1),
    ],
    ids="bytes prefix suffix both anywhere inner limit".split(),
)
def test_an_objective_says_what_auto_weighs(objective: Any, cost: Any, share: float) -> None:
    split = prepare_split(Net().eval(), (X,), split="auto", objective=objective)
    assert split.candidate.cut in best(split.candidates, cost, share)


def test_an_objective_may_be_a_function_of_the_candidate_over_every_safe_cut() -> None:
    split = prepare_split(Net().eval(), (X,), split="auto", objective=lambda c: abs(c.cut - 5))
    assert split.split_id == "cut:5"


def test_an_objective_stays_in_force_when_the_plan_is_cut_elsewhere() -> None:
    split = prepare_split(Net().eval(), (X,), split="50%", objective={"suffix_ops": 1})
    assert split.resplit("auto").candidate.cut in best(split.candidates, lambda c: c.suffix_ops, 0.1)


def test_auto_and_percentages_leave_something_to_train_in_the_suffix_where_that_is_asked_for() -> None:
    model = Net().eval()
    for frozen in (model.narrow, model.head, model.right):
        frozen.requires_grad_(False)
    for boundary in ("auto", "90%"):
        assert not prepare_split(model, (X,), split=SplitSpec(boundary)).candidate.trainable
        split = prepare_split(model, (X,), split=SplitSpec(boundary, trainable=True))
        assert split.candidate.trainable
        assert any(p.requires_grad for p in split.suffix_parameters())


# Candidates


def test_candidates_lists_every_cut_once_in_order(runtime: SplitRuntime) -> None:
    assert [c.cut for c in runtime.candidates] == list(range(1, len(runtime.plan.nodes)))
    assert len({c.split_id for c in runtime.candidates}) == len(runtime.candidates)


def test_a_candidate_tells_the_ops_of_both_sides(runtime: SplitRuntime) -> None:
    for c in runtime.candidates:
        assert (c.prefix_ops, c.suffix_ops) == (c.cut, len(runtime.plan.nodes) - c.cut)


def test_a_candidate_tells_the_values_and_bytes_per_sample_that_really_cross(runtime: SplitRuntime) -> None:
    for c in runtime.candidates:
        for batch in (1, 3):
            payload = runtime.resplit(c).run_prefix(X[:batch])
            assert tuple(payload.labels) == c.live
            assert payload.nbytes == batch * c.boundary_bytes


def test_a_candidate_is_trainable_where_its_suffix_reads_a_parameter_that_requires_grad() -> None:
    model = Net().eval()
    model.narrow.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    split = prepare_split(model, (X,), split="50%")
    for c in split.candidates:
        assert c.trainable == any(p.requires_grad for p in split.resplit(c).suffix_parameters())


def test_a_candidate_is_safe_or_says_why_not() -> None:
    candidates = prepare_split(Overlapping(), (X,), split="75%").candidates
    assert {c.safe for c in candidates} == {True, False}
    for c in candidates:
        assert c.safe == (c.reason == "")
    reason = candidates[1].reason
    assert "writes into memory that 'first' and 'view_1' share" in reason


def test_every_safe_candidate_replays_the_model_and_every_other_is_refused_by_name() -> None:
    split = prepare_split(Overlapping(), (X,), split="75%")
    for c in split.candidates:
        if c.safe:
            assert equals_the_model(split.resplit(c))
        else:
            with pytest.raises(FrontierError, match=rf"cannot split at '{c.split_id}': .* Nearest safe splits: "):
                split.resplit(c)


# Cutting elsewhere


def test_resplit_takes_a_string_a_candidate_or_its_split_id(runtime: SplitRuntime) -> None:
    for c in runtime.candidates:
        by_candidate, by_id = runtime.resplit(c), runtime.resplit(c.split_id)
        assert by_candidate.candidate == by_id.candidate == c
        assert equals_the_model(by_candidate)
    assert runtime.resplit("after:left").candidate == runtime.resplit("cut:4").candidate


def test_resplit_captures_nothing_again_and_leaves_the_runtime_as_it_was(runtime: SplitRuntime) -> None:
    calls = []
    handle = nn.modules.module.register_module_forward_pre_hook(lambda module, args: calls.append(module))
    before = runtime.split_id
    try:
        other = runtime.resplit("auto")
    finally:
        handle.remove()
    assert calls == []
    assert other is not runtime
    assert other.plan is runtime.plan
    assert other.split_id != before == runtime.split_id
    assert equals_the_model(runtime)


def test_resplit_keeps_the_mode_and_the_batch_range() -> None:
    spec = SplitSpec("50%", dynamic_batch=(2, 6))
    split = prepare_split(Net().eval(), (X,), split=spec, mode="debug_interpreter").resplit("auto")
    assert split.settings.mode == "debug_interpreter"
    assert split.settings.spec.batch_range == (2, 6)


def test_resplit_runs_the_same_cut_of_the_same_plan_in_another_mode() -> None:
    split = prepare_split(Net().eval(), (X,), split="after:left")
    debug = split.resplit(mode="debug_interpreter")
    assert (debug.plan, debug.split_id, debug.settings.boundary) == (split.plan, "cut:4", split.settings.boundary)
    assert (debug.cache_key.mode, split.cache_key.mode) == ("debug_interpreter", "generated_eager")
    assert "Interpreter" in repr(debug._now[False].prefix)
    assert equals_the_model(debug)
    crossing = split.run_prefix(X)
    assert difference(split.run_suffix(crossing), debug.run_suffix(crossing)) is None
    elsewhere = debug.resplit("80%")
    assert (elsewhere.cache_key.mode, elsewhere.split_id) == ("debug_interpreter", split.resplit("80%").split_id)


@pytest.mark.compiler
def test_resplit_compiles_what_was_prepared_and_keeps_the_options() -> None:
    split = prepare_split(Net().eval(), (X,), split="after:left")
    compiled = split.resplit(mode="compiled", compile_options={"backend": "aot_eager"})
    assert difference(split.run_suffix(split.run_prefix(X)), compiled.run_suffix(compiled.run_prefix(X))) is None
    assert (compiled.report().mode, compiled.report().backend) == ("compiled", "aot_eager")
    assert len(compiled.report().segments) == 2
    assert compiled.resplit("80%").settings.compile_options == {"backend": "aot_eager"}
    assert compiled.resplit(mode="generated_eager").settings.compile_options is None


def test_resplit_refuses_a_mode_that_there_is_not_and_options_that_do_not_go_with_it(runtime: SplitRuntime) -> None:
    with pytest.raises(SpecError, match=r"mode must be one of .*; found 'fast'"):
        runtime.resplit(mode="fast")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="compile_options go with mode='compiled'; the mode here is 'generated_eager'"):
        runtime.resplit("50%", compile_options={"backend": "eager"})


def test_resplit_in_another_mode_refuses_a_cut_that_the_spec_refuses_by_now() -> None:
    model = Net().eval()
    split = prepare_split(model, (X,), split=SplitSpec("50%", trainable=True))
    model.requires_grad_(False)
    with pytest.raises(FrontierError, match="no parameter after it requires grad"):
        split.resplit(mode="debug_interpreter")


def test_what_is_compiled_was_held_against_the_model_before(monkeypatch: pytest.MonkeyPatch) -> None:
    held = []
    monkeypatch.setattr(
        "ariadne.prepare.prove", lambda _, variant, *rest, **options: held.append(variant.settings.mode)
    )
    split = prepare_split(Net().eval(), (X,), split="50%", mode="compiled", compile_options={"backend": "eager"})
    assert (held, split.cache_key.mode) == (["generated_eager"], "compiled")


def test_options_are_kept_as_they_were_given_and_looked_at_before_anything_runs() -> None:
    options = {"backend": "eager"}
    split = prepare_split(Net().eval(), (X,), split="50%", mode="compiled", compile_options=options)
    options["backend"] = "nonsense"
    assert split.resplit("80%").report().backend == "eager"

    class Silent(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("it ran")

    with pytest.raises(SpecError, match="'speed'"):
        prepare_split(Silent().eval(), (X,), split="50%", mode="compiled", compile_options={"speed": 1})


def test_a_boundary_string_may_stand_in_place_of_a_split_spec() -> None:
    model = Net().eval()
    assert prepare_split(model, (X,), split="after:left").split_id == "cut:4"
    assert prepare_split(model, (X,), split=SplitSpec(boundary="after:left")).split_id == "cut:4"
