"""The project around the runtime: its layout, its metadata, its sessions, and what its files must not name."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

REQUIRED = {
    *(".ci", ".gitignore", "LICENSE", "README.md", "noxfile.py", "pyproject.toml"),
    *("ariadne", "conformance", "constraints", "docs", "examples", "model_zoo"),
}
ALLOWED = REQUIRED | {
    *("benchmarks", "reports", ".gitattributes", "CHANGELOG.md", "CONTRIBUTING.md"),
    *("SECURITY.md", "CITATION.cff", ".editorconfig", ".pre-commit-config.yaml"),
}


def files() -> list[Path]:
    """The files that are in the repository or would be with the next commit."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / name).read_text().splitlines()
    matches = [re.fullmatch(r"([\w.-]+)==([\w.]+)", line) for line in lines if line and not line.startswith("#")]
    assert all(matches), f"{name} holds something other than `name==version`"
    return {canonicalize_name(m[1]): m[2] for m in matches if m}


def direct(*tables: str) -> list[Requirement]:
    """The direct dependencies: of the package itself, of its extras, or of the dependency groups."""
    found = {
        "project": [PYPROJECT["project"]["dependencies"]],
        "extras": PYPROJECT["project"]["optional-dependencies"].values(),
        "groups": PYPROJECT["dependency-groups"].values(),
    }
    texts = [text for table in tables for group in found[table] for text in group if isinstance(text, str)]
    return [r for r in map(Requirement, texts) if r.name != PYPROJECT["project"]["name"]]


def test_the_distribution_is_named_and_needs_torch_and_safetensors_only() -> None:
    project = PYPROJECT["project"]
    assert project["name"] == "ariadne-runtime"
    assert [r.name for r in direct("project")] == ["torch", "safetensors"]
    assert {"zoo", "integration", "visualization"} <= set(project["optional-dependencies"])
    assert (ROOT / "ariadne" / "py.typed").is_file()


def test_the_top_level_holds_what_the_design_names_and_nothing_else() -> None:
    top = {f.relative_to(ROOT).parts[0] for f in files()}
    assert top >= REQUIRED, f"missing: {sorted(REQUIRED - top)}"
    assert top <= ALLOWED, f"not expected: {sorted(top - ALLOWED)}"


def test_the_noxfile_has_the_promised_sessions() -> None:
    defined = re.findall(r"^@nox\.session.*\ndef (\w+)\(", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    assert {"tests", "lint", "typecheck", "demo", "wheel"} <= set(defined)


def test_every_direct_dependency_has_a_tested_version_that_pyproject_allows() -> None:
    tested = pins("tested.txt")
    for requirement in direct("project", "extras", "groups"):
        version = tested.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} has no pin in constraints/tested.txt"
        assert requirement.specifier.contains(version), f"{requirement} does not allow the tested {version}"


def test_the_minimums_are_the_lower_bounds_of_pyproject() -> None:
    bounds = {canonicalize_name(r.name): r.specifier for r in direct("project", "extras")}
    minimums = pins("minimums.txt")
    assert set(minimums) == set(bounds)
    for name, specifier in bounds.items():
        (bound,) = specifier
        assert bound.operator == ">=", f"{name}{specifier} is not a lower bound"
        # `2.11` is tested as `2.11.0`.
        assert re.fullmatch(re.escape(bound.version) + r"(\.0)*", minimums[name]), (
            f"{name}: {specifier}, {minimums[name]}"
        )


def test_the_readme_has_two_commands_and_ci_runs_the_second() -> None:
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    commands = [line for block in blocks for line in block.splitlines() if " -s " in line]
    assert [c.rpartition(" -s ")[2] for c in commands] == ["report", "tests"]
    ci = ROOT / ".ci" / "run"
    assert os.access(ci, os.X_OK)
    run = [line for line in ci.read_text().splitlines() if "nox" in line]
    assert run == [commands[1]]


def test_the_tests_can_not_reach_the_network() -> None:
    with pytest.raises(RuntimeError, match=r"wants the network: socket\.getaddrinfo to 'example\.org'"):
        socket.getaddrinfo("example.org", 443)
    with socket.socket() as client, pytest.raises(RuntimeError, match=r"wants the network: socket\.connect"):
        client.connect(("192.0.2.1", 443))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass  # among themselves they may talk


# Written so that this file does not contain what it looks for.
INDEXES = re.compile(
    r"index-ur[l]|find-link[s]|extra-inde[x]|/simpl[e]/|files\.pythonhoste[d]|download\.pytorch\.or[g]"
)
MACHINE = re.compile(r"(?<![\w.:/~$}-])/(?:wor[k]|roo[t]|home|Users)/\w")


def test_no_file_names_a_package_index_or_a_path_of_this_machine() -> None:
    assert not [f for f in files() if f.name == "uv.lock"], (
        "a lock file names package indexes: the pins are in constraints/"
    )
    here = re.compile(rf"(?<![\w.:/~$}}-]){re.escape(str(ROOT))}\b")
    found = []
    for file in files():
        data = file.read_bytes()
        if b"\0" in data[:1024]:
            continue
        for number, line in enumerate(data.decode(errors="replace").splitlines(), start=1):
            if any(pattern.search(line) for pattern in (INDEXES, MACHINE, here)):
                found.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)
