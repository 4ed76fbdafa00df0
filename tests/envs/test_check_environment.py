"""The conformance suite of environment families: sound families pass, and faults are found."""

import re

import pytest

from coevolve_jax.testing.environment import check_environment
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "guides" / "add_environment.md"
CUPBOARD = (ROOT / "tests" / "support" / "families" / "cupboard.py").read_text()


@pytest.mark.slow
def test_bfcl_conforms():
    check_environment("bfcl", timeout=3.0)


@pytest.mark.slow
def test_the_example_of_the_page_conforms(tmp_path, monkeypatch):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "lights.py").write_text(example)
    check_environment("page.lights", timeout=2.0)


def test_the_cupboard_conforms():
    check_environment("tests.support.families.cupboard", timeout=2.0)


FAULTS = {
    "random_start": (
        "self.shelves, self.goal =",
        "import random; task.scenario['thing'].append(str(random.random())); self.shelves, self.goal =",
        "start in different states",
    ),
    "shared_state": (
        'self.shelves, self.goal = (dict.fromkeys(task.scenario["thing"], "top") for _ in range(2))',
        "self.shelves, self.goal = SHARED.setdefault(task.id, {thing: 'top' for thing in "
        "task.scenario['thing']}), "
        "{thing: 'top' for thing in task.scenario['thing']}",
        "start in different states",
    ),
    "clock": (
        "return Observation(json.dumps(shelves))",
        "import time; return Observation(json.dumps(time.time()))",
        "other observations or states",
    ),
    "raises": (
        "not in list(shelves)",
        "not in shelves",
        r"The call put\(.*lost its world .*step must answer any call",
    ),
    "silent_error": (
        'return Observation(json.dumps({"error": str(error)}), error=True)',
        'return Observation(json.dumps({"error": str(error)}))',
        "no_such_tool.* is answered without an error",
    ),
    "leak": (
        "if thing not in SPLITS.get(apart_from, ())",
        "",
        "leaves scenarios that start as one of the training",
    ),
    "tuple": (
        '{"thing": [thing, "plate", "fork", "spoon"]}',
        '{"thing": (thing, "plate", "fork", "spoon")}',
        "not the same after a trip through JSON",
    ),
    "unknown_split": (
        'raise ValueError(f"Unknown split {split!r}: use train or test.")',
        "return []",
        "scenarios of an unknown split gives an answer",
    ),
    "tasks_of_unknown_split": (
        "enumerate(scenarios(split, settings))",
        "enumerate(scenarios(split if split in SPLITS else 'train', settings))",
        "tasks of an unknown split gives an answer",
    ),
    "tools_by_turns": (
        "return [PUT]",
        "return [{**PUT, 'function': {**PUT['function'], 'name': 'place'}}] if not task.turns else [PUT]",
        "depend on more than its environment and its scenario",
    ),
    "key_by_id": (
        "make = Cupboard",
        "make = Cupboard\ndef task_key(task): return task.id",
        "task_key of .* depends on more than",
    ),
    "key_by_hash": (
        "make = Cupboard",
        "make = Cupboard\ndef task_key(task): return str(hash(str((task.scenario, task.turns))))",
        "is another in another process",
    ),
    "greedy_features": (
        "make = Cupboard",
        "make = Cupboard\ndef features(task): return {task.scenario['thing'].pop(): 1}",
        "features",
    ),
    "numpy": (
        "make = Cupboard",
        "def make():\n    import numpy\n    return Cupboard()",
        "A worker imports numpy",
    ),
    "always_success": (
        "share = self.passed / len(self.task.turns)",
        "share = 1",
        "is a success although none of its reference calls",
    ),
    "never_success": (
        "share = self.passed / len(self.task.turns)",
        "share = 0",
        "reference calls of .* are no success",
    ),
    "reference_left_aside": (
        "        for call in self.task.turns[self.ended].calls:\n            self.put(self.goal, call)\n",
        "        if self.task.id.startswith('tidy'):\n"
        "            self.put(self.goal, self.task.turns[self.ended].calls[0])\n",
        "with reference calls, made of .* is not graded by what they lead to",
    ),
    "endless_turns": (
        'raise ValueError("All turns have ended.")',
        "return",
        "end_turn of a task whose turns have all ended is accepted",
    ),
    "scored_scenario": (
        'raise ValueError("A bare scenario cannot be scored.")',
        "return Outcome(1.0, True)",
        "bare scenario",
    ),
    "blind_fingerprint": ("return digest(self.shelves)", "return 'same'", "does not see the state"),
    "close": ("self.shelves = None", "raise OSError('busy')", "lost in reset, fingerprint or close"),
    "two_tools": ("return [PUT]", "return [PUT, PUT]", "two tools of one name"),
    "slow": (
        "return self.put(self.shelves, call)",
        "import time; end = time.process_time() + 3\n        while time.process_time() < end: pass\n"
        "        return self.put(self.shelves, call)",
        "timeout: more than 1 s of processor time",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_family_is_caught(fault, tmp_path, monkeypatch):
    """Each broken family differs from the cupboard in one place."""
    good, bad, sentence = FAULTS[fault]
    assert CUPBOARD.count(good) == 1
    source = "SHARED = {}\n" + CUPBOARD.replace(good, bad)
    (tmp_path / f"broken_{fault}").mkdir()
    (tmp_path / f"broken_{fault}" / "family.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AssertionError, match=sentence):
        check_environment(f"broken_{fault}.family", timeout=1.0)
