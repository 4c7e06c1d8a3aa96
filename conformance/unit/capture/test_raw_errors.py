"""What once ended in an error of torch's or Python's own: followed bit for bit, or refused with what to do."""

from __future__ import annotations

import copy
import io
import pickle  # noqa: TID251 - what forward must not do
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch.utils.flop_counter import FlopCounterMode

from ariadne import BoundaryPayload, SplitSpec
from ariadne.capture import ways
from ariadne.compare import difference
from ariadne.errors import CaptureError, ModuleError, SpecError, TrainingError, UnsupportedError
from conformance.unit.refusing import prepare_split

Body = Callable[[Any, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.a, self.b, self.body = nn.Linear(4, 4), nn.Linear(4, 4), body
        self.p = nn.Parameter(torch.ones(4))
        self.register_buffer("q", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.b(self.body(self, self.a(x)))
        return found


def inputs(batch: int) -> tuple[torch.Tensor]:
    return (torch.randn(batch, 4, generator=torch.Generator().manual_seed(batch)),)


def split(model: nn.Module, cut: str = "percent:50", given: Any = inputs, trainable: bool = True) -> Any:
    spec = SplitSpec(cut, dynamic_batch=(1, 8), trainable=trainable)
    return prepare_split(model, given(2), split=spec)


def equals_whole(make: Callable[[], nn.Module], given: Any = inputs, cuts: Sequence[str] = ("percent:50",)) -> None:
    """Outputs in eval mode, at every cut by bytes too; then a training step."""
    for cut in cuts:
        torch.manual_seed(0)
        model = make().eval()
        runtime = split(model, cut, given, trainable=False)
        for batch in (2, 1, 3, 5, 8):
            with torch.no_grad():
                whole = model(*given(batch))
            boundary = runtime.run_prefix(*given(batch))
            assert difference(whole, runtime.run_suffix(boundary)) is None
            again = BoundaryPayload.from_bytes(boundary.to_bytes())
            assert difference(whole, runtime.run_suffix(again)) is None
    torch.manual_seed(0)
    model = make().train()
    if not any(p.requires_grad for p in model.parameters()):
        return
    whole_model = copy.deepcopy(model)
    runtime = split(model, given=given)
    for batch in (2, 3, 1):
        torch.manual_seed(1)
        F.mse_loss(out := whole_model(*given(batch)), torch.zeros_like(out)).backward()
        torch.manual_seed(1)
        boundary = runtime.run_training_prefix(*given(batch))
        _, gradients = runtime.train_suffix(boundary, loss_fn=lambda o, _: F.mse_loss(o, torch.zeros_like(o)))
        runtime.backward_prefix(boundary, gradients)
        mine, theirs = ({n: p.grad for n, p in m.named_parameters()} for m in (whole_model, model))
        assert difference(mine, theirs) is None


# Nested tensors


def padded(batch: int) -> tuple[torch.Tensor]:
    tokens = torch.randint(1, 20, (batch, 6), generator=torch.Generator().manual_seed(batch))
    for i in range(batch):
        tokens[i, 6 - i % 3 :] = 0
    return (tokens,)


class Encoder(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.e, self.o = kind, nn.Embedding(20, 8), nn.Linear(8, 3)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu" if kind == "gelu" else "relu")
        self.t = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(8) if kind == "norm" else None)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask: Any = tokens == 0
        if self.kind == "float mask":
            mask = torch.zeros(mask.shape).masked_fill(mask, float("-inf"))
        return self.o(self.t(self.e(tokens), src_key_padding_mask=mask).mean(1))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "kind", ["float mask", *(pytest.param(k, marks=pytest.mark.variants) for k in ("relu", "gelu", "norm"))]
)
def test_an_encoder_with_a_padding_mask_is_followed_through_its_fast_path(kind: str) -> None:
    equals_whole(lambda: Encoder(kind), padded, ("percent:50", "after:t.layers.0", "percent:25"))


def test_a_nested_tensor_crosses_as_the_buffer_that_it_is() -> None:
    runtime = split(Encoder("relu").eval(), "after:t.layers.0", padded)
    boundary = runtime.run_prefix(*padded(3))
    assert "[[6, 8], [5, 8], [4, 8]]" in repr(boundary)
    assert boundary.nbytes == (6 + 5 + 4) * 8 * 4


def test_a_mask_that_takes_the_other_path_is_followed() -> None:
    runtime = split(Encoder("relu").eval(), given=padded)
    (tokens,) = padded(3)
    tokens[0, 0] = 0
    found = runtime.run_suffix(runtime.run_prefix(tokens))
    with torch.no_grad():
        assert torch.equal(found, runtime.model(tokens))


NESTED: dict[str, Body] = {
    "from a list": lambda m, h: torch.nested.as_nested_tensor([h, h[:1]]).to_padded_tensor(0.0, (2, *h.shape)).sum(0),
    "from a mask": lambda m, h: torch._nested_tensor_from_mask(
        h.unsqueeze(0).expand(2, -1, -1).contiguous(), torch.ones(2, h.shape[0], dtype=torch.bool)
    ).to_padded_tensor(0.0).sum(0),
    "a copy": lambda m, h: h + torch.nested.nested_tensor([h, h[:1]]).to_padded_tensor(0.0).sum(0),
}  # fmt: skip


@pytest.mark.parametrize("body", NESTED.values(), ids=NESTED)
def test_a_nested_tensor_made_by_hand_is_followed(body: Body) -> None:
    equals_whole(lambda: Net(body))


def test_no_step_is_trained_across_a_nested_tensor() -> None:
    def body(m: Any, h: torch.Tensor) -> torch.Tensor:
        parts = torch.nested.as_nested_tensor([h, h[:1]])
        return (parts * 2).to_padded_tensor(0.0, (2, *h.shape)).sum(0)

    runtime = split(Net(body))
    inside = next(c for c in runtime.candidates if any(runtime.plan.values[n].is_nested for n in c.live))
    with pytest.raises(TrainingError, match="nested tensor"):
        split(Net(body), inside.split_id, trainable=False).run_training_prefix(*inputs(2))


NOT_NESTED: dict[str, tuple[Body, str]] = {
    "jagged": (
        lambda m, h: torch.nested.as_nested_tensor([h, h[:1]], layout=torch.jagged).to_padded_tensor(0.0).sum(0),
        "jagged",
    ),
    "its size": (
        lambda m, h: h * torch.nested.as_nested_tensor([h, h[:1]]).size(0),
        "asks a nested tensor for its sizes",
    ),
    "its elements": (lambda m, h: h * torch.nested.as_nested_tensor([h, h[:1]]).numel(), "for its sizes"),
    "its length": (lambda m, h: h * len(torch.nested.as_nested_tensor([h, h[:1]])), "for its sizes"),
}


@pytest.mark.parametrize(("body", "words"), NOT_NESTED.values(), ids=NOT_NESTED)
def test_what_a_plan_cant_hold_of_nested_tensors_is_refused(body: Body, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        split(Net(body))


# Higher-order ops


def _with_cond(m: Any, h: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.cond(h.sum() > 1e6, lambda h: h.sin(), lambda h: h.cos() * 2, (h,))
    return found


CONDS: dict[str, Body] = {
    "of data": _with_cond,
    "of its batch": lambda m, h: torch.cond(h.shape[0] > 3, lambda h: h.sin(), lambda h: h.cos(), (h,)),
    "closing over a parameter": lambda m, h: torch.cond((h * h).sum() >= 0, lambda h: h * m.p, lambda h: h + m.p, (h,)),
    "imported by name": lambda m, h: COND(
        (h * h).sum() >= 0, lambda h: (h.sin(), h * 2), lambda h: (h + 1, h * 3), (h,)
    )[1],
}
COND = torch.cond


@pytest.mark.parametrize("body", CONDS.values(), ids=CONDS)
def test_a_functional_if_is_followed(body: Body) -> None:
    equals_whole(lambda: Net(body))


def test_a_functional_if_that_takes_the_other_branch_is_followed() -> None:
    runtime = split(Net(lambda m, h: torch.cond(m.p.sum() > 0, lambda h: h.sin(), lambda h: h.cos(), (h,))).eval())
    with torch.no_grad():
        runtime.model.p.neg_()
    found = runtime.run_suffix(runtime.run_prefix(*inputs(2)))
    with torch.no_grad():
        assert torch.equal(found, runtime.model(*inputs(2)))


def test_another_higher_order_op_is_refused_by_name() -> None:
    def body(m: Any, h: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * 2), (torch.tensor(0), h))[1]
        return found

    with pytest.raises(UnsupportedError, match=r"higher-order op 'while_loop'.*Python's own"):
        split(Net(body))


# out=, and data that leave


GROWN: dict[str, Body] = {
    "out of nothing": lambda m, h: h + torch.add(h.detach(), 1, out=torch.empty(0)),
    "a product": lambda m, h: h + torch.matmul(h.detach(), torch.eye(4), out=torch.empty(0)),
    "twice": lambda m, h: _twice(h),
}


def _twice(h: torch.Tensor) -> torch.Tensor:
    kept = torch.empty(0)
    torch.sin(h.detach(), out=kept)
    g = h + kept
    torch.cos(h.detach(), out=kept)
    return g * kept


@pytest.mark.parametrize("body", GROWN.values(), ids=GROWN)
def test_an_out_that_is_resized_is_followed(body: Body) -> None:
    equals_whole(lambda: Net(body))


@pytest.mark.parametrize("body", GROWN.values(), ids=GROWN)
def test_over_a_wire_no_cut_parts_a_tensor_from_the_op_that_resizes_it(body: Body) -> None:
    model, x = Net(body).eval(), torch.randn(3, 4)
    runtime = prepare_split(model, (x,), split="percent:50")
    unsafe = [c for c in runtime.candidates if not c.safe]
    assert unsafe
    assert all("other sizes" in c.reason for c in unsafe)
    for cut in (c for c in runtime.candidates if c.safe):
        half = runtime.resplit(cut)
        sent = BoundaryPayload.from_bytes(half.run_prefix(x).to_bytes())
        assert difference(model(x), half.run_suffix(sent)) is None, cut


TAKEN: dict[str, Body] = {
    "pickle": lambda m, h: h + pickle.loads(pickle.dumps(h.detach())),  # noqa: S301
    "torch.save": lambda m, h: h + _saved(h),
    "copy.copy": lambda m, h: h + copy.copy(h.detach()),
    "a storage": lambda m, h: h + torch.empty(0).set_(h.detach().untyped_storage(), 0, h.shape, h.stride()),
}


def _saved(h: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(h.detach(), file)
    file.seek(0)
    found: torch.Tensor = torch.load(file)
    return found


@pytest.mark.parametrize("body", TAKEN.values(), ids=TAKEN)
def test_an_activation_that_is_pickled_in_forward_is_refused(body: Body) -> None:
    model = Net(body)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedError, match=r"pickle|storage"):
        split(model)
    assert difference(dict(before), dict(model.state_dict())) is None


# Modules that are not ready, or of another kind


@pytest.mark.parametrize(
    "lazy", [lambda: nn.LazyLinear(4), lambda: nn.LazyBatchNorm1d(), lambda: nn.Sequential(nn.ReLU(), nn.LazyLinear(4))]
)
def test_a_lazy_module_is_to_be_run_first(lazy: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), lazy(), nn.Linear(4, 4))
    with pytest.raises(SpecError, match=r"is lazy and not initialised.*run the model once"):
        split(model)
    model(*inputs(2))
    split(model)


@pytest.mark.planted
def test_a_lazy_module_that_nothing_asks_for_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.parameter, "is_lazy", lambda t: False)
    with pytest.raises(ValueError, match="Attempted to use an uninitialized parameter"):
        test_a_lazy_module_is_to_be_run_first(lambda: nn.LazyLinear(4))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.r, self.o = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.o(self.r(x.unsqueeze(1).expand(-1, 3, -1))[0].mean(1))
        return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "two layers": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)),
    "one of two": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Conv1d(1, 1, 1)),
    "recurrent": Recurrent,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_dynamically_quantized_model_is_followed_until_its_weights_change(make: Callable[[], nn.Module]) -> None:
    def given(batch: int) -> tuple[torch.Tensor]:
        (x,) = inputs(batch)
        return (x.unsqueeze(1),) if any(isinstance(m, nn.Conv1d) for m in make().modules()) else (x,)

    def quantized() -> nn.Module:
        kinds = {nn.Linear, nn.LSTM}
        model: nn.Module = torch.ao.quantization.quantize_dynamic(make(), kinds, dtype=torch.qint8)
        return model.requires_grad_(False)

    equals_whole(quantized, given)
    model = quantized().eval()
    runtime = split(model, given=given, trainable=False)
    layer = next(m for m in model.modules() if isinstance(m, torch.ao.nn.quantized.dynamic.Linear))
    weight, bias = layer._weight_bias()
    layer.set_weight_bias(weight, bias + 1)
    with pytest.raises(ModuleError, match="_packed_params"):
        runtime.run_suffix(runtime.run_prefix(*given(2)))


