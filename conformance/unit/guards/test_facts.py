"""Facts about the model's tensors: each change is seen, however it is made, and what is no change is no alarm."""

import contextlib
import copy
import types
from functools import partial

import pytest
import torch
from torch import nn

import ariadne.guards.facts
from ariadne import BoundaryPayload, SplitRuntime
from ariadne.errors import ModuleError
from ariadne.guards import alike
from ariadne.guards.facts import Facts
from conformance.unit.refusing import prepare_split
from conformance.unit.trap_kit import Twins

NAMES = ("dtype", "device.type", "shape")


def facts_of(*tensors):
    table = dict(enumerate(tensors))
    return table, Facts(NAMES, [(table, k, (t.dtype, t.device.type, t.shape)) for k, t in table.items()])


def put(table):
    table[1] = torch.zeros(3)


def data(table):
    table[1].data = torch.zeros(3)


def half(table):
    table[1].data = table[1].data.half()


def resize(table):
    table[1].resize_(5)


def meta(table):
    table[1] = table[1].to("meta")


@pytest.mark.parametrize("change", [data, half, meta, put, resize], ids=lambda f: f.__name__)
@pytest.mark.parametrize("looked", [0, 1, 3])
def test_every_change_is_seen(change, looked):
    table, facts = facts_of(torch.zeros(2), torch.zeros(2, 2))
    assert all(facts.hold() for _ in range(looked))
    change(table)
    assert not facts.hold()
    assert not facts.hold()


@pytest.mark.parametrize("without", [False, True], ids=["torchs_check", "one_by_one"])
def test_what_is_no_change_is_no_alarm(without, monkeypatch):
    if without:
        monkeypatch.setattr(ariadne.guards.facts, "_guards", None)
    weight = nn.Parameter(torch.zeros(2, 2))
    table, facts = facts_of(weight, torch.zeros(3), torch.zeros(2).to_sparse())
    for _ in range(2):
        assert facts.hold()
        weight.requires_grad_(False)
        assert facts.hold()
        weight.requires_grad_(True)
        with torch.autocast("cpu"), torch.inference_mode():
            assert facts.hold()
        table[0] = torch.ones(2, 2)  # another tensor of the same kind
        assert facts.hold()
        table[0] = torch.ones(2, 2).t()  # other strides
        assert facts.hold()
        table[0] = weight
    table[2] = torch.zeros(3).to_sparse()
    assert not facts.hold()


def test_torchs_check_is_there():
    """Without it all holds as well, at three times the price."""
    tensors = [torch.zeros(2), torch.zeros(3)]
    check = ariadne.guards.facts.alike(tensors)
    assert check is not ariadne.guards.facts.never
    assert check(*tensors)
    assert not check(*reversed(tensors))


class Follows(nn.Module):
    """Computes by the type of a tensor that no op reads."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.unread = nn.Linear(4, 4)
        self.register_buffer("stored", torch.ones(4))
        self.scale = torch.ones(4)
        self.kept = {"scales": [torch.ones(4)]}
        self.second = nn.Linear(4, 4)

    def asked(self):
        raise NotImplementedError

    def forward(self, x):
        asked = self.asked()
        x = self.second(self.first(x).relu())
        return x.to(asked.dtype) * asked.shape[0]


def parameter(self):
    return self.unread.weight


def one_of_all(self):
    return list(self.parameters())[2]


def buffer(self):
    return self.stored


def attribute(self):
    return self.scale


def inner(self):
    return self.kept["scales"][0]


WAYS = [attribute, buffer, inner, one_of_all, parameter]


def equal(split, model, x):
    with torch.no_grad():
        whole, out = model(x), split.run_suffix(split.run_prefix(x))
    assert out.dtype is whole.dtype
    assert torch.equal(out, whole)
    return whole


@pytest.mark.parametrize("change", ["dtype", "shape"])
@pytest.mark.parametrize("of", ["copy", "resplit", "runtime"])
@pytest.mark.parametrize("way", WAYS, ids=lambda f: f.__name__)
def test_the_type_of_a_tensor_that_no_op_reads(way, of, change):
    model = type("Follows", (Follows,), {"asked": way})().eval()
    x = torch.randn(2, 4)
    split = prepare_split(model, (x,), split="percent:50")
    if of == "copy":
        split = copy.deepcopy(split)
        model = split.model
    before = equal(split, model, x)
    t = way(model)
    t.data = t.data.double() if change == "dtype" else torch.ones(6, *t.shape[1:])
    if of == "resplit":
        split = split.resplit("percent:25")
    after = equal(split, model, x)
    assert after.dtype is not before.dtype or not torch.equal(after, before)


class Renews(nn.Module):
    """Keeps its last output, in a buffer and in an attribute, and asks for the type of a parameter."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("last", torch.zeros(1))
        self.seen = torch.zeros(1)

    def forward(self, x):
        y = self.linear(x.to(self.linear.weight.dtype)) * self.linear.weight.shape[0]
        self.last = y.detach()
        self.seen = y.detach()
        return y


