"""Errors of prepare_split: names of boundaries, and what else it is given."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import SplitRuntime, SplitSpec, prepare_split, prepare_split_replay
from ariadne.errors import (
    AriadneError,
    BatchError,
    FrontierError,
    InputError,
    SpecError,
)
from conformance.unit.errors_kit import Net, X, prepared

# Boundary names


def test_an_unknown_module_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(FrontierError, match=r"^cannot split after 'layr3': forward calls no .* Nearest: 'layer3', "):
        prepared("after:layr3")


def test_an_unknown_module_that_nothing_is_near_to_is_answered_with_those_that_are_called() -> None:
    with pytest.raises(FrontierError, match=r"after 'zzz'.* It calls 'layer1', 'layer2', 'twice', 'layer3', 'layer4'"):
        prepared("after:zzz")


def test_a_module_that_is_never_called_is_no_place_to_cut_and_those_called_are_named() -> None:
    with pytest.raises(
        FrontierError, match=r"after 'spare': forward calls no module of that name.* 'layer1', 'layer2'"
    ):
        prepared("after:spare")


def test_a_module_that_is_called_twice_must_be_told_apart_by_its_call() -> None:
    with pytest.raises(FrontierError, match="calls it 2 times; say which, from 'after:twice#1' to 'after:twice#2'"):
        prepared("after:twice")


def test_a_call_that_was_not_made_is_refused_with_the_number_of_calls() -> None:
    with pytest.raises(FrontierError, match=r"call 3 of 'twice': forward calls it 2 time\(s\)"):
        prepared("after:twice#3")


def test_a_module_at_the_end_is_no_cut_and_the_nearest_are_named() -> None:
    with pytest.raises(FrontierError, match=r"one side would be empty. Nearest safe splits: 'after:twice#2', "):
        prepared("after:layer4")


@pytest.mark.parametrize("cut", ["cut:0", "cut:6", "cut:99"])
def test_a_cut_that_the_plan_does_not_have_is_refused_with_those_it_has(cut: str) -> None:
    with pytest.raises(FrontierError, match=rf"there is no '{cut}': this plan has cuts 1 to 5"):
        prepared(cut)


@pytest.mark.parametrize("asked", ["percent:0", "percent:100", "0%", "100%", "150%", "-5%", "at:101%"])
def test_a_percentage_out_of_range_is_refused_with_the_range(asked: str) -> None:
    with pytest.raises(SpecError, match=f"must lie between 0 and 100, both excluded; found '{asked}'"):
        prepared(asked)


@pytest.mark.parametrize("asked", ["middle", "", "after:", "after:a#0", "after:a#b", "cut:", "cut:-1", "percent:abc"])
def test_a_boundary_that_means_nothing_is_refused_with_every_form_there_is(asked: str) -> None:
    forms = "'after:<module>', 'after:<module>#<call>', 'percent:50', '50%', 'at:50%', 'auto' or 'cut:<k>'"
    with pytest.raises(SpecError, match=re.escape(f"no boundary reads {asked!r}; write {forms}")):
        prepared(asked)


@pytest.mark.parametrize("asked", ["layer3", "layer1.0.relu#2", "model.0"])
def test_a_modules_name_alone_is_refused_with_what_to_write(asked: str) -> None:
    with pytest.raises(SpecError, match=re.escape(f"or 'cut:<k>'; after the module of that name: 'after:{asked}'")):
        prepared(asked)


@pytest.mark.parametrize("asked", [None, 3, 0.5])
def test_a_boundary_that_is_no_string_is_refused_with_examples(asked: Any) -> None:
    with pytest.raises(
        SpecError, match=f"a string such as 'after:layer3', '50%' or 'auto'; found {type(asked).__name__}"
    ):
        prepared(asked)


def test_a_cut_that_is_not_safe_says_which_op_is_in_the_way_and_where_else_to_cut() -> None:
    with pytest.raises(FrontierError, match=r"at 'cut:2'.*'add__1' writes.*share.*both cross.*Nearest safe splits"):
        prepare_split(Overlapping(), (X,), split="cut:2")


class Overlapping(nn.Module):
    """A view and its base cross the second cut, and one is written after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.first(x)
        view = base.t()
        view.add_(1)
        return self.last(base) + view.sum()


def test_a_model_of_one_op_has_nothing_to_cut() -> None:
    with pytest.raises(
        FrontierError, match=r"the plan has 1 op\(s\), so there is nothing to cut; split a larger model"
    ):
        prepare_split(nn.Linear(5, 5), (X,), split="50%")


def test_a_named_cut_without_anything_to_train_after_it_says_how_to_get_some() -> None:
    model = Net().requires_grad_(False)
    model.layer1.requires_grad_(True)
    with pytest.raises(
        FrontierError, match=r"trainable=True: no parameter after it requires grad. Cut earlier, unfreeze"
    ):
        prepare_split(model, (X,), split=SplitSpec("after:layer3", trainable=True))


# What is given to prepare_split


