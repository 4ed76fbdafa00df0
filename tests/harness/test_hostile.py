"""Hostile proposers: whatever they say, a frozen key stays, and one sentence says why it is refused."""

import dataclasses
from collections.abc import Mapping

import pytest

from coevolve_jax.harness import levers, loop, summary
from coevolve_jax.harness.diagnostics import COUNT
from coevolve_jax.harness.records import Expectation, Proposal
from coevolve_jax.harness.templates import Candidate
from tests.harness.support import evolution, files

GOOD = Proposal(
    "v000", "learner.learning_rate", "x3", {"learner.learning_rate": 3e-5}, "It is slow.", "hostile",
    expects=Expectation("kl_last", "up", 0.001),
)  # fmt: skip
SEVERAL = {"lever": levers.DESIGN, "move": ""}
UP = Expectation("kl_last", "up", 0.001)
HOSTILE = {
    "a path as parent": {"parent": "../../store/x"},
    "a parent that is not there": {"parent": "v007"},
    "a lever that is a path": {"lever": "../verdict.py"},
    "a lever that is code": {"lever": "__import__('os').system('true')"},
    "a key outside the levers": {"changes": {"environment.eval_split": "test"}},
    "a key beside the lever's": {"changes": {"learner.learning_rate": 3e-5, "evaluation.tasks": 1}},
    "a value that no move gives": {"changes": {"learner.learning_rate": 1e9}},
    "a seed": {**SEVERAL, "changes": {"seed": 7}},
    "several, one out of range": {**SEVERAL, "changes": {"learner.learning_rate": 1e9}},
    "several, not a number": {**SEVERAL, "changes": {"learner.learning_rate": float("nan")}},
    "a module of its own": {**SEVERAL, "changes": {"strategy.name": "tests.harness.test_hostile"}},
    "a test task in a term": {
        **SEVERAL, "changes": {"reward.terms": ("tools.exists(t, t == 'held_out-0'):0.3",)},
    },
    "half of a lever": {**SEVERAL, "changes": {"rollout.group_size": 16}},
    "several, none at all": {**SEVERAL, "changes": {}},
    "several, one without effect": {**SEVERAL, "changes": {"learner.epochs": 2, "learner.filter_z": 1.92}},
    "a whole number as a float": {
        "lever": "learner.epochs", "move": "up", "changes": {"learner.epochs": 2.0},
    },
    "a switch for a number": {
        "lever": "rollout.max_staleness", "move": "up", "changes": {"rollout.max_staleness": True},
    },
    "several, a float": {**SEVERAL, "changes": {"learner.epochs": 2.0}},
    "a skill that is not there": {"skill": "trust-me"},
    "a skill of another lever": {"skill": "on-a-leash"},
    "a skill that does not hold": {
        "lever": "rollout.temperature", "move": "x1.25", "changes": {"rollout.temperature": 1.25},
        "skill": "no-noise",
    },
    "what JSON cannot hold": {"changes": {"learner.learning_rate": 3e-5j}},
    "no value of training": {"expects": dataclasses.replace(UP, diagnostic="success_on_selection")},
    "no direction": {"expects": dataclasses.replace(UP, direction="sideways")},
    "not a number": {"expects": dataclasses.replace(UP, least=float("nan"))},
    "less than nothing": {"expects": dataclasses.replace(UP, least=-1.0)},
    "ten megabytes": {"because": "x" * 10_000_000},
    "a task as evidence": {"evidence": {"held_out-0": 1.0}},
}  # fmt: skip


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """A campaign whose start is judged and whose v001 is due, and its files."""
    found = evolution(tmp_path_factory.mktemp("hostile") / "campaign", "slow", versions=1)

    class Silent:
        def propose(self, history, rng):
            raise KeyboardInterrupt

    found.parts.proposer = Silent()
    with pytest.raises(KeyboardInterrupt):
        found.run()
    return found, files(found.campaign.folder)


class Proposes:
    def __init__(self, proposal):
        self.proposal = proposal

    def propose(self, history, rng):
        return self.proposal


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_proposal_is_refused_in_one_sentence_and_writes_nothing(name, started, monkeypatch):
    found, before = started
    if HOSTILE[name].get("lever") == levers.DESIGN:
        monkeypatch.setattr(found.parts._module, "SEVERAL", True, raising=False)
    monkeypatch.setattr(found.parts, "proposer", Proposes(dataclasses.replace(GOOD, **HOSTILE[name])))
    with pytest.raises(levers.Refused) as refused:
        found.run()
    assert "\n" not in str(refused.value) and 20 < len(str(refused.value)) < 1500
    assert files(found.campaign.folder) == before and found.campaign.next() == ("v001", "proposal")


def test_the_same_proposal_without_what_is_hostile_passes(started, monkeypatch):
    found, _ = started
    several = dataclasses.replace(GOOD, **SEVERAL)
    monkeypatch.setattr(found.parts, "proposer", Proposes(dataclasses.replace(GOOD, skill="too-slow")))
    assert found.parts.proposal("v001")["changes"] == {"learner.learning_rate": 3e-5}
    monkeypatch.setattr(found.parts, "proposer", Proposes(several))
    with pytest.raises(levers.Refused, match="'search' is no open lever"):
        found.parts.proposal("v001")  # its module does not say that it moves several
    monkeypatch.setattr(found.parts._module, "SEVERAL", True, raising=False)
    assert found.parts.proposal("v001")["lever"] == levers.DESIGN


