"""The sessions by which people and CI run Ariadne: `nox -l` lists them, `nox -s NAME -- OPTIONS` runs one."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
import zipfile
from itertools import pairwise
from pathlib import Path

import nox

TESTED, MINIMUMS = "constraints/tested.txt", "constraints/minimums.txt"
PYPROJECT = nox.project.load_toml("pyproject.toml")
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
SUITES = ("pytest", "benchmarks", "--quiet", "--benchmark-json")
TWO = "mlp10x64 or mobilenet_v3_small"

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv|virtualenv"  # uv takes seconds where pip takes minutes
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.sessions = ["lint", "typecheck", "tests", "wheel"]


def install(session: nox.Session, *requirements: str, groups: tuple[str, ...] = (), pins: str = TESTED) -> None:
    """Install requirements and dependency groups in the pinned versions, and show which."""
    wanted = (*requirements, *nox.project.dependency_groups(PYPROJECT, *groups))
    session.install(*wanted, "-c", pins, silent=False)


def offline(session: nox.Session) -> dict[str, str]:
    """The variables that keep the zoo's packages from the network and from the user's own settings.

    And bytecode is kept beside the environment, whatever the machine says: without, each process compiles torch for seconds.
    """
    settings = session.env_dir.resolve() / "ultralytics"
    settings.mkdir(exist_ok=True)
    return {
        "YOLO_OFFLINE": "true",  # not "1": older releases know only the word
        "YOLO_AUTOINSTALL": "false",
        "YOLO_CONFIG_DIR": str(settings),
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(session.env_dir.resolve() / "bytecode"),
    }


# The libraries that the zoo's models come from, each with the requirement that installs it.
LIBRARIES = {re.split(r"\W", text)[0]: text for text in PYPROJECT["project"]["optional-dependencies"]["zoo"]}
FAMILIES = ("nn", "toys", *LIBRARIES)
TORCH = ("2.11", "2.12", "2.13", "2.14", "2.15")


def unit(session: nox.Session, *options: str) -> None:
    """Run the unit tests. Benchmarks can't be timed beside others."""
    pytest = ["pytest", "-n", "2", "--dist", "worksteal", "--benchmark-disable", "--durations", "40", *options]
    session.run(*pytest, env=offline(session) | ONE_THREAD)


# Rooms whose unit tests run in processes of their own: the more classes and modules there are, the longer takes each prepare.
APART = ("capture", "guards", "halves", "random_networks", "runtime", "stopped", "traps")


def units(session: nox.Session) -> None:
    """Run the unit tests that CI has time for, those of some rooms apart; or, with options, only pytest with these."""
    if session.posargs:
        unit(session, *session.posargs)
        return
    apart = [f"conformance/unit/{room}" for room in APART]
    others = [f"--ignore={path}" for path in apart]
    failed = 0
    for options in (apart, others):
        try:
            unit(session, "-m", "not compiler and not planted and not variants", *options)
        except nox.command.CommandFailed:
            failed += 1
    if failed:
        session.error(f"unit tests failed in {failed} of 2 runs")


def suite(session: nox.Session, *options: str) -> None:
    """Run cases of the conformance suite."""
    session.run("python", "-m", "conformance", *options, env=offline(session) | ONE_THREAD)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the unit tests, the suite's selftest and its smoke tier; with options, only pytest with these."""
    install(session, "-e", ".[zoo,remote,export]", groups=("test", "report"))
    units(session)
    if not session.posargs:
        selftest = ["python", "-m", "conformance.selftest", "--results", "results/selftest.jsonl"]
        session.run(*selftest, env=offline(session) | ONE_THREAD)
        suite(session, "--tier", "smoke")


@nox.session
def pipelines(session: nox.Session) -> None:
    """Run every net of the pipeline tests under every schedule, on 2 and 4 processes, against the whole model."""
    install(session, "-e", ".", "numpy", groups=("test",))
    session.run("python", "-m", "conformance.unit.pipeline.everything", env=offline(session) | ONE_THREAD)


@nox.session
def compilers(session: nox.Session) -> None:
    """Run the unit tests that compile with inductor, ahead of time too; they need a C++ compiler."""
    install(session, "-e", ".[zoo,remote,export]", groups=("test", "report"))
    unit(session, "-m", "compiler", *session.posargs)


