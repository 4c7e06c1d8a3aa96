"""Random networks: the corpus first, then new programs; and that the search finds bugs that were planted."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import find, settings

import ariadne.capture.recorded
import ariadne.cut.frontier
import ariadne.prepare
import ariadne.runtime.plans
import ariadne.runtime.split
import ariadne.runtime.taps
import ariadne.runtime.training
import ariadne.runtime.variant
import ariadne.segment.codegen
from ariadne import SplitSpec
from ariadne.errors import UnsupportedError
from conformance.random_networks import corpus
from conformance.random_networks.__main__ import main
from conformance.random_networks.as_python import trial_as_python
from conformance.random_networks.compare import Different, copied, same
from conformance.random_networks.counts import Counts
from conformance.random_networks.draw import Meta, grow, programs
from conformance.random_networks.extent import EXTENT, PROFILE
from conformance.random_networks.parts import KINDS
from conformance.random_networks.program import Program, build
from conformance.random_networks.search import FIRST_FAILURE, QUIET, SMALLEST_FAILURE, Found, search
from conformance.random_networks.steps import STEPS
from conformance.random_networks.tally import VARIABLE, Tally
from conformance.random_networks.trial import trial
from conformance.random_networks.twins import Invalid

# Without this every test keeps thousands of lines that torch writes about its own tracing.
logging.getLogger("torch.__trace").addFilter(lambda record: False)
FILES = corpus.files()
SLOW = """
    buffer_beside_a_checkpoint buffer_noted_too checkpoints_that_write class_attributes deep_copy_of_a_checkpoint
    functions_by_name further_plan_makes_way handed_on_over_a_wire kept_in_a_part kept_of_a_weight
    made_of_a_weight_beside_a_dict modes_of_python object_outside packed_before_opaque path_after_a_checkpoint
    paths_over_a_wire_of_grown_state reshaped_in_place results_that_a_function_keeps slopes_of_composite_ops
    squeezed_in_place teacher_outside tensor_outside weights_by_reference
