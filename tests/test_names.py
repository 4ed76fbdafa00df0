"""Modules that a config names, and the flags of commands: what is wrong with them is one sentence."""

import sys

import pytest
from absl import flags

from coevolve_jax import config as configs
from coevolve_jax import names

KEY = "strategy.name"


def strategy(name, takes=()):
    return names.module("strategies", name, KEY, ["make"], takes=takes)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("def make(c, s=None)\n    pass\n", r"which fails: .*mine.py:1: expected ':'"),
        ("import os\nx = {}[3]\n", r"which fails: .*mine.py:2: KeyError: 3"),
        ("raise ValueError('No data.')\n", r"which fails: .*mine.py:1: ValueError: No data."),
        ("from os import nothing\n", r"which fails: .*mine.py:1: ImportError: cannot import name 'nothing'"),
        ("import no_such_package\n", r"which imports no_such_package, and .* does not have that"),
        ("make = 3\n", r"must define the function make"),
        ("def make(config):\n    pass\n", r"mine.make must take \(config, state\)"),
        ("def make(config, state=None):\n    pass\n", ""),
    ],
)
def test_a_users_module_that_is_wrong_is_named_with_its_line(text, why, tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("own", "own.mine"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    if not why:
        assert strategy("own.mine", ("config", "state")).make({}) is None
        return
    with pytest.raises(ValueError, match=f"config.{KEY} is 'own.mine'.*{why}"):
        strategy("own.mine", ("config", "state"))


@pytest.mark.parametrize("name", ["nothing", "no.where", "", "..", "a b"])
def test_a_module_that_is_not_there_gets_the_names_that_are(name):
    with pytest.raises(ValueError, match=r"must be one of .*coevolve, .*that Python can import\.$"):
        strategy(name)


def test_a_file_beside_a_program_that_python_does_not_look_for_there_is_named(tmp_path, monkeypatch):
    (tmp_path / "unseen").mkdir()
    (tmp_path / "unseen" / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", ".")])
    with pytest.raises(ValueError, match=r"unseen/mine.py is here: start with PYTHONPATH=\."):
        strategy("unseen.mine")


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("--steps=1.5", "flag --steps=1.5: give a whole number"),
        ("--rate=fast", "flag --rate=fast: give a number"),
        ("--config.steps=5", "--config.steps needs --config=FILE beside it"),
    ],
)
def test_a_wrong_flag_says_what_to_give(given, why, monkeypatch):
    known = flags.FlagValues()
    flags.DEFINE_integer("steps", 1, "", flag_values=known)
    flags.DEFINE_float("rate", 1.0, "", flag_values=known)
    monkeypatch.setattr(flags, "FLAGS", known)
    with pytest.raises(SystemExit) as ended:
        configs.parse_flags(["main.py", given])
    assert ended.value.code == f"Error: {why} (--help lists the options)"
