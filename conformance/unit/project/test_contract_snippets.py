"""The contract page: its Python snippets run as written, its names exist, its modes and options do what it says.

The visualization snippets are in test_visualization.py. Snippets are copied from the page letter by letter; each test
gives them the names that the page takes for granted.
"""

from __future__ import annotations

import dataclasses
import inspect
import shutil
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ariadne
from ariadne import RuntimeCacheKey, SplitCandidate, SplitRuntime, SplitSpec, TraceNode, TracePlan, prepare_split
from ariadne.boundary import BoundaryPayload
from ariadne.compare import difference
from ariadne.errors import BatchError, CompileError, SpecError

IMPORTS = """
from ariadne import SplitSpec, prepare_split
import torch

# See usage examples in "Basic Split Inference" and "Basic Split Training" sections below
"""

INFERENCE = """
import torch
from ariadne import SplitSpec, prepare_split

spec = SplitSpec(
    boundary="after:layer3",
    batch_symbol="B",
    dynamic_batch=(2, 64),
    trainable=True,
    trace_batch_mode="batch_gt1",
)

runtime = prepare_split(
    model,
    example_inputs=(torch.randn(4, 5),),
    split=spec,
    mode="generated_eager",
)

boundary = runtime.run_prefix(torch.randn(8, 5))
output = runtime.run_suffix(boundary)
"""

TRAINING = """
import torch.nn.functional as F

boundary = runtime.run_training_prefix(x_batch)
loss, boundary_grads = runtime.train_suffix(
    boundary,
    targets,
    loss_fn=F.mse_loss,
    optimizer=suffix_optimizer,
)
runtime.backward_prefix(
    boundary,
    boundary_grads=boundary_grads,
    optimizer=prefix_optimizer,
)
"""

DYNAMIC_BATCHES = """
from ariadne import validate_dynamic_batches

validate_dynamic_batches(runtime, example_inputs=(x,), batch_sizes=(1, 4, 20))
"""

MODES = """
runtime = prepare_split(
    model,
    example_inputs=(x,),
    split=spec,
    mode="generated_eager",  # or "compiled"
)
"""

REPLAY = """
from ariadne import prepare_split_replay

replay_runtime = prepare_split_replay(
    model,
    example_inputs=(x,),
    split=spec,
    mode="compiled",  # or "generated_eager"
)

replay_runtime.warmup(x)              # trigger compile before measuring/serving
boundary = replay_runtime.run_prefix(x)
output = replay_runtime.run_suffix(boundary)
"""

COMPILE_OPTIONS = """
runtime = prepare_split(
    model,
    example_inputs=(x,),
    split=spec,
    mode="compiled",
    compile_options={"backend": "inductor", "mode": "reduce-overhead", "dynamic": True},
)
"""


def a_model(*, dropout: float = 0.0) -> nn.Module:
    """Four layers of which the third is called layer3, over (B, 5)."""
    torch.manual_seed(0)
    layers = {
        "layer1": nn.Linear(5, 8),
        "relu1": nn.ReLU(inplace=True),
        "layer2": nn.Linear(8, 8),
        "drop": nn.Dropout(dropout),
        "layer3": nn.Linear(8, 8),
        "relu3": nn.ReLU(inplace=True),
        "layer4": nn.Linear(8, 2),
    }
    return nn.Sequential(OrderedDict(layers))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def run(snippet: str, **given: Any) -> dict[str, Any]:
    """The names that a snippet leaves, run with those `given`."""
    exec(compile(snippet, "<contract page>", "exec"), given)
    return given


def whole(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)


def test_the_import_snippet_gives_the_two_names_of_the_page() -> None:
    names = run(IMPORTS)
    assert names["SplitSpec"] is ariadne.SplitSpec
    assert names["prepare_split"] is ariadne.prepare_split


def test_the_inference_snippet_gives_the_output_of_the_model() -> None:
    model = a_model().eval()
    torch.manual_seed(3)
    names = run(INFERENCE, model=model)
    torch.manual_seed(3)
    _, x = torch.randn(4, 5), torch.randn(8, 5)
    assert difference(whole(model, x), names["output"]) is None
    assert names["runtime"].candidate.after == "layer3"