""".split()  # half the time of all; what each found has tests of its own, too
IN_TIME = [pytest.param(path, marks=[pytest.mark.variants] if path.stem in SLOW else []) for path in FILES]


@pytest.mark.parametrize("path", IN_TIME, ids=[path.stem for path in FILES])
def test_a_program_of_the_corpus_split_equals_whole(path: Path) -> None:
    extent = dataclasses.replace(EXTENT, cuts=0) if PROFILE == "smoke" else EXTENT  # at every cut with `nox -s fuzz`
    counts = trial(corpus.load(path), extent)
    assert counts.cuts or counts.refused or counts.limited or counts.steps or counts.replays, "nothing was compared"


def test_random_programs_split_equal_whole() -> None:
    chosen = settings(phases=SMALLEST_FAILURE, max_examples=6 if PROFILE == "smoke" else settings().max_examples)
    tally = search(chosen, Tally("programs", PROFILE), corpus.FOLDER)
    counts = tally.counts
    print(json.dumps(tally.line()))
    assert counts["programs"] >= chosen.max_examples * 0.8, "programs are to be valid by construction"
    modes = 2 if EXTENT.both_modes else 1
    assert counts["uncut"] <= 0.5 * modes * counts["programs"], (
        "most programs are to have a cut, in eval and in train mode"
    )
    assert counts["refused"] <= (0.5 if EXTENT.named else 0.2) * counts["programs"]
    least = counts["programs"] / (2 if PROFILE == "smoke" else 1)  # six programs at about one cut each may have few
    assert counts["cuts"] > least
    assert counts["steps"] > least


@pytest.mark.variants
def test_random_programs_split_as_python_equal_whole() -> None:
    chosen = settings(max_examples=4, derandomize=True, database=None, phases=FIRST_FAILURE)
    tally = search(chosen, Tally("programs, as Python", PROFILE), corpus.FOLDER, trial_as_python)
    print(json.dumps(tally.line()))
    assert tally.counts["replays"]
    assert tally.counts["steps"]


@pytest.mark.variants
def test_what_crosses_beside_a_graph_keeps_its_strides_where_the_batch_is_one() -> None:
    program = {
        "batch": 1,
        "inputs": [{"name": "x", "shape": ["B", 3, 4], "layout": "transposed"}],
        "parts": {"m0": {"kind": "prelu", "args": [1]}},
        "steps": [
            {"do": "call", "of": ["x"], "with": {"module": "m0"}, "to": ["v0"]},
            {"do": "tanh", "of": ["v0"], "to": ["v1"]},
        ],
        "output": {"tuple": ["v0", "v1"]},
    }
    counts = trial_as_python(Program.parse(json.dumps(program)))
    assert counts.cuts == 4  # with a graph before the cut, and without, in both modes
    assert all("loss_fn asks torch.autograd.grad" in error for error in counts.refused)  # of the side before the cut


def test_a_view_that_a_script_wrote_into_is_asked_for_its_node_without_waiting_for_itself() -> None:
    counts = trial_as_python(corpus.load(corpus.FOLDER / "view_written_by_a_script.json"))
    assert counts.steps, counts


# What the programs are


def test_the_corpus_speaks_of_every_hard_thing_by_hand() -> None:
    written = [corpus.load(path) for path in FILES if not path.stem.startswith("found_")]
    assert len(written) >= 15
    assert all(program.about for program in written)


def test_a_program_survives_json() -> None:
    for path in FILES:
        program = corpus.load(path)
        assert Program.parse(program.to_json()) == program


def test_a_program_builds_the_same_numbers_each_time_and_draws_nothing() -> None:
    program = corpus.load(FILES[0])
    before = torch.get_rng_state()
    same(build(program).state_dict(), build(program).state_dict(), "twice")
    same(program.arguments(3), program.arguments(3), "twice")
    same(before, torch.get_rng_state(), "generator")


SMALL = {"inputs": [{"name": "x", "shape": ["B", 4]}], "parts": {}, "steps": [], "output": "x"}


@pytest.mark.parametrize(
    "change",
    [
        {"steps": [{"do": "fly", "of": ["x"], "to": ["v0"]}]},
        {"steps": [{"do": "relu", "of": ["nobody"], "to": ["v0"]}]},
        {"steps": [{"do": "call", "of": ["x"], "with": {"module": "m9"}, "to": ["v0"]}]},
        {"steps": [{"do": "relu", "of": ["x"], "to": ["v0"], "under": "water"}]},
        {"parts": {"m0": {"kind": "engine"}}},
        {"output": {"tuple": ["y"]}},
        {"call": "loudly"},
        {"inputs": [{"name": "x", "shape": ["B"], "layout": "curled"}]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_word_outside_the_vocabulary_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no such|no known kind|nothing made|call is one of"):
        Program.parse(json.dumps(SMALL | change))


def test_the_whole_model_that_raises_is_no_failure_of_the_split() -> None:
    steps = [{"do": "view", "of": ["x"], "with": {"to": ["B", 3]}, "to": ["v0"]}]
    with pytest.raises(Invalid, match="invalid for input"):
        trial(Program.parse(json.dumps(SMALL | {"steps": steps, "output": "v0"})))


def test_a_refusal_counts_only_where_a_step_declares_it(monkeypatch: pytest.MonkeyPatch) -> None:
    program = corpus.load(corpus.FOLDER / "branch_on_data.json")
    counts = trial(program)  # a plan for each path
    assert not counts.refused
    assert not counts.limited
    monkeypatch.setattr("conformance.random_networks.twins.SplitSpec", partial(SplitSpec, max_paths=1))
    assert {*trial(program).limited} == {"a path beyond max_paths"}
    quiet = {name: dataclasses.replace(step, refusable="") for name, step in STEPS.items()}
    monkeypatch.setattr("conformance.random_networks.program.STEPS", quiet)
    with pytest.raises(Different, match=r"no step of this program may be refused|guard fires"):
        trial(program)


def test_a_failure_is_kept_and_replayed_from_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant("double draw", monkeypatch)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "results.jsonl"))
    few = settings(max_examples=25, derandomize=True, database=None, phases=FIRST_FAILURE)
    with pytest.raises(Found, match=r"python -m conformance\.random_networks"):
        search(few, Tally("programs", "test"), tmp_path)
    (path,) = corpus.files(tmp_path)
    assert main([str(path)]) == 1
    monkeypatch.undo()
    assert main([str(path)]) == 0
    planted, undone = capsys.readouterr().out.splitlines()
    assert "batch" in planted  # where it differs: in what is drawn, or in what follows from it
    assert "equal" in undone
    (line,) = (tmp_path / "results.jsonl").read_text().splitlines()
    counted = json.loads(line)
    assert counted["failures"] == 1
    assert counted["profile"] == "test"


def test_a_refusal_of_what_no_op_shows_is_a_limit_only_of_a_program_that_does_such_a_thing() -> None:
    told = UnsupportedError("forward takes data out of torch unseen (by dlpack, a storage)")
    honest = Program.parse(json.dumps(SMALL))
    hiding = dataclasses.replace(
        honest, steps=({"do": "left_torch", "of": ["x"], "with": {"by": "list"}, "to": ["v0"]},)
    )
    counts = Counts()
    for program in (honest, hiding):
        counts.refuse(told, program)
    assert counts.refused == [f"UnsupportedError: {told}"]
    assert counts.limited == ["what forward does by no op of torch"]


def test_a_refused_program_is_kept_with_the_words_and_replayed_from_the_results(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results.jsonl"
    monkeypatch.setenv(VARIABLE, str(results))
    program, tally = Program.parse(json.dumps(SMALL)), Tally("programs", "test")
    tally.add(Counts(refused=["ModuleError: so", "ModuleError: so"]), program)
    tally.add(Counts(limited=["a plan of one op"]), program)
    tally.write()
    assert [example["words"] for example in tally.line()["refused_examples"]] == [["ModuleError: so"]]
    assert main([str(results)]) == 0
    assert capsys.readouterr().out.startswith(f"{results}:1, refused 0: equal;")


@pytest.mark.planted
def test_programs_shrink() -> None:
    few = settings(
        max_examples=200, derandomize=True, database=None, phases=SMALLEST_FAILURE, suppress_health_check=QUIET
    )
    smallest = find(programs(), lambda program: any(step["do"] == "dropout" for step in program.steps), settings=few)
    assert len(smallest.steps) <= 2
    assert len(smallest.inputs) == 1


# Planted bugs: each replaces one piece of the runtime, whose own check of what it prepared is off


def in_segment(side: str, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[..., Any]:
    """A loader of segments that wraps the segments of one side."""
    load = ariadne.runtime.variant.load

    def loaded(source: Any, label: str) -> Callable[..., Any]:
        function = load(source, label)
        return change(function) if source.name == side else function

    return loaded


def swapped(prefix: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        out = list(prefix(*given))
        kinds = [(t.dtype, t.shape, t.stride()) if isinstance(t, torch.Tensor) else None for t in out]
        for i, kind in enumerate(kinds):
            if kind is not None and kind in kinds[:i]:
                j = kinds.index(kind)
                out[i], out[j] = out[j], out[i]
                break
        return tuple(out)

    return run


def draws_first(suffix: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        torch.rand(())
        return suffix(*given)

    return run


def runs_twice(prefix: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        generator = torch.get_rng_state()
        prefix(*copied(given))
        torch.set_rng_state(generator)
        return prefix(*given)

    return run


def rounds(prefix: Callable[..., Any]) -> Callable[..., Any]:
    def run(*given: Any) -> Any:
        kept = lambda t: t.bfloat16().float() if isinstance(t, torch.Tensor) and t.dtype is torch.float32 else t  # noqa: E731
        return tuple(kept(t) for t in prefix(*given))

    return run


def lays_out_anew(prefix: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given: tuple(t.contiguous() if isinstance(t, torch.Tensor) else t for t in prefix(*given))


def a_row_for_none(prefix: Callable[..., Any]) -> Callable[..., Any]:
    def run(batch: int, *given: Any) -> Any:
        def with_a_row(t: Any) -> Any:
            empty = isinstance(t, torch.Tensor) and batch == 0 and t.dim() > 0 and len(t) == 0
            return t.new_zeros(1, *t.shape[1:]) if empty else t

        return tuple(map(with_a_row, prefix(batch, *given)))

    return run


def detached(labels: tuple[str, ...], raw: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    values, wanting = CARRIED(labels, raw)
    return values, wanting[:-1]


def zeros_for_none(runtime: Any, boundary: Any, gradients: Any, **kwargs: Any) -> None:
    RUNTIME_BACKWARD(runtime, boundary, gradients, **kwargs)
    for p in runtime.prefix_parameters():
        if p.requires_grad and p.grad is None:
            p.grad = torch.zeros_like(p)


def scaled_gradients(boundary: Any, gradients: Any, **kwargs: Any) -> None:
    BACKWARD(boundary, {k: g if g is None else g * 1.0001 for k, g in gradients.items()}, **kwargs)


def forgets_shared(suffix: Any, boundary: Any, *args: Any, **kwargs: Any) -> Any:
    found = TRAIN_SUFFIX(suffix, boundary, *args, **kwargs)
    boundary._shared = []
    return found


def all_safe(plan: Any) -> Any:
    return tuple(dataclasses.replace(c, reason="" if c.live else c.reason) for c in FRONTIERS(plan))


def baked(self: Any, atom: Any) -> str:
    if isinstance(atom, ariadne.segment.codegen.Expr):
        return repr(atom.evaluate({self.plan.batch_symbol: self.plan.traced_batch}))
    return ATOM(self, atom)


def no_regions(self: Any, body: Any) -> list[str]:
    return [f"    {line}" for _, line in body]


RUNTIME_BACKWARD = ariadne.runtime.split.SplitRuntime.backward_prefix
CARRIED, BACKWARD = ariadne.runtime.taps.carried, ariadne.runtime.training.backward_prefix
TRAIN_SUFFIX, FRONTIERS = ariadne.runtime.training.train_suffix, ariadne.cut.frontier.frontiers
ATOM = ariadne.segment.codegen._Writer._atom

BUGS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "swapped boundary values": lambda m: m.setattr(ariadne.runtime.variant, "load", in_segment("prefix", swapped)),
    "rounded boundary values": lambda m: m.setattr(ariadne.runtime.variant, "load", in_segment("prefix", rounds)),
    "contiguous boundary values": lambda m: m.setattr(
        ariadne.runtime.variant, "load", in_segment("prefix", lays_out_anew)
    ),
    "a row where the batch is 0": lambda m: m.setattr(
        ariadne.runtime.variant, "load", in_segment("prefix", a_row_for_none)
    ),
    "double draw": lambda m: m.setattr(ariadne.runtime.variant, "load", in_segment("suffix", draws_first)),
    "prefix run twice": lambda m: m.setattr(ariadne.runtime.variant, "load", in_segment("prefix", runs_twice)),
    "detach at the cut": lambda m: m.setattr(ariadne.runtime.taps, "carried", detached),
    "scaled boundary gradients": lambda m: m.setattr(ariadne.runtime.training, "backward_prefix", scaled_gradients),
    "zero for no gradient": lambda m: m.setattr(ariadne.runtime.split.SplitRuntime, "backward_prefix", zeros_for_none),
    "shared parameters forgotten": lambda m: m.setattr(ariadne.runtime.training, "train_suffix", forgets_shared),
    "unsafe cuts called safe": lambda m: (
        m.setattr(ariadne.prepare, "frontiers", all_safe),
        m.setattr(ariadne.runtime.plans, "frontiers", all_safe),
    )[0],
    "baked batch": lambda m: m.setattr(ariadne.segment.codegen._Writer, "_atom", baked),
    "grad regions dropped": lambda m: m.setattr(ariadne.segment.codegen._Writer, "_regions", no_regions),
    "sizes of the model's tensors forgotten": lambda m: m.setattr(
        ariadne.capture.recorded, "deciding", lambda *_: set()
    ),
    "boundary not owned": lambda m: m.setattr(ariadne.segment.codegen, "own", lambda t: t),
}


def plant(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a bug into the runtime, and switch off what would notice it while preparing; what is found is no result."""
    monkeypatch.delenv(VARIABLE, raising=False)
    for module in (ariadne.prepare, ariadne.runtime.plans):
        monkeypatch.setattr(module, "prove", lambda *args, **options: None)
    BUGS[bug](monkeypatch)