# Tensors that move to another place


def _as_parameter(m: Any) -> None:
    del m.q
    m.q = nn.Parameter(torch.ones(4) * 2)


def _as_buffer(m: Any) -> None:
    del m.p
    m.register_buffer("p", torch.ones(4) * 2)


def _as_attribute(m: Any) -> None:
    del m.q
    m.q = torch.ones(4) * 2


@pytest.mark.parametrize("move", [_as_parameter, _as_buffer, _as_attribute])
def test_a_tensor_that_stands_elsewhere_now_is_named(move: Callable[[Any], None]) -> None:
    model = Net(lambda m, h: h * m.p * m.q).eval()
    runtime = split(model)
    move(model)
    with pytest.raises(
        ModuleError, match=r"(buffer 'q'|parameter 'p') of the model, which the plan reads, is gone, and a"
    ):
        runtime.run_suffix(runtime.run_prefix(*inputs(2)))
    with pytest.raises(ModuleError, match="is gone"):
        runtime.joined(*inputs(2))


def test_a_key_error_of_ones_own_loss_stays_that() -> None:
    runtime = split(Net(lambda m, h: h * m.p))

    def loss(out: torch.Tensor, targets: Any) -> torch.Tensor:
        return {}["mine"]  # type: ignore[no-any-return]

    with pytest.raises(KeyError, match="mine"):
        runtime.train_suffix(runtime.run_training_prefix(*inputs(2)), loss_fn=loss)


