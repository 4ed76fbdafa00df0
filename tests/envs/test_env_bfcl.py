"""BFCL's tools as an environment: whitelist, grading, fingerprints, splits."""

import copy
import dataclasses
import decimal
import json
import os
import subprocess
import sys

import mpmath
import numpy as np
import pytest
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker as checker
from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_utils

from coevolve_jax.envs import bfcl
from coevolve_jax.envs.bfcl import benchmark, environment, toolsets
from coevolve_jax.types import Call, Task, Turn

BASE = benchmark.load()
FILES = BASE[0]  # GorillaFileSystem, TwitterAPI
ALL = Task("all", "bfcl", bfcl.scenario(toolsets.TOOLSETS))


def changed(task, **keys):
    """The task with other values in its scenario."""
    return dataclasses.replace(task, scenario={**task.scenario, **keys})


def replay(task, turns=None):
    """The outcome after each turn's calls (default: the reference)."""
    world = environment.Environment()
    world.reset(task)
    for calls in turns if turns is not None else [turn.calls for turn in task.turns]:
        for call in calls:
            world.step(call)
        world.end_turn()
    return world.score()


def without_last_call(task):
    turns = [list(turn.calls) for turn in task.turns]
    [calls for calls in turns if calls][-1].pop()
    return turns


def run(task, *calls):
    """Observations of the calls in a fresh world, and that world."""
    world = environment.Environment()
    world.reset(task)
    return [world.step(call) for call in calls], world


def turns_of(*calls):
    return (Turn("do it", calls),)


@pytest.mark.parametrize("category", benchmark.CATEGORIES)
def test_reference_passes_and_without_its_last_call_fails(category):
    tasks = benchmark.load(category)
    assert [t.id for t in tasks] == [f"{category}_{i}" for i in range(200)]
    assert sum(replay(t).reward for t in tasks) == 200
    assert sum(replay(t, without_last_call(t)).reward for t in tasks) == 0


def test_observations_equal_those_of_the_official_executor():
    compared = 0
    for task in BASE[::5]:
        calls = list(task.calls)
        observations, _ = run(task, *calls)
        official, _ = multi_turn_utils.execute_multi_turn_func_call(
            [toolsets.render(c) for c in calls],
            task.scenario["initial_state"],
            task.scenario["toolsets"],
            "observe",
            task.id,
        )
        assert [o.text for o in observations] == official
        compared += len(calls)
    for name in [n for n in vars(multi_turn_utils) if n.startswith("observe_")]:
        delattr(multi_turn_utils, name)
    assert compared > 150


def test_grading_follows_the_official_checker_turn_by_turn():
    """Under random damage to the reference both verdicts and both error types agree."""
    rng = np.random.default_rng(0)
    seen = set()
    for task in BASE[::2]:
        turns = [list(t.calls) for t in task.turns]
        for calls in turns:
            if calls and rng.random() < 0.4:
                calls.pop(int(rng.integers(len(calls))))
        mine = replay(task, turns)
        official = benchmark.official_check(task.id, [[calls] for calls in turns])
        assert mine.success == official["valid"]
        assert mine.reason == (official["error_type"] or "passed")
        seen.add(mine.reason)
    assert seen == {
        "passed",
        "multi_turn:empty_turn_model_response",
        "multi_turn:instance_state_mismatch",
        "multi_turn:execution_response_mismatch",
    }


def test_progress_counts_turns_before_the_first_failure():
    task = next(t for t in BASE if len(t.turns) == 4 and all(turn.calls for turn in t.turns))
    turns = [t.calls for t in task.turns]
    assert replay(task, [*turns[:2], [], turns[3]]).progress == 0.5
    unfinished = replay(task, turns[:3])
    assert (unfinished.progress, unfinished.reward, unfinished.reason) == (0.75, 0.0, "turns not finished")
    whole = replay(task)
    assert (whole.progress, whole.reward, whole.success, whole.reason) == (1.0, 1.0, True, "passed")


def test_information_calls_count_and_may_come_from_an_earlier_turn():
    ls, pwd = Call("ls", {}), Call("pwd", {})
    task = dataclasses.replace(FILES, turns=(Turn("a", (ls,)), Turn("b", (pwd,))))
    assert not replay(task, [[pwd], [pwd]]).success
    assert replay(task, [[ls, pwd], [ls]]).success
    assert replay(task, [[ls, pwd], []]).reason == "multi_turn:empty_turn_model_response"
    assert replay(dataclasses.replace(task, turns=(Turn("a", ()), Turn("b", (pwd,)))), [[], [pwd]]).success


