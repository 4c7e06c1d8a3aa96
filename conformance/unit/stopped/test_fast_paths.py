"""What asks whether anything overrides torch's functions goes the same way in a Python split as in the whole model."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, has_torch_function

from ariadne import BoundaryPayload, SplitSpec, prepare_split
from ariadne.errors import BoundaryError, UnsupportedError
from ariadne.stopped.absent import Absent, Ghost, Standing
from ariadne.stopped.unseen import Unseen, enter, leave, unseen

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")


class Encoder(nn.Module):
    def __init__(self, *, counts: bool = True) -> None:
        super().__init__()
        self.calls, self.counts = 0, counts
        self.emb = nn.Embedding(11, 8, padding_idx=0)
        self.enc = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.mid, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if self.counts:
            self.calls += 1
        h = self.mid(self.enc(self.emb(ids), src_key_padding_mask=ids == 0))
        if not self.counts:
            self.calls += 1
        return self.head(h.relu().mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.stem = 0, nn.Linear(8, 8)
        self.mha, self.mid, self.head = (
            nn.MultiheadAttention(8, 2, batch_first=True),
            nn.Linear(8, 8),
            nn.Linear(8, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.stem(x)
        return self.head(self.mid(self.mha(h, h, h, need_weights=False)[0])) + self.mha(h, h, h)[0].mean()


def padded() -> torch.Tensor:
    ids = torch.randint(1, 11, (4, 6))
    ids[0, 3:], ids[2, 4:] = 0, 0
    return ids


def same_ways(runtime: Any, model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        whole = model(x)
    boundary = runtime.run_prefix(x)
    payload = BoundaryPayload.from_bytes(boundary.to_bytes())
    for given in (boundary, boundary, payload):
        assert torch.equal(whole, runtime.run_suffix(given))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("cut", ["after:mid", "after:enc", "after:enc.layers.0"])
def test_a_padded_encoder_before_the_cut_takes_its_fast_path(training: bool, cut: str) -> None:
    model, ids = Encoder().train(training), padded()
    runtime = prepare_split(model, (ids,), split=SplitSpec(cut, trainable=training), fallback="python")
    same_ways(runtime, model.eval(), ids)


@pytest.mark.parametrize("cut", ["after:stem", "after:mid"])
def test_attention_takes_its_fast_path_on_what_crossed_besides(cut: str) -> None:
    model, x = Attention().eval(), torch.randn(4, 5, 8)
    same_ways(prepare_split(model, (x,), split=cut, fallback="python"), model, x)


def test_the_graph_before_a_python_suffix_takes_the_fast_path() -> None:
    model, ids = Encoder(counts=False).eval(), padded()
    runtime = prepare_split(model, (ids,), split="after:mid", fallback="python-suffix")
    same_ways(runtime, model, ids)


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.stem, self.head = 0, nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.stem(x)
        for asked in (
            has_torch_function((h, x)),
            torch.overrides.has_torch_function_unary(h),
            torch.overrides.has_torch_function_variadic(h, x),
            torch._C._has_torch_function([h]),
        ):
            h = h * 2 if asked else h + 1
        return self.head(h).relu()


def test_the_models_own_question_is_answered_as_in_the_whole_model_and_put_back() -> None:
    plain = torch._C._has_torch_function
    model, x = Asks().eval(), torch.randn(2, 4)
    same_ways(prepare_split(model, (x,), split="after:head", fallback="python"), model, x)
    same_ways(prepare_split(model, (x,), split="after:stem", fallback="python"), model, x)
    held = torch._C._has_torch_function, torch.overrides.has_torch_function, vars(sys.modules[__name__])
    assert held[0] is plain
    assert held[1] is plain
    assert held[2]["has_torch_function"] is plain


class Other(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Mine(Unseen):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_name_that_comes_to_hold_the_question_later_asks_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    late: Any = ModuleType("asks_late")
    late.asked, t = None, torch.ones(1)
    monkeypatch.setitem(sys.modules, late.__name__, late)
    for asked in (None, has_torch_function, None, has_torch_function):
        late.asked = asked
        with unseen(Mine()):
            assert asked is None or not late.asked((t,))
        assert late.asked is asked


def test_another_mode_is_heard_of() -> None:
    t, mine = torch.ones(1), Mine()
    with unseen():
        enter(mine)
        assert not has_torch_function((t,))
        with Other():
            assert has_torch_function((t,))
        leave(mine)
        assert not has_torch_function((t,))


def test_a_nested_tensor_without_data_tells_no_sizes() -> None:
    kind = Absent.of(torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]))
    assert kind is not None
    ghost = Ghost.of(kind, ("call", 0, 0), "one", Standing())
    assert ghost.is_nested
    assert ghost.dim() == 3
    with pytest.raises(BoundaryError, match="sizes of one, a nested tensor"):
        ghost.size(0)


def test_a_split_that_is_called_within_loss_fn_is_named() -> None:
    model, x = Asks(), torch.randn(2, 4)
    runtime = prepare_split(model, (x,), split=SplitSpec("after:stem", trainable=True), fallback="python")

    def loss_fn(output: torch.Tensor, _: Any) -> torch.Tensor:
        return (output - runtime.run_suffix(runtime.run_prefix(x))).square().sum()

    with pytest.raises(UnsupportedError, match="within loss_fn"):
        runtime.train_suffix(runtime.run_training_prefix(x), loss_fn=loss_fn)
