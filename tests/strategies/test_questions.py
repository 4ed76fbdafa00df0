"""Methods that ask the explorer's language model: what it reads, and what they do with its answers."""

import dataclasses
import json
import re
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.explorers.base import Roles
from coevolve_jax.explorers.llm.saying import Saying
from coevolve_jax.llm.answers import Fault, read
from coevolve_jax.llm.prompting import Question
from coevolve_jax.loop.lab import Laboratory
from coevolve_jax.records.llm_calls import all_lines
from coevolve_jax.records.llm_calls import whole as unpacked
from coevolve_jax.strategies import evolver, middo, questions
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.train import train
from coevolve_jax.types import Call, Group, Hint, Turn
from tests.loop.test_train import comparable
from tests.strategies.test_agent_world import Arena, X
from tests.strategies.test_hints import MOVE, POST
from tests.strategies.test_learner_services import Registry, traces
from tests.strategies.test_proposers import Lab as Drafts
from tests.strategies.test_strategies import rows, settings
from tests.support.method_cases import (
    Lab,
    Rolls,
    a_group,
    a_pool,
    a_rollout,
    a_step,
    a_task,
    again,
    config_of,
)
from tests.support.openai_server import OpenAIServer


class Asked:
    """Mixed into a lab: `says(role, question)` answers, and all questions are kept."""

    says = staticmethod(lambda role, question: None)

    def ask(self, role, questions, reader=""):
        self.questions = [*getattr(self, "questions", []), *((role, q) for q in questions)]
        return [self.says(role, q) for q in questions]


class AskedLab(Asked, Lab):
    pass


class AskedArena(Asked, Arena):
    pass


class AskedRegistry(Asked, Registry):
    pass


def wanted(question) -> str:
    return question.user.rpartition("Answer with a JSON object")[2]


# Socratic-SWE


def test_a_skill_is_worded_once_and_its_drafts_carry_the_words():
    config = config_of("socratic", **{"evolution.every": 1})
    groups = [*traces(1, 4), *traces(2, 4)]
    lab = AskedRegistry(config, [g.task for g in groups])
    lab.says = lambda role, q: "About tool_1." if "tool_1 is due" in wanted(q) else None
    strategy = build.strategy(config)
    for step in range(2):
        strategy.observe(step, groups)
        strategy = again(strategy, config)
        assert strategy.evolve(step, lab).added > 0
    said = {c.must: c.summary for c in lab.contexts}
    assert said == {
        ("tool_1",): "About tool_1.",
        ("tool_2",): "tool_2 is missed, and tool_5 is called instead.",
    }
    # The skill that got no words is asked about again, the other is not.
    about = [next(n for n in ("tool_1", "tool_2") if f"{n} is due" in wanted(q)) for _, q in lab.questions]
    assert sorted(about) == ["tool_1", "tool_2", "tool_2"] and {role for role, _ in lab.questions} == {
        "distil"
    }
    (first,) = [q for _, q in lab.questions if "tool_1 is due" in wanted(q)]
    assert "1. q" in first.user and "instead: tool_5" in first.user and '{"tool": "tool_0"' in first.user


@pytest.mark.parametrize("system", ["", "It is 2024.\nAsk first."])
def test_questions_about_a_task_show_its_system_message(system):
    task = dataclasses.replace(a_task("t", "ls"), system=system)
    lab = AskedLab(config_of("middo"), a_pool(task))
    questions.grades(lab, [task])
    questions.demands(lab, {"t": (task, ("few calls", 2))})
    questions.skills(lab, {"k": (("ls", "", "too few calls"), unguided(task, "c"))})
    shown = [q.user.count("The agent's system message: It is 2024. Ask first.") for _, q in lab.questions]
    assert shown == [bool(system)] * 3


# Agent-World


def test_guidelines_stand_in_the_contexts_of_their_action():
    config = config_of("agent_world", **{"evolution.tasks": 4})
    lab = AskedArena(config, a_pool(a_task("t", "tool_0", "tool_1")))
    lab.says = lambda role, q: "Ask for it late." if f"The action: {X}" in q.user else None
    build.strategy(config).evolve(4, lab)
    assert {role for role, _ in lab.questions} == {"guide"} and len(
        lab.questions
    ) == 2  # half as many as tasks
    said = {c.must[0]: c.summary for c in lab.contexts}
    assert said.pop(X) == "Ask for it late."
    assert all(text.endswith("attempts at unseen tasks.") for text in said.values())
    plain = Arena(config, a_pool(a_task("t", "tool_0", "tool_1")))
    build.strategy(config).evolve(4, plain)
    assert [c.plan for c in plain.contexts] == [c.plan for c in lab.contexts]  # words change no draw


