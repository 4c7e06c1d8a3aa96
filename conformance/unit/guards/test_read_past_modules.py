"""What forward reads past `nn.Module`'s own ways: a module's `__dict__`, its class's class, objects of torch's, registries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ariadne.errors import ModuleError
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import numbers

X = numbers(2, 4)
Forward = Callable[[Any, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Two layers, and a gain that is read in some way."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gain, self.options = nn.Linear(4, 4), nn.Linear(4, 4), 2.0, {"gain": 2.0}
        self.unread = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x) * self.read())

    def read(self) -> Any:
        return self.gain


class ByDict(Net):
    def read(self) -> Any:
        return self.__dict__["gain"]


class ByVars(Net):
    def read(self) -> Any:
        return vars(self)["options"]["gain"]


class ByCopy(Net):
    def read(self) -> Any:
        return {**self.__dict__}.get("gain", 1.0)


class ByObject(Net):
    def read(self) -> Any:
        return object.__getattribute__(self, "gain")


class ByItsOwn(Net):
    def __getattribute__(self, name: str) -> Any:
        if name == "scale":
            return object.__getattribute__(self, "options")["gain"]
        return super().__getattribute__(name)

    def read(self) -> Any:
        return self.scale


class ByMissing(Net):
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self.__dict__["options"]["gain"]

    def read(self) -> Any:
        return self.not_there


def turn(model: Any) -> None:
    model.gain, model.options["gain"] = 5.0, 5.0


@pytest.mark.parametrize("build", [ByDict, ByVars, ByCopy, ByObject, ByItsOwn, ByMissing])
def test_what_is_read_past_getattribute_is_guarded(build: Callable[[], nn.Module]) -> None:
    model = build().eval()
    runtime = prepare_split(model, (X,), split="50%")
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X))
        turn(model)
        with pytest.raises(ModuleError, match=r"attribute '(gain|options)"):
            runtime.run_suffix(runtime.run_prefix(X))


def of_a_class_of_classes() -> tuple[nn.Module, Callable[[], None]]:
    class Kind(type):
        factor = 2.0

    class Model(Net, metaclass=Kind):
        def read(self) -> Any:
            return type(self).factor

    return Model(), lambda: setattr(Kind, "factor", 5.0)


def in_a_class_s_dict() -> tuple[nn.Module, Callable[[], None]]:
    class Model(Net):
        table = {"gain": [2.0]}  # noqa: RUF012 -- as users write it

        def read(self) -> Any:
            return type(self).table["gain"][0]

    return Model(), lambda: Model.table["gain"].__setitem__(0, 5.0)


def a_tensor_of_a_class() -> tuple[nn.Module, Callable[[], None]]:
    class Model(Net):
        factors = torch.ones(4)

        def read(self) -> Any:
            return self.factors

    return Model(), lambda: setattr(Model, "factors", torch.zeros(4))


def a_rate_of_an_optimizer() -> tuple[nn.Module, Callable[[], None]]:
    class Model(Net):
        def read(self) -> Any:
            return self.optimizer.param_groups[0]["lr"]  # type: ignore[union-attr, index, operator]

    model = Model()
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return model, lambda: model.optimizer.param_groups[0].__setitem__("lr", 0.1)  # type: ignore[union-attr, index, operator]


def a_rate_of_a_schedule() -> tuple[nn.Module, Callable[[], None]]:
    class Model(Net):
        def read(self) -> Any:
            return self.schedule.get_last_lr()[0]  # type: ignore[union-attr, index, operator]

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def step() -> None:
        optimizer.step()
        model.schedule.step()  # type: ignore[union-attr, operator]

    return model, step


def a_distribution() -> tuple[nn.Module, Callable[[], None]]:
    class Model(Net):
        def read(self) -> Any:
            return self.prior.log_prob(torch.ones(4))  # type: ignore[union-attr, operator]

    model = Model()
    model.prior = torch.distributions.Normal(torch.zeros(4), torch.ones(4))
    return model, lambda: setattr(model.prior, "loc", torch.ones(4) / 2)


@pytest.mark.parametrize(
    "build",
    [of_a_class_of_classes, in_a_class_s_dict, a_tensor_of_a_class, a_rate_of_an_optimizer, a_rate_of_a_schedule, a_distribution],
)  # fmt: skip
def test_classes_and_objects_of_torch_are_guarded(
    build: Callable[[], tuple[nn.Module, Callable[[], None]]],
) -> None:
    model, change = build()
    runtime = prepare_split(model.eval(), (X,), split="50%")
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X))
        change()
        with pytest.raises(ModuleError, match=r"call prepare_split again"):
            runtime.run_suffix(runtime.run_prefix(X))


def test_an_optimizer_that_forward_does_not_read_may_step() -> None:
    model = Net()
    model.optimizer = torch.optim.Adam(model.parameters(), lr=0.5)  # type: ignore[assignment]
    runtime = prepare_split(model, (X,), split="50%")
    model(X).sum().backward()
    model.optimizer.step()  # type: ignore[union-attr, operator]
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X))


def all_buffers(self: Any) -> Any:
    return sum(b.sum() for b in self.buffers())


def named(self: Any) -> Any:
    return sum(p.sum() for n, p in self.named_parameters() if n.startswith("e"))


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (all_buffers, lambda m: m.register_buffer("more", torch.ones(4))),
        (all_buffers, lambda m: setattr(m, "held", None)),
        (named, lambda m: m.register_parameter("extra", nn.Parameter(torch.ones(4)))),
    ],
)
def test_what_is_registered_is_guarded_where_forward_looks_through_it(read: Any, change: Callable[[Any], None]) -> None:
    model = type("Model", (Net,), {"read": read})()
    model.register_buffer("held", torch.ones(4))
    runtime = prepare_split(model.eval(), (X,), split="50%")
    change(model)
    with pytest.raises(ModuleError, match="which parameters and buffers there are"):
        runtime.run_prefix(X)


LISTED: dict[str, Callable[[Any], Any]] = {
    "vars": lambda self: len(vars(self)),
    "in vars": lambda self: 2 if "more" in vars(self) else 1,
    "dict": lambda self: 2 if "more" in self.__dict__ else 1,
    "get": lambda self: self.__dict__.get("more", 1.0),
    "dir": lambda self: len([n for n in dir(self) if n.startswith("mo")]) + 1,
}


@pytest.mark.parametrize("how", sorted(LISTED))
def test_a_name_that_comes_later_is_noticed_where_forward_looks_through_them(how: str) -> None:
    model = type("Model", (Net,), {"read": LISTED[how]})()
    runtime = prepare_split(model.eval(), (X,), split="50%")
    model.more = 2.0
    with pytest.raises(ModuleError, match=r"the names of its attributes.* more|found no attribute 'more'"):
        runtime.run_prefix(X)
    del model.more
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X))


def test_names_that_forward_sets_by_itself_are_not_among_those() -> None:
    def read(self: Any) -> Any:
        if "seen" not in self.__dict__:
            self.seen = True
        return 2.0

    model = type("Model", (Net,), {"read": read})()
    runtime = prepare_split(model.eval(), (X,), split="50%")
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X))


class Laid(nn.Module):
    """A result that follows how an op's result lies in memory, which follows how the tensors of the model do."""

    def __init__(self, asks: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv, self.head, self.asks = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4), asks
        self.plain = numbers(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.asks(self.conv(x)).mean((2, 3)) @ (self.plain * 1))


