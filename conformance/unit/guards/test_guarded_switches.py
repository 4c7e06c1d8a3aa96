"""Settings of torch that forward asks for are guarded: where one stands otherwise, the call follows the model with another plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.backends import mha
from torch.nn.utils import parametrizations, parametrize

from ariadne import ReplayBoundary, SplitRuntime
from ariadne.errors import BoundaryError, GuardError, UnsupportedError
from ariadne.guards import SWITCHES
from ariadne.guards.calls import autocast_is
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

get_num_threads = torch.get_num_threads


@contextmanager
def with_setting(put: Callable[[Any], Any], to: Any, back: Any) -> Iterator[None]:
    put(to)
    try:
        yield
    finally:
        put(back)


class Asks(nn.Module):
    def __init__(self, asks: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.asks = nn.Linear(4, 4), nn.Linear(4, 2), asks
        self.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.asks(self.first(x)).to(torch.float32))


def split_of(asks: Callable[[torch.Tensor], torch.Tensor], cut: str = "after:first") -> SplitRuntime:
    return prepare_split(Asks(asks).eval(), (numbers(2, 4).float(),), split=cut)


def agree(runtime: SplitRuntime) -> None:
    x = numbers(3, 4).float()
    with torch.no_grad():
        expected = runtime.model(x)
    found = runtime.run_suffix(runtime.run_prefix(x))
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


THIRD = 1 / 3
Setting = Callable[[], AbstractContextManager[Any]]


def double() -> AbstractContextManager[Any]:
    return with_setting(torch.set_default_dtype, torch.float64, torch.float32)


def deterministic() -> AbstractContextManager[Any]:
    return with_setting(lambda on: torch.use_deterministic_algorithms(on, warn_only=True), True, False)


def threads() -> AbstractContextManager[Any]:
    now = torch.get_num_threads()
    return with_setting(torch.set_num_threads, now + 1, now)


def backend(owner: Any, name: str, to: Any) -> Setting:
    return lambda: with_setting(lambda value: setattr(owner, name, value), to, getattr(owner, name))


ASKED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Setting]] = {
    "inference mode": (lambda x: x * (3 if torch.is_inference_mode_enabled() else 2), torch.inference_mode),
    "inference mode, by a name of C's": (lambda x: x * (3 if torch._C.is_inference_mode_enabled() else 2), torch.inference_mode),
    "the default dtype": (lambda x: x.to(torch.get_default_dtype()) * 1.1, double),
    "the default dtype, by numbers": (lambda x: x * torch.tensor([THIRD]), double),
    "the default dtype, by a list": (lambda x: x * torch.as_tensor([THIRD, 1.0, 2.0, 3.0]), double),
    "the default dtype, by a factory": (lambda x: x * torch.full((4,), THIRD), double),
    "the default dtype, by a range": (lambda x: x * torch.linspace(0, 1, 4), double),
    "the default dtype, by the dtype of what was made": (
        lambda x: x * (3 if torch.ones(1).dtype is torch.float64 else 2), double
    ),
    "deterministic algorithms": (lambda x: x * (3 if torch.are_deterministic_algorithms_enabled() else 2), deterministic),
    "deterministic algorithms, by the level": (lambda x: x * (1 + torch.get_deterministic_debug_mode()), deterministic),
    "threads": (lambda x: x * torch.get_num_threads(), threads),
    "threads, by a name of its own": (lambda x: x * get_num_threads(), threads),
    "a backend's flag": (
        lambda x: x * (3 if torch.backends.mkldnn.enabled else 2), lambda: torch.backends.mkldnn.flags(enabled=False)
    ),
    "another backend's flag": (
        lambda x: x * (3 if torch.backends.cudnn.deterministic else 2), backend(torch.backends.cudnn, "deterministic", True)
    ),
    "a kernel of attention": (
        lambda x: x * (3 if torch.backends.cuda.flash_sdp_enabled() else 2),
        lambda: with_setting(torch.backends.cuda.enable_flash_sdp, False, True)
    ),
    "the precision of products": (
        lambda x: x * (2 if torch.get_float32_matmul_precision() == "highest" else 3),
        lambda: with_setting(torch.set_float32_matmul_precision, "high", "highest")
    ),
    "the fast path": (
        lambda x: x * (3 if mha.get_fastpath_enabled() else 2), lambda: with_setting(mha.set_fastpath_enabled, False, True)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ASKED))
def test_a_setting_that_forward_asks_for_is_followed(name: str) -> None:
    asks, setting = ASKED[name]
    runtime = split_of(asks)
    agree(runtime)
    for _ in range(2):
        with setting():
            agree(runtime)
        agree(runtime)
    assert len(runtime._variants) == 2


FURTHER: dict[str, tuple[Callable[[], bool], Setting]] = {
    "warnings each time": (torch.is_warn_always_enabled, lambda: with_setting(torch.set_warn_always, True, False)),
    "how parameters are swapped": (
        torch.__future__.get_swap_module_params_on_conversion,
        lambda: with_setting(torch.__future__.set_swap_module_params_on_conversion, True, False),
    ),
    "what is not filled": (
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
        backend(torch.utils.deterministic, "fill_uninitialized_memory", False),
    ),
    "kept weights": (lambda: bool(parametrize._cache_enabled), parametrize.cached),
    "a profiler": (torch.autograd._profiler_enabled, torch.autograd.profiler.profile),
}


@pytest.mark.parametrize("name", sorted(FURTHER))
def test_a_further_setting_is_followed(name: str) -> None:
    told, setting = FURTHER[name]
    runtime = split_of(lambda x: x * (3 if told() else 2))
    agree(runtime)
    with setting():
        agree(runtime)
    assert len(runtime._variants) == 2


@pytest.mark.parametrize("name", sorted(ASKED))
def test_a_split_that_is_prepared_under_a_setting_is_right_without_it(name: str) -> None:
    asks, setting = ASKED[name]
    with setting():
        runtime = split_of(asks)
        agree(runtime)
    agree(runtime)
    with setting():
        agree(runtime)


@pytest.mark.parametrize("name", sorted(ASKED))
def test_a_suffix_under_another_setting_than_its_prefix_is_an_error(name: str) -> None:
    asks, setting = ASKED[name]
    runtime = split_of(asks)
    boundary = runtime.run_prefix(numbers(3, 4).float())
    with setting(), pytest.raises(GuardError, match=r"was .* at capture, now it is .*prepare again"):
        runtime.run_suffix(boundary)
    runtime.run_suffix(boundary)


def test_settings_that_forward_does_not_ask_for_call_for_no_other_plan() -> None:
    runtime = split_of(lambda x: x * 2)
    for setting in (torch.inference_mode, deterministic, threads, backend(torch.backends.cudnn, "deterministic", True)):
        with setting():
            agree(runtime)
    assert len(runtime._variants) == 1


@pytest.mark.variants
def test_the_fast_path_of_a_transformer_is_followed() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 2)).eval()
    runtime = prepare_split(model, (numbers(2, 3, 8),), split="after:0")
    x = numbers(3, 3, 8)
    for setting in (nullcontext, lambda: with_setting(mha.set_fastpath_enabled, False, True)):
        with setting():
            with torch.no_grad():
                expected = model(x)
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), expected)
    with with_setting(mha.set_fastpath_enabled, False, True):
        assert "transformer_encoder_layer_fwd" not in str(runtime._now[False].plan)


def test_training_follows_the_default_dtype() -> None:
    runtime = split_of(lambda x: x * torch.tensor([THIRD]))
    twin = Asks(runtime.model.asks)
    twin.load_state_dict(runtime.model.state_dict())
    for setting in (nullcontext, double):
        with setting():
            runtime.model.zero_grad()
            twin.zero_grad()
            boundary = runtime.run_training_prefix(numbers(3, 4).float())
            _, gradients = runtime.train_suffix(boundary, loss_fn=lambda output, _: output.sum())
            runtime.backward_prefix(boundary, gradients)
            twin(numbers(3, 4).float()).sum().backward()
        for one, other in zip(runtime.model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one.grad, other.grad)


class Kept(Asks):
    """Keeps its parametrized weight over the two uses of one call, by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return self.last(self.first(self.first(x)))


