"""The names of cases: what is one, what a query means, brace lists, the lock."""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance.suite import lock, matrix, tiers
from conformance.suite.cases import Case, checked_query, matches
from conformance.suite.queries import compact, expand, in_order, queries

LINE = "train/nn/mlp10x64/cut=q50,bs=2,mode=train,backend=generated,steps=3"


def test_a_case_is_one_line_and_back() -> None:
    case = Case.parse(LINE)
    assert str(case) == LINE
    assert (case.check, case.family, case.model, case.bs, case.training) == ("train", "nn", "nn/mlp10x64", 2, True)
    assert Case.of("train", "nn/mlp10x64", steps=3, bs=2, backend="generated", mode="train", cut="q50") == case
    assert str(Case.of("left", "nn/mlp10x64")) == "left/nn/mlp10x64/"
    assert Case.parse("left/nn/mlp10x64/") == Case.of("left", "nn/mlp10x64")


@pytest.mark.parametrize(
    "text",
    [
        "forward/nn",
        "forward/nn/mlp10x64",
        "Forward/nn/m/bs=1",
        "forward/nn/m/bs=0",
        "forward/nn/m/bs=1,cut=q50",
        "forward/nn/m/bs=1,bs=2",
        "forward/nn/m/cut=q33",
        "forward/nn/m/mode=test",
        "forward/nn/m/backend=jit",
        "forward/nn/m/speed=1",
        "forward/nn/m/bs",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a case"):
        Case.parse(text)


def test_cuts_by_name_and_by_seed_are_values() -> None:
    for cut in ("mod:layer3.0", "rand:7", "every", "narrowest"):
        assert Case.parse(f"forward/nn/m/cut={cut},bs=1")["cut"] == cut


def test_a_query_is_a_name_or_a_prefix() -> None:
    assert matches("*", LINE)
    assert matches("train/nn/*", LINE)
    assert matches(LINE, Case.parse(LINE))
    assert not matches("train/nn/mlp10x64", LINE)
    assert not matches("forward/*", LINE)
    assert checked_query("train/nn/*") == "train/nn/*"
    for wrong in ("train/*/mlp10x64/*", "train/nn/mlp10x64", ""):
        with pytest.raises(ValueError, match="not a case"):
            checked_query(wrong)


def test_brace_lists_mean_their_product() -> None:
    assert expand("a/{b,c}/{d,e}*") == ("a/b/d*", "a/b/e*", "a/c/d*", "a/c/e*")
    assert queries("{forward,train}/nn/*") == ("forward/nn/*", "train/nn/*")
    for wrong in ("a/{b", "a/b}", "a/{b,{c}}"):
        with pytest.raises(ValueError, match="braces don't pair"):
            expand(wrong)


def test_compact_lines_mean_exactly_the_cases_that_they_came_from() -> None:
    square = [f"forward/nn/m/cut={cut},bs={bs},mode=eval" for cut in ("q50", "first", "rand:2") for bs in (10, 2)]
    lone = ["forward/nn/m/cut=q50,bs=3,mode=train", "left/nn/m/", "left/nn/m/mode=eval"]
    cases = [Case.parse(name) for name in square + lone]
    lines = compact(cases)
    assert sorted(name for line in lines for name in expand(line)) == sorted(map(str, cases))
    assert lines == compact(reversed(cases))
    assert "forward/nn/m/cut={first,rand:2},bs={2,10},mode=eval" in lines


def test_order_is_by_model_then_check_with_numbers_by_size() -> None:
    names = ["train/nn/a/bs=2", "forward/nn/b/bs=1", "forward/nn/a/bs=10", "forward/nn/a/bs=9"]
    ordered = [str(case) for case in in_order(map(Case.parse, names))]
    assert ordered == ["forward/nn/a/bs=9", "forward/nn/a/bs=10", "train/nn/a/bs=2", "forward/nn/b/bs=1"]


def test_a_lock_is_read_back_and_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "some.lock"
    cases = [Case.parse(f"forward/nn/{m}/bs={bs}") for m in "ab" for bs in (1, 2)]
    path.write_text(lock.text(reversed(cases)))
    assert path.read_text().splitlines()[1:] == ["forward/nn/a/bs={1,2}", "forward/nn/b/bs={1,2}"]
    assert lock.read(path) == cases
    path.write_text("forward/nn/a/bs={1,2}\n\nforward/nn/a/bs=2\n")
    with pytest.raises(ValueError, match=r"some\.lock:3: forward/nn/a/bs=2 stands in line 1 already"):
        lock.read(path)
    path.write_text("forward/nn/a/bs=0\n")
    with pytest.raises(ValueError, match=r"some\.lock:1: not a case"):
        lock.read(path)


def test_shards_are_whole_models_and_together_all() -> None:
    cases = [Case.parse(f"forward/nn/m{i}/bs={bs}") for i in range(40) for bs in (1, 2)]
    shards = [lock.sharded(cases, (i, 3)) for i in (1, 2, 3)]
    assert sorted(case for shard in shards for case in shard) == sorted(cases)
    models = [{case.model for case in shard} for shard in shards]
    assert all(models)
    assert sum(map(len, models)) == 40
    without = [case for case in cases if case.model != "nn/m7"]
    assert lock.sharded(without, (2, 3)) == [case for case in shards[1] if case.model != "nn/m7"]


def test_the_lock_holds_the_matrix() -> None:
    locked, made = set(lock.read()), set(matrix.all_cases())
    gone, new = sorted(map(str, locked - made)), sorted(map(str, made - locked))
    assert not gone, f"{len(gone)} cases are in cases.lock and no more in the matrix, {gone[0]} the first"
    assert not new, f"{len(new)} cases are not in cases.lock, {new[0]} the first: python -m conformance --update-lock"


def test_the_full_tier_compiles_every_toy_that_inductor_compiles() -> None:
    full = tiers.load()[0]["full"]
    compiled = [c for c in matrix.all_cases() if c.family == "toys" and c.get("backend") == "inductor"]
    assert len(compiled) > 20
    assert [c for c in compiled if not full.selects(c)] == []