def flattened(h: torch.Tensor) -> torch.Tensor:
    try:
        return h.view(len(h), -1)[:, :4, None, None]
    except RuntimeError:
        return h * 3


ASKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "is_contiguous": lambda h: h if h.is_contiguous() else h * 2,
    "a format": lambda h: h * 2 if h.is_contiguous(memory_format=torch.channels_last) else h,
    "stride": lambda h: h * h.stride(1),
}


@pytest.mark.parametrize("asked", ASKS)
@pytest.mark.parametrize("of", ["the weights", "a plain tensor"])
def test_strides_that_follow_those_of_the_model(asked: str, of: str) -> None:
    x, model = numbers(2, 3, 5, 5), Laid(ASKS[asked]).eval()
    runtime = prepare_split(model, (x,), split="50%")
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(x)), model(x))
        if of == "the weights":
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        else:
            model.plain.data = model.plain.t().contiguous().t()
        with pytest.raises(ModuleError, match="strides of its tensors"):
            runtime.run_prefix(x)


def test_strides_where_an_op_raised_and_forward_went_on() -> None:
    x, model = numbers(2, 3, 5, 5), Laid(flattened).eval()
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    runtime = prepare_split(model, (x,), split="50%")
    model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    with pytest.raises(ModuleError, match="strides of its tensors"):
        runtime.run_prefix(x)


def test_sizes_where_an_op_raised_and_forward_went_on() -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.a(x)
            try:
                h = h * self.mask
            except RuntimeError:
                h = h * 3
            return self.b(h)

    model = Model().eval()
    model.register_buffer("mask", torch.ones(3))
    runtime = prepare_split(model, (X,), split="50%")
    model.mask = torch.ones(4) * 7
    with torch.no_grad():
        assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), model(X))


def test_a_copy_keeps_these_guards() -> None:
    model = ByDict().eval()
    runtime = copy.deepcopy(prepare_split(model, (X,), split="50%"))
    runtime.model.gain = 5.0
    with pytest.raises(ModuleError, match="attribute 'gain'"):
        runtime.run_suffix(runtime.run_prefix(X))


class ByStateDict(Net):
    """Reads `_version`, which stands in `nn.Module` itself, of each module."""

    def read(self) -> Any:
        return self.state_dict()["a.weight"].sum()


def test_a_state_dict_that_forward_makes_is_followed() -> None:
    model = ByStateDict()
    whole = copy.deepcopy(model)
    runtime = prepare_split(model, (X,), split="50%")
    for _ in range(2):
        for net in (model, whole):
            net.a.weight.data.mul_(2)
        with torch.no_grad():
            assert torch.equal(runtime.run_suffix(runtime.run_prefix(X)), whole(X))
    boundary = runtime.run_training_prefix(X)
    _, gradients = runtime.train_suffix(boundary, loss_fn=lambda o, _: o.sum())
    runtime.backward_prefix(boundary, gradients)
    whole(X).sum().backward()
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    ByStateDict._version = 2
    try:
        with pytest.raises(ModuleError, match="_version"):
            runtime.run_prefix(X)
    finally:
        del ByStateDict._version
    runtime.run_prefix(X)
