"""Torch's settings while a kernel is traced: one graph for every batch, and numbers drawn as eager code draws them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch._subclasses import fake_impls
from torch.fx.experimental import _config as shape_config

from ariadne.forks import rlock

lock = rlock()  # torch's compilers share settings and caches
SETTINGS = 4  # their version: torch's kept graphs are told apart by it, since its keys don't know of what is done here


@contextmanager
def tracing(seeded: bool) -> Iterator[None]:
    """Torch's settings while a kernel is compiled: batch 1 is a batch like any other, equal sizes are not one symbol, and
    random numbers are drawn as eager code draws them."""  # fmt: skip
    with ExitStack() as stack:
        stack.enter_context(shape_config.patch(backed_size_oblivious=True, use_duck_shape=False))  # type: ignore[attr-defined]
        tag = f"{torch.compiler.config.cache_key_tag} ariadne {SETTINGS}".strip()
        stack.enter_context(torch.compiler.config.patch(cache_key_tag=tag))  # type: ignore[attr-defined]
        # The backward pass is compiled with the forward pass: what fails there fails here, where the segment is known.
        stack.enter_context(torch._functorch.config.patch(force_non_lazy_backward_lowering=True))
        stack.enter_context(batch_free_layouts())
        stack.enter_context(batch_free_views())
        stack.enter_context(recurrent_layers())
        if seeded:
            stack.enter_context(torch._inductor.config.patch(fallback_random=True))
        yield


def whenever_compiled(function: Any, around: Callable[[], AbstractContextManager[Any]]) -> bool:
    """Enter `around` each time that torch compiles a piece of `function`, which `torch.compile` made; False where that can't be.

    To enter it around each call as well would cost more than many a call takes. What torch calls to compile a piece stands in the
    function's closure, and has no other door.
    """
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    if "callback" not in names:
        return False
    cell = function.__closure__[names.index("callback")]
    callback = cell.cell_contents
    if not hasattr(callback, "_torchdynamo_orig_backend"):
        return False

    def piece(*args: Any, **kwargs: Any) -> Any:
        with around():
            return callback(*args, **kwargs)

    vars(piece).update(vars(callback))  # by which torch finds the backend, and what it compiled before
    cell.cell_contents = piece
    return True


_FOLLOWING = frozenset({"Mkldnn", "MkldnnTranspose", "Slow2d", "SlowDilated2d", "SlowTranspose2d"})


@contextmanager
def batch_free_layouts() -> Iterator[None]:
    """Let torch's model of a CPU convolution choose a layout without asking for the batch.

    torch asks, since the batch decides between two kernels (16 and above go to oneDNN), and holds compiled code to the answer. But
    both lay out their result as their inputs are laid out, so the answer does not matter where it is one of the two.
    """
    select, layout = torch._C._select_conv_backend, torch._C._conv_determine_backend_memory_format

    def free(t: Any) -> bool:
        return (
            t.device.type == "cpu"
            and t.dim() in (3, 4)
            and torch.backends.mkldnn.is_available()
            and torch._C._get_mkldnn_enabled()
        )

    def unguarded(function: Callable[..., Any], t: Any, *args: Any, **kwargs: Any) -> Any:
        env = getattr(getattr(t, "fake_mode", None), "shape_env", None)
        if env is None or not free(t):
            return function(t, *args, **kwargs)
        with env.suppress_guards():
            found = function(t, *args, **kwargs)
        backend = found if function is select else args[1]
        return found if backend.name in _FOLLOWING else function(t, *args, **kwargs)

    def selected(*args: Any, **kwargs: Any) -> Any:
        t = args[0] if args else kwargs.pop("input")
        return unguarded(select, t, *args[1:], **kwargs)

    with lock:
        torch._C._select_conv_backend = selected
        torch._C._conv_determine_backend_memory_format = lambda t, *args: unguarded(layout, t, *args)
        try:
            yield
        finally:
            torch._C._select_conv_backend, torch._C._conv_determine_backend_memory_format = select, layout


@contextmanager
def batch_free_views() -> Iterator[None]:
    """Let torch's compiler lay out a view for every batch at once, where one layout serves all.

    torch asks whether the batch is 1, whose stride is anybody's, and holds compiled code to the answer.
    """
    strides = fake_impls._compute_stride

    def one_for_all(shape: Any, stride: Any, wanted: Any, size_oblivious: bool = False) -> Any:
        found = strides(shape, stride, wanted, size_oblivious=True)
        return found if found is not None or size_oblivious else strides(shape, stride, wanted)

    with lock:
        fake_impls._compute_stride = one_for_all  # type: ignore[assignment]
        try:
            yield
        finally:
            fake_impls._compute_stride = strides


@contextmanager
def recurrent_layers() -> Iterator[None]:
    """Let torch trace recurrent layers so that they train, with the dropout that they have in eager code.

    Where gradients are wanted, an LSTM on a CPU is traced as the ops of its time steps. torch does so itself where the input
    wants gradients. Where only the weights or the first state do, it traces a oneDNN op whose backward can't be traced.
    Compiling takes time in proportion to the steps.

    Where there is dropout between layers, each layer is traced alone and dropout stands between them, as in eager code: torch's
    own trace of several layers leaves it out (it asks for ``num_layers < i - 1``, which no layer meets), without a word.
    """
    rules: Any = torch._decomp.decompositions
    select, stacked = rules.select_one_layer_lstm_function, rules._rnn_helper

    def selected(given: Any, hidden: Any, weights: Any) -> Any:
        wanted = torch.is_grad_enabled() and any(t.requires_grad for t in chain(hidden, *weights))
        return rules.one_layer_lstm if wanted else select(given, hidden, weights)

    def dropping(states: Any, hidden: Any, weights: Any, *how: Any) -> Any:
        biases, layers, dropout, train, bidirectional, batch_first, layer_fn = how
        if layers == 1 or not (train and dropout):
            return stacked(states, hidden, weights, *how)
        directions = 2 if bidirectional else 1
        last_states = []
        if batch_first:
            states = states.transpose(0, 1)
        for first in range(0, layers * directions, directions):
            if first:
                states = torch.dropout(states, dropout, True)
            layer = slice(first, first + directions)
            one = biases, 1, 0.0, train, bidirectional, False, layer_fn
            states, found = stacked(states, hidden[layer], weights[layer], *one)
            last_states += found
        return states.transpose(0, 1) if batch_first else states, last_states

    with lock:
        rules.select_one_layer_lstm_function, rules._rnn_helper = selected, dropping
        try:
            yield
        finally:
            rules.select_one_layer_lstm_function, rules._rnn_helper = select, stacked
