"""A part of a model as a module: its parameters and buffers under the model's own names, and how it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ariadne.boundary import BoundaryPayload
from ariadne.capture import Example
from ariadne.errors import GuardError, SpecError
from ariadne.pipeline.flight import Flight, Onward, first, later
from ariadne.plan import TracePlan, uses
from ariadne.runtime import SplitRuntime


class Part(nn.Module):
    """One part of a model that was cut in several: what `pipeline.parts[i]` is, and what a stage runs.

    `index` counts from 0, of `count` parts. Its parameters and buffers are the model's own, under the model's names, so optimizers,
    `state_dict()` and `load_state_dict()` work, and those of all parts together are the model's. Called, it runs without gradients:
    the first part takes what the model takes, each other one the boundary that the part before it gave; the last gives the
    model's output.

    >>> boundary = pipeline.parts[0](x)
    >>> pipeline.parts[1](boundary).shape
    torch.Size([8, 1000])
    """

    def __init__(self, index: int, count: int, root: nn.Module, tied: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self._parameters, self._buffers, self._modules = root._parameters, root._buffers, root._modules
        self._non_persistent_buffers_set = root._non_persistent_buffers_set
        self.training = root.training
        self.__dict__.update(index=index, count=count, _root=root, _tied=dict(tied))

    index: int
    count: int
    _root: nn.Module
    _tied: dict[str, tuple[int, ...]]

    @property
    def runtime(self) -> SplitRuntime:
        """What runs it."""
        raise NotImplementedError

    @property
    def onward(self) -> Mapping[str, Onward]:
        """What goes on to the next part, by the signature of the plan; empty for the last part."""
        raise NotImplementedError

    def get_submodule(self, target: str) -> nn.Module:
        """As `nn.Module.get_submodule`: the model's own submodule of that name, also where a part has an attribute so called."""
        return self._root.get_submodule(target) if target else self

    @property
    def tied(self) -> dict[str, nn.Parameter]:
        """The parameters that other parts use too, by the model's first name for each."""
        return {name: self.get_parameter(name) for name, users in self._tied.items() if self.index in users}

    @property
    def shared(self) -> dict[str, tuple[int, ...]]:
        """The parameters that more than one part uses, with these parts in order."""
        return self._tied

    @property
    def reads_once(self) -> bool:
        """Whether no plan of this part uses a parameter at two places."""
        runtime = self.runtime
        known = self.__dict__.get("_once")
        if known is None or known[0] is not runtime:
            self.__dict__["_once"] = known = runtime, not any(map(self._used_twice, runtime.plans))
        return bool(known[1])

    def _used_twice(self, plan: TracePlan) -> bool:
        seen: set[int] = set()
        for node in plan.nodes:
            for name in uses((node.args, tuple(v for _, v in node.kwargs))):
                value = plan.values.get(name)
                if value is None or value.kind != "parameter":
                    continue
                p = self.runtime.model.get_submodule(value.origin[0])._parameters.get(value.origin[1])
                if p is not None and id(p) in seen:
                    return True
                seen.add(id(p))
        return False

    @property
    def owned(self) -> frozenset[str]:
        """Of the tied parameters those whose gradient is summed up here: this part is the first that uses them."""
        return frozenset(name for name, users in self._tied.items() if users[0] == self.index)

    def fly(self, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool) -> Flight:
        """Run forward: the first part on the model's inputs, another one on a boundary."""
        if self.index == 0:
            return first(self.runtime, args, kwargs, trains)
        if len(args) != 1 or not isinstance(args[0], BoundaryPayload):
            raise SpecError(
                f"part {self.index} of {self.count} takes the boundary that part {self.index - 1} gave, and nothing else"
            )
        return later(self.runtime, args[0], self.onward, trains)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run this part without gradients."""
        flight = self.fly(args, kwargs, False)
        return flight.output if flight.gives is None else flight.gives

    def foreign(self) -> list[torch.Tensor]:
        """Parameters that other parts alone use, where they are at hand."""
        return []


class Unserved(GuardError):
    """A call that no plan of a pipeline serves yet: where the pipeline itself is asked, it captures one for all parts."""

    def __init__(self, example: Example, trains: bool) -> None:
        given = ", ".join(f"{t.dtype} {list(t.shape)}" for t in example.leaves if isinstance(t, torch.Tensor))
        super().__init__(
            f"one part was asked for {'a training step' if trains else 'a call'} on {given}, and no plan that the pipeline has "
            "serves that as the model, its inputs and torch's settings are now; a plan is cut for all parts at once. Call "
            "pipeline(...) or pipeline.parts[0](...) on these inputs, which captures one"
        )
        self.example, self.trains = example, trains


class ModelPart(Part):
    """A part of a model that is here: it reads the model's own tensors, and follows them."""

    _model: nn.Module
    _runtime: Callable[[int], SplitRuntime]
    _onward: Callable[[int], Mapping[str, Onward]]
    _places: tuple[tuple[str, str, str], ...]
    _extend: Callable[[Example, bool], None]

    def __init__(self, index: int, count: int, model: nn.Module, tied: Mapping[str, tuple[int, ...]],
                 places: Iterable[tuple[str, str, str]], runtime: Callable[[int], SplitRuntime],
                 onward: Callable[[int], Mapping[str, Onward]],
                 extend: Callable[[Example, bool], None]) -> None:  # fmt: skip
        super().__init__(index, count, view_of(model, places), tied)
        self.__dict__.update(_model=model, _runtime=runtime, _onward=onward, _places=tuple(places), _extend=extend)

    @property
    def runtime(self) -> SplitRuntime:
        """What runs it."""
        return self._runtime(self.index)

    @property
    def onward(self) -> Mapping[str, Onward]:
        """What goes on to the next part, by the signature of the plan; empty for the last part."""
        return self._onward(self.index)

    def fly(self, args: tuple[Any, ...], kwargs: dict[str, Any], trains: bool) -> Flight:
        """As `Part.fly`; on inputs that no plan serves yet, the first part has one captured for all of them."""
        try:
            return super().fly(args, kwargs, trains)
        except Unserved as call:
            if self.index:
                raise
            self._extend(call.example, call.trains)
        return super().fly(args, kwargs, trains)

    def foreign(self) -> list[torch.Tensor]:
        """Parameters of the model that this part does not use."""
        return list(self._model.parameters())

    def train(self, mode: bool = True) -> ModelPart:
        """As `nn.Module.train`, for the whole model; what was captured holds for one mode only."""
        super().train(mode)
        self._model.train(mode)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> ModelPart:
        """What `.to()` comes to: the model's own tables get what stands in this part's."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for table, path, key in self._places:
            here = self._root.get_submodule(path).__dict__[table]
            self._model.get_submodule(path).__dict__[table][key] = here[key]
        return self

    def __repr__(self) -> str:
        return f"Part({self.index} of {self.count}, of {type(self._model).__name__})"


def view_of(model: nn.Module, places: Iterable[tuple[str, str, str]]) -> nn.Module:
    """Plain modules that hold some of a model's tensors, the very same, at the same paths; `places` are (table, path, name)."""
    root = nn.Module()
    root.training = model.training
    for table, path, key in places:
        at, of = root, model
        for step in path.split(".") if path else []:
            of = of.get_submodule(step)
            if step not in at._modules:
                child = nn.Module()
                child.training = of.training
                at._modules[step] = child
            at = at._modules[step]  # type: ignore[assignment]
        at.__dict__[table][key] = of.__dict__[table][key]
        if table == "_buffers" and key in of._non_persistent_buffers_set:
            at._non_persistent_buffers_set.add(key)
    return root