def test_the_training_snippet_trains_as_the_whole_model_does() -> None:
    model, twin = a_model(dropout=0.4).train(), a_model(dropout=0.4).train()
    runtime = run(INFERENCE, model=model)["runtime"]
    optimizers = {
        "prefix_optimizer": sgd(runtime.prefix_parameters()),
        "suffix_optimizer": sgd(runtime.suffix_parameters()),
    }
    both = sgd(twin.parameters())
    for step in range(3):
        x_batch, targets = torch.randn(6 + step, 5), torch.randn(6 + step, 2)
        torch.manual_seed(step)
        names = run(TRAINING, runtime=runtime, x_batch=x_batch, targets=targets, **optimizers)
        drawn = torch.get_rng_state()
        torch.manual_seed(step)
        both.zero_grad()
        loss = F.mse_loss(twin(x_batch), targets)
        loss.backward()
        both.step()
        assert difference(loss.detach(), names["loss"]) is None
        assert difference(torch.get_rng_state(), drawn) is None
        for (name, p), q in zip(twin.named_parameters(), model.parameters(), strict=True):
            assert difference((p.detach(), p.grad), (q.detach(), q.grad)) is None, (name, step)


def test_the_batch_validation_snippet_returns_for_a_runtime_that_equals_the_model() -> None:
    runtime = prepare_split(a_model().eval(), (torch.randn(4, 5),), split="after:layer3")
    run(DYNAMIC_BATCHES, runtime=runtime, x=torch.randn(4, 5))


def test_the_batch_validation_snippet_raises_for_a_batch_outside_the_range() -> None:
    runtime = run(INFERENCE, model=a_model().eval())["runtime"]
    with pytest.raises(BatchError, match=r"batch 1 lies outside dynamic_batch \(2, 64\)"):
        run(DYNAMIC_BATCHES, runtime=runtime, x=torch.randn(4, 5))


def test_the_modes_snippet_gives_a_runtime_that_equals_the_model() -> None:
    model, x = a_model().eval(), torch.randn(4, 5)
    runtime = run(MODES, model=model, x=x, spec=SplitSpec("after:layer3"), prepare_split=prepare_split)["runtime"]
    assert difference(whole(model, x), runtime.run_suffix(runtime.run_prefix(x))) is None


@pytest.mark.compiler
def test_the_replay_snippet_compiles_where_there_is_a_compiler_and_says_so_where_there_is_none() -> None:
    model, x = a_model().eval(), torch.randn(4, 5)
    given = {"model": model, "x": x, "spec": SplitSpec("after:layer3")}
    if shutil.which("c++") or shutil.which("g++") or shutil.which("clang++"):
        names = run(REPLAY, **given)
        torch.testing.assert_close(names["output"], whole(model, x))
        assert type(names["boundary"]) is ariadne.ReplayBoundary
    else:
        with pytest.raises(CompileError, match="mode='generated_eager'"):
            run(REPLAY, **given)


def test_the_replay_snippet_runs_in_the_other_mode_that_its_comment_names() -> None:
    model, x = a_model().eval(), torch.randn(4, 5)
    eager = REPLAY.replace('mode="compiled",  # or "generated_eager"', 'mode="generated_eager",')
    names = run(eager, model=model, x=x, spec=SplitSpec("after:layer3"))
    assert names["replay_runtime"].settings.mode == "generated_eager"
    assert difference(whole(model, x), names["output"]) is None


def test_the_compile_options_snippet_hands_its_options_to_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    compile_ = torch.compile

    def watched(function: Any, **options: Any) -> Any:
        seen.append(options)
        return compile_(function, **options)

    monkeypatch.setattr(torch, "compile", watched)
    given = {"model": a_model().eval(), "x": torch.randn(4, 5), "spec": SplitSpec("after:layer3")}
    run(COMPILE_OPTIONS, prepare_split=prepare_split, **given)
    assert seen == [{"backend": "inductor", "mode": "reduce-overhead", "dynamic": True}] * 2  # prefix and suffix


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_mode_runs_and_trains_at_every_batch_of_the_range(backend: str) -> None:
    model, twin = a_model().eval(), a_model().eval()
    runtime = prepare_split(
        model, (torch.randn(4, 5),), split="after:layer3", mode="compiled", compile_options={"backend": backend}
    )
    for batch in (1, 2, 5):
        x = torch.randn(batch, 5)
        torch.testing.assert_close(runtime.run_suffix(runtime.run_prefix(x)), whole(model, x))
    x, targets = torch.randn(3, 5), torch.randn(3, 2)
    boundary = runtime.run_training_prefix(x)
    loss, gradients = runtime.train_suffix(boundary, targets, loss_fn=F.mse_loss)
    runtime.backward_prefix(boundary, gradients)
    expected = F.mse_loss(twin(x), targets)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for p, q in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad)


def test_compiled_mode_really_compiles_both_segments_and_warmup_does_it_beforehand() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, x = a_model().eval(), torch.randn(4, 5)
    runtime = prepare_split(model, (x,), split="after:layer3", mode="compiled", compile_options={"backend": backend})
    assert graphs == []
    runtime.warmup(x)
    assert len(graphs) == 2
    runtime.run_suffix(runtime.run_prefix(x))
    assert len(graphs) == 2