def test_what_cannot_be_scored_or_ended_says_so():
    world = environment.Environment()
    world.reset(benchmark.scenarios("train")[0])
    with pytest.raises(ValueError, match="bare scenario"):
        world.score()
    with pytest.raises(ValueError, match="has only 0 turns"):
        world.end_turn()
    with pytest.raises(ValueError, match="environment 'mars'"):
        world.reset(dataclasses.replace(FILES, environment="mars"))
    with pytest.raises(ValueError, match="initial state"):
        world.reset(changed(FILES, initial_state={"GorillaFileSystem": {"root": 5}}))


def test_tools_are_json_schema_documents():
    docs = bfcl.tools(ALL)
    assert len(docs) == 128 and len({d["function"]["name"] for d in docs}) == 128

    def types(schema):
        yield schema["type"]
        for child in schema.get("properties", {}).values():
            yield from types(child)
        if "items" in schema:
            yield from types(schema["items"])

    for doc in docs:
        function = doc["function"]
        assert doc["type"] == "function" and set(function) == {"name", "description", "parameters"}
        assert "This tool belongs to" not in function["description"]
        assert set(types(function["parameters"])) <= {
            "object",
            "string",
            "number",
            "integer",
            "array",
            "boolean",
        }
        assert set(function["parameters"]["required"]) <= set(function["parameters"]["properties"])
    with pytest.raises(ValueError, match="Unknown toolset 'os': use some of GorillaFileSystem"):
        bfcl.tools(changed(ALL, toolsets=["os"]))


def test_excluded_tools_are_neither_offered_nor_callable():
    task = changed(dataclasses.replace(FILES, turns=()), excluded=["ls"])
    assert "ls" not in {d["function"]["name"] for d in bfcl.tools(task)}
    (observation,), _ = run(task, Call("ls", {}))
    assert observation.error and "no tool named 'ls'" in observation.text


ESCAPES = [
    "__import__('os').system('touch {0}')",
    "__class__",
    "__init__",
    "_load_scenario",
    "_navigate_to_directory",
    "cd.__globals__",
    "root",
    "_current_dir",
    "ls()",
    "ls (",
    "ls ",
    "os.system",
    "eval",
    "exec",
    "",
    "a\x00b",
    "x" * 50_000_000,
    None,
    3,
    ["ls"],
    {"a": 1},
]


@pytest.mark.parametrize("name", ESCAPES, ids=lambda n: str(n)[:20])
def test_no_name_outside_the_whitelist_runs(name, tmp_path):
    trap = tmp_path / "trap"
    name = name.replace("{0}", str(trap)) if isinstance(name, str) else name
    before = run(FILES)[1].fingerprint()
    (observation,), world = run(FILES, Call(name, {}))
    assert observation.error and observation.valid and json.loads(observation.text)["error"]
    assert len(observation.text) < 300
    assert world.fingerprint() == before and not trap.exists()
    with pytest.raises(ValueError):
        toolsets.render(Call(name, {}))


def deep(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "arguments",
    [
        {"content": "x" * 50_000_000},
        {"content": deep(100_000)},
        {"content": deep(500)},
        {"content": float("nan")},
        {"content": float("inf")},
        {"content": 10**5000},
        {"content": {1, 2}},
        {"content": object()},
        {"content": "a", "__class__": 1},
        {"content": "a", "self": 1},
        {"content": "a", "file_name=__import__('os')": 1},
        {},
        [],
        "content",
        None,
        3,
        [["content", "a"]],
    ],
    ids=lambda a: str(type(a).__name__),
)
def test_bad_arguments_are_refused(arguments):
    before = run(FILES)[1].fingerprint()
    (observation,), world = run(FILES, Call("echo", arguments))
    assert observation.error and observation.valid and json.loads(observation.text)["error"]
    assert len(observation.text) < 400 and world.fingerprint() == before


def test_code_in_arguments_stays_a_string(tmp_path):
    trap = tmp_path / "trap"
    code = f"__import__('os').system('touch {trap}')"
    for text in [
        code,
        f"ls({code})",
        f"'+{code}+'",
        f"') or {code} or ('",
        "touch(file_name='x')",
        "{0.__class__}",
    ]:
        (observation,), _ = run(FILES, Call("echo", {"content": text}))
        assert json.loads(observation.text) == {"terminal_output": text}
        benchmark.official_check(FILES.id, [[[Call("echo", {"content": text})]]] + [[]] * 3)
    assert not trap.exists()
    with pytest.raises(ValueError):
        toolsets.render(Call("echo", {f"content={code}, file_name": "a"}))


