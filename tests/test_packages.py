"""Import rules: a table, held against every import of coevolve_jax and experiments."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.paths import ROOT

PACKAGE = "coevolve_jax"
ALL = ("",)
# Package -> what its files may import of ours, besides each other. A module belongs to the longest matching
# name; "envs.*" is one package for each family.
MAY_IMPORT = {
    "types": (),
    "shipped": (),
    "cli": ("shipped",),
    "__main__": ("cli",),
    "config": ("names", "shipped", "preemption", "config.schedule", "diagnosis.rewards", "llm.settings"),
    "config.schedule": (),
    "seeding": (),
    "names": (),
    "event_loop": (),
    "distributed.sharding": (),
    "diagnosis": ("types",),
    "models": ("shipped", "distributed.sharding"),
    "grpo": ("types", "names", "models", "distributed.sharding"),
    "envs.base": ("types",),
    "envs.calls": ("types",),
    "envs.turns": ("types",),
    "envs.lockdown": (),
    "envs.family": ("types", "shipped", "names", "envs.base", "envs.remote"),
    "envs.worker_process": ("types", "names", "shipped", "envs.base"),
    "envs.remote": ("types", "envs.worker_process"),
    "envs.worker": ("types", "envs.base", "envs.family"),
    "envs.worker_pool": ("types", "envs.base", "envs.calls", "envs.worker_process", "envs.ray_workers"),
    "envs.ray_workers": ("envs.worker_process",),
    "envs": ("envs.family",),
    "envs.*": ("types", "shipped", "envs.base", "envs.calls", "envs.turns", "envs.lockdown"),
    "envs.folder_tools": ("types", "envs.base", "envs.mcp"),
    "rollout": ("types", "shipped", "models", "envs.base", "event_loop"),
    "rollout.native": ("rollout", "models", "distributed.sharding"),
    "llm": ("types", "event_loop"),
    "explorers.base": ("types", "llm.calls", "llm.prompting"),
    "synthesis": ("types", "envs.base", "envs.calls", "explorers.base"),
    "explorers": ("types", "explorers.base", "llm"),
    "explorers.policy": ("types", "explorers", "llm", "event_loop", "rollout.engine", "rollout.chat"),
    "explorers.wording": ("types", "explorers", "explorers.policy", "rollout.engine", "rollout.chat"),
    "strategies": (
        "types",
        "seeding",
        "config.schedule",
        "envs.base",
        "explorers.evidence",
        "llm.prompting",
        "synthesis",
        "grpo.advantages",
        "grpo.filter",
        "diagnosis.rewards",
    ),
    "preemption": (),
    "records": ("types", "config", "names", "llm.calls", "diagnosis"),
    "loop": ALL,
    "harness": (
        "types",
        "shipped",
        "envs.base",
        "envs.family",
        "envs.tools.source",
        "envs.worker_pool",
        "llm",
        "seeding",
        "config",
        "names",
        "preemption",
        "diagnosis",
        "strategies",
        "synthesis",
        "records",
        "analysis.stats",
        "comparison",
    ),
    "harness.gradient": ("types", "names", "harness", "grpo", "models.decoder", "distributed.sharding"),
    "planning": ("types", "shipped", "config", "grpo", "models", "rollout.native", "distributed.sharding"),
    "analysis.stats": ("types", "envs.base"),
    "analysis": (
        "types",
        "analysis.stats",
        "records",
        "envs.base",
        "envs.family",
        "diagnosis.trends",
        "harness.campaign",
        "harness.progress",
        "harness.records",
        "harness.smoke",
    ),
    "toolcheck": (
        "types",
        "build",
        "config",
        "seeding",
        "envs",
        "envs.tools.source",
        "explorers.scripted",
        "llm.prompting",
        "synthesis",
        "rollout.chat",
    ),
    "exports": ("shipped", "config", "records", "analysis.loading", "analysis.summary"),
    "tfds_tasks": ("types", "analysis.loading", "exports.tables"),
    "distributed.gathering": ("distributed.sharding",),
    "build": ALL,
    "comparison": ("types", "shipped", "config", "names", "preemption", "records", "analysis.stats"),
    "train": ALL,
    "testing": ALL,
}
NOBODY_IMPORTS = ("train", "testing", "__main__")
# Known violations, as (file, module); delete an entry whose violation is gone.
NOT_YET: set[tuple[str, str]] = set()
WITHOUT_JAX = (
    "types",
    "envs",
    "llm",
    "synthesis",
    "explorers",
    "strategies",
    "diagnosis",
    "records.rollouts",
)
JAX = ("jax", "jaxlib", "flax", "optax", "orbax")
OF_NAMEDTUPLES = ("_replace", "_asdict", "_fields", "_make")


class Import(NamedTuple):
    """file imports module, both relative to the root; name: a private name that it takes, or ""."""

    file: str
    line: int
    module: str
    name: str = ""


def imports(root: Path, folders: tuple[str, ...] = (PACKAGE, "experiments")) -> list[Import]:
    """All imports of modules under root, wherever in a file they stand."""
    files = {p.relative_to(root) for folder in folders for p in (root / folder).rglob("*.py")}
    modules = {".".join(f.with_suffix("").parts).removesuffix(".__init__") for f in files}
    found = []
    for file in sorted(files):
        tree = ast.parse((root / file).read_text())
        here = file.with_suffix("").parts
        # A program finds the modules of its own folder
        beside = "experiments" if here[0] == "experiments" else ""
        bound: dict[str, str] = {}  # name in this file -> module or module.name of ours

        def add(line: int, base: str, name: str, file: Path = file) -> None:
            whole = f"{base}.{name}"
            module = whole if whole in modules else base
            private = name if module == base and _private(name) else ""
            found.append(Import(str(file), line, module, private))

        for node in ast.walk(tree):
            match node:
                case ast.Import(names=names):
                    for alias in names:
                        if f"{beside}.{alias.name}" in modules:
                            found.append(Import(str(file), node.lineno, f"{beside}.{alias.name}"))
                        if alias.name in modules:
                            found.append(Import(str(file), node.lineno, alias.name))
                            bound[alias.asname or alias.name] = alias.name
                case ast.ImportFrom(module=base, names=names, level=level):
                    if level:
                        base = ".".join((*here[:-level], *((base,) if base else ())))
                    if not level and f"{beside}.{base}" in modules:
                        found.append(Import(str(file), node.lineno, f"{beside}.{base}"))
                    if base in modules:
                        for alias in names:
                            add(node.lineno, base, alias.name)
                            bound[alias.asname or alias.name] = f"{base}.{alias.name}"
                case ast.Call(func=ast.Name(id="import_module") | ast.Attribute(attr="import_module")):
                    match node.args[0]:
                        case ast.Constant(value=str(module)) if module in modules:
                            found.append(Import(str(file), node.lineno, module))
        for node in ast.walk(tree):
            base = bound.get(_dotted(node.value)) if isinstance(node, ast.Attribute) else None
            if base and (f"{base}.{node.attr}" in modules or _private(node.attr)):
                add(node.lineno, base if base in modules else base.rpartition(".")[0], node.attr)
    return found


def _dotted(node: ast.expr) -> str:
    """The text a.b.c of an expression that is just that; "" otherwise."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_NAMEDTUPLES


