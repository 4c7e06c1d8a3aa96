"""What forward keeps from one call to the next, wherever it keeps it: left behind as the model would, or refused by name."""

from __future__ import annotations

import itertools
import sys
import types
import warnings
from textwrap import dedent, indent
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ariadne import SplitSpec, prepare_split
from ariadne.compare import difference
from ariadne.errors import CaptureError, UnsupportedError

BATCHES = (2, 3, 3, 1, 6, 8, 2, 2, 5)
COUNT = itertools.count()


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.d: dict[Any, Any] = {}
        self.seen: set[Any] = set()
        self.o = types.SimpleNamespace(n=0)
        self.n = 0
        self.rows: list[Any] = [0, 1]


def model(body: str, head: str) -> nn.Module:
    """A model whose forward has this body, in a module of its own in which `head` stands."""
    home = types.ModuleType(f"kept_{next(COUNT)}")
    sys.modules[home.__name__] = home
    home.__dict__.update(torch=torch, nn=nn, F=F, Base=Base)
    source = (
        f"{dedent(head)}\nclass M(Base):\n    memo = None\n    count = 0\n    table = {{}}\n    def forward(s, x):\n"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # `is` with a number
        exec(compile(source + indent(dedent(body), "        "), home.__name__, "exec"), home.__dict__)
    found: nn.Module = home.M().eval()
    return found


def kept(m: nn.Module) -> dict[str, Any]:
    """All that stands where such a model may keep something."""
    plain = (int, float, str, tuple, list, dict, set, torch.Tensor, type(None))
    home = vars(sys.modules[type(m).__module__])
    tables = {"globals": home, "module": vars(m), "class": vars(type(m)), "object": vars(m.o)}
    tables |= {name: vars(thing) for name, thing in home.items() if isinstance(thing, (type, types.FunctionType))}
    return {
        f"{where}.{name}": {*value} if isinstance(value, set) else value
        for where, table in tables.items()
        for name, value in [*table.items()]
        if isinstance(value, plain) and not name.startswith("_")
    }


def same_throughout(body: str, head: str, trainable: bool, ran: bool = False, state: bool = True) -> None:
    """A model is prepared and left as it was; then its calls are those of a twin, with all that they leave behind."""
    torch.manual_seed(1)
    whole, split = model(body, head), model(body, head)
    if ran:
        for m in (whole, split):
            m(torch.ones(2, 4))
    before = repr(kept(split))
    spec = SplitSpec("percent:50", dynamic_batch=(1, 8), trainable=trainable)
    try:
        runtime = prepare_split(split, (torch.randn(2, 4),), split=spec)
    finally:
        assert repr(kept(split)) == before
    for batch in BATCHES:
        x = torch.randn(batch, 4)
        with torch.no_grad():
            expected = whole(x)
        assert difference(expected, runtime.run_suffix(runtime.run_prefix(x))) is None, f"batch {batch}"
        if state:
            assert difference(kept(whole), kept(split)) is None, f"batch {batch}"


NOTED = {
    "an entry": ("s.d['n'] = x.shape[0]\nreturn s.b(s.a(x))", ""),
    "an entry that is looked at first": (
        "if s.d.get('n') != x.shape[0]: s.d['n'] = x.shape[0]\nreturn s.b(s.a(x))",
        "",
    ),
    "a tuple": ("s.d['n'] = tuple(x.shape)\nreturn s.b(s.a(x))", ""),
    "an attribute": ("s.n = x.shape[0]\nreturn s.b(s.a(x))", ""),
    "an object's": ("s.o.n = x.shape[0]\nreturn s.b(s.a(x))", ""),
    "a place in a list": ("s.rows[0] = x.shape[0]\nreturn s.b(s.a(x))", ""),
    "a global": ("global LAST\nh = s.a(x)\nLAST = x.shape[0]\nreturn s.b(h)", "LAST = None"),
    "a global tensor": ("global LAST\nLAST = h = s.a(x)\nreturn s.b(h)", "LAST = None"),
    "a global dict": ("D['n'] = x.shape[0]\nreturn s.b(s.a(x))", "D = {}"),
    "another class": ("Notes.last = h = s.a(x)\nreturn s.b(h)", "class Notes:\n    last = None"),
    "its class": ("type(s).memo = x.shape[0]\nreturn s.b(s.a(x))", ""),
    "a function's": ("return s.b(f(s.a(x)))", "def f(x):\n    f.last = x.shape[0]\n    return x * 2\nf.last = 0"),
    "a variable around": (
        "return s.b(s.a(x) * note(x.shape[0]))",
        "def make():\n    last = 0\n    def note(n):\n        nonlocal last\n        last = n\n        return 2\n    return note\n"
        "note = make()",
    ),
}


# A buffer that forward replaces, or writes into, and puts somewhere else, too: `q` is the model's, and `n` what is made.
HANDED_ON = {
    "under a key": "s.d['p'] = s.q; s.q = n; h = h + s.q",
    "under a key, and a new one beside": "s.d['new'] = n; s.d['p'] = s.q; s.q = s.q * 0.9 + n",
    "under a key that holds another": "s.d['z'] = s.q; s.q = n",
    "under a key that always holds it": "s.d['z'] = s.q; h = h + s.q",
    "under a key, and written in place": "s.q.mul_(0.5).add_(n); s.d['z'] = s.q",
    "by an object": "s.o.p = s.q; s.q = n; h = h + s.o.p",
    "by an object that had one": "s.o.z = s.q; s.q = n",
    "in a list": "s.rows[0] = s.q; s.q = n",
    "in a global dict": "D['p'] = s.q; s.q = n",
    "by a global": "global G; G = s.q; s.q = n",
    "by an attribute": "s.prev = s.q; s.q = n",
    "further on": "s.o.z = s.d['z']; s.d['z'] = s.q; s.q = n",
    "further on, and a new one there": "s.o.z = s.d['z']; s.d['z'] = s.q = n",
    "where it changes places": "s.d['z'], s.o.z = s.o.z, s.d['z']",
    "where nothing stands": "if s.memo is None: s.memo = s.q\nh = h + s.q",
}


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("case", HANDED_ON)
def test_a_buffer_that_is_put_elsewhere_too_is_put_there_at_each_call(case: str, ran: bool) -> None:
    head = """
    D, G = {}, None
    class Base(Base):
        def __init__(self):
            super().__init__()
            self.register_buffer("q", torch.zeros(4))
            self.d["z"], self.o.z, self.prev = torch.ones(4), torch.ones(4) * 2, None
    """
    body = f"h = s.a(x); n = h.mean(0).detach()\n{HANDED_ON[case]}\nreturn s.b(h)"
    same_throughout(body, head, trainable=False, ran=ran)


@pytest.mark.parametrize("gives", ["s.b(h + r)", "(s.b(h), r)"])
def test_a_buffer_that_results_follow_where_it_is_handed_on_to_is_refused(gives: str) -> None:
    body = f"h = s.a(x); r = s.d['z']; s.d['z'] = s.q; s.q = h.mean(0).detach(); return {gives}"
    head = "class Base(Base):\n    def __init__(self):\n        super().__init__()\n"
    head += "        self.register_buffer('q', torch.zeros(4)); self.d['z'] = torch.ones(4)"
    with pytest.raises(UnsupportedError, match="gives another result when it runs again"):
        same_throughout(body, head, trainable=False)


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("case", NOTED)
def test_what_each_call_notes_of_its_batch_is_noted_by_the_split(case: str, ran: bool) -> None:
    same_throughout(*NOTED[case], trainable=False, ran=ran)


CACHED = {
    "a table of the width": (
        "global T\nif T is None: T = torch.linspace(0, 1, x.shape[1])\nreturn s.b(s.a(x) * T)", "T = None"
    ),
    "a table of the longest": (
        "n = x.shape[0]\nif s.d.get('t') is None or s.d['t'].shape[0] < n: s.d['t'] = torch.arange(n)\n"
        "return s.b(s.a(x) * s.d['t'][:n, None])", ""
    ),
    "a table of this batch": (
        "n = x.shape[0]\nif s.memo is None or s.memo.shape[0] != n: s.memo = torch.arange(n)\nreturn s.b(s.a(x) * s.memo[:, None])",
        "",
    ),
    "a table for each batch": (
        "n = x.shape[0]\nif n not in s.d: s.d[n] = torch.linspace(0, 1, 4) * n\nreturn s.b(s.a(x) * s.d[n])", ""
    ),
    "lru_cache": (
        "return s.b(s.a(x) * f(x.shape[0]))",
        "import functools\n@functools.lru_cache(None)\ndef f(n): return torch.linspace(0, 1, 4) * n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("case", CACHED)
def test_a_cache_that_no_result_follows_is_left_alone(case: str, trainable: bool) -> None:
    same_throughout(*CACHED[case], trainable=trainable, state=False)


REFUSED = {
    "the largest, a global": ("global BIG\nBIG = max(BIG, x.shape[0])\nreturn s.b(s.a(x) * BIG)", "BIG = 0"),
    "the largest, by globals()": ("globals()['BIG'] = max(BIG, x.shape[0])\nreturn s.b(s.a(x) * BIG)", "BIG = 0"),
    "the largest, in a helper": (
        "return s.b(s.a(x) * bump(x.shape[0]))",
        "BIG = 0\ndef bump(n):\n    global BIG\n    BIG = max(BIG, n)\n    return BIG",
    ),
    "the first data, a global": (
        "global FIRST\nh = s.a(x)\nif FIRST is None: FIRST = h.detach().mean()\nreturn s.b(h * FIRST)", "FIRST = None"
    ),
    "the first data, its class": (
        "h = s.a(x)\nif type(s).memo is None: type(s).memo = h.detach().mean()\nreturn s.b(h * s.memo)", ""
    ),
    "the first batch, its class": ("cls = type(s)\nif cls.memo is None: cls.memo = x.shape[0]\nreturn s.b(s.a(x) * cls.memo)", ""),
    "the largest, by its class's name": ("M.count = max(M.count, x.shape[0])\nreturn s.b(s.a(x) * M.count)", ""),
    "a count, by setattr": ("setattr(type(s), 'count', s.count + 1)\nreturn s.b(s.a(x) * s.count)", ""),
    "the largest, a function's": (
        "return s.b(f(s.a(x)))", "def f(x):\n    f.m = max(f.m, x.shape[0])\n    return x * f.m\nf.m = 0"
    ),
    "the first data, a function's": (
        "return s.b(f(s.a(x)))",
        "def f(x):\n    if not hasattr(f, 'first'): f.first = x.detach().mean()\n    return x * f.first",
    ),
    "the largest, a variable around": (
        "return s.b(s.a(x) * bump(x.shape[0]))",
        "def make():\n    n = 0\n    def bump(k):\n        nonlocal n\n        n = max(n, k)\n        return n\n    return bump\n"
        "bump = make()",
    ),
    "how many, by lru_cache": (
        "return s.b(s.a(x) * f(x.shape[0]))",
        "import functools\ncalls = []\n@functools.lru_cache(None)\ndef f(n):\n    calls.append(n)\n    return len(calls)",
    ),
    "the batch before": (
        "n = x.shape[0]\np = s.d.get('b', n)\ns.d['b'] = n\nreturn s.b(s.a(x) * (2 if p == n else 3))", ""
    ),
    "how many batches, a set": ("s.seen.add(x.shape[0])\nreturn s.b(s.a(x) * len(s.seen))", ""),
    "how many batches, a dict": ("s.d.setdefault(x.shape[0], 1)\nreturn s.b(s.a(x) * len(s.d))", ""),
    "members, unread": ("s.seen.add(x.shape[0])\nreturn s.b(s.a(x))", ""),
    "the first batch, a list": ("s.rows.append(x.shape[0])\nreturn s.b(s.a(x) * s.rows[2])", ""),
    "the first data of each batch": (
        "n = x.shape[0]\nh = s.a(x)\nif n not in s.d: s.d[n] = h.detach().mean()\nreturn s.b(h * s.d[n])", ""
    ),
}  # fmt: skip


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_what_results_follow_from_call_to_call_is_refused_by_name(case: str, trainable: bool) -> None:
    with pytest.raises(
        UnsupportedError,
        match=r"forward (keeps|sets up|reads and changes|gives another|changes what|puts something more)",
    ):
        same_throughout(*REFUSED[case], trainable=trainable)


IDENTITY = {
    "a number": "if x.shape[0] is 2: h = h * 3",
    "not a number": "if x.shape[0] is not 2: h = h * 3",
    "a number that did not run": "if x.shape[0] is 6: h = h * 3",
    "a variable": "n = x.shape[0]\nif n is s.o.n + 2: h = h * 3",
    "a global": "if x.size(0) is TWO: h = h * 3",
    "in a function": "if alike(x.shape[0], 6): h = h * 3",
    "of the module operator": "import operator\nif operator.is_(len(x), 6): h = h * 3",
    "in a generator": "if any(x.shape[0] is k for k in (3, 6)): h = h * 3",
    "of a sum": "if x.shape[0] + 1 is 7: h = h * 3",
    "of two sizes": "if x.shape[0] is x.shape[1]: h = h * 3",
    "True": "if (x.shape[0] > 5) is True: h = h * 3",
}


@pytest.mark.parametrize("case", IDENTITY)
def test_a_size_that_is_compared_by_identity_is_answered_as_by_the_model(case: str) -> None:
    head = "TWO = 2\ndef alike(a, b): return a is b"
    same_throughout(f"h = s.a(x)\n{IDENTITY[case]}\nreturn s.b(h)", head, trainable=False)


@pytest.mark.parametrize(
    "line",
    ["if s.memo is None: h = h * x.shape[0]", "if type(x) is torch.Tensor: h = h * x.shape[0]", "if s.a is not s.b: h = h * 2",
     "if x.dtype is torch.float32: h = h * 2", "m = s.a\nif m is s.a and h is not x: h = h * 2"],
)  # fmt: skip
def test_identity_of_what_is_no_number_costs_no_range(line: str) -> None:
    m = model(f"h = s.a(x)\n{line}\nreturn s.b(h)", "")
    runtime = prepare_split(m, (torch.randn(2, 4),), split=SplitSpec("percent:50", dynamic_batch=(1, 8)))
    assert str(runtime.plan.batches) == "1 to 8"


SETTINGS = {
    "a default dtype": "b = torch.get_default_dtype()\ntorch.set_default_dtype(torch.float64)\nt = torch.ones(4) / 3\n"
    "torch.set_default_dtype(b)\nh = h * t.float()",
    "attention's kernel": "q = h[None, None].repeat(1, 1, 16, 1)\n"
    "with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):\n"
    "    q = F.scaled_dot_product_attention(q, q, q)\nh = q[0, 0, :x.shape[0]]",
    "cudnn": "with torch.backends.cudnn.flags(enabled=False):\n    h = torch.tanh(h)",
    "mkldnn": "with torch.backends.mkldnn.flags(enabled=False):\n"
    "    h = h * F.conv2d(h[:, None, :, None].expand(-1, 3, 4, 4), torch.ones(4, 3, 3, 3) / 3).mean((2, 3))",
}


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("case", SETTINGS)
def test_ops_run_under_the_settings_that_forward_sets(case: str, trainable: bool) -> None:
    same_throughout(f"h = s.a(x)\n{SETTINGS[case]}\nreturn s.b(h)", "import torch.nn.attention", trainable)


def test_a_setting_that_forward_leaves_is_refused_and_put_back() -> None:
    m = model("torch.use_deterministic_algorithms(True)\nreturn s.b(s.a(x))", "")
    with pytest.raises(UnsupportedError, match=r"leaves torch.are_deterministic_algorithms_enabled\(\) at True"):
        prepare_split(m, (torch.randn(2, 4),), split="percent:50")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("kind", ["buffer", "attribute", "written"])
def test_a_tensor_that_shows_one_number_many_times_is_put_back(kind: str) -> None:
    m = model("s.e = s.e + s.n\nreturn s.b(s.a(x) + s.e)" if kind == "written" else "return s.b(s.a(x) + s.e)", "")
    shown = torch.ones(1).expand(4)
    m.register_buffer("e", shown) if kind != "attribute" else setattr(m, "e", shown)
    x = torch.randn(2, 4)
    runtime = prepare_split(m, (x,), split="percent:50")
    assert torch.equal(m.e, torch.ones(4))
    with torch.no_grad():
        assert torch.equal(m(x), runtime.run_suffix(runtime.run_prefix(x)))


@pytest.mark.parametrize(
    "line",
    ["h = h.to_sparse().coalesce().to_dense()", "h = h * torch.eye(4).to_sparse().coalesce().values()",
     "h = h * (2 if torch.eye(4).to_sparse().coalesce().is_coalesced() else 3)"],
)  # fmt: skip
def test_sparse_tensors_are_coalesced(line: str) -> None:
    try:
        same_throughout(f"h = s.a(x)\n{line}\nreturn s.b(h)", "", trainable=False)
    except CaptureError as error:  # for batches that a plan of real runs does not hold
        raise AssertionError("coalesce is followed") from error


class WriteOnce(dict[str, Any]):
    """A registry in which nothing may be put in the place of another thing."""

    def __setitem__(self, key: str, value: Any) -> None:
        if self.get(key, value) is not value:
            raise RuntimeError("twice")
        super().__setitem__(key, value)


@pytest.mark.parametrize("what", ["s.q", "s.a.weight"])
@pytest.mark.parametrize("where", ["s.strict['p']", "s.d['p']", "s.d['z']"])
def test_a_tensor_of_the_model_is_put_where_forward_puts_it(where: str, what: str) -> None:
    head = "class Base(Base):\n    def __init__(self):\n        super().__init__()\n        self.strict = WriteOnce()\n"
    head += "        self.register_buffer('q', torch.zeros(4)); self.d['z'] = torch.ones(4)"
    whole, split = (model(f"{where} = {what}\nreturn s.b(s.a(x))", f"{STRICT}\n{head}") for _ in range(2))
    runtime = prepare_split(split, (torch.randn(2, 4),), split="percent:50", fallback="refuse")
    for batch in (2, 3):
        x = torch.randn(batch, 4)
        assert torch.equal(whole(x), runtime.run_suffix(runtime.run_prefix(x)))
        held = [{**vars(m)["strict"], **vars(m)["d"]} for m in (whole, split)]
        if "strict" not in where:  # there it is taken for a cache, which may stay empty
            assert held[0].keys() == held[1].keys()
            assert all(map(torch.equal, held[0].values(), held[1].values()))


STRICT = f"from {__name__} import WriteOnce"


@pytest.mark.parametrize("place", ["s.d['p']", "s.rows[0]"])
def test_what_is_asked_by_is_before_it_is_put_there_once_is_no_write_of_each_call(place: str) -> None:
    got = "s.d.get('p')" if "d" in place else place
    body = f"if {got} is not s.q:\n    {place} = s.q; s.times += 1\nreturn s.b(s.a(x))"
    head = "class Base(Base):\n    def __init__(self):\n        super().__init__()\n"
    head += "        self.register_buffer('q', torch.zeros(4)); self.register_buffer('times', torch.zeros(()))"
    with pytest.raises(UnsupportedError, match="writes into the buffer 'times' of the model at its first call"):
        prepare_split(model(body, head), (torch.randn(2, 4),), split="percent:50", fallback="refuse")


def test_a_dict_that_loses_at_its_first_call_what_it_held_is_refused() -> None:
    body, head = (
        "s.aux.clear(); h = s.a(x); s.aux['h'] = h.detach()\nreturn s.b(h)",
        "class Base(Base):\n    aux = None",
    )
    m = model(body, head)
    vars(m)["aux"] = {"old": 1}
    with pytest.raises(UnsupportedError, match="which loses 'old'"):
        prepare_split(m, (torch.randn(2, 4),), split="percent:50", fallback="refuse")
