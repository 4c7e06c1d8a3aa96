"""How tensors hold their numbers, dense or sparse: inputs are dense, and of the model's tensors what forward asked stays so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ariadne.errors import InputError, ModuleError, UnsupportedError
from conformance.unit.refusing import prepare_split

ASKS: dict[str, Callable[[Tensor], bool]] = {
    "is_sparse": lambda t: t.is_sparse,
    "is_sparse_csr": lambda t: t.is_sparse_csr,
    "layout": lambda t: t.layout is not torch.strided,
    "what an op raises": lambda t: coalesces(t),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "dense": lambda t: t,
}


def coalesces(t: Tensor) -> bool:
    try:
        t.coalesce()
    except RuntimeError:
        return False
    return True


pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support:UserWarning", "ignore:The PyTorch API of nested:UserWarning"
)


class Graph(nn.Module):
    """Features of four nodes and how these are joined, handed in or kept; twice as much where the matrix answers so."""

    def __init__(self, ask: Callable[[Tensor], bool], kept: Tensor | None = None) -> None:
        super().__init__()
        self.a, self.c, self.ask = nn.Linear(8, 8), nn.Linear(8, 4), ask
        self.register_buffer("kept", kept)

    def forward(self, x: Tensor, joined: Tensor | None = None) -> Tensor:
        joined = self.kept if joined is None else joined
        h = joined @ self.a(x)
        found: Tensor = self.c(h * 2 if self.ask(joined) else h)
        return found


@pytest.mark.parametrize("ask", sorted(ASKS))
def test_a_sparse_input_is_refused_where_the_example_was_dense(ask: str) -> None:
    torch.manual_seed(0)
    model, x, joined = Graph(ASKS[ask]), torch.randn(4, 8), torch.randn(4, 4).relu()
    runtime = prepare_split(model, (x, joined), split="after:a")
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x, joined)), model(x, joined))
    for how in ("coo", "csr"):
        with pytest.raises(InputError, match="Hand it in dense"):
            runtime.run_prefix(x, LAYOUTS[how](joined))


@pytest.mark.parametrize("how", ["coo", "csr"])
def test_a_sparse_example_is_refused_by_name_and_served_by_the_models_own_python(how: str) -> None:
    torch.manual_seed(0)
    model, x, joined = Graph(ASKS["layout"]), torch.randn(4, 8), LAYOUTS[how](torch.randn(4, 4).relu())
    with pytest.raises(UnsupportedError, match=r"input \[1\] is of layout torch\.sparse"):
        prepare_split(model, (x, joined), split="after:a")
    runtime = prepare_split(model, (x, joined), split="after:a", fallback="python")
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x, joined)), model(x, joined))


def test_a_nested_input_is_refused() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)])
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(InputError, match="nested"):
        prepare_split(model, (nested,), split="percent:50")
    runtime = prepare_split(model, (torch.randn(2, 3, 8),), split="percent:50")
    with pytest.raises(InputError, match="nested"):
        runtime.run_prefix(nested)


@pytest.mark.parametrize("ask", sorted(ASKS.keys() - {"what an op raises"}))
@pytest.mark.parametrize("first", sorted(LAYOUTS))
def test_a_buffer_of_another_layout_is_noticed_where_forward_asks(first: str, ask: str) -> None:
    torch.manual_seed(0)
    x, joined = torch.randn(4, 8), torch.randn(4, 4).relu()
    model = Graph(ASKS[ask], LAYOUTS[first](joined))
    runtime = prepare_split(model, (x,), split="after:a")
    for how, turned in LAYOUTS.items():
        model.kept = turned(joined)
        if how == first:
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
        else:
            with pytest.raises(ModuleError, match="which tensors stand where"):
                runtime.run_prefix(x)


def test_a_jagged_input_beside_a_dense_one_is_served_by_the_models_own_python() -> None:
    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.c = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor, rows: Tensor) -> Tensor:
            found: Tensor = self.c(self.a(x)) + rows.to_padded_tensor(0.0).sum()
            return found

    torch.manual_seed(0)
    model, x = Padded(), torch.randn(2, 8)
    rows = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=torch.jagged)
    with pytest.raises(UnsupportedError, match=r"input \[1\] is nested"):
        prepare_split(model, (x, rows), split="after:a")
    runtime = prepare_split(model, (x, rows), split="after:a", fallback="python")
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x, rows)), model(x, rows))


def test_a_sparse_parameter_is_refused_by_name_and_served_by_the_models_own_python() -> None:
    torch.manual_seed(0)
    model, x = Graph(ASKS["layout"]), torch.randn(4, 8)
    del model.kept
    model.kept = nn.Parameter(torch.randn(4, 4).relu().to_sparse())
    with pytest.raises(UnsupportedError, match=r"the parameter 'kept' is of layout torch\.sparse_coo"):
        prepare_split(model, (x,), split="after:a")
    runtime = prepare_split(model.eval(), (x,), split="after:a", fallback="python")
    assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