# EvolveR


def mixed(task, good, bad):
    return Group(task, (a_rollout(task, 0, True, [a_step(good)]), a_rollout(task, 1, False, [a_step(bad)])))


def test_a_model_words_principles_and_their_uses_are_counted():
    config = config_of("evolver", distilled=1.0, prune_every=1)
    strategy, lab = build.strategy(config), AskedLab(config, a_pool(MOVE, POST))
    strategy.observe(0, [mixed(MOVE, "mv", "cp"), mixed(POST, "post", "like")])
    assert strategy.help(MOVE, 0) == Hint("Hint: Use mv. Not cp.")
    lab.says = lambda role, q: "Call mv to move." if '"mv"' in q.user and "what to do" in wanted(q) else None
    strategy = again(strategy, config)
    strategy.evolve(4, lab)
    asked = [json.loads(line) for _, q in lab.questions for line in q.user.splitlines() if line[:1] == "{"]
    assert len(lab.questions) == 4 and {row["tool"] for row in asked} == {"mv", "cp", "post", "like"}
    assert sum("Move 'a' into 'b'." in q.user for _, q in lab.questions) == 2
    strategy = again(strategy, config)
    assert strategy.help(MOVE, 0) == Hint("Hint: Not cp. Call mv to move.")
    assert strategy.help(POST, 0) == Hint("Hint: Use post. Not like.")
    lab.questions = []
    strategy.evolve(9, lab)
    assert not lab.questions  # each is asked about once
    for step in range(1, 4):
        strategy.observe(step, [a_group(MOVE, False, False)])
    assert strategy.help(MOVE, 0) is None  # the sentence is used, scored and pruned like any


def test_a_sentence_without_room_is_left_out_and_not_used():
    config = config_of("evolver", characters=len("Hint: Not cp. Call mv."))
    cases = {
        "Call mv.": ("Hint: Not cp. Call mv.", [1, 1]),
        "Call mv now so.": ("Hint: Call mv now so.", [1, 0]),  # the better one first
        "Call mv now, please.": ("Hint: Use mv. Not cp.", [1, 1]),  # too long: its action stands for it
    }
    for text, (line, uses) in cases.items():
        strategy = build.strategy(config)
        good, bad = evolver.distil(mixed(MOVE, "mv", "cp"))
        strategy._store = [{**good, "text": text}, bad]
        assert strategy.help(MOVE, 0) == Hint(line)
        strategy.observe(1, [a_group(MOVE, True)])
        assert [p["uses"] for p in strategy._store] == uses
    lab = AskedLab(config, a_pool(MOVE))
    strategy = build.strategy(config_of("evolver", characters=60, distilled=1.0))
    strategy.observe(0, [mixed(MOVE, "mv", "cp")])
    lab.says = lambda role, q: "x" * (30 + ("avoid" in wanted(q)))
    strategy.evolve(4, lab)
    assert ["text" in p for p in strategy._store] == [True, False]  # two have to fit into a line


@given(st.lists(st.tuples(st.booleans(), st.sampled_from(["mv", "cp", "rename_file"]),
                          st.text("ab ", max_size=40))),
       st.integers(5, 80))  # fmt: skip
def test_the_line_of_principles_keeps_its_length_and_holds_what_it_says(principles, most):
    strategy = build.strategy(config_of("evolver", characters=most, read=4))
    fresh = {"words": ["into", "move"], "task": "t", "uses": 0, "successes": 0}
    strategy._store = [
        {"do": d, "action": a, **({"text": x} if x else {}), **fresh} for d, a, x in principles
    ]
    line, held = strategy._read(MOVE)
    assert len(line) <= most and bool(line) == bool(held) and len(set(held)) == len(held)
    for p in (strategy._store[i] for i in held):
        assert f" {p['action']}" in line or p["text"] in line


