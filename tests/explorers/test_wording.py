"""The policy's words for queries of rules: the checks, counts, lineage, leak control, and whole runs."""

import dataclasses
import itertools
import json
import re
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.config import idle
from coevolve_jax.envs import bfcl
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.explorers import scripted
from coevolve_jax.explorers.base import Proposal
from coevolve_jax.explorers.paraphrase import fault
from coevolve_jax.explorers.policy.client import Client
from coevolve_jax.explorers.scripted.abstractor import word
from coevolve_jax.explorers.wording import worded
from coevolve_jax.records.workdir import fork
from coevolve_jax.rollout.engine import Completion, EngineError
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.synthesis.leakage import LeakGuard
from coevolve_jax.synthesis.lineage import Birth
from coevolve_jax.synthesis.pipeline import SynthesisRequest, Synthesizer
from coevolve_jax.synthesis.settings import Settings
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.synthesis.validate import validate
from coevolve_jax.testing.explorer import check_explorer
from coevolve_jax.train import train
from coevolve_jax.types import Call, Lineage, Turn
from tests.loop.test_train import comparable
from tests.strategies.test_strategies import rows, settings
from tests.support.explorer_cases import file_task, recorded, trajectory
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

TINY = ROOT / "models" / "tiny_qwen3"
CONFIG = configs.override(
    configs.load_file(ROOT / "configs" / "bfcl_tiny.py"), {"model": str(TINY), "explorer.wording": "policy"}
)

# The text of a paraphrase

TICKET = Turn(
    "Create a ticket in the system (title 'draft forecast', priority 3).",
    (Call("create_ticket", {"title": "draft forecast", "priority": 3}),),
)
TOOLS = ("create_ticket", "close_ticket", "find")


@pytest.mark.parametrize(
    "lost, answer",
    [
        ("", 'Please open a ticket "draft forecast" of priority 3.'),
        ("", "Find time to open a ticket 'draft forecast' of priority 3."),  # a word, and no name
        ("same", "create a  ticket in the system (title 'draft forecast', priority 3)"),
        ("too_long", "Please open the ticket 'draft forecast' with priority 3" + ", now" * 20),
        ("control", "<|im_start|>Open a ticket 'draft forecast' of priority 3."),
        ("control", "<tool_call>Open a ticket 'draft forecast' of priority 3."),
        ("control", "Open a ticket:\n'draft forecast' of priority 3."),
        ("markup", "<b>Open a ticket 'draft forecast' of priority 3.</b>"),
        ("markup", "Open {title: 'draft forecast', priority: 3}"),
        ("value", "Open a ticket 'draft Forecast' of priority 3."),
        ("value", "Open a ticket called draft forecast of priority 3."),  # quotes show where it ends
        ("value", "Open a ticket 'draft forecast' of priority three."),
        ("value", "Open a ticket 'draft forecast' of priority 31."),
        ("value", "Open a ticket 'draft forecast' of priority 3.5"),
        ("value", "Open 2 tickets 'draft forecast' of priority 3."),  # a number of its own
        ("tool_name", "Call create_ticket, 'draft forecast' of priority 3."),
        ("tool_name", "Please find a ticket 'draft forecast' of priority 3."),
    ],
)
def test_each_check_refuses_what_it_should(policy, lost, answer):
    assert fault(TICKET, answer, TOOLS, policy.chat.controls) == lost


@pytest.mark.parametrize(
    "lost, answer",
    [
        ("", 'Please order the items {"mug": 3, "pen": null}, urgent true.'),
        ("value", 'Please order the items {"pen": null}, 3 of them, urgent true.'),
        ("value", 'Please order the items {"mug": 3, "pen": null}.'),
        ("value", 'Please order the items {"mug": 3, "pen": 3}, urgent true.'),
    ],
)
def test_keys_and_words_of_json_are_values_too(lost, answer):
    turn = Turn(
        'Order the items (items {"mug": 3, "pen": null}, urgent true, gift false).',
        (Call("order", {"items": {"mug": 3, "pen": None}, "urgent": True}),),
    )
    assert fault(turn, answer, (), lambda text: False) == lost


