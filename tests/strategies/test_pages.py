"""The page of strategies: each has a short section, which says how near it is to its paper."""

import importlib
import pkgutil
import re

import pytest

from coevolve_jax import strategies
from coevolve_jax.comparison.arms import ARMS
from coevolve_jax.config import idle, load_file, override
from tests.support.paths import ROOT

ARENA = (ROOT / "docs" / "guides" / "enter_the_arena.md").read_text()
PAGE = (ROOT / "docs" / "strategies.md").read_text()
SECTIONS = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", PAGE, re.M | re.S))
NAMES = [m.name for m in pkgutil.iter_modules(strategies.__path__) if m.name not in strategies.SHARED]


def fidelity(name: str) -> str | None:
    return getattr(importlib.import_module(f"coevolve_jax.strategies.{name}"), "FIDELITY", None)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_a_strategy_has_a_section_and_an_arm(name):
    assert 20 < len(SECTIONS[name].split()) <= 90
    assert ARMS[name].changes["strategy.name"] == name


@pytest.mark.parametrize("name", [name for name in NAMES if fidelity(name)])
def test_a_fidelity_is_a_mark_and_a_sentence(name):
    assert re.fullmatch(r"[FPNL]: [^.]+\.", fidelity(name) or "")
    ours = "method of ours" in fidelity(name)
    assert ours or "**Missing:**" in SECTIONS[name] or "**Departs:**" in SECTIONS[name]
    assert ours or re.search(r", mark ([FPNL])\.", SECTIONS[name])[1] == fidelity(name)[0]


def test_the_example_of_the_arena_names_the_settings_that_it_decides_itself(tmp_path, monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", ARENA, re.DOTALL)
    (package := tmp_path / "entered").mkdir()
    (package / "half_solved.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    data = {"data.retire_after": 3, "data.sampling": "variance"}
    config = load_file(ROOT / "configs" / "bfcl_tiny.py", "strategy=entered.half_solved")
    said = idle.notes(override(config, data))
    assert {key for key in data if any(line.startswith(f"config.{key} = ") for line in said)} == {*data}


def test_every_section_is_a_strategy():
    assert set(SECTIONS) <= set(NAMES)