@pytest.mark.parametrize("prepare", [prepare_split, prepare_split_replay])
def test_a_misspelt_mode_is_refused_with_the_modes_there_are(prepare: Callable[..., SplitRuntime]) -> None:
    words = "mode must be one of 'debug_interpreter', 'generated_eager', 'compiled'; found 'generated'"
    with pytest.raises(SpecError, match=words):
        prepare(Net(), (X,), split="50%", mode="generated")


@pytest.mark.parametrize("pair", [(0, 0), (4, 2), (-1, 4), (1,), (1, 2, 3), 5, "ab", (True, 4), (1.0, 4), (1, None)])
def test_a_batch_range_that_is_none_is_refused_with_what_one_is(pair: Any) -> None:
    words = f"dynamic_batch must be (smallest, largest) with 0 <= smallest <= largest and 1 <= largest; found {pair!r}"
    with pytest.raises(SpecError, match=re.escape(words)):
        SplitSpec("50%", dynamic_batch=pair)


@pytest.mark.parametrize("symbol", ["1B", "", "B C", None, "class", "None"])
def test_a_batch_symbol_that_could_not_stand_in_source_is_refused(symbol: Any) -> None:
    with pytest.raises(SpecError, match=f"must be a Python identifier such as 'B'; found {symbol!r}"):
        prepared(batch_symbol=symbol)


def test_a_misspelt_trace_batch_mode_is_refused_with_the_modes_there_are() -> None:
    with pytest.raises(SpecError, match="trace_batch_mode must be one of 'batch_1', 'batch_gt1'; found 'batch_2'"):
        prepared(trace_batch_mode="batch_2")


def test_batch_1_mode_refuses_a_larger_example() -> None:
    with pytest.raises(BatchError, match="trace_batch_mode 'batch_1' needs example inputs of batch 1; found batch 4"):
        prepared(trace_batch_mode="batch_1")


def test_batch_1_mode_refuses_a_range_without_1() -> None:
    with pytest.raises(SpecError, match=r"'batch_1' needs a dynamic_batch that includes 1; found \(2, 4\)"):
        prepared(trace_batch_mode="batch_1", dynamic_batch=(2, 4))


def test_batch_gt1_mode_refuses_an_example_of_one() -> None:
    with pytest.raises(BatchError, match="'batch_gt1' needs example inputs of batch 2 or more; found batch 1"):
        prepared(example=(X[:1],), trace_batch_mode="batch_gt1")


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(SpecError, match=r"the model must be a torch.nn.Module; found function"):
        prepare_split(lambda x: x, (X,), split="50%")


def test_a_model_on_the_meta_device_is_refused_with_the_tensor_that_is_there() -> None:
    model = Net()
    model.layer2.to("meta")
    with pytest.raises(
        SpecError, match=r"'layer2.weight' is on the meta device, .* load or initialise the model first"
    ):
        prepare_split(model, (X,), split="50%")


def test_example_inputs_on_the_meta_device_are_refused() -> None:
    with pytest.raises(AriadneError, match="meta"):
        prepared(example=(X.to("meta"),))


@pytest.mark.parametrize("example", [(), (3,), ([1.0, 2.0],), (None, "text")])
def test_example_inputs_without_a_tensor_have_no_batch(example: Any) -> None:
    with pytest.raises(
        InputError, match="hold no tensor, and a split begins with the tensors that forward is given; pass at least one"
    ):
        prepared(example=example)


def test_a_lone_tensor_in_place_of_the_tuple_is_refused_with_the_way_to_write_it() -> None:
    with pytest.raises(InputError, match=r"a tuple of forward's positional inputs; found Tensor. Write \(x,\)"):
        prepared(example=X)


def test_a_scalar_tensor_has_no_dim_for_the_batch() -> None:
    with pytest.raises(
        InputError, match="the first tensor of the example inputs has no dims; its dim 0 must be the batch"
    ):
        prepared(example=(torch.tensor(1.0),))


def test_an_empty_example_batch_is_refused() -> None:
    with pytest.raises(
        BatchError,
        match="the example inputs have batch 0, of which nothing is learnt for others; pass at least one sample",
    ):
        prepared(example=(X[:0],))


def test_example_kwargs_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(AriadneError, match="example_kwargs"):
        prepared(example_kwargs=[X])


def test_an_objective_with_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(
        SpecError, match="objective has no 'speed'; it takes 'boundary_bytes', 'prefix_ops', 'suffix_ops'"
    ):
        prepared("auto", objective={"speed": 1})


@pytest.mark.parametrize("objective", ["boundary_bytes", 3, {"boundary_bytes": "small"}])
def test_an_objective_of_another_type_is_refused(objective: Any) -> None:
    with pytest.raises(SpecError, match="objective"):
        prepared("auto", objective=objective)


def test_an_objective_that_no_cut_meets_says_so() -> None:
    with pytest.raises(FrontierError, match=r"no safe cut leaves each side .* with at most 1 boundary bytes"):
        prepared("auto", objective={"max_boundary_bytes": 1})


@pytest.mark.parametrize("options", [{"backend": "nosuch"}, {"mode": "nosuch"}, "inductor"])
def test_compile_options_that_torch_compile_does_not_know_are_refused(options: Any) -> None:
    with pytest.raises(AriadneError, match=r"nosuch|compile_options"):
        prepared(mode="compiled", compile_options=options)