@nox.session
def variants(session: nox.Session) -> None:
    """Run traps, changes and planted faults in all the spellings that the session `tests` has no time for."""
    install(session, "-e", ".[zoo,remote,export]", groups=("test", "report"))
    unit(session, "-m", "variants", *session.posargs)


@nox.session
@nox.parametrize("family", FAMILIES, ids=FAMILIES)
def conformance(session: nox.Session, family: str) -> None:
    """Run a family's cases, the full tier or what the options select, where only its library is installed."""
    options = [*session.posargs]
    if not concerns(options, family):
        if not any(concerns(options, each) for each in FAMILIES):
            session.error(f"no --case is about any of the families {', '.join(FAMILIES)}")
        session.skip(f"no --case is about {family}")
    # numpy is what some toys draw from; the libraries bring their own.
    install(session, "-e", ".", LIBRARIES.get(family, "numpy"), groups=("test",))
    if not any(option.startswith(("--case", "--tier", "--list", "--help")) for option in options):
        options += ["--tier", "full"]
    suite(session, "--family", family, *options)


def concerns(options: list[str], family: str) -> bool:
    """Whether some `--case` among the options may be about models of this family; so it is where there is none."""
    given = [after for option, after in pairwise(options) if option == "--case"]
    given += [option.partition("=")[2] for option in options if option.startswith("--case=")]
    return not given or any(asks(query, family) for query in given)


def asks(query: str, family: str) -> bool:
    """Whether the second part of a query, `check/family/…` with or without brace lists, leaves room for this family."""
    _, slash, rest = query.partition("/")
    names = re.split(r"[{},]", rest.partition("/")[0])
    return not slash or any(family.startswith(n[:-1]) if n.endswith("*") else n == family for n in names)


@nox.session
def fuzz(session: nox.Session) -> None:
    """Run random networks against their eager twins: `-- smoke`, `full` (as without), `wide` or `nightly`; the rest to pytest."""
    install(session, "-e", ".[remote]", "numpy", groups=("test",))
    profile, options = "full", [*session.posargs]
    if options and options[0] in ("smoke", "full", "wide", "nightly"):
        profile, options = options[0], options[1:]
    drawn = ("random_networks", "state_machine", "views_and_writes")
    files = [f"conformance/unit/random_networks/test_{name}.py" for name in drawn]
    env = {"ARIADNE_HYPOTHESIS_PROFILE": profile, "ARIADNE_FUZZ_RESULTS": str(Path("results/fuzz.jsonl").resolve())}
    Path("results").mkdir(exist_ok=True)
    env |= {"ARIADNE_HALVES_FUZZ": {"smoke": "150", "full": "5000", "wide": "5000", "nightly": "500000"}[profile]}
    files.append("conformance/unit/halves/test_halves.py::test_mutated_files_are_refused_or_decoded")
    env |= {"ARIADNE_REMOTE_FUZZ": {"smoke": "1500", "full": "100000", "wide": "100000", "nightly": "1000000"}[profile]}
    files.append("conformance/unit/remote/test_remote_strangers.py::test_mutated_messages_cost_their_sender_alone")
    session.run("pytest", *files, *options, env=offline(session) | ONE_THREAD | env)


@nox.session
def benchmarks(session: nox.Session) -> None:
    """Measure the split, eager and compiled, beside the whole model, on this CPU; options go to `python -m benchmarks run`."""
    measure(session, Path("results/benchmarks-cpu"), "cpu")


@nox.session
def benchmarks_cuda(session: nox.Session) -> None:
    """The same on CUDA, replay and training at batch 1, 4, 32 and 256; refuses where there is no CUDA device."""
    options = ["--require-cuda", "--batches", "1", "4", "32", "256", "--tasks", "inference", "training"]
    options += ["--start-batches", "1"]  # each start is a process of its own, and half of them compile from nothing
    measure(session, Path("results/benchmarks-cuda"), "cuda", *options)


@nox.session
def faults(session: nox.Session) -> None:
    """Kill both sides of a training run in two processes at 1,000 random moments, or `-- N`; final weights must be the same."""
    install(session, "-e", ".[remote]", "numpy")
    command = ["python", "-m", "conformance.suite.remote_faults", *(session.posargs or ["1000"])]
    session.run(*command, env=offline(session) | ONE_THREAD)