def test_wrong_parameters_are_named():
    observations, _ = run(FILES, Call("mv", {"source": "a"}), Call("ls", {"all": True}))
    assert "mv needs the parameter 'destination'" in observations[0].text
    assert "ls has no parameter 'all'" in observations[1].text


def test_exceptions_of_tools_are_observations():
    observations, _ = run(
        ALL,
        Call("add", {"a": "x", "b": 1}),
        Call("power", {"base": 10, "exponent": 5000}),
        Call("round_number", {"number": [], "decimal_places": "a"}),
        Call("si_unit_conversion", {"value": 1, "unit_in": [], "unit_out": {}}),
        Call("cd", {"folder": 3}),
        Call("power", {"base": 0, "exponent": -1}),
    )
    assert all(o.error and o.valid and "error" in json.loads(o.text) for o in observations)


def test_equal_tasks_give_equal_worlds_and_stay_untouched():
    for task in BASE[::20]:
        before = copy.deepcopy(task.to_json())
        worlds = [run(task)[1] for _ in range(8)]
        assert len({w.fingerprint() for w in worlds}) == 1
        fresh = worlds[1].fingerprint()
        for call in task.calls:
            worlds[0].step(call)
        assert worlds[1].fingerprint() == fresh == run(task)[1].fingerprint()
        assert task.to_json() == before


def test_fingerprints_are_equal_exactly_where_states_are():
    rng = np.random.default_rng(1)
    equal = different = 0
    for task in BASE[::4]:
        worlds = []
        for _ in range(3):
            keep = [c for c in task.calls if rng.random() < 0.7]
            worlds.append(run(task, *keep)[1])
        for one in worlds:
            for other in worlds:
                same = checker.state_checker(one._world, other._world)["valid"]
                assert same == (one.fingerprint() == other.fingerprint())
                equal, different = equal + same, different + (not same)
    assert equal > 150 and different > 50


def test_fingerprint_knows_values_by_equality():
    same = [
        (1, 1.0),
        (True, 1),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({3, 1}, {1, 3}),
        ([1, [2.0]], [1, [2]]),
    ]
    differ = [
        (1, "1"),
        ([1], (1,)),
        ("a,b", ["a", "b"]),
        (None, "None"),
        ({"a": 1}, {"a": 2}),
        (1, 1.5),
        ([], {}),
    ]
    assert all(environment._canonical(a) == environment._canonical(b) and a == b for a, b in same)
    assert all(environment._canonical(a) != environment._canonical(b) and a != b for a, b in differ)


def test_fingerprint_ignores_the_way_to_a_directory_tree():
    """Children of a moved directory keep their old parent; BFCL does not compare parents."""

    def mkdir(name):
        return Call("mkdir", {"dir_name": name})

    inside = (Call("cd", {"folder": "a"}), mkdir("b"), Call("cd", {"folder": "b"}), mkdir("x"))
    _, moved = run(
        FILES,
        mkdir("a"),
        *inside,
        Call("cd", {"folder": ".."}),
        Call("cd", {"folder": ".."}),
        Call("mv", {"source": "a", "destination": "c"}),
    )
    _, made = run(FILES, mkdir("c"), Call("cd", {"folder": "c"}), *inside[1:])
    assert checker.state_checker(moved._world, made._world)["valid"]
    assert moved.fingerprint() == made.fingerprint() != run(FILES, mkdir("c"))[1].fingerprint()


def test_a_directory_that_contains_itself_does_no_harm():
    loop = (Call("mkdir", {"dir_name": "a"}), Call("cp", {"source": "a", "destination": "a"}))
    task = dataclasses.replace(FILES, turns=turns_of(*loop))
    (*_, found), world = run(task, *loop, Call("find", {}))
    assert found.error and "recursion" in found.text
    assert world.fingerprint() == run(task, *loop)[1].fingerprint() != run(task, loop[0])[1].fingerprint()
    assert replay(task).reason == "multi_turn:instance_state_mismatch"


def test_worlds_share_no_default_arguments_and_no_precision():
    login = [
        Call("authenticate_twitter", {"username": "john", "password": "john123"}),
        Call("post_tweet", {"content": "hi"}),
    ]
    _, first = run(ALL, *login, Call("mention", {"tweet_id": 0, "mentioned_usernames": ["@eve"]}))
    observations, _ = run(ALL, *login)
    assert json.loads(observations[-1].text)["mentions"] == []
    run(
        ALL,
        Call("logarithm", {"value": 3, "base": 7, "precision": 60}),
        Call("square_root", {"number": 3, "precision": 90}),
    )
    run(ALL, Call("ls", {}))
    assert (mpmath.mp.dps, decimal.getcontext().prec) == (15, 28)


