"""The boundary payload: what the prefix hands to the suffix, in memory as it is, on the wire as safe bytes."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ariadne import tree
from ariadne.boundary.autocast import Autocast, autocast_in, autocast_now, refuse_another
from ariadne.boundary.nodes import TensorRef, register_boundary_serializer, shown
from ariadne.boundary.ragged import Ragged, buffer_of, sizes_of
from ariadne.boundary.sections import Memo, header_section, values_section
from ariadne.boundary.wire import Form, encode, joined, on_the_cpu, opened, tensors_of
from ariadne.compare import same_bits
from ariadne.errors import BoundaryError, ConsumedError, PayloadError
from ariadne.plan import own

PROTOCOL_VERSION = 2
Shares = Sequence[tuple[Any, torch.Tensor]]


class BoundaryPayload:
    """The values that cross one cut, for one batch.

    In memory nothing is copied. `batch` counts samples. `labels` names the values in order; `tensors` holds every tensor by its
    label (a sequence called `parts` gives `parts[0]`, `parts[1]`, ...), `values` the tree with `TensorRef`s in their place.
    A boundary made by `run_training_prefix` also keeps the prefix's autograd graph, which does not travel. Values that share
    memory with an input, an output or a tensor of the model must not be written into before the suffix has run: that is refused,
    save for tensors made under `torch.inference_mode()` and writes through `.data` or `.numpy()`, which torch doesn't count.

    `to_bytes` and `from_bytes` write and read it as bytes without pickle; reading checks every length before it
    allocates, and raises `PayloadError` for anything malformed. A deep copy has values of its own,
    and so has what pickle makes of it; neither has the graph.

    >>> boundary = runtime.run_prefix(torch.randn(8, 3, 224, 224))
    >>> boundary.nbytes, {label: list(t.shape) for label, t in boundary.tensors.items()}
    (1605632, {'layer3_1_relu_call2': [8, 256, 14, 14]})
    """

    __slots__ = ("__weakref__", "_before", "_casts", "_consumed", "_disturbed", "_earlier", "_graph", "_held", "_moves", "_noted",
                 "_quiet", "_shared", "_stood", "autocast", "batch", "labels", "plan_signature", "raw", "requires_grad", "split_id",
                 "weights")  # fmt: skip

    def __init__(
        self,
        split_id: str,
        plan_signature: str,
        batch: int,
        labels: tuple[str, ...],
        raw: tuple[Any, ...],
        requires_grad: tuple[str, ...] = (),
        graph: tuple[Any, ...] | None = None,
    ) -> None:
        self.split_id, self.plan_signature, self.batch = split_id, plan_signature, batch
        self.labels, self.raw, self.requires_grad = labels, raw, requires_grad
        self._graph, self._held = graph, _NOTHING
        self.autocast: Autocast | None = autocast_now()  # that the prefix ran under; None where nobody knows
        self._before: Any = None  # what the prefix ran from, where the suffix may need it on another path
        self._moves: int | None = None  # how often state of the model had been moved after the prefix, if that was here
        self._quiet: tuple[tuple[int, torch.Tensor], ...] = ()  # values that may move uncounted, with copies
        self._stood: list[Any] | None = None  # how the state stood then that both sides use
        self.weights = ""  # a digest of the weights of the model that the prefix is of, where it was loaded from a file
        self._consumed: dict[str, object] = {}  # by whom it was taken
        self._shared: Shares = ()  # leaves, with what waits for the prefix's part
        self._noted: Shares = ()  # leaves of neither side, with what the loss gave them
        self._casts: Any = None  # which casts autocast kept as the prefix had run
        self._disturbed = False  # whether loss_fn itself put gradients on parameters of the prefix
        self._earlier: frozenset[int] = (
            frozenset()
        )  # ids of the suffix's parameters to whose gradients train_suffix added

    @property
    def protocol_version(self) -> int:
        """The version of the payload's form."""
        return PROTOCOL_VERSION

    @property
    def batch_size(self) -> int:
        """The batch."""
        return self.batch

    @property
    def supports_prefix_backward(self) -> bool:
        """Whether the prefix's graph is still there for `backward_prefix`."""
        return self._graph is not None and "backward_prefix" not in self._consumed

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor, by label."""
        return {label: t for label, t in self.leaves() if isinstance(t, torch.Tensor)}

    @property
    def values(self) -> tuple[Any, ...]:
        """The values in the order of `labels`, with a `TensorRef` for every tensor: to its first label, where it has several."""
        first: dict[int, str] = {}
        for label, v in self.leaves():
            first.setdefault(id(v), label)
        return tuple(
            tree.unflatten(
                [TensorRef(first[id(v)]) if isinstance(v, torch.Tensor) else v for _, v in tree.paths(value)],
                tree.flatten(value)[1],
            )
            for value in self.raw
        )

    @property
    def nbytes(self) -> int:
        """The bytes of all its tensors; on the wire a header of some hundred bytes comes on top."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def leaves(self) -> list[tuple[str, Any]]:
        """The tensors and plain values that it holds, each with its label."""
        return [
            (f"{label}{at}", v)
            for label, value in zip(self.labels, self.raw, strict=True)
            for at, v in tree.paths(value)
        ]

    def hold(self, at: tuple[int, ...], kept: frozenset[int] = frozenset()) -> None:
        """Note how often the values at these positions were written into, so that a later write shows.

        `kept`: those of them that are the model's own, of which copies are made before the next prefix writes into them.
        """
        self._held = at, _writes(self.raw, at), kept

    def quieten(self, at: Iterable[int]) -> None:
        """Note the numbers of the values at these positions, into which ops may write without counting it."""
        with torch.inference_mode(False), torch.no_grad():
            self._quiet = tuple((i, own(self.raw[i].detach())) for i in at)

    def put_back_quiet(self) -> None:
        """Let the values that moved uncounted since the prefix ran be copies, as this call left them."""
        moved = {i: copy for i, copy in self._quiet if not same_bits(self.raw[i], copy)}
        if moved:
            self.raw = tuple(moved.get(i, value) for i, value in enumerate(self.raw))

    def refuse_if_written(self) -> None:
        """Raise `BoundaryError` if a value that others can reach was written into since the prefix ran."""
        at, before, kept = self._held
        if not at or (now := _writes(self.raw, at)) == before:
            return
        i = next(i for i, a, b in zip(at, before, now, strict=True) if a != b)
        label = self.labels[i]
        if i in kept:
            raise BoundaryError(
                f"{label!r} crosses this boundary ({self.split_id}) and is a tensor of the model, which was written into after the "
                "prefix ran, by you or by another call of the model itself; the suffix would not find it as its own call left it. "
                "Write into it after the suffix has run, or send the boundary through to_bytes first"
            )
        raise BoundaryError(
            f"{label!r} crosses this boundary ({self.split_id}) and shares memory with an input, an output or a tensor of the "
            "model, which was written into after the prefix ran; the whole model would not see that. Write into it after the "
            "suffix has run, hand a copy to the prefix (x.clone()), or send the boundary through to_bytes first"
        )

    def refuse_another_autocast(self) -> None:
        """Raise `BoundaryError` unless the suffix is called under the autocast that the prefix ran under."""
        refuse_another(self.autocast, self.split_id)

    def refuse_if_taken(self, by: str) -> None:
        """Raise `ConsumedError` if `train_suffix` or `backward_prefix`, whichever `by` names, took it before."""
        if by in self._consumed:
            raise ConsumedError(
                f"this boundary (batch {self.batch}, {self.split_id}) was already taken by {by}; each boundary is trained "
                "once. Make another with run_training_prefix"
            )

    def consume(self, by: str) -> None:
        """Mark it as taken by `train_suffix` or `backward_prefix`; the second time by the same one raises."""
        mine = object()
        if self._consumed.setdefault(by, mine) is not mine:  # one step, also where two threads come at once
            self.refuse_if_taken(by)

    def release(self, by: str) -> None:
        """Take `consume` back."""
        self._consumed.pop(by, None)

    def become(self, other: BoundaryPayload) -> None:
        """Be another boundary from now on: that of the path which its call turned out to take."""
        for name in self.__slots__[1:]:  # all but who refers to it
            setattr(self, name, getattr(other, name))

    def narrowed(self, plan_signature: str, split_id: str, labels: tuple[str, ...]) -> BoundaryPayload:
        """The boundary of a plan's cut that takes these values of it alone, in this order; it is taken and trained as this one is.

        What crosses for the sake of other paths is left out. The values are the same, and so is the record of who took it.
        """
        at = [self.labels.index(label) for label in labels]
        graph = tuple(self._graph[i] for i in at) if self._graph else self._graph
        found = type(self)(split_id, plan_signature, self.batch, labels, tuple(self.raw[i] for i in at), (), graph)
        if self.requires_grad:
            there = {label for label, _ in found.leaves()}
            found.requires_grad = tuple(label for label in self.requires_grad if label in there)
        for name in ("_consumed", "_moves", "_stood", "_casts", "autocast", "weights"):
            setattr(found, name, getattr(self, name))
        return found

    def trained_as(self, narrow: BoundaryPayload) -> None:
        """Take over what the suffix's step left in a narrower form of this boundary for `backward_prefix`."""
        self._shared, self._noted, self._disturbed = narrow._shared, narrow._noted, narrow._disturbed
        self._earlier = narrow._earlier

    def to_bytes(self) -> bytes:
        """The payload as bytes, for any process that prepared the same split.

        Raises `BoundaryError` for a value that no serializer knows, and for values that were written into since the prefix ran.

        >>> BoundaryPayload.from_bytes(boundary.to_bytes())
        BoundaryPayload(cut:50, batch 8, layer3_1_relu_call2: [8, 256, 14, 14])
        """
        self.refuse_if_written()
        self.put_back_quiet()
        data = self._encoded()
        if self._stood is not None:  # which matters to the suffix, where these bytes come back to this process
            _SENT[_digest(data)] = self._moves, self._stood
            if len(_SENT) > _MOST_SENT:
                del _SENT[next(iter(_SENT))]
        return data

    def _encoded(self) -> bytes:
        alone = dict(zip(self.labels, self.raw, strict=True))
        if len({id(v) for v in alone.values() if type(v) is torch.Tensor and not v.is_nested}) == len(self.raw):
            stay = on_the_cpu(alone)
            key = (
                stay,
                self.split_id,
                self.plan_signature,
                self.batch,
                self.labels,
                self.requires_grad,
                self.weights,
                self.autocast,
            )
            known = _SECTIONS.get(key)
            if known is None or type(self.batch) is not int:
                told = header_section(self._header(stay)), values_section(self.values, self.labels)
                known = _SECTIONS.put(key, told)
            return joined(known[0], known[1], alone)
        held = self.tensors
        first = {id(t): label for label, t in reversed(held.items())}
        tensors = {label: t.detach() for label, t in held.items() if first[id(t)] == label}
        nested = {label: Ragged.of(label, t) for label, t in tensors.items() if t.is_nested}
        values: Any = self.values
        if nested:
            tensors |= {label: buffer_of(tensors[label]) for label in nested}
            values = tree.map_leaves(lambda v: nested.get(v.label, v) if isinstance(v, TensorRef) else v, values)
        return encode(self._header(on_the_cpu(tensors)), tensors, values)

    def _header(self, stay: tuple[str, ...]) -> dict[str, Any]:
        header: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "split_id": self.split_id,
            "plan_signature": self.plan_signature,
            "batch": self.batch,
            "labels": self.labels,
            "requires_grad": self.requires_grad,
        }
        if self.autocast:
            header["autocast"] = self.autocast
        if stay:
            header["on_cpu"] = stay
        return {**header, "weights": self.weights} if self.weights else header

    @classmethod
    def from_tensors(
        cls,
        tensors: Mapping[str, Any],
        *,
        split_id: str,
        plan_signature: str,
        batch: int | None = None,
        weights: str = "",
    ) -> BoundaryPayload:
        """The boundary that holds these tensors, or arrays, by label, for a suffix to go on from: such as what an exported
        prefix gave in another runtime.

        The labels are in the order of the cut. `split_id` and `plan_signature` name the boundary; `half.boundary_key` has
        them, and so has the metadata of an exported half. `batch` is the first size of the first tensor unless given. Arrays are
        taken without a copy where torch can. The suffix checks labels, sizes, dtypes and devices. Raises `BoundaryError` for
        what is no tensor.

        >>> boundary = ReplayBoundary.from_tensors({"relu_6": array}, **server.boundary_key)
        >>> server.run_suffix(boundary)
        """
        raw = []
        for label, thing in tensors.items():
            try:
                raw.append(thing if isinstance(thing, torch.Tensor) else torch.as_tensor(thing))
            except (TypeError, ValueError, RuntimeError) as error:
                raise BoundaryError(
                    f"{label!r} is a {type(thing).__name__}, which torch makes no tensor of ({str(error)[:80]}); pass tensors "
                    "or arrays"
                ) from None
        if batch is None:
            batch = int(raw[0].shape[0]) if raw and raw[0].dim() else 1
        if type(batch) is not int or batch < 0:
            raise BoundaryError(f"a boundary has a batch of 0 or more; found {batch!r}")
        found = cls(split_id, plan_signature, batch, tuple(tensors), tuple(raw))
        found.weights, found.autocast = weights, None
        return found

    @classmethod
    def from_bytes(
        cls, data: bytes | bytearray | memoryview, *, device: str = "cpu", max_bytes: int = 1 << 32
    ) -> BoundaryPayload:
        """The payload that `to_bytes` wrote, its tensors on `device`; raises `PayloadError` for bytes that are not one.

        Of a boundary of two devices, tensors that were on the CPU are on the CPU again.
        `max_bytes` bounds the bytes, and the memory that its tensors may take.
        """
        form, stored = opened(data, max_bytes)
        told = form.told
        if told is None:
            told = form.told = _told(form)
        split_id, signature, batch, labels, wanting, weights, autocast, stay = told
        tensors = tensors_of(form, stored, device, stay)
        raw = tuple(
            tensors[v.label] if type(v) is TensorRef else tree.map_leaves(lambda leaf: _take(tensors, leaf), v)
            for v in form.values
        )
        found = cls(split_id, signature, batch, labels, raw, wanting)
        held = found.tensors if wanting else {}
        odd = next((n for n in wanting if n not in held or not _differentiable(held[n])), None)
        if odd is not None:
            raise PayloadError(
                f"the payload wants a gradient of {shown(odd)}, which is no tensor of floats in it; refuse the sender"
            )
        if _SENT:
            found._moves, found._stood = _SENT.get(_digest(data), (None, None))
        found.weights, found.autocast = weights, autocast
        return found

    def __copy__(self) -> BoundaryPayload:
        return self  # it is trained once, and what its step leaves is for its prefix

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundaryPayload:
        """The same with values of its own, each with memory of its own, and without the graph."""
        self.refuse_if_written()
        self.put_back_quiet()

        def copied(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return copy.deepcopy(leaf, memo)
            if id(leaf) not in memo:
                memo[id(leaf)] = own(leaf.detach())
            return memo[id(leaf)]

        with torch.inference_mode(False), torch.no_grad():
            raw = tuple(tree.map_leaves(copied, value) for value in self.raw)
        found = type(self)(self.split_id, self.plan_signature, self.batch, self.labels, raw, self.requires_grad)
        found._moves, found._stood = self._moves, self._stood
        found.weights, found.autocast = self.weights, self.autocast
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _unpickled, (
            self.to_bytes(),
            next((str(t.device) for t in self.tensors.values() if t.device.type != "cpu"), "cpu"),
        )

    def __repr__(self) -> str:
        parts = ", ".join(f"{k}: {sizes_of(t)}" for k, t in self.tensors.items())
        return f"BoundaryPayload({self.split_id}, batch {self.batch}, {parts})"


ReplayBoundary = BoundaryPayload
register_boundary_serializer(Ragged, Ragged.told, Ragged.read, "label, sizes, strides, offsets")
_NOTHING: tuple[tuple[int, ...], list[int], frozenset[int]] = ((), [], frozenset())
_SENT: dict[bytes, tuple[int | None, list[Any]]] = {}  # of bytes that this process wrote, how state of the model stood
_MOST_SENT = 256
_SECTIONS = Memo()  # header and values of boundaries that hold nothing but tensors, by what is in them


def _digest(data: bytes | bytearray | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _unpickled(data: bytes, device: str) -> BoundaryPayload:
    """What pickle reads, who has been trusted already."""
    return BoundaryPayload.from_bytes(data, device=device, max_bytes=1 << 62)


def _writes(raw: tuple[Any, ...], at: tuple[int, ...]) -> list[int]:
    """How often each of some tensors was written into; 0 for those made under inference mode, which don't count it."""
    try:
        return [raw[i]._version for i in at]
    except RuntimeError:
        return [0 if raw[i].is_inference() else raw[i]._version for i in at]


def _differentiable(t: torch.Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _told(form: Form) -> tuple[Any, ...]:
    """What a header says: split, plan, batch, labels, what wants a gradient, weights, autocast; `PayloadError` where it doesn't."""
    header, values = form.header, form.values
    for key, kind in (("split_id", str), ("plan_signature", str), ("batch", int)):
        if type(header.get(key)) is not kind:
            raise PayloadError(
                f"the header's {key!r} must be of type {kind.__name__}; found {shown(header.get(key))}; refuse the sender"
            )
    if header["batch"] < 0:
        raise PayloadError(f"the payload has batch {shown(header['batch'])}, which no split serves; refuse the sender")
    labels, wanting = _names(header, "labels"), _names(header, "requires_grad")
    if header.get("protocol_version") != PROTOCOL_VERSION:
        raise PayloadError(
            f"the payload has protocol version {header.get('protocol_version')!r}; this Ariadne reads {PROTOCOL_VERSION}; "
            "use the same version of Ariadne on both sides"
        )
    if not isinstance(values, (tuple, list)) or len(values) != len(labels):
        raise PayloadError(f"the payload has {len(labels)} label(s), but not as many values")
    told = header["split_id"], header["plan_signature"], header["batch"], labels
    return *told, wanting, str(header.get("weights", ""))[:64], autocast_in(header), _names(header, "on_cpu", ())


def _names(header: Mapping[str, Any], key: str, otherwise: Any = None) -> tuple[str, ...]:
    """The names under a key of a header that a stranger may have written, each there once."""
    found: Any = header.get(key, otherwise)
    if type(found) not in (tuple, list) or not all(type(name) is str for name in found):
        raise PayloadError(f"the header's {key!r} must be a list of strings; found {shown(found)}; refuse the sender")
    if len({*found}) < len(found):
        raise PayloadError(f"a name appears twice in the header's {key!r}; refuse the sender")
    return tuple(found)


def _take(tensors: Mapping[str, torch.Tensor], value: Any) -> Any:
    if isinstance(value, TensorRef):
        if value.label not in tensors:
            raise PayloadError(f"the payload refers to a tensor {value.label!r} that it does not hold")
        return tensors[value.label]
    if isinstance(value, Ragged):
        if value.label not in tensors:
            raise PayloadError(f"the payload refers to a tensor {value.label!r} that it does not hold")
        try:
            return value.within(tensors[value.label])
        except (ValueError, RuntimeError) as error:
            raise PayloadError(f"malformed payload: {value.label!r}: {error}") from None
    return value


def no_boundary(found: object) -> BoundaryError:
    """The error for what a suffix is given in place of a boundary; of bytes it says how to read them."""
    words = f"a boundary is what run_prefix or run_training_prefix returns; found {type(found).__name__}"
    if isinstance(found, (bytes, bytearray, memoryview)):
        words += ". Read bytes by BoundaryPayload.from_bytes(...) first"
    return BoundaryError(words)


def gradients_to_bytes(gradients: Mapping[str, torch.Tensor | None]) -> bytes:
    """Boundary gradients, by label, as bytes that `gradients_from_bytes` reads without pickle.

    >>> data = gradients_to_bytes({"relu_6": torch.zeros(8, 64), "mask": None})
    >>> {label: g is not None for label, g in gradients_from_bytes(data).items()}
    {'relu_6': True, 'mask': False}
    """
    held = {k: g for k, g in gradients.items() if g is not None}
    stay = on_the_cpu(held)
    return encode({"gradients": list(gradients), **({"on_cpu": stay} if stay else {})}, held, None)


def gradients_from_bytes(
    data: bytes | bytearray | memoryview, *, device: str = "cpu"
) -> dict[str, torch.Tensor | None]:
    """The gradients that `gradients_to_bytes` wrote, on `device`, None where there was none; else raises `PayloadError`.

    `device` is where the prefix ran: `backward_prefix` takes gradients that lie where their boundary tensors do. Of gradients on
    two devices, those that were on the CPU are on the CPU again.
    """
    form, stored = opened(data, 1 << 32)
    if "gradients" not in form.header:
        raise PayloadError("the bytes hold no boundary gradients; pass what gradients_to_bytes wrote")
    names = _names(form.header, "gradients")
    tensors = tensors_of(form, stored, device, _names(form.header, "on_cpu", ()))
    if not tensors.keys() <= {*names}:
        raise PayloadError("the bytes hold a gradient that their header does not name; refuse the sender")
    return {name: tensors.get(name) for name in names}
