"""Errors: one tree, and words that say what was asked, what was found, and what to do."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ariadne import BoundaryPayload, SplitRuntime, SplitSpec, errors
from ariadne.boundary.payload import gradients_from_bytes
from ariadne.errors import (
    BatchError,
    BoundaryError,
    ConsumedError,
    InputError,
    ModuleError,
    PayloadError,
    SpecError,
    TrainingError,
    VerificationError,
)
from conformance.unit.errors_kit import Net, X, prepared
from conformance.unit.refusing import prepare_split


@pytest.fixture(scope="module")
def runtime() -> SplitRuntime:
    return prepared(dynamic_batch=(2, 64))


def total(output: torch.Tensor, targets: Any) -> torch.Tensor:
    return output.sum()


# The tree


def drawn() -> dict[str, list[str]]:
    """The tree of the docstring: each class with its bases, the one that it is drawn under first."""
    found: dict[str, list[str]] = {}
    above: list[tuple[int, str]] = []
    assert errors.__doc__ is not None
    block = errors.__doc__.partition("most general first::\n\n")[2].partition("\n\n")[0]
    for line in block.splitlines():
        match = re.match(r"( +)(\w+Error)(?: +\((\w+)\))?", line)
        assert match, line
        indent, name, builtin = len(match[1]), match[2], match[3]
        above = [(i, n) for i, n in above if i < indent]
        found[name] = [n for _, n in above[-1:]] + [builtin] * bool(builtin)
        above.append((indent, name))
    return found


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    classes = {n: c for n, c in vars(errors).items() if isinstance(c, type) and issubclass(c, Exception)}
    real = {n: [b.__name__ for b in c.__bases__ if b is not Exception] for n, c in classes.items()}
    assert drawn() == real


def test_the_page_about_errors_has_the_same_tree_and_a_section_or_a_row_for_each_error() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/errors.md").read_text()
    assert errors.__doc__ is not None
    block = errors.__doc__.partition("most general first::\n\n")[2].partition("\n\n")[0]
    assert textwrap.dedent(block) in page
    headings = " ".join(line for line in page.splitlines() if line.startswith("## "))
    assert [name for name in drawn() if name not in headings] == ["AriadneError", "GuardError"]


def test_every_error_says_in_its_docstring_when_it_is_raised() -> None:
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    assert len(classes) > 10
    assert all(c.__doc__ and c.__doc__.rstrip().endswith(".") for c in classes)


def test_bad_input_may_be_caught_as_the_built_in_error_that_python_users_expect() -> None:
    with pytest.raises(ValueError, match="no boundary reads"):
        SplitSpec("middle")
    with pytest.raises(RuntimeError, match="lies outside"):
        prepared(dynamic_batch=(2, 8)).run_prefix(X[:1])


# What is given to a runtime


@pytest.mark.parametrize("batch", [0, 1, 65])
@pytest.mark.parametrize("method", ["run_prefix", "run_training_prefix", "warmup"])
def test_a_batch_outside_the_range_is_refused_with_the_range(runtime: SplitRuntime, batch: int, method: str) -> None:
    words = rf"batch {batch} lies outside dynamic_batch \(2, 64\); prepare with a range that holds it"
    with pytest.raises(BatchError, match=words):
        getattr(runtime, method)(torch.zeros(batch, 5))


def test_both_ends_of_the_range_are_served(runtime: SplitRuntime) -> None:
    for batch in (2, 64):
        assert runtime.run_suffix(runtime.run_prefix(torch.zeros(batch, 5))).shape == (batch, 3)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (X.tolist(), r"another structure than at capture: expected args \(\*,\).*Pass them as example_inputs"),
        (X.numpy(), r"input \[0\] must be a tensor f32\[B, 5\]; found ndarray"),
        (None, r"input \[0\] must be a tensor f32\[B, 5\]; found NoneType"),
        (7, r"input \[0\] must be a tensor f32\[B, 5\]; found int"),
        (X[0], r"input \[0\] must be f32\[B, 5\], of rank 2; found f32\[5\]"),
        (X[None], r"input \[0\] must be f32\[B, 5\], of rank 2; found f32\[1, 4, 5\]"),
        (X[:, :4], r"dim 1 is 5 in the plan; found f32\[4, 4\] .*prepare again for other sizes"),
        (X.double(), r"must be f32\[B, 5\]; found f64\[4, 5\] on cpu. Convert it, or prepare again"),
        (X.int(), r"must be f32\[B, 5\]; found i32\[4, 5\] on cpu. Convert it, or prepare again"),
        (X.to("meta"), r"was captured on cpu; found f32\[4, 5\] on meta. Move it, or prepare again"),
    ],
    ids=["list", "numpy", "none", "int", "rank-1", "rank+1", "dim", "dtype", "int dtype", "device"],
)
def test_inputs_unlike_those_captured_are_refused(runtime: SplitRuntime, x: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        runtime.run_prefix(x)


@pytest.mark.parametrize(
    ("args", "kwargs", "found"),
    [
        ((), {}, r"args \(\), kwargs \{\}"),
        ((X, X), {}, r"args \(\*, \*\), kwargs \{\}"),
        ((), {"mask": X}, r"args \(\), kwargs \{'mask': \*\}"),
        ((X,), {"mask": None}, r"args \(\*,\), kwargs \{'mask': \*\}"),
        (((X,),), {}, r"args \(\(\*,\),\), kwargs \{\}"),
    ],
    ids=["none", "two", "another keyword", "one more keyword", "nested"],
)
def test_inputs_in_another_structure_are_refused_with_both(
    runtime: SplitRuntime, args: Any, kwargs: Any, found: str
) -> None:
    words = rf"expected args \(\*,\), kwargs \{{\}}; found {found}. Pass them as"
    with pytest.raises(InputError, match=words):
        runtime.run_prefix(*args, **kwargs)


def test_inputs_that_do_not_share_one_batch_are_refused_with_both() -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x + y).relu()

    runtime = prepare_split(Two(), (X, X), split="cut:1")
    with pytest.raises(BatchError, match=r"must share one batch: the first has 4, input \[1\] has 3"):
        runtime.run_prefix(X, X[:3])


def test_an_input_that_is_no_tensor_is_part_of_the_plan() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor, factor: Any) -> torch.Tensor:
            return (x * factor).relu()

    runtime = prepare_split(Scaled(), (X, 2.0), split="cut:1")
    with pytest.raises(InputError, match=r"input \[1\] was 2.0 at capture, now it is f32\[\] on cpu; .*Prepare again"):
        runtime.run_prefix(X, torch.tensor(3.0))


@pytest.mark.parametrize("train", [False, True])
def test_a_flip_between_train_and_eval_is_refused_on_both_sides_with_the_way_back(train: bool) -> None:
    runtime = prepared(train=train).resplit(on_change="refuse")
    boundary = runtime.run_prefix(X)
    runtime.model.train(not train)
    was, now = ("train", "eval") if train else ("eval", "train")
    words = rf"the model was captured in {was} mode and is now in {now} mode; call .{was}\(\) on it, or prepare again"
    with pytest.raises(ModuleError, match=words):
        runtime.run_prefix(X)
    with pytest.raises(ModuleError, match=words):
        runtime.run_suffix(boundary)
    runtime.model.train(train)
    runtime.run_suffix(boundary)


def test_a_flip_of_one_module_names_the_one_that_looks_and_elsewhere_changes_nothing() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Sequential(nn.ReLU(), nn.Dropout()), nn.Linear(5, 1)).eval()
    runtime = prepare_split(model, (X,), split="after:1")
    expected = model(X)
    model[0].train()  # a linear layer is the same in either mode
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), expected)
    model[1].train()
    with pytest.raises(ModuleError, match=r"'1\.1' was captured in eval mode and is now in train mode"):
        runtime.run_prefix(X)


@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_flip_of_a_module_that_ran_no_op_is_refused_wherever_it_stands(at: int) -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(5, 5), nn.Dropout(), nn.Linear(5, 1), nn.Dropout()).eval()
    runtime = prepare_split(model, (X,), split="after:1")
    model[at].train()
    with pytest.raises(ModuleError, match=f"'{at}' was captured in eval mode"):
        runtime.run_suffix(runtime.run_prefix(X))


def test_a_candidate_of_another_plan_is_refused(runtime: SplitRuntime) -> None:
    other = prepare_split(nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 1)), (X,), split="50%")
    with pytest.raises(SpecError, match=r"cut:1 is not a candidate of this plan; take one from runtime.candidates"):
        runtime.resplit(other.candidates[0])


# Boundaries


def test_a_boundary_of_another_split_is_refused_with_both(runtime: SplitRuntime) -> None:
    words = r"made by another split \(cut:2 of plan \w{16}\); this one is cut:4 of plan \w{16}. Run"
    other = runtime.resplit("after:layer2")
    with pytest.raises(BoundaryError, match=words):
        runtime.run_suffix(other.run_prefix(X))
    with pytest.raises(BoundaryError, match=words):
        runtime.train_suffix(other.run_training_prefix(X), None, loss_fn=total)


def test_a_boundary_of_another_model_is_refused_though_its_cut_has_the_same_name(runtime: SplitRuntime) -> None:
    other = prepare_split(
        nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.ReLU(), nn.ReLU(), nn.ReLU()), (X,), split="cut:4"
    )
    assert other.split_id == runtime.split_id
    with pytest.raises(BoundaryError, match="this boundary was made by another split"):
        runtime.run_suffix(other.run_prefix(X))


def test_what_is_no_boundary_is_refused(runtime: SplitRuntime) -> None:
    with pytest.raises(BoundaryError, match="what run_prefix or run_training_prefix returns; found Tensor"):
        runtime.run_suffix(X)
    with pytest.raises(BoundaryError, match=r"found bytes. Read bytes by BoundaryPayload.from_bytes\(...\) first"):
        runtime.run_suffix(runtime.run_prefix(X).to_bytes())


def test_a_boundary_is_trained_once(runtime: SplitRuntime) -> None:
    boundary = runtime.run_training_prefix(X)
    runtime.train_suffix(boundary, None, loss_fn=total)
    with pytest.raises(ConsumedError, match=r"batch 4, cut:4\) was already taken by train_suffix; .*Make another"):
        runtime.train_suffix(boundary, None, loss_fn=total)


def test_a_boundary_is_walked_back_once(runtime: SplitRuntime) -> None:
    boundary = runtime.run_training_prefix(X)
    _, gradients = runtime.train_suffix(boundary, None, loss_fn=total)
    runtime.backward_prefix(boundary, gradients)
    with pytest.raises(ConsumedError, match=r"was already taken by backward_prefix; .*Make another"):
        runtime.backward_prefix(boundary, gradients)


def test_a_boundary_without_a_graph_can_not_be_walked_back(runtime: SplitRuntime) -> None:
    boundary = runtime.run_prefix(X)
    with pytest.raises(BoundaryError, match=r"has no prefix graph: .* Use the one that run_training_prefix returned"):
        runtime.backward_prefix(boundary, {"layer3": torch.zeros(4, 8)})


@pytest.mark.parametrize(
    ("gradients", "words"),
    [
        ({"layer9": torch.zeros(4, 8)}, "a gradient for 'layer9', but the boundary holds layer3"),
        (
            {"layer3": torch.zeros(4, 7)},
            r"of 'layer3' is f32\[4, 7\] on cpu; the boundary tensor is f32\[4, 8\] on cpu\. Pass what",
        ),
        ([torch.zeros(4, 8)], "the dict that train_suffix returned; found list"),
    ],
    ids=["label", "shape", "type"],
)
def test_gradients_that_do_not_fit_the_boundary_are_refused_and_it_stays_usable(
    runtime: SplitRuntime, gradients: Any, words: str
) -> None:
    boundary = runtime.run_training_prefix(X)
    with pytest.raises(BoundaryError, match=words):
        runtime.backward_prefix(boundary, gradients)
    runtime.backward_prefix(boundary, {"layer3": torch.zeros(4, 8)})


def test_a_loss_that_is_not_one_number_is_refused(runtime: SplitRuntime) -> None:
    with pytest.raises(TrainingError, match=r"loss_fn must return a tensor with one element; found .*\[4, 3\]"):
        runtime.train_suffix(runtime.run_training_prefix(X), None, loss_fn=lambda output, _: output)


def test_a_loss_without_anything_to_train_is_refused() -> None:
    runtime = prepare_split(Net().eval().requires_grad_(False), (X,), split="after:layer3")
    with pytest.raises(TrainingError, match=r"does not depend on anything that requires grad: .* Unfreeze"):
        runtime.train_suffix(runtime.run_training_prefix(X), None, loss_fn=total)


def test_training_under_inference_mode_is_refused(runtime: SplitRuntime) -> None:
    with torch.inference_mode(), pytest.raises(TrainingError, match=r"under torch.inference_mode\(\)"):
        runtime.run_training_prefix(X)


def test_an_optimizer_of_the_suffix_that_owns_what_the_prefix_uses_too_is_refused_with_the_way_out() -> None:
    layer = nn.Linear(5, 5)
    runtime = prepare_split(nn.Sequential(layer, nn.ReLU(), layer), (X,), split="after:1")
    with pytest.raises(TrainingError, match=r"owns 2 parameter\(s\) that the prefix uses too .*optimizer=None"):
        runtime.train_suffix(
            runtime.run_training_prefix(X), None, loss_fn=total, optimizer=torch.optim.SGD(layer.parameters(), lr=0.1)
        )


# Payloads that came over the wire


def sent(runtime: SplitRuntime, **changes: Any) -> BoundaryPayload:
    """A boundary of the runtime with some of its fields changed, after a journey over the wire."""
    b = runtime.run_prefix(X)
    fields = {name: getattr(b, name) for name in ("split_id", "plan_signature", "batch", "labels", "raw")}
    return BoundaryPayload.from_bytes(BoundaryPayload(**{**fields, **changes}).to_bytes())


def test_a_boundary_that_crossed_the_wire_unchanged_is_taken(runtime: SplitRuntime) -> None:
    assert torch.equal(runtime.run_suffix(sent(runtime)), runtime.run_suffix(runtime.run_prefix(X)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"raw": (torch.zeros(4, 9),)}, r"'layer3' must be f32\[B, 8\].*found f32\[4, 9\]"),
        ({"raw": (torch.zeros(3, 8),)}, r"'layer3' must be f32\[B, 8\], here \[4, 8\]; found f32\[3, 8\]"),
        ({"raw": (torch.zeros(4, 8, 1),)}, r"'layer3' must be f32\[B, 8\].*found f32\[4, 8, 1\]"),
        ({"raw": (torch.zeros(4, 8).int(),)}, r"'layer3' must be f32\[B, 8\].*found i32\[4, 8\]"),
        ({"raw": (torch.zeros(4, 8).double(),)}, r"'layer3' must be f32\[B, 8\].*found f64\[4, 8\]"),
        ({"raw": (None,)}, r"'layer3' must be a tensor f32\[B, 8\]; found NoneType"),
        ({"raw": ([torch.zeros(4, 8)],)}, r"'layer3' must be a tensor f32\[B, 8\]; found list"),
        ({"labels": ("layer9",)}, "the boundary holds layer9; this split needs layer3"),
        ({"labels": ("layer3", "x"), "raw": (X, X)}, "the boundary holds layer3, x; this split needs layer3"),
        ({"batch": 3}, r"'layer3' must be f32\[B, 8\], here \[3, 8\]; found f32\[4, 8\]"),
        ({"batch": 99}, r"the boundary's batch 99 is not one that this plan serves \(2 to 64\)"),
        ({"split_id": "cut:1"}, r"made by another split \(cut:1 of"),
        ({"plan_signature": "0" * 16}, r"made by another split \(cut:4 of plan 0{16}\)"),
    ],
    ids="columns rows rank int32 float64 none list label labels batch range cut plan".split(),
)
def test_a_payload_with_other_contents_than_the_suffix_needs_is_refused(
    runtime: SplitRuntime, changes: dict[str, Any], words: str
) -> None:
    boundary = sent(runtime, **changes)
    with pytest.raises(BoundaryError, match=words):
        runtime.run_suffix(boundary)
    with pytest.raises(BoundaryError, match=words):
        runtime.train_suffix(boundary, None, loss_fn=total)


def test_a_payload_in_another_float_dtype_is_refused_where_no_op_would_object() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Tanh())
    runtime = prepare_split(model, (X,), split="after:0")
    with pytest.raises(BoundaryError, match=r"must be f32\[B, 5\].*found bf16\[4, 5\]"):
        runtime.run_suffix(sent(runtime, raw=(torch.zeros(4, 5).bfloat16(),)))


@pytest.mark.parametrize("data", [b"", b"junk", b"ARIADNE\n", bytes(200)])
def test_bytes_that_are_no_payload_are_refused_with_how_they_start(data: bytes) -> None:
    with pytest.raises(PayloadError, match=re.escape(f"found {len(data)} bytes that start with {data[:8]!r}")):
        BoundaryPayload.from_bytes(data)


def test_what_is_no_bytes_is_refused() -> None:
    with pytest.raises(PayloadError, match="expected a payload as bytes, found str"):
        BoundaryPayload.from_bytes("text")


def test_a_payload_cut_short_is_refused_with_both_lengths(runtime: SplitRuntime) -> None:
    data = runtime.run_prefix(X).to_bytes()
    with pytest.raises(
        PayloadError, match=f"expected a payload of {len(data)} bytes, found {len(data) - 3}; send it again"
    ):
        BoundaryPayload.from_bytes(data[:-3])


def test_a_payload_with_one_bit_changed_is_refused(runtime: SplitRuntime) -> None:
    data = bytearray(runtime.run_prefix(X).to_bytes())
    data[-1] ^= 1
    with pytest.raises(PayloadError, match="checksum does not match its bytes: they changed on the way; send it again"):
        BoundaryPayload.from_bytes(data)


def test_bytes_of_a_boundary_are_no_gradients(runtime: SplitRuntime) -> None:
    with pytest.raises(PayloadError, match="the bytes hold no boundary gradients"):
        gradients_from_bytes(runtime.run_prefix(X).to_bytes())


def test_a_split_that_differs_from_its_model_is_never_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ariadne.runtime.variant.Variant.joined", lambda self, x: torch.zeros(x.shape[0], 3))
    with pytest.raises(
        VerificationError, match=r"at batch 4 the split at cut:4 differs from the model: .*values differ"
    ):
        prepared()


@pytest.mark.parametrize("options", [{}, {"fallback": "python"}])
def test_a_split_that_is_called_as_a_model_says_what_to_call(options: dict[str, Any]) -> None:
    split = prepare_split(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.ones(2, 4),), split="after:0", **options)
    with pytest.raises(
        SpecError, match=r"is two halves: call runtime\.run_suffix\(runtime\.run_prefix\(\.\.\.\)\); to train"
    ):
        split(torch.ones(2, 4))
