"""Results: lines that are appended, read back, repaired, resumed and merged."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import pytest
import torch

from conformance.suite import results
from conformance.suite.environment import Environment, full, short, simd, sources
from conformance.suite.results import Result
from conformance.suite.run import started
from conformance.suite.statuses import Status

HERE = Environment("2026-01-02T03:04:05Z", {"torch": "2.15.0", "target": "ariadne"})


def result(name: str, status: Status = Status.PASS, environment: Environment = HERE) -> Result:
    return Result(name, status, "" if status == Status.PASS else "why", {"op": 3}, 0.25, environment.id)


def file(path: Path, *records: Environment | Result) -> Path:
    for record in records:
        results.append(path, record)
    return path


def test_a_record_is_read_back_as_written(tmp_path: Path) -> None:
    one = result("forward/nn/a/bs=1", Status.FAIL_STATE)
    found = results.read(file(tmp_path / "r", HERE, one))
    assert found.by_case == {"forward/nn/a/bs=1": one}
    assert found.environments == {HERE.id: HERE}
    keys = list(json.loads((tmp_path / "r").read_text().splitlines()[1]))
    assert keys == ["case", "status", "reason", "facts", "seconds", "environment"]


def test_a_published_text_names_no_place_of_the_machine_that_wrote_it() -> None:
    here = Path(results.__file__).resolve()
    text = f'File "{torch.__file__}", line 1 File "{json.__file__}", line 2 File "{here}", line 3: 1 / 2, /dev/null'
    said = results.plain({"reason": [text]})["reason"][0]
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    expected = f'File "site-packages/torch/__init__.py", line 1 File "{version}/json/__init__.py", line 2 '
    assert said == expected + 'File "conformance/suite/results.py", line 3: 1 / 2, /dev/null'


def test_facts_become_json_whatever_they_are() -> None:
    assert results.plain({1: float("nan"), "b": (1.5, True, None, Path("x"))}) == {
        "1": "nan",
        "b": [1.5, True, None, repr(Path("x"))],
    }


def test_many_writers_leave_whole_lines(tmp_path: Path) -> None:
    path = file(tmp_path / "r", HERE)
    writers = [
        threading.Thread(
            target=lambda i=i: [results.append(path, result(f"forward/nn/m{i}/bs={n}")) for n in range(1, 50)]
        )
        for i in range(8)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(results.read(path).by_case) == 8 * 49


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = file(tmp_path / "r", HERE)
    for wrong in ("[1]", "{", '{"case": "x"}', '{"case": "x", "status": "fine"}'):
        path.write_text(results.line(HERE) + "\n" + wrong + "\n")
        with pytest.raises(ValueError, match=r"r:2: "):
            results.read(path)
    path.write_text(results.line(result("forward/nn/a/bs=1")) + "\n")
    with pytest.raises(ValueError, match=r"its environment '.*' is in none of these files"):
        results.read(path)
    path.write_text(results.line(HERE).replace("2.15.0", "2.14.0") + "\n")
    with pytest.raises(ValueError, match="does not fit its facts"):
        results.read(path)


def test_an_unfinished_last_line_is_passed_over_and_cut_off(tmp_path: Path) -> None:
    path = file(tmp_path / "r", HERE, result("forward/nn/a/bs=1"))
    with path.open("a") as out:
        out.write('{"case": "forw')
    assert list(results.read(path).by_case) == ["forward/nn/a/bs=1"]
    results.repair(path)
    results.append(path, result("forward/nn/a/bs=2"))
    assert list(results.read(path).by_case) == ["forward/nn/a/bs=1", "forward/nn/a/bs=2"]


def test_a_later_result_counts_unless_it_did_not_run(tmp_path: Path) -> None:
    a = "forward/nn/a/bs=1"
    path = file(tmp_path / "r", HERE, result(a, Status.NOT_SELECTED), result(a, Status.CRASH))
    assert results.read(path).by_case[a].status == Status.CRASH
    results.append(path, result(a, Status.NOT_SELECTED))
    found = results.read(path)
    assert found.by_case[a].status == Status.CRASH
    found.hold_single()
    results.append(path, result(a))
    found = results.read(path)
    assert found.by_case[a].status == Status.PASS
    with pytest.raises(ValueError, match=r"have two results, forward/nn/a/bs=1 for one: crash in .*, pass in "):
        found.hold_single()


def test_resuming_skips_what_ran_in_this_environment(tmp_path: Path) -> None:
    other = Environment(HERE.date, HERE.facts | {"torch": "2.14.0"})
    names = [f"forward/nn/a/bs={n}" for n in (1, 2, 3)]
    path = file(
        tmp_path / "r", HERE, other, result(names[0]), result(names[1], environment=other), result(names[2], Status.NOT_SELECTED)
    )  # fmt: skip
    assert started(path, HERE, resumed=True) == {names[0]}
    assert path.read_text().count("\n") == 5  # nothing to add: its environment is there
    later = Environment("2027-01-01T00:00:00Z", HERE.facts)
    assert started(path, later, resumed=True) == {names[0]}, "the date makes no other environment"
    with pytest.raises(ValueError, match="holds results; go on with them by --resume"):
        started(path, HERE, resumed=False)
    assert path.read_text().count("\n") == 5
    assert started(tmp_path / "new", HERE, resumed=False) == set()
    assert (tmp_path / "new").read_text() == results.line(HERE) + "\n"


def test_merged_files_are_one_in_order(tmp_path: Path) -> None:
    other = Environment("2026-01-01T00:00:00Z", HERE.facts | {"torch": "2.14.0"})
    one = file(tmp_path / "1", HERE, result("forward/nn/b/bs=1"))
    two = file(tmp_path / "2", other, HERE, result("forward/nn/a/bs=1", environment=other))
    merged = list(results.merged(results.read(one, two)))
    assert merged == [results.line(other), results.line(HERE)] + [
        results.line(r) for r in (result("forward/nn/a/bs=1", environment=other), result("forward/nn/b/bs=1"))
    ]
    assert merged == list(results.merged(results.read(two, one)))


def test_a_target_from_elsewhere_brings_a_digest_of_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "target_sources" not in Environment.here("ariadne", "2026-01-01T00:00:00Z").facts
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "a_target_of_mine").mkdir()
    (tmp_path / "a_target_of_mine" / "__init__.py").write_text("")
    code = tmp_path / "a_target_of_mine" / "split.py"
    ids = []
    for text in ("one = 1", "one = 2"):
        code.write_text(text)
        ids.append(Environment.here("a_target_of_mine.split:prepare", "2026-01-01T00:00:00Z").id)
    assert ids[0] != ids[1]


def test_the_widest_instructions_are_told_by_the_flags() -> None:
    narrow = "fpu sse4_2 avx avx2 fma"
    assert simd(narrow) == "avx2"
    assert simd(f"{narrow} avx512f") == "avx2", "torch's kernels want more of AVX-512 than its foundation"
    assert simd(f"{narrow} avx512f avx512bw avx512dq avx512vl") == "avx512"
    assert simd("fp asimd") == simd("") == "other"


def test_an_environment_names_versions_target_and_sources(tmp_path: Path) -> None:
    here = Environment.here("conformance.identity:prepare_split", "2026-01-01T00:00:00Z")
    assert here.facts["target"] == "identity"
    assert {"torch", "python", "platform", "machine", "sources"} <= here.facts.keys()
    assert short("ariadne:prepare_split") == "ariadne"
    assert short(full("pkg:other")) == "pkg:other"


def test_the_digest_of_the_sources_follows_code_and_not_tests(tmp_path: Path) -> None:
    (tmp_path / "ariadne").mkdir()
    code, test = tmp_path / "ariadne" / "a.py", tmp_path / "ariadne" / "test_a.py"
    code.write_text("1")
    before = sources(tmp_path)
    test.write_text("2")
    assert sources(tmp_path) == before
    code.write_text("3")
    assert sources(tmp_path) != before