def test_long_context_worlds_share_no_extension():
    scenario = benchmark.scenarios("train", ["TravelAPI"], "multi_turn_long_context")[0]
    short = benchmark.scenarios("train", ["TravelAPI"])[0]
    _, world = run(scenario)
    before = world.fingerprint()
    assert before != run(short)[1].fingerprint()
    for card in world._world["TravelAPI"].credit_card_list.values():
        card["balance"] = -1
    assert world.fingerprint() != before == run(scenario)[1].fingerprint()


def test_age_does_not_depend_on_the_day_of_the_run():
    def verify(born):
        user = {"user_first_name": "A", "user_last_name": "B"}
        arguments = {"first_name": "A", "last_name": "B", "date_of_birth": born, "passport_number": "US1"}
        (observation,), _ = run(
            changed(ALL, initial_state={"TravelAPI": user}),
            Call("verify_traveler_information", arguments),
        )
        return json.loads(observation.text)["verification_status"]

    assert verify("2008-03-23") and not verify("2008-03-24")
    assert toolsets.TODAY.strftime("%Y-%m-%d") == "2026-03-23"


def test_positional_arguments_get_the_names_of_the_signature():
    assert toolsets.parse("sort('a.txt')") == Call("sort", {"file_name": "a.txt"})
    assert toolsets.parse("mv('a', destination='b')") == Call("mv", {"source": "a", "destination": "b"})
    # BFCL's doc of this tool lists the cost before the booking; Python binds by the signature.
    insurance = toolsets.parse("purchase_insurance('t', 'type', 'booking', 12.5, 'card')")
    assert insurance.arguments["booking_id"] == "booking" and insurance.arguments["insurance_cost"] == 12.5
    for text in [
        "ls(True, False)",
        "mv('a', source='b')",
        "rm(**{})",
        "os.system('x')",
        "ls(a=b)",
        "nope()",
        "ls",
        "echo(content=ls())",
        "ls(",
        "ls(b=1)",
        "echo(content=f'{1}')",
    ]:
        with pytest.raises(ValueError, match="no BFCL call"):
            toolsets.parse(text)


def test_render_and_parse_are_inverse():
    calls = [call for task in BASE for call in task.calls]
    assert all(toolsets.parse(toolsets.render(call)) == call for call in calls)
    odd = Call("echo", {"content": "a'b\"c\\\n(", "file_name": None})
    assert toolsets.parse(toolsets.render(odd)) == odd


def test_official_check_leaves_no_world_behind():
    before = set(vars(multi_turn_utils))
    reference = [[list(t.calls)] for t in FILES.turns]
    assert benchmark.official_check(FILES.id, reference) == {
        "valid": True,
        "error_type": "",
        "error_message": "",
    }
    assert benchmark.official_check(FILES.id, reference[:1])["error_type"] == "multi_turn:force_terminated"
    refused = [[[*reference[0][0], Call("__import__", {}), Call("add", {"a": 1, "b": 1}), Call("ls", "a")]]]
    assert benchmark.official_check(FILES.id, refused + reference[1:])["valid"]
    assert benchmark._render_or_refuse(Call("add", {"a": 1, "b": 1}), ("ls",)) == "refused_call()"
    assert set(vars(multi_turn_utils)) == before
    with pytest.raises(ValueError, match="BFCL has no task"):
        benchmark.official_check("multi_turn_base_200", [])
    with pytest.raises(ValueError, match="Unknown BFCL category"):
        benchmark.official_check("simple_1", [])


def with_arguments(task, name, **arguments):
    """The reference calls per turn and step; calls of the tool `name` also get these arguments."""
    change = lambda c: dataclasses.replace(c, arguments={**c.arguments, **arguments}) if c.name == name else c
    return [[list(map(change, turn.calls))] for turn in task.turns]


def test_official_check_changes_no_later_verdict():
    """A tool of BFCL changes a default argument for the whole process when a tweet mentions nobody."""
    task = BASE[5]
    mentioning = with_arguments(task, "post_tweet")
    mentioning[2][0].append(Call("mention", {"tweet_id": 0, "mentioned_usernames": ["@eve"]}))
    assert not benchmark.official_check(task.id, mentioning)["valid"]
    assert benchmark.official_check(task.id, with_arguments(task, "post_tweet", mentions=[]))["valid"]


