"""The exports of `import coevolve_jax`: every name resolves, and heavy imports wait for their first use."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import coevolve_jax

ROOT = Path(coevolve_jax.__file__).parents[1]


# tfds_tasks imports what make test-fast does not install.
NAMES = [pytest.param(n, marks=pytest.mark.slow) if n == "tfds_tasks" else n for n in coevolve_jax.__all__]


@pytest.mark.parametrize("name", NAMES)
def test_every_name_resolves_to_what_it_says(name):
    found = getattr(coevolve_jax, name)
    if name == "__version__":
        return
    if isinstance(found, types.ModuleType):
        assert found.__name__.rsplit(".", 1)[1] == name
    elif inspect.isclass(found):
        assert found.__name__ == name and found.__doc__
    else:
        assert callable(found) and found.__doc__
    assert name in dir(coevolve_jax)


@pytest.mark.slow
def test_what_type_checkers_are_told_is_what_is_there():
    """The stub names exactly the package's exports, from the same modules."""
    tree = ast.parse(Path(coevolve_jax.__file__).with_suffix(".pyi").read_text())
    told = {}
    for node in (n for n in tree.body if isinstance(n, ast.ImportFrom)):
        for alias in node.names:
            assert alias.asname == alias.name  # otherwise type checkers take it for private
            told[alias.name] = importlib.import_module(node.module), alias.name
    assert told.keys() == set(coevolve_jax.__all__) - {"__version__"}
    for name, (module, there) in told.items():
        assert getattr(module, there) is getattr(coevolve_jax, name), name


def test_importing_the_package_alone_is_light():
    program = """
import sys
import coevolve_jax
coevolve_jax.__version__, dir(coevolve_jax)
heavy = {"jax", "numpy", "flax", "optax", "transformers", "ml_collections", "tqdm"} & sys.modules.keys()
assert not heavy, heavy
coevolve_jax.Task
assert "jax" not in sys.modules and coevolve_jax.config is sys.modules["coevolve_jax.config"]
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_wrong_name_is_answered_with_what_there_is():
    with pytest.raises(AttributeError, match="no attribute 'trian'.*load_run"):
        getattr(coevolve_jax, "trian")  # noqa: B009


def test_there_is_one_version():
    version = coevolve_jax.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    name = subprocess.run(
        [sys.executable, "setup.py", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert name.stdout.split()[-1] == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
