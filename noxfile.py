"""The sessions by which people and CI run Ariadne: `nox -l` lists them, `nox -s NAME -- OPTIONS` runs one."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import nox

TESTED = "constraints/tested.txt"
PYPROJECT = nox.project.load_toml("pyproject.toml")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv|virtualenv"  # uv takes seconds where pip takes minutes
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.sessions = ["lint", "typecheck", "tests", "wheel"]


def install(session: nox.Session, *requirements: str, groups: tuple[str, ...] = ()) -> None:
    """Install requirements and dependency groups in the tested versions, and show which."""
    wanted = (*requirements, *nox.project.dependency_groups(PYPROJECT, *groups))
    session.install(*wanted, "-c", TESTED, silent=False)


def offline(session: nox.Session) -> dict[str, str]:
    """The variables that keep the zoo's packages from the network and from the user's own settings."""
    settings = session.env_dir.resolve() / "ultralytics"
    settings.mkdir(exist_ok=True)
    return {
        "YOLO_OFFLINE": "true",  # not "1": older releases know only the word
        "YOLO_AUTOINSTALL": "false",
        "YOLO_CONFIG_DIR": str(settings),
        "HF_HUB_OFFLINE": "1",
    }


@nox.session
def tests(session: nox.Session) -> None:
    """Run the conformance suite; options go to pytest."""
    install(session, "-e", ".[zoo]", groups=("test",))
    # `loadgroup` keeps the tests of one model in one process; benchmarks can't be timed beside others.
    pytest = ["pytest", "-n", "2", "--dist", "loadgroup", "--benchmark-disable", *session.posargs]
    session.run(*pytest, env=offline(session) | ONE_THREAD)


@nox.session
def lint(session: nox.Session) -> None:
    """Check the style and the format of every Python file."""
    install(session, groups=("lint",))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check the types of `ariadne`, strictly."""
    install(session, "-e", ".", groups=("typecheck",))
    session.run("mypy", *session.posargs)


@nox.session
def demo(session: nox.Session) -> None:
    """Split, replay and train real models, and print a table; options go to examples/demo.py."""
    install(session, "-e", ".[zoo]")
    session.run("python", "examples/demo.py", *session.posargs, env=offline(session))


@nox.session(reuse_venv=False)
def wheel(session: nox.Session) -> None:
    """Build the sdist and from it the wheel, look into both, and import the wheel from elsewhere."""
    install(session, groups=("build",))
    elsewhere = session.env_dir.resolve() / "elsewhere"
    elsewhere.mkdir()
    session.run("python", "-m", "build", "--no-isolation", "--outdir", str(elsewhere))
    (sdist,) = elsewhere.glob("*.tar.gz")
    (built,) = elsewhere.glob("*.whl")
    look_into(session, sdist, built)
    install(session, str(built))
    session.chdir(elsewhere)
    session.run("python", "-I", "-c", IMPORT_ALL)


IMPORT_ALL = """
import importlib, pkgutil, ariadne
assert all("site-packages" in p for p in ariadne.__path__), ariadne.__path__
names = [m.name for m in pkgutil.walk_packages(ariadne.__path__, "ariadne.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
print("imported", "ariadne", *names)
"""


def look_into(session: nox.Session, sdist: Path, built: Path) -> None:
    """Stop the session unless the wheel holds only `ariadne`, and the sdist what builds and tests it."""
    with zipfile.ZipFile(built) as archive:
        inside = set(archive.namelist())
    package = {f.as_posix() for f in Path("ariadne").rglob("*") if f.suffix == ".py" or f.name == "py.typed"}
    found = {name for name in inside if ".dist-info/" not in name}
    if found != package or "ariadne/py.typed" not in found:
        session.error(f"{built.name}: missing {sorted(package - found)}, not expected {sorted(found - package)}")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "README.md", "LICENSE", "noxfile.py", TESTED, *package}
    strays = {name for name in inside if name.startswith((".git/", ".nox", ".venv")) or name == "uv.lock"}
    if not needed <= inside or strays:
        session.error(f"{sdist.name}: missing {sorted(needed - inside)}, not expected {sorted(strays)}")
    session.log(f"{built.name}: {len(found)} files, only `ariadne`; {sdist.name}: {len(inside)} files")