def test_a_tool_that_the_query_names_may_be_named():
    turn = Turn("Find 'a'; sort the file.", (Call("find", {"name": "a"}), Call("sort", {})))
    assert fault(turn, "Please find 'a', and sort the file.", ("find", "sort"), lambda text: False) == ""


TEXTS = st.text(alphabet="ab1 .-_/é'", min_size=1, max_size=6).filter(lambda text: text.strip() == text)
LEAVES = TEXTS | st.integers(-30, 30) | st.floats(-9, 9).map(lambda x: round(x, 1))
VALUES = LEAVES | st.lists(LEAVES, max_size=2) | st.booleans() | st.none()
CALLS = st.lists(
    st.dictionaries(st.sampled_from(("x", "yy", "zip")), VALUES, max_size=2).map(lambda a: Call("do", a)),
    min_size=1, max_size=3,
)  # fmt: skip


def worded_by_rules(calls, seed):
    return word(calls, [{"function": {"name": "do"}}], np.random.default_rng(seed), lambda call: "")


def leaves(value):
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return [value] if parts is None else [leaf for part in parts for leaf in leaves(part)]


@given(CALLS, st.integers(0, 20), st.data())
def test_a_query_that_lost_a_value_is_refused_and_one_that_kept_all_is_not(calls, seed, data):
    query = worded_by_rules(calls, seed)
    turn, never = Turn(query, tuple(calls)), lambda text: False
    kept = f"Please, {query[0].lower()}{query[1:]}"
    assert fault(turn, kept, (), never) in ("", "too_long")
    held = [v for call in calls for v in leaves(dict(call.arguments)) if isinstance(v, str | float | int)]
    held = [str(v) if isinstance(v, str) else json.dumps(v) for v in held if not isinstance(v, bool)]
    assume(held)
    gone = data.draw(st.sampled_from(held))
    # Deleted as text, wherever it stands: what is left cannot hold it.
    without = kept.replace(gone, "")
    assume(gone in query and gone not in without)
    assert fault(turn, without, (), never) in ("value", "too_long")


# The role


@pytest.fixture(scope="module")
def policy():
    return build.policy(TINY)


@pytest.fixture(scope="module")
def pool():
    with ProcessPool("bfcl", workers=2, timeout=60.0) as pool:
        yield pool


class Voice:
    """An engine that answers each query with `say(query)`; None is an answer that was cut."""

    batches, constrains = True, False

    def __init__(self, policy, say):
        self.chat, self.tokenizer, self.say, self.seen = policy.chat, policy.tokenizer, say, []

    async def generate(self, requests):
        self.seen += requests
        return [self.completion(self.say(self.query(r))) for r in requests]

    def query(self, request):
        user = self.chat.decode(request.ids).split("<|im_start|>user\n")[1]
        return user.partition("<|im_end|>")[0].partition("\n")[2].strip()

    def completion(self, text):
        ids = self.tokenizer.encode(text or "") + list(self.chat.stop_ids[: text is not None])
        none = np.zeros(len(ids))
        finish = "length" if text is None else "stop"
        return Completion(np.asarray(ids, np.int32), none.astype(np.float32), finish, none.astype(np.int32))

    def release(self, conversation_ids):
        pass


def please(query):
    return f"Please {query[0].lower()}{query[1:]}"


def moody():
    """Returns a voice that says every second query well, and the others wrong in all ways, in turn."""
    wrong = (
        lambda query: None, lambda query: "", lambda query: query, lambda query: "so " * len(query),
        lambda query: f"<tool_call>{please(query)}", lambda query: f"<b>{please(query)}",
        lambda query: f"{please(query)} 77", lambda query: f"{please(query)} (mkdir)",
    )  # fmt: skip
    moods = itertools.cycle(mood for one in wrong for mood in (one, please))
    return lambda query: next(moods)(query)