def test_a_model_judges_what_is_merged():
    config = config_of("evolver", distilled=1.0)
    kept = {}
    for answer in ("Yes.", "no", None):
        strategy, lab = build.strategy(config), AskedLab(config, a_pool(MOVE))
        lab.says = lambda role, q: answer if role == "merge" else "Move with the right tool."
        for step, group in enumerate(
            (mixed(MOVE, "mv", ""), mixed(MOVE, "rename", ""), mixed(POST, "post", ""))
        ):
            strategy.observe(step, [group])
        strategy.evolve(4, lab)
        kept[answer] = [p["action"] for p in strategy._store if p["do"]]
        # Only principles of one task and kind are compared: of POST there is one.
        assert [role for role, _ in lab.questions].count("merge") == 1
        strategy = again(strategy, config)
        strategy.observe(5, [mixed(MOVE, "rename", "")])  # what was merged does not come again
        assert [p["action"] for p in strategy._store if p["do"]] == kept[answer]
    assert kept == {"Yes.": ["mv", "post"], "no": ["mv", "rename", "post"], None: ["mv", "rename", "post"]}


# Evolving-RL


def roll_with(seen):
    """Rolls every task with success, and notes the lines that its rollouts read."""

    def roll(drawn, k, hints):
        seen.update({t.id: [hints(t, m) and hints(t, m).before_task for m in range(k)] for t in drawn})
        return [a_group(t, *[True] * k) for t in drawn]

    return roll


def test_the_sentence_of_a_success_is_one_more_skill_and_is_paid_like_the_others():
    """Only rollouts that read a sentence succeed, so the extractor comes to choose it."""
    config = config_of(
        "evolving_rl", near=2, learning_rate=1.0, worded=2,
        **{"rollout.tasks_per_step": 4, "rollout.group_size": 8},
    )  # fmt: skip
    tasks = [a_task(f"a{i}", "a", f"end_{i}") for i in range(12)]
    strategy, lab, seen = build.strategy(config), AskedLab(config, a_pool(*tasks)), {}
    strategy.observe(0, [a_group(t, True, False) for t in tasks[:3]])
    lab.says = lambda role, q: "End it." if role == "distil" and "end_" in q.user else None
    strategy.evolve(4, lab)
    assert len(lab.questions) == 2 and all(
        '{"tool": "a"' in q.user and "at most 194 characters" in q.user for _, q in lab.questions
    )
    strategy = again(strategy, config)
    worded = {id for id, e in strategy.to_json()["episodes"].items() if e.get("text") == "End it."}
    assert len(worded) == 2 and not any("shown" in e for e in strategy.to_json()["episodes"].values())
    lab.questions = []
    strategy.observe(5, [a_group(t, True, False) for t in tasks[:3]])  # the same actions as before
    strategy.evolve(9, lab)
    assert not lab.questions and strategy.to_json()["episodes"].keys() == {"a0", "a1", "a2"}

    def paid(drawn, k, hints):
        roll_with(seen)(drawn, k, hints)
        return [a_group(t, *(line == "Hint: End it." for line in seen[t.id])) for t in drawn]

    for step in range(10, 40):
        seen.clear()
        groups = strategy.collect(step, lab.tasks, paid)
        for source, skills in strategy._skills.items():
            assert "sentence" not in skills or source in worded
        strategy.observe(step, [g for g in groups if g.task.id in strategy._sources])
        strategy = again(strategy, config)
    shares = strategy.observe(40, []).rows[-1]["shares"]
    assert list(shares)[-1] == "sentence" and shares["sentence"] > 0.7
    line = strategy.help(tasks[0].without_calls(), 0).before_task  # of a0, whose query is the first as alike
    assert (line == "Hint: End it.") == ("a0" in worded)


def test_a_success_by_other_actions_is_asked_about_again_and_a_long_sentence_is_none():
    config = config_of("evolving_rl", characters=len("Hint: Move it."))
    strategy, lab = build.strategy(config), AskedLab(config, a_pool(MOVE))
    succeed = lambda action: [
        Group(MOVE, (a_rollout(MOVE, 0, True, [a_step(action)]), a_rollout(MOVE, 1, False, [a_step("cp")])))
    ]
    for text, kept in (("Move it.", True), ("Move it!!", False)):
        lab.says, lab.questions = lambda role, q, text=text: text, []
        strategy.observe(0, succeed("mv" if kept else "rename"))
        strategy = again(strategy, config)
        strategy.evolve(4, lab)
        assert len(lab.questions) == 1 and "Move 'a' into 'b'." in lab.questions[0][1].user
        (episode,) = strategy.to_json()["episodes"].values()
        assert ("text" in episode) == kept
    # Without an answer there is no such skill, as where rules explore.
    plain = build.strategy(config)
    plain.observe(0, succeed("mv"))
    plain.evolve(4, AskedLab(config, a_pool(MOVE)))
    assert "sentence" not in plain.observe(5, []).rows[-1]["shares"]