def test_parametrized_weights_that_are_kept_from_call_to_call_are_refused_and_within_forward_followed() -> None:
    x = numbers(3, 4).float()
    for kind in (Asks, Kept):
        model = kind(torch.tanh).eval()
        parametrizations.weight_norm(model.first)
        parametrizations.weight_norm(model.last)
        runtime = prepare_split(model, (x,), split="cut:1")
        agree(runtime)
        boundary = runtime.run_prefix(x)
        with parametrize.cached():
            with pytest.raises(GuardError, match=r"parametrize.cached\(\) was False at capture, now it is True"):
                runtime.run_suffix(boundary)
            with pytest.raises(UnsupportedError, match=r"'first' has a parametrized weight, .*call outside of it"):
                runtime.run_training_prefix(x)
        agree(runtime)
    plain = split_of(torch.tanh)
    with parametrize.cached():  # where nothing is parametrized it keeps nothing
        agree(plain)


def lowered() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def lowered_anew() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)


@pytest.mark.parametrize("there", [nullcontext, lowered, lowered_anew])
@pytest.mark.parametrize("here", [nullcontext, lowered])
def test_a_suffix_runs_under_the_autocast_that_its_prefix_ran_under(there: Setting, here: Setting) -> None:
    runtime = split_of(torch.tanh)
    x = numbers(3, 4).float()
    with there():
        boundary, trained = runtime.run_prefix(x), runtime.run_training_prefix(x)
        sent = ReplayBoundary.from_bytes(boundary.to_bytes())
        with torch.no_grad():
            expected = runtime.model(x)
    with here():
        if there is here:
            assert torch.equal(runtime.run_suffix(boundary), expected)
            assert torch.equal(runtime.run_suffix(sent), expected)
            return
        words = (
            r"the prefix ran (outside of|under) autocast.*, and the suffix is called (outside|under).*Call both halves"
        )
        for one in (boundary, sent):
            with pytest.raises(BoundaryError, match=words):
                runtime.run_suffix(one)
        with pytest.raises(BoundaryError, match=words):
            runtime.train_suffix(trained, loss_fn=lambda output, _: output.sum())
    with there():
        _, gradients = runtime.train_suffix(trained, loss_fn=lambda output, _: output.sum())
    with here():
        runtime.backward_prefix(trained, gradients)  # backward passes run outside of it, wherever they are called
    arrays = ReplayBoundary.from_tensors(
        boundary.tensors, split_id=boundary.split_id, plan_signature=boundary.plan_signature
    )
    with there():
        assert torch.equal(runtime.run_suffix(arrays), expected)  # nobody knows under what arrays were made