@pytest.mark.planted
def test_where_no_bug_is_planted_none_is_found_in_the_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUGS, "nothing", lambda m: None)
    plant("nothing", monkeypatch)
    for path in FILES:
        trial(corpus.load(path))


@pytest.mark.planted
@pytest.mark.parametrize("bug", sorted(BUGS))
def test_a_planted_bug_is_found_in_the_corpus_or_within_a_hundred_programs(
    bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(bug, monkeypatch)
    for path in FILES:
        try:
            trial(corpus.load(path))
        except Different as found:
            if isinstance(found.__cause__, (TypeError, AttributeError, NameError)):
                raise AssertionError("the planted code itself does not fit the runtime any more") from found
            return
    # What is drawn follows from the sources too, out of which hypothesis takes numbers.
    few = settings(settings(), max_examples=100, derandomize=True, database=None, phases=FIRST_FAILURE)
    with pytest.raises(Found):
        search(few, Tally("planted", "few"), None)


@pytest.mark.parametrize("name", sorted(STEPS))
def test_every_step_can_be_drawn(name: str) -> None:
    kinds = [
        ("x", ["B", 3], "float32"),
        ("y", ["B", 3, 3], "float32"),
        ("z", ["B", 3], "float32"),
        ("i", ["B", 3], "int64"),
        ("m", ["B", 3], "bool"),
    ]
    kinds += [("j", ["B"], "int64"), ("n", ["B", 3], "bool"), ("w", ["B", 4, 3], "float32")]
    meta = Meta([{"name": name, "shape": shape, "dtype": dtype} for name, shape, dtype in kinds])
    for a, b, c in itertools.product(range(3), range(3), range(64)):
        grow(meta, (name, a, b, c, 6))
        if meta.steps:
            break
    assert [step["do"] for step in meta.steps] == [name]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_kind_of_part_can_be_drawn(kind: str) -> None:
    inputs = [{"name": "x", "shape": ["B", 3, 4]}, {"name": "i", "shape": ["B"], "dtype": "int64"}]
    meta = Meta(inputs)
    for a in range(2):
        grow(meta, ("call", a, 0, list(KINDS).index(kind), 0))
    assert {part["kind"] for part in meta.parts.values()} == {kind}