def test_warmup_leaves_buffers_and_the_generator_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 2)).train()
    runtime = prepare_split(model, (torch.randn(4, 5),), split="after:0")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x, state = torch.randn(4, 5), torch.get_rng_state()
    runtime.warmup(x)
    assert difference(before, dict(model.named_buffers())) is None
    assert difference(state, torch.get_rng_state()) is None


def test_a_segment_that_the_compiler_refuses_raises_and_does_not_fall_back() -> None:
    def backend(graph: Any, example_inputs: Any) -> Any:
        raise ValueError("no such instruction")

    x = torch.randn(4, 5)
    runtime = prepare_split(
        a_model().eval(), (x,), split="after:layer3", mode="compiled", compile_options={"backend": backend}
    )
    with pytest.raises(CompileError, match=r"(?s)refused 'prefix'.*no such instruction.*'generated_eager'"):
        runtime.run_prefix(x)


def test_an_unknown_compile_option_is_refused_and_the_known_ones_listed() -> None:
    with pytest.raises(SpecError, match=r"compile_options has no 'speed'; .*'backend', 'mode', 'dynamic'"):
        prepare_split(
            a_model().eval(), (torch.randn(4, 5),), split="50%", mode="compiled", compile_options={"speed": 1}
        )


def test_debug_interpreter_equals_the_model_and_shares_nothing_with_the_generated_code() -> None:
    model, x = a_model().eval(), torch.randn(4, 5)
    runtime = prepare_split(model, (x,), split="after:layer3", mode="debug_interpreter")
    assert difference(whole(model, x), runtime.run_suffix(runtime.run_prefix(x))) is None
    assert "codegen" not in inspect.getsource(inspect.getmodule(ariadne.segment.interpreter.Interpreter)).replace(
        "code generation", ""
    )


# The names of the page


def test_every_name_of_the_page_is_exported() -> None:
    names = """
        SplitSpec prepare_split prepare_split_replay SplitRuntime BoundaryPayload ReplayBoundary
        register_boundary_serializer validate_dynamic_batches TracePlan TraceNode SplitCandidate RuntimeCacheKey
    """.split()
    assert set(names) <= set(ariadne.__all__)
    assert all(hasattr(ariadne, name) for name in names)


def test_split_spec_has_the_fields_of_the_page_in_its_order() -> None:
    fields = [f.name for f in dataclasses.fields(SplitSpec)]
    page = ["boundary", "batch_symbol", "dynamic_batch", "trainable", "trace_batch_mode"]
    assert fields[: len(page)] == page  # what came since is given by name


@pytest.mark.parametrize("name", ["prepare_split", "prepare_split_replay"])
def test_prepare_takes_the_arguments_of_the_page(name: str) -> None:
    taken = inspect.signature(getattr(ariadne, name)).parameters
    assert {"model", "example_inputs", "split", "mode", "compile_options", "example_kwargs"} <= set(taken)
    assert taken["mode"].default == "generated_eager"


def test_the_runtime_has_the_methods_and_attributes_of_the_page() -> None:
    methods = "run_prefix run_suffix run_training_prefix train_suffix backward_prefix warmup resplit"
    attributes = "plan trace_plan candidate candidates split_id prefix_source suffix_source cache_key"
    assert all(callable(getattr(SplitRuntime, name)) for name in methods.split())
    runtime = prepare_split(a_model().eval(), (torch.randn(4, 5),), split="after:layer3")
    assert all(getattr(runtime, name) is not None for name in attributes.split())
    assert isinstance(runtime.trace_plan, TracePlan)
    assert isinstance(runtime.candidate, SplitCandidate)
    assert all(isinstance(node, TraceNode) for node in runtime.trace_plan.nodes)


def test_a_boundary_is_of_protocol_2_and_holds_tensors_by_label() -> None:
    runtime = prepare_split(a_model().eval(), (torch.randn(4, 5),), split="after:layer3")
    boundary = runtime.run_prefix(torch.randn(3, 5))
    assert isinstance(boundary, BoundaryPayload)
    assert boundary.protocol_version == 2
    assert list(boundary.tensors) == list(runtime.candidate.live)
    assert boundary.batch_size == 3


def test_only_a_boundary_of_the_training_prefix_keeps_the_graph_of_the_prefix() -> None:
    runtime = prepare_split(a_model().train(), (torch.randn(4, 5),), split="after:layer3")
    assert not runtime.run_prefix(torch.randn(3, 5)).supports_prefix_backward
    assert runtime.run_training_prefix(torch.randn(3, 5)).supports_prefix_backward