def made(policy, pool, say, solves=lambda task: True, guard=None, **changes):
    """Returns (tasks, the roles' costs, the rolled out tasks, stats) of one synthesis."""
    config = configs.override(CONFIG, changes)
    rolled, rules = [], build.explorer(configs.override(config, {"explorer.wording": "rules"}))

    def roll(tasks, seeds):
        rolled.append((list(tasks), list(seeds)))
        return [trajectory(0, float(solves(task))) for task in tasks]

    roles = worded(rules, config, policy.chat, Voice(policy, say), roll) if say else rules
    tasks = TaskPool()
    stats = Synthesizer(roles, bfcl.tools, pool, config, guard).synthesize_unguided(
        tasks, bfcl.scenarios("train", {"toolsets": ("TicketAPI", "GorillaFileSystem")}),
        SynthesisRequest(wanted=8, kind="random", step=2, rng=np.random.default_rng(3)),
    )  # fmt: skip
    return list(tasks), Counter(roles.costs), rolled, stats


@pytest.fixture(scope="module")
def plain(policy, pool):
    """The tasks in the words of the rules."""
    return made(policy, pool, None)[0]


def lost(costs):
    return sum(n for key, n in costs.items() if key.startswith("wording_lost/"))


def by_rules(task):
    """The task with the words of the rules."""
    queries = task.lineage.rule_queries or [turn.query for turn in task.turns]
    turns = [dataclasses.replace(t, query=q) for t, q in zip(task.turns, queries, strict=True)]
    line = dataclasses.replace(task.lineage, rule_queries=())
    return dataclasses.replace(task, turns=tuple(turns), lineage=line)


def test_words_change_and_calls_do_not(policy, pool, plain):
    tasks, costs, rolled, _ = made(policy, pool, please)
    assert [by_rules(task) for task in tasks] == plain and len(tasks) == 8
    assert all(turn.query.startswith("Please ") for task in tasks for turn in task.turns)
    assert costs["wording_kept"] == costs["wording_asked"] == costs["llm_requests/word"] > 0
    assert costs["rollouts/wording"] == len(rolled[0][0]) and lost(costs) == 0
    assert costs["llm_tokens"] == costs["llm_tokens_in/word"] + costs["llm_tokens_out/word"]
    for task in tasks:
        again = Lineage.from_json(json.loads(json.dumps(task.lineage.to_json())))
        assert again == task.lineage and len(again.rule_queries) == len(task.turns)
    assert made(policy, pool, please)[:3] == (tasks, costs, rolled)


def test_counts_add_up_whatever_the_policy_says(policy, pool, plain):
    solved = lambda task: sum(map(ord, task.turns[0].query)) % 3 > 0
    tasks, costs, rolled, _ = made(policy, pool, moody(), solved)
    assert [by_rules(task) for task in tasks] == plain
    assert costs["wording_asked"] == costs["wording_kept"] + lost(costs) and costs["wording_kept"] > 0
    names = ("no_answer", "same", "too_long", "control", "markup", "value", "tool_name", "not_solved")
    assert {key.partition("/")[2] for key in costs if key.startswith("wording_lost/")} == set(names)
    for task in tasks:
        changed = [a.query != b for a, b in zip(task.turns, task.lineage.rule_queries)]
        assert bool(task.lineage.rule_queries) == any(changed)
        assert solved(task) or not any(changed)
    # A task that its first rollout solves gets no second one.
    assert [solved(task) for task in rolled[1][0]] == [False] * len(rolled[1][0])
    assert costs["rollouts/wording"] == sum(len(batch) for batch, _ in rolled)
    assert len({seed for _, seeds in rolled for seed in seeds}) == costs["rollouts/wording"]


def test_without_attempts_the_text_alone_decides(policy, pool):
    tasks, costs, rolled, _ = made(policy, pool, please, **{"explorer.wording_attempts": 0})
    assert not rolled and costs["wording_kept"] == costs["wording_asked"] and tasks[0].lineage.rule_queries


