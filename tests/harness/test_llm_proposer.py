"""A language model as proposer: good, hostile, silent and spent. Its questions hold nothing that selects."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax import config as configs
from coevolve_jax.diagnosis.trends import MEANINGS
from coevolve_jax.harness.proposers import llm
from coevolve_jax.harness.templates import Candidate
from coevolve_jax.llm.answers import Fault, read
from coevolve_jax.llm.calls import LLMCall
from tests.harness.support import evolution, rewritten
from tests.support.llm_cases import server, settings_of  # noqa: F401 (fixture)
from tests.support.openai_server import FAULTS, replied

pytestmark = pytest.mark.slow

GOOD = {
    "lever": "learner.learning_rate", "move": "x3", "because": "It is slow.", "diagnostic": "kl_last",
    "direction": "up", "least": 0.001,
}  # fmt: skip


class Playing:
    """A client whose model says what it was told to; the questions and its answers are kept."""

    def __init__(self, *texts: str | None):
        self.costs, self.llm_calls, self.questions, self._texts = Counter(), [], [], list(texts)

    def resume(self, llm_calls):
        self.llm_calls += llm_calls

    def ask(self, role, questions, form):
        self.questions += questions
        text = self._texts.pop(0) if self._texts else None
        call = LLMCall(
            role, questions[0].about, questions[0].system, questions[0].user, [text] if text else []
        )
        self.llm_calls.append(call)
        try:
            if text is None:
                raise Fault("refusal")
            return [read(text, form)]
        except Fault as fault:
            call.fault = fault.kind
            return [None]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """A campaign whose start is judged: the next thing is a proposal."""
    found = evolution(tmp_path_factory.mktemp("llm") / "campaign", "slow", versions=2)
    found.run()
    found.known = found.versions.history("v001")
    return found


def propose(campaign, *texts):
    model = llm.Model(Playing(*texts))
    return model, model.propose(campaign.known, np.random.default_rng(0))


def test_a_good_answer_becomes_one_move_with_its_hypothesis(campaign):
    model, drawn = propose(campaign, json.dumps(GOOD))
    assert (drawn.lever, drawn.move, drawn.proposer) == ("learner.learning_rate", "x3", "llm")
    assert drawn.changes == {"learner.learning_rate": pytest.approx(3e-5)}
    assert drawn.expects.diagnostic == "kl_last" and drawn.evidence["kl_last"] is not None
    campaign.parts.check("v001", drawn)


def test_a_question_holds_the_levers_and_nothing_that_selects(campaign):
    model, _ = propose(campaign, json.dumps(GOOD))
    (question,) = model.client.questions
    text = question.system + question.user
    for lever in campaign.versions.open_levers("v001").values():
        assert not lever.moves(campaign.versions.config("v000")) or lever.name in text
    assert "kl_last" in text and '"steps"' in text and "too-slow" not in text
    selection = campaign.versions.selection("v000")[0]
    assert not any(task in text for task in selection.by_task) and str(campaign.campaign.folder) not in text
    assert f"{selection.success:.6f}" not in text and "seed_0" not in text
    assert text.count("score about") == 1  # rounded to one standard error


TEXTS = st.one_of(
    st.text(max_size=40),
    st.sampled_from(["evaluation.tasks", "../verdict.py", "environment.eval_split", "x3", "seed", "v001"]),
)


@settings(max_examples=40)
@given(lever=TEXTS, move=TEXTS, diagnostic=TEXTS, because=st.text(max_size=60))
def test_a_hostile_answer_changes_nothing_and_the_scripted_proposer_goes_on(
    campaign, lever, move, diagnostic, because
):
    bad = {**GOOD, "lever": lever, "move": move, "diagnostic": diagnostic, "because": because}
    model, drawn = propose(campaign, *[json.dumps(bad)] * llm.ATTEMPTS)
    if diagnostic not in MEANINGS:
        assert drawn.proposer == "scripted" and model.client.costs["refused/propose"] == llm.ATTEMPTS
    campaign.parts.check("v001", drawn)
    assert all("\n" not in why and len(why) < 200 for why in model.refused)


@pytest.mark.parametrize(
    "text",
    [None, "", "no JSON", '{"lever": "learner.learning_rate"}', json.dumps({**GOOD, "least": -1}),
     json.dumps(GOOD).replace("0.001", "NaN"), json.dumps({**GOOD, "lever": "x" * 10_000_000})],
)  # fmt: skip
def test_a_broken_or_missing_answer_is_no_proposal(campaign, text):
    _, drawn = propose(campaign, text)
    assert drawn.proposer == "scripted"


def test_a_campaign_over_http_ends_and_its_books_add_up(server, tmp_path, monkeypatch):
    known = configs.harness_model().to_dict()
    given = {
        key: value for key, value in settings_of(server).items() if key in ("base_url", "cache", "attempts")
    }
    monkeypatch.setattr("tests.harness.support.MODEL", {**known, **given, "json_schema": False})
    monkeypatch.setitem(FAULTS, "a proposal", ("", False, replied(text=json.dumps(GOOD))))
    server.faults = ["a proposal", "refusal"]
    found = evolution(tmp_path / "campaign", "slow", versions=2, proposer="llm")
    found.run()
    first, second = (found.versions.proposal(v) for v in ("v001", "v002"))
    assert (first.proposer, first.move) == ("llm", "x3") and second.proposer == "scripted"
    costs = found.parts.proposer.client.costs
    # The same command, begun again, knows what was asked and paid.
    calls = found.campaign.llm_calls()
    told = [(row["role"], row["fault"]) for row in calls]
    assert told[:2] == [("propose", ""), ("propose", "refusal")]
    again = evolution(tmp_path / "campaign", "slow", versions=2, proposer="llm")
    again.run()
    assert again.parts.proposer.client.costs == costs and again.campaign.llm_calls() == calls
    assert costs["llm_tokens"] == costs["llm_tokens_in/propose"] + costs["llm_tokens_out/propose"] > 0
    assert found.replay() == []


@pytest.mark.parametrize("answer", [json.dumps(GOOD), None], ids=["an answer", "a fault"])
def test_what_was_answered_before_a_kill_is_taken_and_not_asked_again(answer, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(*part):
        raise Killed

    def resumed(*texts):
        monkeypatch.setattr(llm, "make", lambda config: llm.Model(Playing(*texts)))
        return evolution(tmp_path / "campaign", "slow", versions=1, proposer="llm")

    first = resumed(answer)
    with monkeypatch.context() as during, pytest.raises(Killed):
        write = first.campaign.write
        at = ("v001", "proposal")
        during.setattr(first.campaign, "write", lambda *p: kill() if p[:2] == at else write(*p))
        first.run()
    kept = first.campaign.llm_calls()
    assert len(kept) == 1 and not first.campaign.path("v001", "proposal").exists()
    with open(first.campaign.folder / "llm_calls.jsonl", "a") as file:
        file.write('{"role": "prop')  # half a line, as a kill may leave it
    second = resumed(json.dumps({**GOOD, "lever": "learner.epochs", "move": "up"}))
    second.run()
    proposal = second.versions.proposal("v001")
    assert (proposal.lever, proposal.proposer) == (GOOD["lever"], "llm" if answer else "scripted")
    assert second.campaign.llm_calls() == kept and second.parts.proposer.client.questions == []
    assert second.replay() == []


FORMULA = {"unit": "trajectory", "formula": "double(errors) / double(calls)"}


def invent(campaign, text):
    model = llm.Model(Playing(text))
    known = campaign.versions.history("v000", and_itself=True)
    return model, model.invent(known, "v000", np.random.default_rng(0))


def test_a_formula_of_a_model_becomes_a_candidate_that_must_pass_a_test(campaign):
    model, drawn = invent(campaign, json.dumps(FORMULA))
    assert drawn == [Candidate("llm_v000", FORMULA["formula"], None, "trajectory", "llm")]
    (question,) = model.client.questions
    text = question.system + question.user
    assert "errors, int: calls that came back as errors" in text and "tool_0" in text and '"steps"' in text
    assert "held_out-" not in text and str(campaign.campaign.folder) not in text
    _, drawn = invent(campaign, json.dumps({"unit": "step", "formula": "kl * 2.0"}))
    assert [c.unit for c in drawn] == ["step"]


HOSTILE = [
    "__import__('os').system('true')", "open('/etc/passwd')", "tools.exists(t, t == 'held_out-0')", "success",
    "reward > 0.5", "1", "errors", "tools.filter(a, tools.exists(b, a == b)).size() > 1", "x" * 301, "",
    "a.b", "string(stop)", "tools[0] == '../../verdict.py'", "double(errors) / 1e999", "calls > 0 ? 1.0",
]  # fmt: skip


@pytest.mark.parametrize("formula", HOSTILE)
def test_a_hostile_formula_is_refused_in_one_sentence(campaign, formula):
    model, drawn = invent(campaign, json.dumps({**FORMULA, "formula": formula}))
    assert drawn == []
    assert all("\n" not in why and len(why) < 200 for why in model.refused)
    assert len(formula) > 300 or model.client.costs["refused/invent"] == 1


def test_a_models_formula_is_tested_in_the_loop_and_not_asked_for_again(tmp_path, monkeypatch):
    texts = [json.dumps(FORMULA), json.dumps(GOOD), json.dumps({"unit": "step", "formula": "kl * 2.0"})]
    asked = Playing(*texts)
    monkeypatch.setattr("coevolve_jax.testing.campaign.GROUPS", 40)  # enough for a test after the start
    monkeypatch.setattr(llm, "make", lambda config: llm.Model(asked))
    found = evolution(tmp_path / "campaign", "slow", versions=1, proposer="llm", diagnostics="evolving")
    found.run()
    known = {d.id: d for d in found.versions.diagnostics("v999")}
    assert known["llm_v000"].test.number == 1 and known["llm_v000"].proposer == "llm"
    assert (known["llm_v001"].status, known["llm_v001"].unit) == ("tracked", "step")
    assert len(asked.questions) == 3 and found.replay() == [] and len(asked.questions) == 3
    # What the model never said is found, although nothing asks it again.
    proposal, learned = (found.campaign.read("v001", part) for part in ("proposal", "learned"))
    for values in ({"because": "Trust me."}, {"evidence": {"kl_last": 9.0}}, {"lever": "learner.epochs"}):
        rewritten(found, "v001", "proposal", **values)
        (told,) = found._differences("v001", "proposal")
        assert "v001/proposal.json differs" in told
        rewritten(found, "v001", "proposal", **proposal)
    other = [d | {"formula": "kl * 3.0"} if d["id"] == "llm_v001" else d for d in learned["diagnostics"]]
    rewritten(found, "v001", "learned", diagnostics=other)
    (told,) = found._differences("v001", "learned")
    assert "v001/learned.json differs" in told and len(asked.questions) == 3