def test_official_check_changes_no_later_world():
    """The call pays for a flight with a card that all long contexts start with."""
    task = benchmark.load("multi_turn_long_context")[151]
    before = run(task)[1].fingerprint()
    benchmark.official_check(task.id, with_arguments(task, "book_flight", card_id="1234567812345678"))
    assert run(task)[1].fingerprint() == before


def test_splits_are_fixed_stratified_and_disjoint():
    train, test = benchmark.split("train"), benchmark.split("evaluation")
    assert train | test == set(range(200)) and not train & test
    for block in range(4):
        assert sum(block * 50 <= i < block * 50 + 50 for i in train) == 25
    # A new split invalidates all comparisons
    assert sorted(train)[:10] == [1, 2, 3, 4, 5, 12, 13, 14, 17, 19]
    assert benchmark.split("sequential_train") == set(range(100))
    assert benchmark.split("sequential_test") == set(range(100, 200))
    for category in benchmark.CATEGORIES:  # an index is nearly the same task in every category
        sides = {
            name: {int(s.id.rpartition("_")[2]) for s in benchmark.scenarios(name, category=category)}
            for name in ("train", "evaluation")
        }
        assert sides == {"train": train, "evaluation": test}
    with pytest.raises(
        ValueError, match="Unknown split 'dev': use one of train, evaluation, development, test"
    ):
        benchmark.split("dev")


@pytest.mark.parametrize("category", benchmark.CATEGORIES)
def test_what_stands_on_both_sides_of_the_splits(category):
    """The page's section on splits names these counts and tasks."""
    begun = lambda scenario: {start for start in benchmark.starts(scenario) if json.loads(start)[1]}
    all_begun = {s: [begun(t) for t in benchmark.scenarios(s, category=category)] for s in benchmark.SPLITS}
    train = set().union(*all_begun["train"])
    shared = {side: sum(not own.isdisjoint(train) for own in found) for side, found in all_begun.items()}
    assert (shared["test"], shared["development"], len(all_begun["test"])) == (12, 2, 50)
    known, pairs = benchmark.load(category), []
    wholes = [(t.scenario["toolsets"], t.scenario["initial_state"]) for t in known]
    for parts in (wholes, [task.calls for task in known]):
        same = [(i, j) for i in range(200) for j in range(i + 1, 200) if parts[i] == parts[j]]
        pairs.append([pair for pair in same if len(benchmark.split("train") & {*pair}) == 1])
    assert pairs == [[(100, 104)], [(107, 136), (120, 124)]]
    assert {100, 107, 124} <= benchmark.split("train") and 120 in benchmark.split("development")
    assert {104, 136} <= benchmark.split("test")


def test_held_out_scenarios_begin_as_no_training_scenario():
    """The page's section on splits names the counts."""
    train = set().union(*map(benchmark.starts, benchmark.scenarios("train")))
    for side, count in (("development", 41), ("test", 27)):
        found = bfcl.scenarios(side, apart_from="train")
        assert len(found) == count and all(train.isdisjoint(benchmark.starts(s)) for s in found)


def test_scenarios_are_bare_and_restricted():
    scenarios = benchmark.scenarios("train", ["TwitterAPI", "MathAPI"])
    assert 0 < len(scenarios) < 100
    for scenario in scenarios:
        assert (
            scenario.turns == ()
            and scenario.scenario["excluded"] == []
            and set(scenario.scenario["toolsets"]) <= {"TwitterAPI", "MathAPI"}
        )
        start = scenario.scenario
        assert set(start["initial_state"]) <= set(start["toolsets"]) and scenario.id.startswith("scenario_")
    with pytest.raises(ValueError, match="Unknown toolset 'Twitter'"):
        benchmark.scenarios("train", ["Twitter"])
    with pytest.raises(ValueError, match="Unknown BFCL category 'base'"):
        benchmark.scenarios("train", category="base")
    assert (
        benchmark.scenarios("test", category="multi_turn_long_context")[0].environment == "bfcl_long_context"
    )


def test_tasks_survive_json():
    for task in BASE[::10]:
        assert Task.from_json(json.loads(json.dumps(task.to_json()))) == task


def test_import_brings_neither_jax_nor_folders():
    code = (
        "import sys; from coevolve_jax.envs import bfcl, worker; bfcl.warm_up(); "
        "print('jax' in sys.modules, 'bfcl_eval.utils' in sys.modules)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert out.stdout.split() == ["False", "False"]