def _sets_a_parameter(m: Any, h: torch.Tensor) -> torch.Tensor:
    if not hasattr(m, "w"):
        m.w = nn.Parameter(torch.zeros(4))
    return h + m.w  # type: ignore[no-any-return]


def _sets_a_layer(m: Any, h: torch.Tensor) -> torch.Tensor:
    if not hasattr(m, "layer"):
        m.layer = nn.Linear(4, 4)
        nn.init.eye_(m.layer.weight)
    return m.layer(h)  # type: ignore[no-any-return]


def _moves_a_buffer(m: Any, h: torch.Tensor) -> torch.Tensor:
    if "q" in m._buffers:
        _as_parameter(m)
    return h * m.q  # type: ignore[no-any-return]


@pytest.mark.parametrize("body", [_sets_a_parameter, _sets_a_layer, _moves_a_buffer])
def test_parameters_that_forward_registers_are_refused_until_they_are_there(body: Body) -> None:
    model = Net(body)
    with pytest.raises(UnsupportedError, match="run the model once"):
        split(model)
    model(*inputs(2))
    split(model)


def _attribute(m: Any, h: torch.Tensor) -> torch.Tensor:
    if not hasattr(m, "mu"):
        m.mu = h.mean(0).detach()
    return h - m.mu  # type: ignore[no-any-return]