def package(module: str) -> str | None:
    """The entry of MAY_IMPORT to which a module belongs; None where the table has none."""
    name = module.removeprefix(PACKAGE).removeprefix(".")
    parts = name.split(".")
    fits = [".".join(parts[:n]) for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in MAY_IMPORT]
    if fits == ["envs"] and name != "envs":
        return ".".join(parts[:2])
    return fits[0] if fits else None


def within(name: str, allowed: str) -> bool:
    return allowed == "" or name == allowed or name.startswith(f"{allowed}.")


def violations(found: list[Import]) -> list[str]:
    """Sentences, each with file and line; and one for each obsolete entry of NOT_YET."""
    wrong, late = [], set(NOT_YET)
    for i in found:
        at = f"{i.file}:{i.line}"
        ours = ".".join(Path(i.file).with_suffix("").parts).removesuffix(".__init__")
        name = i.module.removeprefix(PACKAGE).removeprefix(".")
        if i.name:
            wrong.append(f"{at} takes the private name {i.name} of {i.module}: make it public or do without.")
        if within(i.module, "experiments"):
            wrong.append(f"{at} imports {i.module}, and experiments/ are programs: move what is shared.")
        if not within(ours, PACKAGE) or not name:
            continue
        home = package(ours)
        if home is None:
            wrong.append(f"{at} is in no package of MAY_IMPORT: add {i.file} with what it may import.")
        elif (i.file, i.module) in NOT_YET:
            late.discard((i.file, i.module))
        elif package(i.module) != home:
            may = MAY_IMPORT.get(home, MAY_IMPORT["envs.*"])
            if name.split(".")[0] in NOBODY_IMPORTS or not any(within(name, other) for other in may):
                told = ", ".join(may) or "nothing of ours"
                wrong.append(f"{at} imports {i.module}, and {home} may import {told}.")
    return [*dict.fromkeys(wrong)] + [
        f"{file} imports {module} no more: take it out of NOT_YET." for file, module in late
    ]