def measure(session: nox.Session, run: Path, device: str, *options: str) -> None:
    """Measure into a folder that `report` takes; what is in it already is kept, and only what is missing is measured."""
    install(session, "-e", ".[zoo,remote]", groups=("test",))
    run.mkdir(parents=True, exist_ok=True)
    command = [
        "python",
        "-m",
        "benchmarks",
        "run",
        *options,
        *session.posargs,
        "--output",
        str(run / "benchmarks.jsonl"),
    ]
    profiles = ["python", "-m", "benchmarks.cut_profile", device, "--device", device]
    profiles += ["--output", str(run / "cuts.jsonl")]
    failed = attempt(session, run, "speeds and costs", *command)
    failed += attempt(session, run, "profiles along the cut", *profiles, **ONE_THREAD)
    if device == "cpu":
        suites = ["python", "-m", *SUITES, str(run / "pytest-benchmark.json")]
        failed += attempt(session, run, "suites of one process", *suites, **ONE_THREAD)
    session.log(f"for a page: nox -s report -- {run} --output {run / 'report'}")
    if failed:
        session.error(f"not as expected: {'; '.join(failed)}")


def attempt(session: nox.Session, run: Path, what: str, *command: str, **variables: str) -> list[str]:
    """Run a command, and go on if it fails; returns what failed, for the session to end with.

    Whether it did stands in the run, too, for the page to show: a step that was begun counts as failed until it has ended well.
    """

    def note(failed: bool) -> None:
        with (run / "steps.jsonl").open("a") as file:
            file.write(json.dumps({"step": what, "failed": failed}) + "\n")

    note(True)
    try:
        session.run(*command, env=offline(session) | variables)
    except nox.command.CommandFailed:
        return [what]
    note(False)
    return []


@nox.session
def report(session: nox.Session) -> None:
    """Write a report of runs, `-- RUN… [--baseline RUN] [--output FOLDER]`; or, without options, check and measure a little."""
    install(session, "-e", ".[zoo,remote,export]", groups=("test", "report"))
    if session.posargs:
        session.run("python", "-m", "reports", *session.posargs)
        return
    run = Path("results/quick")
    shutil.rmtree(run, ignore_errors=True)  # a run of another day, or of other code
    run.mkdir(parents=True)
    commands = [
        ("the smoke tier of the conformance suite", "conformance", "--tier", "smoke", "--results", "conformance.jsonl"),
        ("planted bugs, which it must notice", "conformance.selftest", "--results", "selftest.jsonl"),
        ("two models, measured", "benchmarks", "run", "--quick", "--output", "benchmarks.jsonl"),
        ("two models, the suites of one process", *SUITES[:-1], "-k", TWO, SUITES[-1], "pytest-benchmark.json"),
        ("two models, cut everywhere", "benchmarks.cut_profile", "quick", "--output", "cuts.jsonl"),
    ]
    failed = []
    for number, (what, module, *options, file) in enumerate(commands, start=1):
        session.log(f"{number} of {len(commands)}: {what}")
        failed += attempt(session, run, what, "python", "-m", module, *options, str(run / file), **ONE_THREAD)
    session.run("python", "-m", "reports", str(run), "--output", str(run / "report"))
    if failed:
        session.error(f"not as expected: {'; '.join(failed)}")


@nox.session
def scoreboard(session: nox.Session) -> None:
    """Put the scoreboard's questions to every system, about 21 toys in ten minutes, or as the options of `run` say."""
    install(session, "-e", ".[zoo]", groups=("test", "report", "scoreboard"))
    folder = session.env_dir.resolve() / "ariadne_split"  # it is imported as `ariadne`, so it lies apart
    session.install("--no-deps", "--target", str(folder), "ariadne-split==0.1.2")
    variables = offline(session) | ONE_THREAD | {"ARIADNE_SPLIT": str(folder)}
    answers = "results/scoreboard/answers.jsonl"
    command = ["python", "-m", "conformance.scoreboard"]
    options = session.posargs or ["--minutes", "10"]
    session.run(*command, "run", "--results", answers, *options, env=variables)
    session.run(*command, "page", answers, "--output", "results/scoreboard", env=variables)


