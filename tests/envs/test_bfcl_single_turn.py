"""BFCL's single-turn categories: references, spoilt answers, hostile texts, splits, prompts and rollouts."""

import ast
import importlib.resources
import inspect
import json
import random
import re
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax import build, envs
from coevolve_jax.envs import bfcl
from coevolve_jax.envs.base import digest
from coevolve_jax.envs.bfcl import single_turn
from coevolve_jax.envs.calls import bind, signatures
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.rollout.agent import Agent
from coevolve_jax.rollout.engine import Completion
from coevolve_jax.rollout.limits import Limits, reference_fits
from coevolve_jax.rollout.tool_call_format import parse_calls, render_call
from coevolve_jax.types import Call, Observation, Task
from tests.envs.test_hostile import hostile, message
from tests.support import forked
from tests.support.paths import ROOT

SINGLE = bfcl.SINGLE_TURN
NOT_LIVE = SINGLE[:4]
PARALLEL = [name for name in SINGLE if "parallel" in name]


def some(category: str, count: int = 30) -> list[Task]:
    tasks = single_turn.load(category)
    return tasks[:: max(1, len(tasks) // count)][:count]


def valid(task: Task, calls) -> bool:
    return single_turn.check(task, calls)["valid"]


# ---- Verdicts ----------------------------------------------------------------------------------------------


# BFCL's own data: a required parameter has no possible answer, or the answer has an unknown parameter.
WITHOUT_ANSWER = {
    "live_simple_106-63-0",
    "live_simple_112-68-0",
    "live_multiple_862-181-3",
    "live_multiple_964-207-0",
}


@pytest.mark.parametrize("category", SINGLE)
def test_every_reference_passes(category):
    tasks = single_turn.load(category)
    failed = {task.id for task in tasks if not valid(task, task.calls)}
    assert failed == WITHOUT_ANSWER & {task.id for task in tasks}


def another(value):
    """A value of the same type that nobody would answer."""
    if isinstance(value, str):
        return f"{value} and nothing of the kind"
    if isinstance(value, list):
        return [*value, *value, *value, "nothing of the kind"]
    return {"nothing": "of the kind"} if isinstance(value, dict) else value + 7654321


def changed(call: Call, change) -> Call:
    """The call with an argument changed, the first that is not true or false.

    change: its name and value -> the arguments in its place.
    """
    for name, value in call.arguments.items():
        if not isinstance(value, bool):
            rest = {k: v for k, v in call.arguments.items() if k != name}
            return Call(call.name, {**rest, **change(name, value)})
    return call


SPOILT = {
    "wrong value": lambda calls: [changed(calls[0], lambda k, v: {k: another(v)}), *calls[1:]],
    "missing parameter": lambda calls: [*calls[:-1], changed(calls[-1], lambda k, v: {})],
    "unknown parameter": lambda calls: [Call(calls[0].name, {**calls[0].arguments, "nil": 1}), *calls[1:]],
    "wrong function": lambda calls: [Call(f"{calls[0].name}_s", calls[0].arguments), *calls[1:]],
    "extra call": lambda calls: [*calls, calls[-1]],
    "missing call": lambda calls: calls[1:],
    "no call": lambda calls: [],
    "arguments as text": lambda calls: [Call(calls[0].name, str(calls[0].arguments)), *calls[1:]],
    "not JSON": lambda calls: [Call(calls[0].name, {"a": float("nan")}), *calls[1:]],
}


@pytest.mark.parametrize("spoilt", SPOILT)
@pytest.mark.parametrize("category", NOT_LIVE)
def test_a_spoilt_answer_fails(category, spoilt):
    tried = 0
    for task in some(category):
        calls = SPOILT[spoilt](list(task.calls))
        if calls != list(task.calls):  # a call may have no argument that can be spoilt
            tried += 1
            verdict = single_turn.check(task, calls)
            assert not verdict["valid"] and verdict["error_type"] and verdict["error_message"], task.id
            assert verdict["error_type"] != "ast_checker:failed"
    assert tried >= 28


@pytest.mark.parametrize("category", PARALLEL)
def test_the_order_of_parallel_calls_does_not_count(category):
    for task in some(category):
        assert valid(task, task.calls[::-1]), task.id


def test_the_values_that_bfcl_allows_pass():
    (task,) = [t for t in single_turn.load("simple_python") if t.id == "simple_python_0"]
    area = lambda **more: [Call("calculate_triangle_area", {"base": 10, "height": 5, **more})]
    assert valid(task, area()) and valid(task, area(unit="units")) and valid(task, area(unit="UNITS"))
    assert not valid(task, area(unit="miles")) and not valid(task, area(base=10.0))


def test_the_checker_is_the_packages_own_and_alone():
    file = importlib.resources.files("bfcl_eval").joinpath("eval_checker/ast_eval/ast_checker.py")
    assert inspect.getsourcefile(single_turn.official_checker()) == str(file)
    code = (
        "import sys; from coevolve_jax.envs import bfcl; bfcl.warm_up(); "
        "heavy = 'model_config', 'model_handler'; "
        "print([n for n in sys.modules if n in ('jax', 'numpy') or n.endswith(heavy)])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_stand_in_says_what_the_packages_table_says():
    """The table gives the flag for each model. Its file is read, for it imports every vendor's SDK."""
    source = importlib.resources.files("bfcl_eval").joinpath("constants/model_config.py").read_text()
    flags = {
        key.value: {k.arg: getattr(k.value, "value", None) for k in value.keywords}
        for table in ast.walk(ast.parse(source))
        if isinstance(table, ast.Dict)
        for key, value in zip(table.keys, table.values)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Call)
    }
    with single_turn.without_handlers():
        from bfcl_eval.constants.model_config import MODEL_CONFIG_MAPPING as stand_in
    ((name, told),) = stand_in.items()
    assert flags[name]["underscore_to_dot"] is told.underscore_to_dot is False


def test_the_official_verdict_is_asked_by_id():
    for category in SINGLE:
        task = some(category)[0]
        by_step = [[call] for call in task.calls]
        assert bfcl.judge(task.id, [by_step])["valid"] and bfcl.judge(task.id, [[list(task.calls)]])["valid"]
        assert not bfcl.judge(task.id, [by_step[1:]])["valid"]
    with pytest.raises(ValueError, match="BFCL's simple_python has no task 'simple_python_400'"):
        bfcl.judge("simple_python_400", [[]])
    with pytest.raises(ValueError, match="of 2 turns"):
        bfcl.judge("simple_python_0", [[], []])


# ---- Hostile texts -----------------------------------------------------------------------------------------

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
TASKS = [task for category in SINGLE for task in some(category, 10)]


@settings(max_examples=100)
@given(st.data())
def test_no_value_breaks_the_verdict(data):
    task = data.draw(st.sampled_from(TASKS))
    calls = [changed(call, lambda k, v: {k: data.draw(json_values)}) for call in task.calls]
    assert set(single_turn.check(task, calls)) == {"valid", "error_type", "error_message"}


@given(st.lists(st.builds(Call, st.text(), json_values), max_size=4))
def test_no_call_breaks_a_world(calls):
    world = bfcl.make()
    world.reset(TASKS[0])
    for call in calls:
        assert world.step(call).last_message
    world.end_turn()
    assert not world.score().success and world.fingerprint()


def test_hostile_messages_end_no_worker(tmp_path):
    mark, rng = str(tmp_path / "ran"), random.Random(0)
    texts, played = hostile(mark), rng.choices(TASKS, k=500)
    tools = [{t["function"]["name"]: t["function"] for t in bfcl.tools(task)} for task in played]
    with ProcessPool("bfcl", workers=1, timeout=60.0) as pool:
        env_ids = pool.reset(played)
        parsed = [parse_calls(message(rng, texts, own)) for own in tools]
        answers = pool.step(env_ids, [[p.call for p in own if p.call] for own in parsed])
        pool.end_turn(env_ids)
        outcomes = pool.score(env_ids)
        pool.close(env_ids)
        assert pool.restarts == 0
    assert all(a.valid and not a.fatal and a.last_message for own in answers for a in own)
    assert all(o.valid and not o.success for o in outcomes) and sum(map(len, answers)) > 100
    assert not (tmp_path / "ran").exists()


# ---- Tasks, splits, documents ------------------------------------------------------------------------------


def tasks(split, *categories, **more):
    family = envs.load("bfcl")
    return family.tasks(split, {**family.settings(categories), **more})


def test_halves_are_fixed_and_share_no_function():
    """The digest holds the halves as they are: a test half that moves has been read before."""
    halves = {}
    for split in ("development", "test"):
        halves[split] = tasks(split, *SINGLE)
    ids = {split: [task.id for task in own] for split, own in halves.items()}
    assert {split: len(own) for split, own in ids.items()} == {"development": 1076, "test": 1275}
    assert digest(ids["development"]).startswith("e829ff0a1899f566")
    everything = sorted(task.id for name in SINGLE for task in single_turn.load(name))
    assert sorted([*ids["development"], *ids["test"]]) == everything
    for split in ("evaluation", "all"):
        assert sorted(task.id for task in tasks(split, *SINGLE)) == everything
    names = [{bfcl.alike(task) for task in own} for own in halves.values()]
    queries = [{task.turns[0].query for task in own if "live" not in task.id} for own in halves.values()]
    assert names[0].isdisjoint(names[1]) and queries[0].isdisjoint(queries[1])


def test_what_the_halves_share_is_what_the_page_says():
    """A task belongs to a half by the set of functions that its answer calls, so sets may overlap."""
    page = (ROOT / "docs" / "environments" / "bfcl.md").read_text()
    development, test = tasks("development", *SINGLE), tasks("test", *SINGLE)
    known = {call.name for task in development for call in task.calls}
    for label, names in (("not live", NOT_LIVE), ("`live_...`", SINGLE[4:])):
        cells = [label]
        for own in (tasks("test", name) for name in names):
            shared = sum(not known.isdisjoint(call.name for call in task.calls) for task in own)
            cells.append(f"{shared} of {len(own)}")
        assert f"\n| {' | '.join(cells)} |\n" in page
    requests = {task.turns[0].query for task in development} & {task.turns[0].query for task in test}
    assert len(requests) == 7 and "Seven requests, all of `live_` tasks" in page
    assert requests.isdisjoint(task.turns[0].query for name in NOT_LIVE for task in single_turn.load(name))
    categories = [{task.turns[0].query for task in single_turn.load(name)} for name in SINGLE]
    twice = {query for own in categories for query in own if sum(query in c for c in categories) > 1}
    assert len(twice) == 100 and len(twice & requests) == 1 and "100 requests that stand in two" in page


def test_simple_is_short_for_simple_python():
    simple = tasks("development", "simple")
    assert simple == tasks("development", "simple_python") == tasks("development", "simple", "simple_python")
    assert simple[0].id.startswith("simple_python_")


def test_what_there_is_not_is_told_in_one_sentence():
    known = "base, miss_func, miss_param, long_context, simple, simple_python, multiple, parallel, "
    with pytest.raises(
        ValueError, match=f"bfcl has no category 'simpel': it has {known}parallel_multiple, l"
    ):
        envs.load("bfcl").settings(["simpel"])
    assert tasks("train", "multiple") == []
    with pytest.raises(ValueError, match="Unknown split 'dev'"):
        tasks("dev", "multiple")
    with pytest.raises(ValueError, match="Only single-turn tasks take worked examples: use some of simple_p"):
        tasks("development", "base", "multiple", few_shot=1)
    with pytest.raises(ValueError, match="has [34] worked examples at most: 6 are asked for"):
        tasks("test", "live_parallel", few_shot=6)
    assert len(tasks("train", "base", "multiple")) == 100  # only base has tasks to train on


@pytest.mark.parametrize("category", SINGLE)
def test_tasks_survive_json_and_have_documents(category):
    json_types = {"object", "string", "number", "integer", "boolean", "array"}
    for task in some(category):
        assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task
        names = {doc["function"]["name"] for doc in bfcl.tools(task)}
        assert {call.name for call in task.calls} <= names
        for doc in bfcl.tools(task):
            assert doc["function"]["parameters"]["type"] == "object"
            types = re.findall(r'"type": "(\w+)"', json.dumps(doc["function"]["parameters"]))
            assert set(types) <= json_types


def test_keys_differ_and_depend_on_the_task_alone():
    keys = [bfcl.task_key(task) for task in TASKS]
    assert len(set(keys)) == len(keys)
    assert keys == [bfcl.task_key(Task.from_json(task.to_json())) for task in TASKS]


def test_worked_examples_are_right_and_of_the_development_half():
    development = [task.turns[0] for task in tasks("development", "multiple")]
    plain = {task.id: task for task in tasks("all", "multiple")}
    for split in ("development", "test"):
        shown = tasks(split, "multiple", few_shot=3, seed=1)
        assert shown == tasks(split, "multiple", few_shot=3, seed=1)
        assert shown != tasks(split, "multiple", few_shot=3, seed=2)
        for task in shown:
            drawn = [turn.calls[0].name for turn in task.examples]
            assert len({*drawn, bfcl.alike(task)}) == 4  # each calls another function
            assert all(turn in development for turn in task.examples)
            offered = [doc["function"]["name"] for doc in bfcl.tools(task)]
            own = [doc["function"]["name"] for doc in bfcl.tools(plain[task.id])]
            assert offered[: len(own)] == own and {*drawn} < {*offered} and len({*offered}) == len(offered)
            assert single_turn.check(task, task.calls) == single_turn.check(plain[task.id], task.calls)
            assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task
    assert not any(task.examples for task in tasks("test", "multiple"))
    broken = [t.turns[0] for t in single_turn.load("live_simple", "development") if t.id in WITHOUT_ANSWER]
    shown = [turn for t in tasks("test", "live_simple", few_shot=44) for turn in t.examples]
    assert broken and not any(turn in shown for turn in broken)


@pytest.mark.parametrize("category", SINGLE)
def test_no_worked_example_shows_a_task_its_own_answer(category):
    for seed in range(3):
        for task in tasks("all", category, few_shot=3, seed=seed):
            called, drawn = {call.name for call in task.calls}, task.examples
            assert called.isdisjoint(call.name for turn in drawn for call in turn.calls), task.id
            assert len({turn.query for turn in (*drawn, task.turns[0])}) == 4, task.id


def test_no_worked_example_has_the_request_of_its_task():
    """Two development tasks ask the same and call different functions; each is shown nearly all others."""
    asked = "What is the sum of 133 and 34?"
    pair = [task for task in single_turn.load("live_simple") if task.turns[0].query == asked]
    assert len({*map(bfcl.alike, pair)}) == 2
    for task in pair:
        shown = single_turn.with_examples(task, 43, seed=0).examples
        assert asked not in {turn.query for turn in shown}


@pytest.mark.parametrize("category", ["multiple", "parallel_multiple", "live_multiple"])
def test_worked_calls_are_calls_of_the_functions_that_are_offered(category):
    shown = [task for split in ("development", "test") for task in tasks(split, category, few_shot=3)]
    for task in shown[:200]:
        offered = signatures(bfcl.tools(task))
        for call in (call for turn in (*task.examples, task.turns[0]) for call in turn.calls):
            assert bind(call, offered) == dict(call.arguments)


# ---- Worlds and rollouts -----------------------------------------------------------------------------------


def test_a_world_records_and_grades_once():
    task = some("parallel")[0]
    world = bfcl.make()
    world.reset(task)
    empty = world.fingerprint()
    for call in task.calls:
        assert world.step(call) == Observation("recorded", last_message=True)
    assert world.fingerprint() != empty and not world.score().success  # the turn has not ended
    world.end_turn()
    assert world.score().success and world.score().progress == 1
    with pytest.raises(ValueError, match="has only 1 turns: all have ended"):
        world.end_turn()
    world.reset(task)
    assert world.fingerprint() == empty
    answer = world.step(Call("os.system", {}))
    assert answer.error and json.loads(answer.text) == {"error": "There is no tool named 'os.system'."}
    world.close()


@pytest.fixture(scope="module")
def policy():
    return build.policy(ROOT / "models" / "tiny_qwen3")


@pytest.fixture(scope="module")
def env_pool():
    with ProcessPool("bfcl", workers=1, timeout=60.0) as pool:
        yield pool


class Script:
    """An engine that gives scripted messages."""

    batches = True

    def __init__(self, policy, messages):
        encode = lambda m: policy.tokenizer.encode(m, add_special_tokens=False)
        self._lines = [encode(m) + [policy.chat.stop_ids[0]] for m in messages]
        self.seen = []

    async def generate(self, requests):
        (request,) = requests
        self.seen.append(request.ids)
        ids = np.asarray(self._lines[len(self.seen) - 1], np.int32)
        return [Completion(ids, np.zeros(len(ids), np.float32), "stop", np.zeros(len(ids)))]

    def release(self, conversation_ids):
        pass


def play(policy, env_pool, task, messages, protocol="official"):
    """The group of one rollout, and the prompts that its engine saw."""
    engine = Script(policy, messages)
    limits = Limits(max_length=10**6, max_new_tokens=10, **bfcl.PROTOCOLS.get(protocol, {}))
    agent = Agent(engine, policy.chat, env_pool, bfcl.tools, limits, concurrency=1)
    (group,) = agent.rollout_groups([task], [[0]], 1.0)
    return group, engine.seen


@pytest.mark.parametrize("category", SINGLE)
def test_one_message_is_the_whole_rollout(policy, env_pool, category):
    task = next(t for t in single_turn.load(category, "development") if t.id not in WITHOUT_ANSWER)
    right = "\n".join(map(render_call, task.calls))
    wrong = f"{right}\n{render_call(task.calls[-1])}"
    groups = []
    for said, success in ((right, True), (wrong, False), ("I do not know.", False)):
        group, seen = play(policy, env_pool, task, [said])  # a second message would be missing
        (t,) = group.trajectories
        assert len(seen) == 1 and t.stop == "done" and t.outcome.success is success
        assert [s.call for s in t.steps] == [p.call for p in parse_calls(said)]
        assert policy.chat.decode(t.ids[t.mask]) == f"{said}<|im_end|>"
        groups.append(group)
    report = bfcl.report(groups[:1], env_pool.judge)
    assert report["benchmark"] == f"BFCL single_turn: {category}"
    assert report["scoring"] == "official ast_checker"
    assert (report["success"], report["by_task"], report["failures"]) == (1, {task.id: [1, 1]}, {})
    assert report["categories"] == {task.id: category} and report["alike"] == {task.id: bfcl.alike(task)}
    for group in groups[1:]:
        report = bfcl.report([group], env_pool.judge)
        assert report["success"] == 0 and sum(report["failures"].values()) == 1


def test_a_report_of_both_kinds_names_both(policy, env_pool):
    multi, single = tasks("development", "base", "simple")[0], tasks("development", "simple")[0]
    done = "\n".join(map(render_call, single.calls))
    groups = [play(policy, env_pool, t, said)[0] for t, said in ((multi, ["No."] * 9), (single, [done]))]
    report = bfcl.report(groups, env_pool.judge)
    assert report["benchmark"] == "BFCL multi_turn and single_turn: base, simple_python"
    assert report["scoring"] == "official multi_turn_checker and ast_checker"
    assert report["by_task"] == {multi.id: [0, 1], single.id: [1, 1]}


def test_an_unreadable_call_may_be_repeated_unless_the_protocol_is_official(policy, env_pool):
    task = some("simple_python")[0]
    right = render_call(task.calls[0])
    said = ["<tool_call>\nnonsense\n</tool_call>", right]
    (t,) = play(policy, env_pool, task, said, "")[0].trajectories
    assert t.outcome.success and len(t.steps) == 2
    (t,) = play(policy, env_pool, task, said[:1])[0].trajectories
    assert not t.outcome.success and t.stop == "done"
    (t,) = play(policy, env_pool, task, ["\n".join(said)], "")[0].trajectories
    assert t.outcome.success and t.stop == "done"


def test_worked_examples_and_system_messages_precede_the_query(policy, env_pool):
    plain = next(t for t in single_turn.load("live_multiple", "test") if t.system)
    (task,) = [t for t in tasks("test", "live_multiple", few_shot=2) if t.id == plain.id]
    right = "\n".join(map(render_call, task.calls))
    group, (prompt,) = play(policy, env_pool, task, [right])
    chat, text = policy.chat, policy.chat.decode(prompt)
    assert group.trajectories[0].outcome.success and group.trajectories[0].mask[: len(prompt)].sum() == 0
    parts = [task.system, *(p for e in task.examples for p in (e.query, *map(render_call, e.calls)))]
    places = [text.index(part) for part in (*parts, task.turns[0].query)]
    assert places == sorted(places) and text.count("<|im_start|>user") == 3
    first, second = task.examples
    pieces = chat.prompt(bfcl.tools(task), first.query, task.system) + chat.message(first.calls)
    pieces += chat.user(second.query) + chat.message(second.calls) + chat.user(task.turns[0].query)
    assert prompt.tolist() == pieces
    recorded = [[Observation("recorded")] * len(task.calls)]
    room = lambda length: Limits(max_length=length, max_new_tokens=400)
    assert reference_fits(room(len(prompt) + 2000), chat, bfcl.tools, task, recorded)
    assert not reference_fits(room(len(prompt) + 300), chat, bfcl.tools, task, recorded)


@pytest.mark.slow
def test_the_command_scores_single_turn_tasks(tmp_path, quick):
    output = tmp_path / "score.json"
    command = ["experiments/evaluate.py", "--model=models/tiny_qwen3", "--benchmark=bfcl"]
    run = lambda *more: forked.run([*command, *more], quick)
    asked = ["--category=live_parallel", "--split=development", "--max_length=1024", "--max_new_tokens=16"]
    done = run(*asked, "--few_shot=1", f"--output={output}")
    assert done.returncode == 0, done.stderr
    report = json.loads(output.read_text())
    assert [(row["category"], row["tasks"]) for row in report["scores"]] == [("live_parallel", 5)]
    told = report["protocol"]
    assert (told["scoring"], told["worked_examples"]) == ("official ast_checker", 1)
    assert (told["dtype"], told["call_timeout"]) == ("float32", 5.0)
    assert (report["trials"], report["invalid"]) == (5, 0)
    assert report["success"] == sum(s for s, _ in report["official"]["by_task"].values()) / 5
    assert " of 5 rollouts; 0 invalid ones left out\n" in done.stdout
    refused = run("--category=simpel")
    assert refused.stderr.startswith("Error: bfcl has no category 'simpel': it has base, miss_func")
    refused = run("--few_shot=1")
    assert refused.stderr.startswith("Error: Only single-turn tasks take worked examples")