def cycles(arrows: set[tuple[str, str]]) -> set[str]:
    """The nodes of cycles, and those on a path from one to another."""
    arrows = {(a, b) for a, b in arrows if a != b}
    while True:
        starts, ends = {a for a, _ in arrows}, {b for _, b in arrows}
        left = {(a, b) for a, b in arrows if a in ends and b in starts}
        if left == arrows:
            return starts | ends
        arrows = left


def refused(modules: tuple[str, ...], blocked: tuple[str, ...]) -> list[str]:
    """The modules, at any level below these, that fail to import without the blocked packages."""
    code = """
import importlib, pkgutil, sys
modules, blocked = (text.split(",") for text in sys.argv[1:])
sys.modules.update(dict.fromkeys(blocked))
for name in modules:
    try:
        module = importlib.import_module(name)
        below = [m.name for m in pkgutil.walk_packages(getattr(module, "__path__", []), name + ".")]
    except ImportError as error:
        print(f"{name}: {error}")
        continue
    for other in below:
        try:
            importlib.import_module(other)
        except ImportError as error:
            print(f"{other}: {error}")
"""
    names = ",".join(f"{PACKAGE}.{name}" for name in modules)
    done = subprocess.run(
        [sys.executable, "-c", code, names, ",".join(blocked)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def there(packages: tuple[str, ...]) -> tuple[str, ...]:
    folder = lambda name: ROOT / PACKAGE / name.replace(".", "/")
    return tuple(
        name for name in packages if folder(name).exists() or folder(name).with_suffix(".py").exists()
    )


def test_every_import_is_one_that_the_table_allows():
    assert violations(imports(ROOT)) == []


def test_arrows_between_files_and_between_packages_point_down():
    name = lambda file: ".".join(Path(file).with_suffix("").parts).removesuffix(".__init__")
    ours = [i for i in imports(ROOT, (PACKAGE,)) if i.module != PACKAGE and i[::2] not in NOT_YET]
    assert cycles({(name(i.file), i.module) for i in ours}) == set()
    assert cycles({(str(package(name(i.file))), str(package(i.module))) for i in ours}) == set()


@pytest.mark.slow
def test_what_needs_no_accelerator_imports_without_jax():
    assert refused(there(WITHOUT_JAX), JAX) == []


def test_a_worker_imports_with_neither_jax_nor_numpy():
    assert refused(("types", "envs.base", "envs.worker"), (*JAX, "numpy")) == []


# ---- The tests above can fail --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file, text, why",
    [
        ("coevolve_jax/types.py", "\nfrom coevolve_jax import config", ":2 imports coevolve_jax.config"),
        ("coevolve_jax/types.py", "from . import config", ":1 imports coevolve_jax.config"),
        ("coevolve_jax/types.py", "from coevolve_jax.grpo.losses import kl",
            ":1 imports coevolve_jax.grpo.losses"),
        ("coevolve_jax/rollout/a.py", "def f():\n  import coevolve_jax.envs.toy.world", ":2 imports"),
        ("coevolve_jax/rollout/a.py", "import coevolve_jax\ncoevolve_jax.build",
            ":2 imports coevolve_jax.build"),
        ("coevolve_jax/envs/other/a.py", "from coevolve_jax.envs.toy import world",
            "envs.other may import types"),
        ("coevolve_jax/envs/worker.py", "import_module('coevolve_jax.envs.toy')", "envs.worker may import"),
        ("coevolve_jax/build.py", "from coevolve_jax import train", "build may import"),
        ("coevolve_jax/grpo/a.py", "from coevolve_jax.grpo.losses import _kl", "private name _kl"),
        ("coevolve_jax/grpo/a.py", "from coevolve_jax.grpo import losses as l\nl._kl()",
            ":2 takes the private name"),
        ("coevolve_jax/grpo/a.py", "from ..grpo.losses import Loss\nLoss._kl",
            ":2 takes the private name _kl"),
        ("coevolve_jax/build.py", "from experiments import main", "experiments/ are programs"),
        ("experiments/plan.py", "from main import main", "experiments/ are programs"),
        ("coevolve_jax/attic/a.py", "from coevolve_jax import types", "in no package"),
    ],
)  # fmt: skip
def test_a_violation_is_told_with_file_and_line(tmp_path, monkeypatch, file, text, why):
    monkeypatch.setattr(sys.modules[__name__], "NOT_YET", set())
    modules = ("types", "config", "build", "train", "grpo/__init__", "grpo/losses", "envs/toy/__init__")
    for name in (*modules, "__init__", "rollout/__init__", "envs/toy/world"):
        (tmp_path / PACKAGE / f"{name}.py").parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / PACKAGE / f"{name}.py").write_text("")
    (tmp_path / "experiments").mkdir()
    for name in ("__init__", "main"):
        (tmp_path / "experiments" / f"{name}.py").write_text("")
    assert violations(imports(tmp_path)) == []
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    (wrong,) = violations(imports(tmp_path))
    assert wrong.startswith(f"{file}:") and why in wrong


def test_an_exception_that_is_not_needed_is_told(monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "NOT_YET", {("coevolve_jax/types.py", "coevolve_jax.build")})
    assert violations([]) == [
        "coevolve_jax/types.py imports coevolve_jax.build no more: take it out of NOT_YET."
    ]


def test_cycles_and_what_needs_jax_are_seen():
    assert cycles({("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")}) == {"b", "c"}
    assert cycles({("a", "b"), ("b", "c"), ("a", "c"), ("c", "c")}) == set()
    (told,) = refused(("grpo.losses",), JAX)
    assert told.startswith("coevolve_jax.grpo.losses: ")
    assert refused(("types", "seeding"), ("numpy",))[0].startswith("coevolve_jax.seeding: ")


@pytest.mark.nightly
def test_what_make_test_fast_collects_needs_nothing_that_only_make_test_installs():
    """A file's own imports are no part of the choice of its tests, unless it begins with their marks."""
    missing = ["nbclient", "nbformat", "playwright", "pandas", "peft", "tensorflow_datasets", "trl", "wandb"]
    code = f"""
import sys, pytest
sys.modules.update(dict.fromkeys({missing}))
chosen = "not slow and not server and not browser"
sys.exit(pytest.main(["tests", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", chosen]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