def test_what_forward_renews_calls_for_no_new_plan():
    model = Renews().eval()
    split = prepare_split(model, (torch.randn(2, 4),), split="percent:50")
    for n in (1, 2, 3, 5):
        equal(split, model, torch.randn(n, 4))
    assert len(split._variants) == 1


class Tied(nn.Module):
    """Ends with the weight that it starts with, and with the size of a layer in between."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.unread = nn.Linear(4, 4)
        self.kept = {"scale": torch.ones(4)}

    def forward(self, x):
        x = self.middle(self.first(x).relu())
        return self.last(x) * self.unread.weight.shape[0] * self.kept["scale"].numel()


def untie(model):
    model.last.weight = nn.Parameter(torch.randn(4, 4))


def resize_unread(model):
    model.unread.weight.data = torch.ones(6, 4)


def resize_kept(model):
    model.kept["scale"] = torch.ones(2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (untie, "'first.weight' and 'last.weight' were one tensor at capture, and are two now"),
        (resize_kept, r"the shape of \"kept\['scale'\]\" of the model, .* was \[4\] at capture, now it is \[2\]"),
        (resize_unread, r"the shape of 'weight' of 'unread', .* was \[4, 4\] at capture, now it is \[6, 4\]"),
    ],
    ids=["untie", "kept", "unread"],
)
@pytest.mark.parametrize("training", [False, True])
def test_a_suffix_that_runs_alone_sees_it(change, words, training):
    model, x = Tied().train(training), torch.randn(2, 4)
    split = prepare_split(model, (x,), split="after:middle")
    boundary = split.run_training_prefix(x) if training else split.run_prefix(x)
    change(model)
    run = partial(split.train_suffix, loss_fn=lambda y, _: y.sum()) if training else split.run_suffix
    with pytest.raises(ModuleError, match=words):
        run(boundary)
    equal(split, model, x)  # from its prefix on it takes a plan for what the model is now


class Around(nn.Module):
    """Asks for a size and a dtype; what else it holds, a test says."""

    def __init__(self, ask=None):
        super().__init__()
        self.a, self.b, self.aux = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.pos = nn.Parameter(torch.ones(4))
        self.last = None
        self.ask = ask

    def forward(self, x):
        x = self.a(x.to(self.a.weight.dtype) * self.pos).view(-1, self.a.weight.shape[0])
        if self.last is None:
            x = x * 2
        if self.ask is not None:
            x = x * self.ask(self.aux.weight)
        return self.b(x.relu())


def split_of(model, boundary="percent:50"):
    return prepare_split(model, (torch.randn(2, 4),), split=boundary)


def halves_agree(model, split):
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(model(x), split.run_suffix(split.run_prefix(x)))


ODD = {
    "coo": lambda: torch.eye(4).to_sparse(),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr(2),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("where", ["attribute", "buffer", "list", "none"])
@pytest.mark.parametrize("kind", sorted(ODD))
def test_tensors_without_strides_end_no_process(kind, where):
    """torch's own check aborts where a tensor has none."""
    model = Around().eval()
    if where == "buffer":
        del model.last
        model.register_buffer("last", ODD[kind]())
    elif where != "none":
        model.last = ODD[kind]() if where == "attribute" else [ODD[kind]()]
    split = split_of(model)
    halves_agree(model, split)
    table, facts = facts_of(torch.zeros(2), torch.zeros(3))
    assert facts.hold()
    assert facts.hold()
    table[1] = ODD[kind]()
    with contextlib.suppress(RuntimeError):  # a nested tensor has no shape
        assert not facts.hold()
    assert alike([ODD[kind]()])(ODD[kind]()) is False


def test_plans_that_differ_in_facts_alone_serve_their_own_boundaries():
    model = Around(lambda weight: weight.shape[0]).eval()
    split = split_of(model)
    for n in (4, 5, 6, 5, 4):
        model.aux.weight = nn.Parameter(torch.zeros(n, 4))
        halves_agree(model, split)
    for n in range(7, 40):  # more than are kept
        model.aux.weight = nn.Parameter(torch.zeros(n, 4))
        halves_agree(model, split)


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(4)

    def forward(self, x):
        return x * self.scale


def test_a_tensor_of_a_module_in_a_plain_list():
    model = Around().eval()
    scale = Scale()
    model.ask = lambda weight: scale(weight)[0, 0]
    model.scales = [scale]
    model.forward = types.MethodType(lambda m, x: m.b(m.scales[0](m.a(x)).view(-1, m.a.weight.shape[0])), model)
    split = split_of(model)
    halves_agree(model, split)
    scale.scale = torch.ones(4) * 3
    with pytest.raises(ModuleError, match="scale"):
        split.run_prefix(torch.randn(3, 4))


def test_a_suffix_that_runs_alone_may_have_let_go_of_what_it_does_not_read():
    model = Around().eval()
    split = split_of(model, "after:a")
    x = torch.randn(3, 4)
    boundary = split.run_prefix(x)
    with torch.no_grad():
        whole = model(x)
    model.pos.data = torch.empty(0)
    model.aux.weight.data = torch.empty(0)
    model.a.weight.data = torch.empty(0)
    assert torch.equal(split.run_suffix(boundary), whole)