# SEIF


class AskedDrafts(Asked, Drafts):
    """A lab whose drafts have tool_0 to tool_7, which are also the tools on offer."""

    def offered(self, scenario):
        return frozenset(f"tool_{n}" for n in range(8))


def demanded(question) -> tuple[str, str]:
    """The kind of demand that a question is about, and its number or tool."""
    if found := re.search(r"at most (\d+) calls of tools", question.user):
        return "few calls", found[1]
    return "without", re.search(r"the tool (\w+) is not used", question.user)[1]


def told(role, question):
    kind, what = demanded(question)
    return f"Please make at most {what} calls." if kind == "few calls" else f"Never use {what}."


def seif_lab(says, rolled=None, **own):
    config = config_of("seif", **{"explorer.name": "llm", "evolution.every": 1, "evolution.tasks": 6, **own})
    lab = AskedDrafts(config, rolled or (lambda task, k: a_group(task, *[True] * k)))
    lab.says = says
    return build.strategy(config), lab, config


def test_demands_stand_in_the_first_query_and_the_reference_meets_them():
    strategy, lab, config = seif_lab(told)
    for step in range(3):
        assert strategy.evolve(step, lab).added == 6
        strategy = again(strategy, config)
    held = strategy.to_json()["demands"]
    new = [task for task in lab.tasks if task.lineage.kind == "signal"]
    assert held.keys() == {task.id for task in new if task.turns[0].query != "q"}
    assert {kind for kind, _ in held.values()} == {"few calls", "without"}
    assert {role for role, _ in lab.questions} == {"demand"} and len(lab.questions) > len(held)
    for task in (task for task in new if task.id in held):
        kind, what = held[task.id]
        called = [call.name for call in task.calls]
        assert task.turns[0].query == f"q {told('', SimpleNamespace(user=wording(kind, what)))}"
        assert what == len(called) if kind == "few calls" else what not in called
        # Its own calls meet the demand; one call more, or the tool, does not, and nor does a failure.
        more = [*(a_step(name) for name in called), a_step(called[0] if kind == "few calls" else what)]
        rollouts = (
            a_rollout(task, 0, True), a_rollout(task, 1, True, more), a_rollout(task, 2, False, []),
        )  # fmt: skip
        assert strategy.met(Group(task, rollouts)) == [1.0, 0.5, 0.0]
        advantages = [s.advantages[0] for s in strategy.compute_advantages([Group(task, rollouts)])]
        assert advantages[0] > advantages[1] > advantages[2]


def wording(kind, what) -> str:
    return f"at most {what} calls of tools" if kind == "few calls" else f"the tool {what} is not used"


@pytest.mark.parametrize(
    "answer", [None, "Please hurry.", "Use no tool_99 and no 77 calls.", "x 1 2 3 4 5 6 7" * 20]
)
def test_an_answer_without_the_demand_makes_none(answer):
    strategy, lab, _ = seif_lab(lambda role, q: answer)
    assert strategy.evolve(0, lab).added == 6 and lab.questions
    new = [task.turns[0].query for task in lab.tasks if task.lineage.kind == "signal"]
    assert new == ["q"] * 6 and strategy.to_json()["demands"] == {}
    assert dict(strategy.to_json()["knobs"]).keys() >= {"demand"}


def test_the_instructor_learns_to_demand_what_the_follower_does_not_heed():
    """The follower solves every task, and makes one call too many in all of them."""

    def rolled(task, k):
        steps = [*(a_step(call.name) for call in task.calls), a_step(task.calls[0].name)]
        return Group(task, tuple(a_rollout(task, m, True, steps) for m in range(k)))

    strategy, lab, config = seif_lab(told, rolled)
    for step in range(12):
        strategy.evolve(step, lab)
        strategy = again(strategy, config)
    logits = dict(strategy.to_json()["knobs"]["demand"])
    assert logits["few calls"] > logits["none"] + 1 and logits["few calls"] > logits["without"] + 1


def test_where_rules_explore_or_demands_are_off_the_instructor_has_no_such_setting():
    for own in ({"explorer.name": "scripted"}, {"demands": False}):
        strategy, lab, _ = seif_lab(told, **own)
        strategy.evolve(0, lab)
        assert "demand" not in strategy.to_json()["knobs"] and not getattr(lab, "questions", [])