def _none(m: Any, h: torch.Tensor) -> torch.Tensor:
    if m.__dict__.get("kept") is None:
        m.kept = torch.randn(4)
    return h * m.kept  # type: ignore[no-any-return]


STORE: dict[str, torch.Tensor] = {}


class Kept(Net):
    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self.cache: dict[str, torch.Tensor] = {}


def _dict(m: Any, h: torch.Tensor) -> torch.Tensor:
    if "mu" not in m.cache:
        m.cache["mu"] = h.std().detach()
    return h / m.cache["mu"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("body", [_attribute, _none, _dict])
def test_what_the_first_call_sets_up_from_its_data_is_refused_until_it_is_there(body: Body) -> None:
    model = Kept(body).eval()
    with pytest.raises(UnsupportedError, match=r"sets up .* when it first runs.*Run the model once"):
        split(model)
    model(*inputs(2))
    runtime = split(model)
    with torch.no_grad():
        whole = model(*inputs(3))
    assert difference(whole, runtime.run_suffix(runtime.run_prefix(*inputs(3)))) is None


def _from_sizes(m: Any, h: torch.Tensor) -> torch.Tensor:
    if "at" not in m.cache:
        m.cache["at"] = torch.arange(h.shape[1])
    return h + m.cache["at"]  # type: ignore[no-any-return]


def test_what_the_first_call_sets_up_from_sizes_is_followed() -> None:
    model = Kept(_from_sizes).eval()
    runtime = split(model)
    for batch in (2, 3, 2):
        with torch.no_grad():
            whole = copy.deepcopy(model)(*inputs(batch))
        assert difference(whole, runtime.run_suffix(runtime.run_prefix(*inputs(batch)))) is None


# Modules in plain lists


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4, 4)), torch.randn(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.w.shape[0] == x.shape[-1] == self.v.size(0)
        found: torch.Tensor = torch.tanh(x @ self.w) * self.v
        return found


class Listed(nn.Module):
    def __init__(self, hold: Callable[[list[Layer]], Any]) -> None:
        super().__init__()
        layers = [Layer(), Layer()]
        self.kept, self.params = hold(layers), nn.ParameterList([layer.w for layer in layers])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.kept.values() if isinstance(self.kept, dict) else self.kept:
            x = getattr(layer, "operation", layer)(x)
        return x


class Node:
    def __init__(self, operation: nn.Module) -> None:
        self.operation = operation


HOLDS: dict[str, Callable[[list[Layer]], Any]] = {
    "list": list,
    "dict": lambda layers: {"a": layers[0], "b": layers[1]},
    "objects": lambda layers: [Node(layer) for layer in layers],
}


@pytest.mark.parametrize("hold", HOLDS.values(), ids=HOLDS)
def test_modules_in_plain_containers_may_ask_for_sizes_of_their_tensors(hold: Callable[[list[Layer]], Any]) -> None:
    torch.manual_seed(0)
    model = Listed(hold).eval()
    runtime = split(model, trainable=False)
    for batch in (2, 3):
        with torch.no_grad():
            whole = model(*inputs(batch))
        assert difference(whole, runtime.run_suffix(runtime.run_prefix(*inputs(batch)))) is None


# Counters


def test_a_split_counts_as_many_operations_as_the_whole() -> None:
    model = Net(lambda m, h: torch.relu(h)).eval()
    runtime = split(model)
    with FlopCounterMode(display=False) as split_count:
        runtime.run_suffix(runtime.run_prefix(*inputs(3)))
        boundary = runtime.run_training_prefix(*inputs(3))
        _, gradients = runtime.train_suffix(boundary, loss_fn=lambda out, _: out.sum())
        runtime.backward_prefix(boundary, gradients)
    with FlopCounterMode(display=False) as whole_count:
        with torch.no_grad():
            model(*inputs(3))
        model(*inputs(3)).sum().backward()
    assert split_count.get_total_flops() == whole_count.get_total_flops() > 0


def test_what_is_captured_under_a_counter_is_refused_by_its_name() -> None:
    with FlopCounterMode(display=False), pytest.raises(CaptureError, match="capture outside of FlopCounterMode"):
        split(Net(lambda m, h: h))


@pytest.mark.planted
def test_a_counter_that_nothing_asks_for_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ways, "refuse_hooks", lambda model: None)
    with pytest.raises(AssertionError, match=r"forward calls Tensor\.register_hook"):
        test_what_is_captured_under_a_counter_is_refused_by_its_name()


def test_weights_of_inference_mode_are_split_for_inference_and_told_of_in_training() -> None:
    with torch.inference_mode():
        model = Net(lambda m, h: h.relu())
    runtime = prepare_split(model, inputs(2), split="after:a")
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(*inputs(3))), model(*inputs(3)))
    told = r"'p' is an inference tensor, made under torch.inference_mode\(\).*copy.deepcopy\(model\)"
    with pytest.raises(TrainingError, match=told):
        runtime.run_training_prefix(*inputs(3))
    with pytest.raises(SpecError, match=f"trainable=True asks for what can't be.*{told}"):
        prepare_split(model, inputs(2), split=SplitSpec("after:a", trainable=True))
    prepare_split(copy.deepcopy(model), inputs(2), split=SplitSpec("after:a", trainable=True))