def test_words_that_nobody_understands_are_taken_back(policy, pool, plain):
    tasks, costs, rolled, _ = made(policy, pool, please, lambda task: False)
    assert tasks == plain and costs["wording_lost/not_solved"] == costs["wording_asked"]
    assert costs["wording_kept"] == 0 and costs["rollouts/wording"] == 2 * len(rolled[0][0])


def test_an_engine_that_fails_leaves_the_rules_words(policy, pool, plain):
    def broken(query):
        raise EngineError("no server")

    tasks, costs, _, _ = made(policy, pool, broken)
    assert tasks == plain and costs["wording_lost/no_answer"] == costs["wording_asked"]


def test_leak_control_reads_the_new_words(policy, pool, plain):
    """The new words are those of an evaluation task; the rules' words are far from it."""
    say = lambda query: re.sub(r"^\w+", "Kindly do as an old friend would", query)
    own = {"explorer.wording_attempts": 0}
    copied = made(policy, pool, say, **own)[0][0]
    # An evaluation task with these words, and other calls and scenario.
    other = dataclasses.replace(copied, id="held", scenario=plain[-1].scenario, turns=tuple(
        Turn(turn.query, plain[-1].calls) for turn in copied.turns
    ))  # fmt: skip
    guard = LeakGuard([other], 0.999, query_threshold=0.99)
    assert guard.check(copied) and not guard.check(by_rules(copied))
    tasks, _, _, stats = made(policy, pool, say, guard=guard, **own)
    assert stats.refused["near_evaluation"] >= 1
    assert copied.turns not in [task.turns for task in tasks]


def test_a_task_that_is_cut_keeps_the_queries_of_its_turns(pool):
    """Execution refuses the last turn."""
    good, bad = (Call("touch", {"file_name": "b.txt"}), Call("ls", {})), Call("cat", {"file_name": "none"})
    steps = recorded(pool, file_task(), [*good, bad])
    turns = (Turn("please, one", good), Turn("please, two", (bad,)))
    proposal = Proposal(
        unguided(file_task(), "c"), "goal", turns, (0, 1, 2),
        tuple(step.observation for step in steps), (), ("one", "two"),
    )  # fmt: skip
    (verdict,) = validate(
        scripted.make(None, build.family(CONFIG)), bfcl.tools, pool, [proposal], Settings(), Birth("random")
    )
    assert verdict.verdict == "retain" and verdict.task.lineage.rule_queries == ("one",)
    assert verdict.task.lineage.triplets == (0, 1)


@pytest.mark.slow
def test_the_roles_keep_their_contract(policy, pool):
    roll = lambda tasks, seeds: [trajectory(0, 1.0) for _ in tasks]
    roles = worded(
        scripted.make(None, build.family(CONFIG)), CONFIG, policy.chat, Voice(policy, please), roll
    )
    check_explorer(roles, bfcl.tools, pool, bfcl.scenarios("train")[:10])
    assert roles.name == "scripted" and roles.initial.costs is None


# Settings


def test_rules_word_queries_by_default():
    config = configs.override(CONFIG, {"explorer.wording": "rules"})
    configs.check(config)
    assert not configs.asks_policy(config) and build.explorer(config).costs is None
    assert configs.defaults().explorer.wording == "rules"
    (note,) = idle.notes(configs.override(config, {"explorer.wording_attempts": 5}))
    assert note.endswith(
        "wording_attempts = 5 has no effect: config.explorer.wording is not policy, so no model is asked."
    )
    assert not idle.notes(configs.override(CONFIG, {"explorer.wording_attempts": 5}))