# Middo


def test_a_poorly_worded_task_is_replaced_by_one_that_is_worded_anew():
    config = config_of("middo", lonely=0.0, **{"rollout.tasks_per_step": 3})
    tasks = a_pool(*(a_task(f"t{i}", "tool_0", "tool_1", "tool_2") for i in range(10)))
    named = a_task("vague", "tool_0", "tool_1", "tool_2")
    tasks.add([dataclasses.replace(named, turns=(Turn("Do something.", named.calls),))])
    strategy, lab = build.strategy(config), AskedLab(config, tasks)
    lab.says = lambda role, q: "2" if "Do something." in q.user else "9"
    strategy.evolve(4, lab)
    assert [(c.task.id, c.signal) for c in lab.contexts] == [("vague", "other_arguments")]
    strategy = again(strategy, config)
    drawn = {g.task.id for s in range(60) for g in strategy.collect(s, lab.tasks, Rolls(lambda t: 0.5))}
    (new,) = [t for t in lab.tasks if t.lineage.parent == "vague"]
    assert "vague" not in drawn and new.id in drawn
    assert len(lab.questions) == 11
    before = strategy.to_json()
    lab.says = lambda role, q: "8/10"
    strategy.evolve(9, lab)
    assert len(lab.questions) == 12  # the new task alone
    assert new.id not in before["grades"]  # a state that was saved stays as it was
    strategy.evolve(14, lab)
    assert len(lab.questions) == 12 and strategy.to_json()["grades"][new.id] == 0  # asked once, whatever came
    strategy.evolve(19, AskedLab(config, lab.tasks))  # no grade at all, as from a server that is away


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 10), max_size=12), st.floats(0, 2))
def test_a_grade_is_poor_below_the_mean_less_deviations(grades, deviations):
    values = np.array([grades[id] for id in grades]) if grades else np.zeros(1)
    bound = values.mean() - deviations * np.sqrt(((values - values.mean()) ** 2).mean())
    found = middo.poor(grades, deviations)
    assert all(grades[id] <= bound + 1e-9 for id in found)
    assert all(grades[id] >= bound - 1e-9 for id in grades.keys() - found)


# Answers are data


def test_a_number_that_a_model_writes_as_one_is_a_line():
    assert read('{"answer": 7}', Saying).answer == "7"
    for bad in ('{"answer": true}', '{"answer": ""}', '{"answer": ["7"]}'):
        with pytest.raises(Fault):
            read(bad, Saying)


def test_nothing_is_asked_for_a_part_that_rules_play_or_where_rules_play_all():
    config = config_of("static")
    config.explorer = configs.explorer("llm")
    config.explorer.update(
        base_url="http://127.0.0.1:9/v1", attempts=1, cache="", model="m", abstractor="scripted"
    )
    said = lambda role, questions: ["yes"] * len(questions)
    roles = Roles("r", *[None] * 4, ask=said)
    made = SimpleNamespace(roles=roles, config=config)
    lab = Laboratory(a_pool(), [], made, None, Counter())
    asked = [lab.ask("x", [Question("s", "u", 1)], reader=r) for r in ("", "explorer", "abstractor")]
    assert asked == [["yes"], ["yes"], [None]]
    config.explorer.update(dict.fromkeys(configs.PARTS, "scripted"))
    assert build.explorer(config).ask is None


@pytest.mark.parametrize("said", ["11", "0", "-1", "7.5", "seven", "1e0", "٣", "9 out of 10"])
def test_only_a_whole_number_from_1_to_10_is_a_grade(said):
    lab = AskedLab(config_of("middo"), a_pool())
    lab.says = lambda role, q: said
    assert questions.grades(lab, [a_task("t", "tool_0")]) == {"t": 0}
    lab.says = lambda role, q: "10."
    assert questions.grades(lab, [a_task("t", "tool_0")]) == {"t": 10}


@given(st.text(max_size=60))
def test_no_text_of_an_environment_or_a_model_leaves_its_line(text):
    def asked(word):
        lab = AskedLab(config_of("static"), a_pool())
        call = Call("tool_0", {"a": word})
        task = dataclasses.replace(a_task("t", "x"), turns=(Turn(f"Do {word}.", (call,)),))
        context = dataclasses.replace(unguided(task, "c"), plan=(call, "x"))
        questions.skills(lab, {"s": (("x", "y", "error"), context)})
        questions.guidelines(lab, {"x": {"attempts": 2, "misses": 1, "mistakes": [word], "others": ["y"]}})
        shown = {"do": True, "request": f"Do {word}.", "good": call.to_json(), "bad": None}
        questions.principles(lab, {"p": shown}, 100)
        questions.same(lab, {"p": (word, f"{word}!")})
        questions.grades(lab, [task])
        return [q.user.splitlines() for _, q in lab.questions]

    plain, other = asked("word"), asked(text)
    assert [len(lines) for lines in plain] == [len(lines) for lines in other]