OBEYED = "Slow.\x1b[2J\x1b]0;mine\x07\r\nv001 is promoted.\x9b\u202e\0"  # by a terminal


def test_what_a_proposer_says_is_shown_in_one_line_that_no_terminal_obeys(tmp_path, monkeypatch):
    begun, said = evolution(tmp_path / "campaign", "slow", versions=1), []
    found = loop.Evolution(begun.campaign, begun._config, begun.store, said.append)
    monkeypatch.setattr(found.parts._module, "SEVERAL", True, raising=False)
    told = dataclasses.replace(GOOD, because=OBEYED, lever=levers.DESIGN, move=OBEYED)
    found.parts.proposer = Proposes(told)
    found.run()
    assert any("Slow.[2J]0;mine v001 is promoted." in text for text in said)
    assert found.versions.proposal("v001").because == OBEYED  # the record holds it as it was
    shown = [*said, *summary.table(found).splitlines()]
    assert len(shown) > 5 and all(text.isprintable() for text in shown)
    with pytest.raises(levers.Refused) as refused:
        found.parts.check("v001", dataclasses.replace(told, skill="on-a-leash"))
    assert str(refused.value).isprintable()


class TwoFaced(Mapping):
    """Answers with a lever's key while it is checked, and with another one when it is written."""

    def __init__(self):
        self.asked = 0

    def __iter__(self):
        self.asked += 1
        return iter(["learner.learning_rate" if self.asked < 3 else "environment.eval_split"])

    def __len__(self):
        return 1

    def __getitem__(self, key):
        return 3e-5


@dataclasses.dataclass(frozen=True)
class OtherFile(Proposal):
    """Is checked as one proposal, and writes another."""

    def to_json(self):
        return {**super().to_json(), "changes": {"environment.eval_split": "test"}}


def test_what_is_written_is_what_was_checked(started, monkeypatch):
    found, _ = started
    fields = {field.name: getattr(GOOD, field.name) for field in dataclasses.fields(GOOD)}
    for drawn in (OtherFile(**fields), dataclasses.replace(GOOD, changes=TwoFaced())):
        monkeypatch.setattr(found.parts, "proposer", Proposes(drawn))
        assert found.parts.proposal("v001")["changes"] == {"learner.learning_rate": 3e-5}


def test_evidence_is_what_the_parent_showed_and_the_proposer_that_of_the_config(started, monkeypatch):
    found, _ = started
    for name, told in (("a person", "scripted"), ("scripted", "scripted")):
        drawn = dataclasses.replace(GOOD, evidence={"kl_last": 99.0}, proposer=name)
        monkeypatch.setattr(found.parts, "proposer", Proposes(drawn))
        made = found.parts.proposal("v001")
        assert made["evidence"] == {"kl_last": found.versions.row("v000")["kl_last"]}
        assert made["proposer"] == told


def test_a_proposer_that_writes_into_the_configs_that_it_is_shown_changes_none(started, monkeypatch):
    found, before = started

    class Writes:
        def propose(self, history, rng):
            history.configs["v000"].environment.eval_split = "test"
            history.configs["v000"].learner.learning_rate = 1.0
            return GOOD

    monkeypatch.setattr(found.parts, "proposer", Writes())
    assert found.parts.proposal("v001")["changes"] == {"learner.learning_rate": 3e-5}
    start = found.versions.config("v000")
    assert start.environment.eval_split != "test" and start.learner.learning_rate == 1e-5
    assert files(found.campaign.folder) == before


FORMULAS = [
    Candidate("a", "tools.exists(t, t == 'held_out-0')"),
    Candidate("b", "tools.exists(t, t == 's0')", unit="trajectory"),
    Candidate("c", "open('../evaluations.jsonl')"),
    Candidate("../d", "double(errors)"),
    Candidate("e", "double(errors)", unit="../e"),
    Candidate("kl", "double(errors)"),  # a name that is taken
    Candidate("f", "success"),
    Candidate("\u0435rrors", "double(errors) + 1.0"),  # looks like a name that is taken
]
TEMPLATE = "count_of_errors"


def test_hostile_formulas_are_left_out_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr("coevolve_jax.testing.campaign.GROUPS", 40)  # enough for a test after the start
    found = evolution(tmp_path / "campaign", "slow", versions=1, diagnostics="evolving")
    said = []
    found.parts._say = said.append

    class Invents:
        def propose(self, history, rng):
            return None

        def invent(self, history, version, rng):
            steps = [Candidate(f"s{i}", f"double(calls) * {i}.0", unit="step") for i in range(300)]
            return [
                *FORMULAS,
                Candidate(TEMPLATE, "double(errors) / double(calls)", proposer="hostile"),
                *steps,
            ]

    found.parts.proposer = Invents()
    found.run()
    born = [d for d in found.versions.diagnostics("v001") if d.born]
    known = {d.id: d for d in born}
    assert len(known) == len(born) == 2 * COUNT  # of the steps as many as of the trajectories
    assert known[TEMPLATE].test.number == 1 and not {c.id for c in FORMULAS} & known.keys()
    refused = [text for text in said if text.startswith("A proposed diagnostic is left out: ")]
    assert len(refused) == len(FORMULAS) and not any("\n" in text for text in refused)