def test_a_tensor_that_nobody_asked_for_its_size_calls_for_no_new_plan():
    model = Around().eval()
    model.last = torch.ones(1)
    split = split_of(model)
    for n in (1, 2, 3):
        model.last = torch.ones(n)
        model.aux.weight.data = torch.ones(n, 4)
        halves_agree(model, split)
    assert len(split._variants) == 1


@pytest.mark.parametrize(
    ("ask", "change"),
    [
        (lambda t: t.element_size(), torch.float64),
        (lambda t: t.size(0), (6, 4)),
        (lambda t: t.type() == "torch.DoubleTensor", torch.float64),
        (lambda t: 2 if t.is_floating_point() else 3, torch.int64),
        (lambda t: 2 if t.is_complex() else 3, torch.complex64),
        (len, (6, 4)),
    ],
    ids=["element_size", "size", "type", "is_floating_point", "is_complex", "len"],
)
def test_every_way_to_ask_counts(ask, change):
    model = Around(ask).eval()
    del model.aux.weight
    model.aux.register_buffer("weight", torch.ones(4, 4))
    split = split_of(model)
    halves_agree(model, split)
    model.aux.weight = torch.ones(change) if isinstance(change, tuple) else model.aux.weight.to(change)
    halves_agree(model, split)


class Remembers(nn.Module):
    """As timm's ConViT: a table is made when another size than the kept one is asked for, and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 2)
        self.register_buffer("table", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        if self.table.shape[0] != x.shape[1]:
            self.table = torch.arange(x.shape[1]).float().exp()
        return self.after(x.relu() * self.table)


def remembering(cut: int) -> SplitRuntime:
    return Twins(Remembers, torch.randn(2, 6)).runtime.resplit(f"cut:{cut}")


@pytest.mark.parametrize("cut", range(1, 6))
def test_what_the_plan_itself_stores_is_no_change_of_the_model(cut: int) -> None:
    split = remembering(cut)
    whole = copy.deepcopy(split.model)
    x, y = torch.randn(3, 6), torch.randn(5, 6)
    first, second = split.run_prefix(x), split.run_prefix(y)
    with torch.no_grad():
        wanted = whole(x), whole(y)
    for boundary, output in ((first, wanted[0]), (first, wanted[0]), (second, wanted[1])):
        assert torch.equal(split.run_suffix(boundary), output)
    assert torch.equal(split.model.table, whole.table)
    assert torch.equal(split.run_suffix(split.run_prefix(x)), wanted[0]), "the next call, which makes no table"


class Flag(nn.Module):
    """Its second call is another: it adds what the first one kept of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 2)
        self.register_buffer("seen", torch.zeros(0, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        if self.seen.shape[0] == 0:
            self.seen = x.mean(0, keepdim=True)
        else:
            x = x + self.seen
        return self.after(x.relu())


def test_a_second_boundary_is_refused_where_the_first_one_stored_what_it_computed() -> None:
    split = Twins(Flag, torch.randn(2, 6)).runtime.resplit("cut:1")
    first, second = split.run_prefix(torch.randn(3, 6)), split.run_prefix(torch.randn(3, 6))
    split.run_suffix(first)
    with pytest.raises(ModuleError, match="the shape of 'seen'"):
        split.run_suffix(second)


class Untied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 2)
        start = torch.ones(6)
        self.register_buffer("start", start)
        self.register_buffer("now", start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        self.now = self.now * 0.9 + h.mean(0)
        return self.b(h * self.now + self.start)


def test_a_store_of_the_prefix_that_unties_two_buffers_is_no_change_of_the_model() -> None:
    runtime = Twins(Untied, torch.randn(2, 6)).runtime
    for candidate in [c for c in runtime.candidates if c.safe]:
        split = copy.deepcopy(runtime.resplit(candidate))
        whole = copy.deepcopy(split.model)
        for batch in (2, 3):
            x = torch.randn(batch, 6)
            with torch.no_grad():
                wanted = whole(x)
            assert torch.equal(split.run_suffix(split.run_prefix(x)), wanted)


def test_a_suffix_whose_prefix_is_elsewhere_refuses_a_second_call_that_would_take_another_branch() -> None:
    edge, server = remembering(1), remembering(1)
    sent = [edge.run_prefix(torch.randn(3, 6)).to_bytes() for _ in range(2)]
    server.run_suffix(BoundaryPayload.from_bytes(sent[0]))
    with pytest.raises(ModuleError, match=r"the shape of 'table' of the model, which forward asked for, was \[1\] at"):
        server.run_suffix(BoundaryPayload.from_bytes(sent[1]))
    edge = remembering(1)
    server = copy.deepcopy(edge)
    server.run_suffix(edge.run_prefix(torch.randn(3, 6)))
    with pytest.raises(ModuleError, match="the shape of 'table'"):
        server.run_suffix(edge.run_prefix(torch.randn(3, 6)))
