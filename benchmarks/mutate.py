r"""How many small faults do the tests find? Mutation testing with mutmut, on a seeded sample of the mutants.

    .venv/bin/python benchmarks/mutate.py --sample=300 --seed=0
    .venv/bin/python benchmarks/mutate.py --only=comparison,analysis --sample=60
    .venv/bin/python benchmarks/mutate.py --files='coevolve_jax/synthesis/sig*' --sample=0 \
        --tests=tests/synthesis/test_signals.py

mutmut gets a virtual environment of its own (--tool), which also sees this one's packages; the first call
makes it. It works in a copy of the tree and resumes there after a stop. Each mutant meets the tests that call
its function. The program prints the survivors and the score: the found share of the tried mutants. A
failing test or a timeout finds a mutant; a mutant that no test calls is not found.

Mutants that change texts alone (mostly messages) need --texts. Only function bodies are mutated: constants of
a module and decorated functions stay.
"""

import ast
import difflib
import fnmatch
import json
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import threading
import venv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from absl import app, flags

ROOT = Path(__file__).parents[1]
VERSION = "3.8.1"  # the version of mutmut
WHOLE_LOOP = ("tests/loop/test_loop.py", "tests/loop/test_run_files.py")
SUITE = "tests/strategies/test_strategies.py::test_every_strategy_passes_the_suite"
LIVE = "tests/analysis/test_viewer.py::test_the_live_server_answers_this_machine_and_nothing_else"