def test_every_switch_can_be_asked_and_none_has_a_name_twice() -> None:
    assert len({id(ask) for ask in SWITCHES.values()}) == len(SWITCHES)
    for ask in SWITCHES.values():
        ask()


@contextmanager
def another_dtype(kind: str) -> Iterator[None]:
    """What autocast takes where a forward enables it, and nothing is enabled now."""
    before = torch.get_autocast_dtype(kind)
    torch.set_autocast_dtype(kind, torch.float16 if before is not torch.float16 else torch.bfloat16)
    try:
        yield
    finally:
        torch.set_autocast_dtype(kind, before)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_autocast_is_as_it_was_only_if_its_dtype_is_enabled_or_not(kind: str) -> None:
    off = tuple((d, False, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda"))
    on = tuple((d, d == "cpu", dtype) for d, _, dtype in off)
    assert (autocast_is(off), autocast_is(on)) == (True, False)
    with another_dtype(kind):
        assert not autocast_is(off)
    with torch.autocast("cpu"):
        assert (autocast_is(off), autocast_is(on)) == (False, True)
        with another_dtype(kind):
            assert not autocast_is(on)


def is_followed_in_another(
    changed: AbstractContextManager[Any], within: bool, asks: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Prepare outside of a block and call inside of it, or the other way round."""
    model, x = Asks(asks).eval(), torch.randn(3, 4)
    states: list[AbstractContextManager[Any]] = [nullcontext(), changed]
    if within:
        states.reverse()
    with states[0]:
        runtime = prepare_split(model, (torch.randn(2, 4),), split="50%")
    with states[1], torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "ask",
    [
        lambda: torch.is_autocast_cpu_enabled(),
        lambda: torch.get_autocast_cpu_dtype() is torch.float16,
        lambda: not torch.is_autocast_cache_enabled(),
    ],
)
@pytest.mark.parametrize("within", [False, True], ids=["called in autocast", "prepared in autocast"])
def test_autocast_is_followed_by_its_older_names_and_its_cache_too(ask: Callable[[], bool], within: bool) -> None:
    changed = torch.autocast("cpu", torch.float16, cache_enabled=False)
    is_followed_in_another(changed, within, lambda h: h * 2 if ask() else h)


@contextmanager
def in_a_group() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("within", [False, True], ids=["made later", "gone later"])
def test_a_process_group_that_comes_or_goes_is_followed(within: bool) -> None:
    def ask(h: torch.Tensor) -> torch.Tensor:
        return h * (2 + distributed.get_world_size()) if distributed.is_initialized() else h

    is_followed_in_another(in_a_group(), within, ask)