def test_a_method_that_keeps_answers_is_refused_beside_training():
    for name in ("evolver", "middo"):
        with pytest.raises(ValueError, match=r"config\.evolution\.async_steps is 1: it must be 0"):
            configs.check(config_of(name, **{"evolution.async_steps": 1}))


# Runs over HTTP

OWN = {
    "agent_world": {"arena": 4, "arena_rollouts": 2, "drafts": 1.0, "runs": 2, "agree": 0},
    "socratic": {"drafts": 1.0, "probe": 2, "goal": 2, "goal_probe": 2},
    "evolver": {"distilled": 1.0},
    "evolving_rl": {"near": 1},
    "seif": {"probe": 2},
    "middo": {"lonely": 0.5},
}
ROLES = {
    "agent_world": "guide",
    "socratic": "distil",
    "evolver": "distil",
    "evolving_rl": "distil",
    "seif": "demand",
    "middo": "grade",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.nightly if n != "evolver" else ()) for n in OWN]
)
def test_a_run_asks_the_model_and_goes_on_where_it_was(name, tmp_path):
    changes = {"steps": 6, "evolution.async_steps": 0, **{f"strategy.{k}": v for k, v in OWN[name].items()}}
    with OpenAIServer() as server:
        model = {"name": "llm", "base_url": server.url, "cache": str(tmp_path / "answers.sqlite")}
        changes |= {f"explorer.{k}": v for k, v in model.items()}
        config = configs.override(settings(name), changes)
        train(config, tmp_path / "run", until=3)
        train(config, tmp_path / "run")
        asked = len(server.seen)
        train(config, tmp_path / "whole")
        assert len(server.seen) == asked  # the cache knows all answers: the same questions were asked
    want, got = comparable(tmp_path / "whole"), comparable(tmp_path / "run")
    for file in want:
        assert got[file] == want[file], file
    packed = rows(tmp_path / "run", "llm_calls.jsonl")
    lines = all_lines(packed)
    calls = [unpacked(row, lines) for row in packed]
    own = [d for d in calls if d["role"] == ROLES[name]]
    assert own and all(d["about"]["subject"] and not d["fault"] for d in own)
    ledger = json.loads((tmp_path / "run" / "ledger.json").read_text())["costs"]
    assert ledger[f"explorer/llm_requests/{ROLES[name]}"] == len(own)
    if name in ("agent_world", "socratic"):  # the explorer reads the words
        explored = [d["user"] for d in calls if d["role"] == "explore"]
        assert any("What was seen: Said of" in text for text in explored)
    elif name == "evolver":  # the policy does, once an evolution has made some
        files = sorted((tmp_path / "run" / "trajectories").iterdir())
        read = [text for file in files for row in map(json.loads, file.open()) for _, text in row["hints"]]
        assert any(text.startswith("Hint: ") and "Said of" in text for text in read)
    elif name == "evolving_rl":  # its extractor can choose them
        newest = max((tmp_path / "run" / "checkpoints").glob("step_*"))
        kept = json.loads((newest / "state.json").read_text())["state"]["strategy"]["state"]
        assert [skill for skill, _ in kept["knobs"]["skill"]][-1] == "sentence"
        assert any(e.get("text", "").startswith("Said of") for e in kept["episodes"].values())
    elif name == "seif":
        newest = max((tmp_path / "run" / "checkpoints").glob("step_*"))
        demands = json.loads((newest / "state.json").read_text())["state"]["strategy"]["state"]["demands"]
        first = {t["id"]: t["turns"][0]["query"] for t in rows(tmp_path / "run", "tasks.jsonl")}
        assert demands and all(first[id].endswith(f" Said of {what}.") for id, (_, what) in demands.items())
        assert sum("Said of" in query for query in first.values()) == len(demands)
    else:
        state = json.loads((tmp_path / "run" / "tasks.jsonl").read_text().splitlines()[0])
        assert state["id"] in {d["about"]["subject"] for d in own}