class Module(NamedTuple):
    """Files that are mutated together.

    files: patterns. tests: the nearest ones, without servers, browsers or a run of a model.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]


def module(files: str, *tests: str) -> Module:
    """files: below coevolve_jax/. tests: names of files in tests/ without test_ and .py, or whole paths."""
    found = {path.name: str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    paths = [name if "/" in name else found[f"test_{name}.py"] for name in tests]
    return Module(tuple(f"coevolve_jax/{name}" for name in files.split()), tuple(paths))


MODULES = {
    "strategies": module("strategies/*.py", "arms", "comparable", "collect", SUITE, *WHOLE_LOOP),
    "synthesis": module(
        "synthesis/*.py", "signals", "synthesis", "choice", "leakage", "task_pool", "comparable", *WHOLE_LOOP
    ),
    "grpo": module(
        "grpo/*.py", "grpo", "losses", "streams", "packing", "logprobs", "lora", "collect", *WHOLE_LOOP
    ),
    "agent": module(
        "rollout/agent.py rollout/batch_scheduler.py rollout/limits.py rollout/utilization.py",
        *("rollout", "ahead", "comparable", *WHOLE_LOOP),
    ),
    "initial": module("loop/initial.py", "run", "leakage", *WHOLE_LOOP),
    "run": module("loop/run.py loop/state.py loop/summary.py", "run", "logs", *WHOLE_LOOP),
    "collect": module("loop/collect.py", "collect", "ahead", "step_numbers", *WHOLE_LOOP),
    "evaluate": module("loop/evaluate.py", "evaluate", "scores", *WHOLE_LOOP),
    "health": module("records/health.py", "health", "step_numbers", *WHOLE_LOOP),
    "explorers": module(
        "explorers/*.py explorers/*/*.py",
        *("evidence", "scripted", "explorers", "wording", "policy_explorer", "llm_explorer", "demonstrator"),
    ),
    "llm": module("llm/*.py", "client", "llm_explorer"),
    "comparison": module("comparison/*.py", "comparison", "comparison_tables", "comparable", "stats"),
    "analysis": module(
        "analysis/*.py",
        *("run_read", "report", "stats", "summary", "comparison", "comparison_tables", "scores", LIVE),
    ),
}
EXCLUDED = (  # start whole programs, which take minutes, or do not see the mutants
    "test_cells_run_fail_by_name_and_go_on",
    "test_command_line",
    "over_http",
    "killed",
)
_ONLY = flags.DEFINE_list("only", list(MODULES), "Modules to mutate, with the tests nearest to each.")
_FILES = flags.DEFINE_list("files", [], "Patterns of the files to mutate, in place of --only.")
_TESTS = flags.DEFINE_list(
    "tests", [], "With --files: test files, or tests as FILE::NAME, that may find the mutants."
)
_SKIP = flags.DEFINE_list("skip", [], "Tests whose names contain one of these stay out: slow ones, say.")
_TOOL = flags.DEFINE_string("tool", str(ROOT / "runs" / "mutmut"), "Virtual environment of mutmut.")
_SAMPLE = flags.DEFINE_integer("sample", 300, "How many mutants to try; 0: all.", lower_bound=0)
_SEED = flags.DEFINE_integer("seed", 0, "Of the sample.")
_TEXTS = flags.DEFINE_bool("texts", False, "Try also mutants that only change a text.")
_FOLDER = flags.DEFINE_string("folder", str(ROOT / "runs" / "mutants"), "Of the copy.")
_PROCESSES = flags.DEFINE_integer("processes", os.cpu_count(), "Mutants tried at a time.", lower_bound=1)
# The meaning of mutmut's exit codes; a mutant with any other one is tried again.
KINDS = {0: "survived", 1: "failed", 3: "failed", 5: "not called", 33: "not called"} | dict.fromkeys(
    (-24, 24, 36, 152, 255, -9, -11), "out of time"
)
COLUMNS = ("failed", "out of time", "survived", "not called", "untried")


class Mutant(NamedTuple):
    """line: of the original file. diff: of the function. text: it changes string constants only."""

    name: str
    file: str
    line: int
    diff: str
    text: bool


def main(_) -> None:
    folder = Path(_FOLDER.value)
    patterns, tests = chosen(_ONLY.value, _FILES.value, _TESTS.value)
    python = environment(Path(_TOOL.value))
    copy_tree(folder)
    (folder / "mutants").mkdir(exist_ok=True)  # Python never looks again into a PYTHONPATH that is not there
    there = [t for t in tests if (folder / t.partition("::")[0]).exists()]
    configure(folder, patterns, there, [*EXCLUDED, *_SKIP.value])
    # With a name that no mutant has it makes the mutants, learns which test calls what, and stops.
    done = mutmut(python, folder, ["none"], _PROCESSES.value, capture_output=True, text=True)
    if "nothing matches" not in done.stderr:
        unmutated = f"see that the tests that it was to use pass in {folder / 'mutants'}"
        sys.exit(f"mutmut could not begin: {unmutated}.\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")

    found = [m for m in mutants(folder, patterns) if _TEXTS.value or not m.text]
    if _SAMPLE.value and _SAMPLE.value < len(found):
        drawn = set(random.Random(_SEED.value).sample(sorted(m.name for m in found), _SAMPLE.value))
        sample = [m for m in found if m.name in drawn]
    else:
        sample = found
    left = [name for name, kind in kinds(folder, sample).items() if kind == "untried"]
    print(
        f"{len(found)} mutants, {len(sample)} of them in the sample, {len(left)} still to be tried",
        flush=True,
    )
    if left:
        told = threading.Event()
        threading.Thread(target=tell, args=(folder, sample, told), daemon=True).start()
        # It keeps its results, also if it is interrupted.
        mutmut(python, folder, left, _PROCESSES.value, stdout=subprocess.DEVNULL)
        told.set()
    report(folder, sample)


def chosen(only: Sequence[str], files: Sequence[str], tests: Sequence[str]) -> tuple[list[str], list[str]]:
    """Patterns of files, and tests. Raises app.UsageError for unknown modules and for files without tests."""
    if files:
        if not tests:
            raise app.UsageError(
                "--files names files to mutate: name the tests that may find the mutants in --tests."
            )
        return list(files), list(tests)
    if unknown := [name for name in only if name not in MODULES]:
        raise app.UsageError(f"--only={','.join(unknown)} is no module: name some of {', '.join(MODULES)}.")
    found = [MODULES[name] for name in only]
    return [f for m in found for f in m.files], list(dict.fromkeys(t for m in found for t in m.tests))


def environment(folder: Path) -> Path:
    """The interpreter of a virtual environment with mutmut that also sees the packages of this one."""
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        venv.create(folder, with_pip=True, clear=True)
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-m", "pip", "install", "-q", f"mutmut=={VERSION}"], check=True)
        (folder / "made").touch()
    return python


def tell(folder: Path, sample: list[Mutant], over: threading.Event) -> None:
    """Prints the progress every minute."""
    while not over.wait(60):
        tried = sum(kind != "untried" for kind in kinds(folder, sample).values())
        print(f"{tried} of {len(sample)}", flush=True)


def copy_tree(folder: Path) -> None:
    """Copies tracked and new files as they are now; unchanged ones stay."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    names = [name for name in names if name and (ROOT / name).is_file()]
    for base in (folder, folder / "mutants"):
        for path in [p for p in base.rglob("*.py") if (base / "coevolve_jax").exists()]:
            name = path.relative_to(base)
            if name.parts[0] in ("coevolve_jax", "tests") and str(name) not in names:
                path.unlink()
    for name in names:
        there = folder / name
        there.parent.mkdir(parents=True, exist_ok=True)
        if not there.exists() or there.read_bytes() != (ROOT / name).read_bytes():
            shutil.copyfile(ROOT / name, there)