def test_what_cannot_be_is_refused():
    configs.check(CONFIG)
    assert configs.asks_policy(CONFIG)
    with pytest.raises(ValueError, match="explorer.wording is 'policy', which asks .* here: set it to rules"):
        build.explorer(CONFIG)
    with pytest.raises(
        ValueError, match="explorer.wording is 'llm': it must be one of rules, varied, policy"
    ):
        configs.check(configs.override(CONFIG, {"explorer.wording": "llm"}))
    with pytest.raises(ValueError, match="async_steps is 2: it must be 0 where the explorer is scripted"):
        configs.check(configs.override(CONFIG, {"evolution.async_steps": 2}))


@pytest.mark.parametrize("name", ["llm", "policy"])
def test_a_model_words_its_own_queries(name):
    config = configs.override(CONFIG, {"explorer.name": name})
    with config.unlocked():
        config.explorer.wording = "policy"
    why = (
        f"wording is 'policy': it must be absent where the explorer is {name}, which words its queries itself"
    )
    with pytest.raises(ValueError, match=why):
        configs.check(config)
    with pytest.raises(ValueError, match="config.explorer.wording is no setting of this config's explorer"):
        configs.override(CONFIG, {"explorer.name": name, "explorer.wording": "policy"})


# Runs

RUN = {
    "seed": 1, "steps": 3, "evolution.every": 1, "evolution.rounds": 2, "evolution.steps": 5,
    "explorer.wording": "policy", "explorer.max_tokens": 64,
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.slow
def test_a_policy_without_words_gives_the_run_of_the_rules(tmp_path):
    """The tiny policy's paraphrases are no English: all are lost, and two evolutions add the same tasks."""
    train(settings("coevolve", **{**RUN, "explorer.wording": "rules"}), tmp_path / "rules")
    train(settings("coevolve", **RUN), tmp_path / "policy")
    want, got = rows(tmp_path / "rules", "tasks.jsonl"), rows(tmp_path / "policy", "tasks.jsonl")
    assert got == want and len(got) > 8
    evolved = [row["evolution"] is not None for row in rows(tmp_path / "policy", "metrics.jsonl")]
    assert evolved.count(True) == 2
    summary = json.loads((tmp_path / "policy" / "summary.json").read_text())["explorer"]
    assert summary["wording_asked"] == lost(summary) > 0 and summary["wording_kept"] == 0
    assert summary["llm_tokens_in/word"] > 0
    asked = rows(tmp_path / "policy", "llm_calls.jsonl")
    assert len(asked) == summary["wording_asked"] and {row["role"] for row in asked} == {"word"}
    assert not (tmp_path / "rules" / "llm_calls.jsonl").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_with_new_words_ends_in_the_same_bits_when_it_is_killed(tmp_path, monkeypatch):
    """A polite stand-in speaks; the tiny policy understands it in some rollouts."""
    real, asked = Client.words, []

    def words(self, role, questions):
        answers = real(self, role, questions)
        asked.append(len(answers))
        if len(asked) == kill_at:
            raise KeyboardInterrupt
        return [please(q.user.partition("\n")[2]) for q in questions]

    monkeypatch.setattr(Client, "words", words)
    kill_at = None
    train(settings("coevolve", **RUN), tmp_path / "whole")
    lines = [task["lineage"] for task in rows(tmp_path / "whole", "tasks.jsonl")]
    assert any("rule_queries" in line for line in lines[8:])
    assert not any("rule_queries" in line for line in lines[:8])  # D_0 has the words of the rules
    costs = json.loads((tmp_path / "whole" / "ledger.json").read_text())["costs"]
    assert costs["explorer/wording_kept"] > 0 and costs["explorer/rollouts/wording"] > 0
    assert costs["explorer/wording_asked"] == costs["explorer/wording_kept"] + sum(
        n for key, n in costs.items() if key.startswith("explorer/wording_lost/")
    )
    config = fork(tmp_path / "whole", 1, tmp_path / "killed")
    kill_at = len(asked) + 1
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "killed")
    kill_at = None
    train(config, tmp_path / "killed")
    want, got = comparable(tmp_path / "whole"), comparable(tmp_path / "killed")
    for name in want:
        assert got[name] == want[name], name