def test_a_registered_type_crosses_the_wire() -> None:
    ariadne.register_boundary_serializer(Celsius, lambda c: c.degrees, Celsius)
    try:
        sent = BoundaryPayload("cut:1", "0" * 16, 1, ("t",), (Celsius(21.5),)).to_bytes()
        assert BoundaryPayload.from_bytes(sent).raw == (Celsius(21.5),)
    finally:
        ariadne.boundary.nodes.unregister_boundary_serializer(Celsius)


class Celsius:
    def __init__(self, degrees: float) -> None:
        self.degrees = degrees

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Celsius) and other.degrees == self.degrees

    __hash__ = None  # type: ignore[assignment]


def test_the_cache_key_does_not_hold_the_concrete_batch() -> None:
    model = a_model().eval()
    keys = {prepare_split(model, (torch.randn(b, 5),), split="after:layer3").cache_key for b in (1, 2, 4, 9)}
    assert len(keys) == 1
    (key,) = keys
    assert isinstance(key, RuntimeCacheKey)
    assert key.non_batch_shapes == (("B", 5),)
    assert not any("batch" in f.name and f.name != "non_batch_shapes" for f in dataclasses.fields(key))


def test_the_cache_key_tells_cuts_modes_and_inputs_apart() -> None:
    model, x = a_model().eval(), torch.randn(2, 5)
    runtime = prepare_split(model, (x,), split="after:layer3")
    others = [
        runtime.resplit("after:layer2"),
        prepare_split(model, (x,), split="after:layer3", mode="debug_interpreter"),
        prepare_split(model.double(), (x.double(),), split="after:layer3"),
    ]
    assert len({r.cache_key for r in (runtime, *others)}) == 4


def test_the_plan_has_the_batch_as_a_symbol_where_a_size_merely_equals_it() -> None:
    spec = SplitSpec("after:layer3", batch_symbol="N")
    runtime = prepare_split(a_model().eval(), (torch.randn(8, 5),), split=spec)  # the layers are 8 wide, too
    shape = runtime.plan.values["layer3"].shape
    assert (str(shape[0]), shape[1]) == ("N", 8)


def test_batch_1_mode_serves_the_whole_range() -> None:
    spec = SplitSpec("after:layer3", dynamic_batch=(1, 32), trace_batch_mode="batch_1")
    model = a_model().eval()
    runtime = prepare_split(model, (torch.randn(1, 5),), split=spec)
    for batch in (1, 2, 32):
        x = torch.randn(batch, 5)
        assert difference(whole(model, x), runtime.run_suffix(runtime.run_prefix(x))) is None


def test_trainable_moves_a_percentage_to_a_cut_with_something_to_train_after_it() -> None:
    model = a_model().eval()
    model.layer4.requires_grad_(False)
    x = torch.randn(4, 5)
    assert not prepare_split(model, (x,), split=SplitSpec("percent:90")).candidate.trainable
    assert prepare_split(model, (x,), split=SplitSpec("percent:90", trainable=True)).candidate.trainable


def test_the_model_itself_may_be_called_between_calls_of_its_split() -> None:
    model, x = Caching().eval(), torch.randn(3, 4)
    runtime = prepare_split(model, (torch.randn(2, 4),), split="after:first")
    first = runtime.run_suffix(runtime.run_prefix(x))
    expected = whole(model, x)  # fills the cache, as forward of RF-DETR does
    again = runtime.run_suffix(runtime.run_prefix(x))
    assert difference((expected, expected), (first, again)) is None


class Caching(nn.Module):
    """Keeps what it has made in a dict of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.positions: dict[int, torch.Tensor] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if x.shape[1] not in self.positions:
            self.positions[x.shape[1]] = torch.arange(x.shape[1], dtype=x.dtype)
        return self.second(x + self.positions[x.shape[1]])


def test_parameters_on_both_sides_are_trained_by_the_optimizer_of_the_prefix_over_many_steps() -> None:
    torch.manual_seed(0)
    model, twin, x = Tied(), Tied(), torch.randn(4, 4)
    twin.load_state_dict(model.state_dict())
    runtime = prepare_split(model, (x,), split="after:middle")
    mine, both = sgd(runtime.prefix_parameters()), sgd(twin.parameters())
    for step in range(3):
        both.zero_grad()
        twin(x).square().sum().backward()
        both.step()
        boundary = runtime.run_training_prefix(x)
        _, gradients = runtime.train_suffix(boundary, None, loss_fn=lambda output, _: output.square().sum())
        runtime.backward_prefix(boundary, gradients, optimizer=mine)
        assert difference(dict(twin.named_parameters()), dict(model.named_parameters())) is None, step


class Tied(nn.Module):
    """Its first layer is its last, too."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.middle = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.middle(self.outer(x)).relu()) / 10