@nox.session
def wild(session: nox.Session) -> None:
    """Ask Ariadne, or as the options of `run` say, about models of packages beyond the zoo, in an environment of their own."""
    install(session, "-e", ".[zoo]", groups=("test", "report", "scoreboard"))
    session.install("--no-deps", "-r", "constraints/wild.txt")
    # transformers imports torchaudio where it finds it, and torchaudio refuses a torch that was built for another CUDA.
    folder = session.env_dir.resolve() / "torchaudio"
    session.install("--no-deps", "--target", str(folder), "torchaudio==2.11.0")
    variables = offline(session) | ONE_THREAD
    answers = "results/wild/answers.jsonl"
    command = ["python", "-m", "conformance.scoreboard"]
    options = session.posargs or ["--target", "ariadne_here", "--limit", "100"]
    others = variables | {"PYTHONPATH": str(folder)}
    session.run(*command, "run", "--results", answers, "--program", "wild/torchaudio/*", *options, env=others)
    session.run(*command, "run", "--results", answers, "--program", "wild/*", *options, env=variables)
    session.run(*command, "page", answers, "--output", "results/wild", env=variables)


@nox.session
def minimums(session: nox.Session) -> None:
    """Run the unit tests and the smoke tier with the lowest versions that pyproject.toml allows."""
    install(session, "-e", ".[zoo,remote,export]", groups=("test", "report"), pins=MINIMUMS)
    unit(session, *session.posargs)
    suite(session, "--tier", "smoke")


@nox.session
@nox.parametrize("version", TORCH, ids=TORCH)
def torch(session: nox.Session, version: str) -> None:
    """Run the unit tests and the smoke tier with one release of torch, and of torchvision that which was made for it."""
    others = session.env_dir.resolve() / "constraints.txt"
    kept = [line for line in Path(TESTED).read_text().splitlines() if not line.startswith("torch")]
    others.write_text("\n".join([*kept, f"torch=={version}.*", ""]))
    install(session, "-e", ".[zoo,remote,export]", groups=("test", "report"), pins=str(others))
    unit(session, *session.posargs)
    suite(session, "--tier", "smoke")


@nox.session(python=["3.12", "3.13"])
def pythons(session: nox.Session) -> None:
    """Run the unit tests and the smoke tier under the later Pythons: other byte code, and another way to watch it."""
    install(session, "-e", ".[zoo,remote,export]", groups=("test", "report"))
    units(session)
    if not session.posargs:
        suite(session, "--tier", "smoke")


@nox.session
def newest(session: nox.Session) -> None:
    """Run the unit tests and the smoke tier with the newest release of everything, whatever the constraints say."""
    session.install(
        "-e", ".[zoo,remote,export]", *nox.project.dependency_groups(PYPROJECT, "test", "report"), silent=False
    )
    units(session)
    if not session.posargs:
        suite(session, "--tier", "smoke")


@nox.session
def lint(session: nox.Session) -> None:
    """Check the style and the format of every Python file."""
    install(session, groups=("lint",))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Check the types of `ariadne`, strictly."""
    install(session, "-e", ".[remote]", groups=("typecheck",))
    session.run("mypy", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site of the documentation into results/site, warnings as errors; its pages must ask nothing of the network."""
    install(session, groups=("docs",))
    silent = {"NO_MKDOCS_2_WARNING": "1"}  # Material's notice about another project's plans
    # Not --quiet: it keeps the warnings from --strict, too.
    session.run("mkdocs", "build", "--strict", "-f", "docs/site/mkdocs.yml", env=silent)
    pages = sorted(Path("results/site").rglob("*.html"))
    asking = [page for page in pages if FETCHES.search(page.read_text(encoding="utf-8"))]
    if asking:
        session.error(f"fetched from elsewhere when read: {', '.join(map(str, asking))}")
    session.log(f"{len(pages)} pages; open results/site/index.html")


# An element that a browser fetches as it shows the page; links that a reader may follow are none.
FETCHES = re.compile(
    r"<(?:script|img|iframe|source)\b[^>]*\bsrc=.?(?:https?:)?//|<link\b(?![^>]*canonical)[^>]*\bhref=.?(?:https?:)?//"
)


@nox.session
def demo(session: nox.Session) -> None:
    """Split, replay and train real models, and print a table; options go to examples/demo.py."""
    install(session, "-e", ".[zoo,remote]")
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