def configure(folder: Path, files: list[str], tests: list[str], excluded: list[str]) -> None:
    settings = {
        "source_paths": ["coevolve_jax"],
        "only_mutate": files,
        "also_copy": [p.name for p in folder.iterdir() if p.name not in ("mutants", "tests")],
        "pytest_add_cli_args_test_selection": tests,
        "pytest_add_cli_args": [
            *("-p", "no:cacheprovider"),
            *("-k", " and ".join(f"not {name}" for name in excluded)),
        ],
        "process_isolation": "forkserver",  # JAX does not survive a fork
        "use_git_change_detection": False,
    }
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    text = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(f"{text}\n[tool.mutmut]\n{lines}")


def mutmut(
    python: Path, folder: Path, names: list[str], processes: int, **options
) -> subprocess.CompletedProcess:
    command = [python, "-m", "mutmut", "run", "--max-children", str(processes), *names]
    # Programs that tests start see the mutants too, and not this tree.
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(folder / "mutants")}
    return subprocess.run(command, cwd=folder, env=environ, check=False, **options)


def codes(folder: Path, file: str) -> dict[str, int | None]:
    """The tests' exit codes, by mutant; None where it has not been tried."""
    meta = folder / "mutants" / f"{file}.meta"
    return json.loads(meta.read_text())["exit_code_by_key"] if meta.exists() else {}


def mutants(folder: Path, patterns: list[str]) -> list[Mutant]:
    found = []
    for path in sorted((folder / "coevolve_jax").rglob("*.py")):
        file = str(path.relative_to(folder))
        known = codes(folder, file)
        if not known or not any(fnmatch.fnmatch(file, pattern) for pattern in patterns):
            continue
        mutated = (folder / "mutants" / file).read_text()
        nodes = {n.name: n for n in ast.walk(ast.parse(mutated)) if isinstance(n, FUNCTION)}
        lines = mutated.splitlines()
        for name in known:
            own = name.rpartition(".")[2]
            first, second = (nodes[n] for n in (own.rpartition("__mutmut_")[0] + "__mutmut_orig", own))
            before, after = (source(lines, n) for n in (first, second))
            diff = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
            offset = next(i for i, pair in enumerate(zip(before, after)) if pair[0] != pair[1])
            line = original_line(path, own) + offset
            found.append(
                Mutant(name, file, line, "\n".join(diff), without_text(first) == without_text(second))
            )
    return found


FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


def source(lines: list[str], node: ast.FunctionDef) -> list[str]:
    """The function's lines under one name, so that mutants differ in the mutation alone."""
    text = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
    return text.replace(node.name, "_", 1).splitlines()


def original_line(path: Path, mangled: str) -> int:
    """Line of the `def` of a mutant's function.

    The mangled name gives the class: x_run__mutmut_3, xǁAgentǁrun__mutmut_3.
    """
    whole = mangled.rpartition("__mutmut_")[0]
    *classes, name = whole[1:].strip("ǁ").split("ǁ") if "ǁ" in whole else [whole.removeprefix("x_")]
    scope = ast.parse(path.read_text())
    for part in classes:
        scope = next(n for n in ast.walk(scope) if isinstance(n, ast.ClassDef) and n.name == part)
    return next(n for n in ast.walk(scope) if isinstance(n, FUNCTION) and n.name == name).lineno


def without_text(node: ast.FunctionDef) -> str:
    class Blank(ast.NodeTransformer):
        def visit_Constant(self, constant):
            return ast.Constant("") if isinstance(constant.value, str) else constant

    blank = Blank().visit(ast.parse(ast.unparse(node)).body[0])
    blank.name = "_"
    return ast.dump(blank)


def kinds(folder: Path, sample: list[Mutant]) -> dict[str, str]:
    """The outcome of the tests, by the mutant's name."""
    ends = {file: codes(folder, file) for file in {m.file for m in sample}}
    return {m.name: KINDS.get(ends[m.file].get(m.name), "untried") for m in sample}


def report(folder: Path, sample: list[Mutant]) -> None:
    files: dict[str, Counter] = {}
    ends = kinds(folder, sample)
    for m in sorted(sample, key=lambda m: (m.file, m.line)):
        kind = ends[m.name]
        files.setdefault(m.file, Counter())[kind] += 1
        if kind in ("survived", "not called"):
            print(f"\n{m.file}:{m.line} {kind} ({m.name.rpartition('.')[2]})")
            print(textwrap.indent("\n".join(x for x in m.diff.splitlines() if x[0] in "+-"), "    "))
    print(f"\n{'file':40}" + "".join(f"{name:>12}" for name in (*COLUMNS, "score")))
    for file, n in [*files.items(), ("all", sum(files.values(), Counter()))]:
        tried = n.total() - n["untried"]
        score = f"{(n['failed'] + n['out of time']) / tried:.1%}" if tried else "-"
        print(f"{file:40}" + "".join(f"{n[name]:12}" for name in COLUMNS) + f"{score:>12}")


if __name__ == "__main__":
    app.run(main)
