"""TextWorld: parsing commands, real games in their own virtual environment, exploration in them."""

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax import build, envs
from coevolve_jax import config as configs
from coevolve_jax.envs import textworld
from coevolve_jax.envs.base import task_key
from coevolve_jax.envs.textworld import commands, environment
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.explorers import scripted
from coevolve_jax.explorers.base import Episode, Limits
from coevolve_jax.synthesis.explore import explore, unguided
from coevolve_jax.synthesis.leakage import LeakGuard
from coevolve_jax.synthesis.validate import execute
from coevolve_jax.testing.environment import check_environment
from coevolve_jax.testing.explorer import check_explorer
from coevolve_jax.types import Call, Observation, Task, Turn
from tests.support.openai_server import OpenAIServer
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

PYTHON = str(ROOT / ".textworld" / "bin" / "python")
# The games that `make textworld` makes.
SETTINGS = {"games": 2, "difficulty": (1, 1), "train_split": "train", "eval_split": "development"}
SMALL = dict(limits=Limits(1, max_calls=4), rounds=1, steps=6)  # for the suite of explorers
installed = pytest.mark.skipif(
    not Path(PYTHON).exists(), reason="TextWorld is not set up: make textworld does it (it needs gcc)"
)


def act(*lines):
    return [Call("act", {"command": line}) for line in lines]


class House:
    """A made-up game: what is taken is a fact, and to look at a thing changes none."""

    def __init__(self, name):
        self.facts, self.won = frozenset(), False

    def act(self, call):
        command = call.arguments["command"]
        self.facts |= {command} if command.startswith("take") else set()
        return Observation(f"You {command}.")

    def close(self):
        pass


@pytest.mark.parametrize(
    "commands, reason",
    [
        (("take apple", "look at fridge"), "passed"),
        (("look at fridge", "take pear", "look at door", "take apple"), "passed"),
        (("take apple",), "answer_missing"),
        (("take apple", "look at door"), "answer_missing"),
        (("look at fridge", "take pear"), "facts_missing"),
        ((), "facts_missing"),
    ],
)
def test_a_turn_passes_with_its_facts_and_with_each_answer_that_changed_none(commands, reason, monkeypatch):
    monkeypatch.setattr(environment, "Game", House)
    asked = Turn("Take the apple and look at the fridge.", tuple(act("take apple", "look at fridge")))
    world = environment.Environment()
    world.reset(Task("t", "textworld", {"level": 1, "seed": 0}, (asked,)))
    for call in act(*commands):
        world.step(call)
    world.end_turn()
    assert (world.score().reason, world.score().success) == (reason, reason == "passed")


# --- Commands -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "query, won, reason",
    [
        ("Win.", True, "passed"),
        ("Win.", False, "quest_not_won"),
        ("Take the apple.", True, "facts_missing"),
        ("Take the apple.", False, "facts_missing"),
    ],
)
def test_the_goal_of_a_game_grades_its_own_quest_and_no_new_task_in_its_house(
    query, won, reason, monkeypatch
):
    monkeypatch.setattr(environment, "Game", House)
    monkeypatch.setattr(environment.games, "quest", lambda name: ("Win.", ("take apple",)))
    world = environment.Environment()
    scenario = {"level": 1, "seed": 0, "quest": True}
    world.reset(Task("t", "textworld", scenario, (Turn(query, tuple(act("take apple"))),)))
    world._game.won = won
    world.end_turn()
    assert world.score().reason == reason


@pytest.mark.parametrize(
    "command, word",
    [
        ("save", "no verb 'save'"),
        ("restore", "no verb"),
        ("undo", "no verb"),
        ("quit", "no verb"),
        ("tw-print state", "no verb 'tw-print'"),
        ("look. save", "letters, digits"),
        ("look then save", "one command at a time"),
        ("take apple AND pear", "one command at a time"),
        ("take apple, pear", "letters, digits"),
        ("look\x00", "letters, digits"),
        ("", "letters, digits"),
        ("take " + "x" * 100, "at most 100"),
        (7, "must be text"),
    ],
)
def test_only_one_command_of_the_game_itself_gets_through(command, word):
    (call,) = act(command)
    with pytest.raises(ValueError, match=word):
        commands.read(call)
    assert commands.verb(call) == commands.wording(call) == ""


@settings(max_examples=50, deadline=None)
@given(st.one_of(st.text(), st.text(alphabet="look then.save,\n>", max_size=30)))
def test_whatever_gets_through_is_one_line_that_begins_with_a_verb(text):
    (call,) = act(text)
    verb = commands.verb(call)
    if verb:
        line = commands.read(call)
        assert verb in commands.VERBS and line.isprintable() and line.isascii() and len(line) <= 100
        assert not set(line) & set('.,;:!?">') and not {"then", "and"} & set(line.lower().split())


def test_a_command_in_the_words_of_a_user():
    said = {
        "take old key from wooden box": "take the old key from the wooden box",
        "unlock type X safe with type X key": "unlock the type X safe with the type X key",
        "Open the door": "Open the door",
        "go east": "go east",
        "look": "look around",
        "inventory": "tell me what you are carrying",
    }
    assert {line: commands.wording(*act(line)) for line in said} == said
    assert commands.wording(Call("jump", {})) == ""


def test_settings_that_make_no_sense_are_named():
    for wrong, why in [
        ({"difficulty": (0, 2)}, r"difficulty is \(0, 2\)"),
        ({"difficulty": (3, 2)}, "lowest and the highest"),
        ({"difficulty": (1, 9)}, "from 1 to 8"),
        ({"games": 0}, "games is 0"),
    ]:
        with pytest.raises(ValueError, match=why):
            textworld.scenarios("train", wrong)
    with pytest.raises(ValueError, match="no split 'dev': use one of train, development, test"):
        textworld.tasks("dev", {})


# --- Games ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def family():
    return envs.load("textworld", PYTHON)


@pytest.fixture(scope="module")
def train(family):
    return family.scenarios("train", SETTINGS)


@pytest.fixture(scope="module")
def pool():
    with ProcessPool("textworld", workers=2, timeout=60.0, python=PYTHON) as pool:
        yield pool


@installed
def test_it_conforms():
    check_environment("textworld", PYTHON, SETTINGS, timeout=60.0, allowed=("numpy",))


@installed
def test_a_seed_gives_the_same_house_again_and_the_splits_share_no_seed(family, train):
    code = (
        "import json\nfrom coevolve_jax.envs.textworld import commands, games\nname = games.Name(1, 0)\n"
        "house, kept = games.house(name), json.loads(name.path.with_suffix('.json').read_text())\n"
        "made = json.loads(json.dumps(house.serialize()))\n"
        "print(made['world'] == kept['world'], made['infos'] == kept['infos'], house.verbs == "
        "sorted(commands.VERBS))"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([PYTHON, "-P", "-c", code], capture_output=True, text=True, env=environ)
    assert done.stdout.split() == ["True"] * 3, done.stderr
    held_out = family.scenarios("development", SETTINGS, apart_from="train")
    seeds = [{s.scenario["seed"] for s in scenarios} for scenarios in (train, held_out)]
    assert all(seeds) and not seeds[0] & seeds[1]
    assert max(textworld.FIRST_SEED.values()) + textworld.MAX_GAMES < 2**32


@installed
def test_a_harder_level_is_a_larger_house(family):
    easy, hard = (
        family.scenarios("train", {**SETTINGS, "games": 1, "difficulty": (n, n)})[0] for n in (1, 2)
    )
    assert (easy.scenario["level"], hard.scenario["level"]) == (1, 2)
    assert family.task_key(easy) != family.task_key(hard)


@installed
def test_a_turn_is_passed_by_the_facts_that_it_gains(train, pool):
    """Other actions and other words do not matter; without the last step the turn fails."""
    (first, *_), (second, *_) = (pool.options(pool.reset([s])) for s in train)
    changing = [
        (scenario, call)
        for scenario, calls in zip(train, (first, second))
        for call in calls
        if call.arguments["command"].split()[0] in ("open", "close", "take", "drop")
    ]
    scenario, call = changing[0]
    task = dataclasses.replace(scenario, turns=(Turn("Do it.", (call,)), Turn("Look.", tuple(act("look")))))
    env_ids = pool.reset([task] * 3)
    shouted = [Call("act", {"command": call.arguments["command"].replace(" ", "  the ", 1)})]
    for turns in (
        (act("inventory") + shouted, [call], act("inventory")),
        (act("look"), act("look"), act("inventory")),
    ):
        pool.step(env_ids, turns)
        pool.end_turn(env_ids)
    good, again, idle = pool.score(env_ids)
    pool.close(env_ids)
    assert good.success and again.success
    assert not idle.success and idle.progress == 0 and idle.reason == "facts_missing"


@installed
def test_all_that_a_game_says_it_would_take_it_takes(train, pool):
    """The tracked facts match the game's: otherwise its parser would refuse."""
    rng = np.random.default_rng(0)
    for scenario in train:
        (env_id,) = pool.reset([scenario])
        played = []
        for _ in range(12):
            (options,) = pool.options([env_id])
            runs = pool.execute([(scenario, [*played, option]) for option in options])
            refused = [o for o, run in zip(options, runs) if run.observations[-1].error]
            assert options and not refused
            played.append(options[rng.integers(len(options))])
            pool.step([env_id], [played[-1:]])
        pool.close([env_id])


@installed
def test_a_copy_of_a_quest_is_a_leak_and_a_training_task_is_none(family, train):
    quests = family.tasks("development", SETTINGS)
    guard = LeakGuard(quests, features=family.features)
    copy = dataclasses.replace(train[0], id="copy", turns=(Turn("Tidy up.", quests[0].calls),))
    own = dataclasses.replace(
        train[0], id="own", turns=(Turn("Look around.", tuple(act("look", "go east"))),)
    )
    assert guard.check(copy) == "near_evaluation" and guard.check(own) is None


@installed
def test_a_quest_ends_when_it_is_won(family, pool):
    (task, *_) = family.tasks("development", SETTINGS)
    ((answers, outcome),) = execute(pool, [task])
    assert outcome.success and answers[-1][-1].text.endswith("*** The End ***")
    env_ids = pool.reset([task])
    pool.step(env_ids, [task.calls])
    assert pool.options(env_ids) == [[]]
    ((after,),) = pool.step(env_ids, [act("look")])
    pool.close(env_ids)
    assert after.error and json.loads(after.text) == {"error": "The game has ended."}


# --- The explorer ---------------------------------------------------------------------------------


@installed
def test_the_scripted_explorer_keeps_its_contract_here(family, train, pool):
    check_explorer(scripted.make(None, family), family.tools, pool, train * 2, **SMALL)


@installed
def test_a_language_model_works_in_all_four_roles_and_finds_the_options_in_its_prompt(family, train, pool):
    with OpenAIServer() as server:
        config = configs.load_file(ROOT / "configs" / "textworld_tiny.py", "explorer=llm")
        config.environment.python = PYTHON
        config.explorer.update(base_url=server.url, cache="", timeout=60.0)
        roles = build.explorer(config)
        check_explorer(roles, family.tools, pool, train * 2, deterministic=False, **SMALL)
        explored = [body["messages"][-1]["content"] for body in server.seen if "next action" in str(body)]
    assert explored and all('{"tool": "act", "arguments": {"command": "look"}}' in text for text in explored)
    asked = {name.partition("/")[2] for name in roles.costs if name.startswith("llm_requests")}
    assert asked == {"reflect", "explore", "abstract", "judge"}
    assert not any(name.startswith("llm_faults") for name in roles.costs)


@installed
def test_a_verb_in_focus_is_practised(family, train, pool):
    roles, rng = scripted.make(None, family), np.random.default_rng(0)
    free = [unguided(train[0], f"free{n}") for n in range(6)]
    guided = [dataclasses.replace(c, signal="rare", focus_pattern=("open", "close")) for c in free]
    shares = []
    for contexts in (guided, free):
        found = explore(roles.explorer, family.tools, pool, contexts, rounds=1, steps=8, rng=rng)
        steps = [t for e in found for t in e.triplets]
        assert steps and not any(t.observation.error for t in steps)
        shares.append(np.mean([family.action_pattern(t.call) in ("open", "close") for t in steps]))
    assert shares[0] > 1.5 * shares[1]


def test_on_a_boundary_the_task_is_followed_and_varied():
    family = envs.load("textworld")  # its light functions need no TextWorld
    reference = tuple(act("open chest", "take coin", "drop coin"))
    task = dataclasses.replace(unguided(None, "c"), signal="boundary", focus_pattern=("open",))
    options = act("look", "open chest", "open door", "go east")
    context = dataclasses.replace(task, task=build_task(reference))
    explorer, rng = scripted.make(None, family).explorer, np.random.default_rng(0)
    chosen = [
        explorer.act([Episode(context, [commands.ACT], (), round, rng, options)])[0].arguments["command"]
        for round in (0, 3)
        for _ in range(200)
    ]
    first, later = chosen[:200], chosen[200:]
    assert first.count("open chest") > 120 > later.count("open chest") > later.count("go east")
    avoided = dataclasses.replace(context, avoid=('act({"command": "open chest"}): no',))
    for _ in range(50):
        (call,) = explorer.act([Episode(avoided, [commands.ACT], (), 0, rng, options)])
        assert call.arguments["command"] != "open chest"


def build_task(calls):
    scenario = {"level": 1, "seed": 0}
    return dataclasses.replace(
        build.Task("t", "textworld", scenario, (Turn("Do it.", calls),)), description="made up"
    )


def test_tasks_of_two_houses_are_two_tasks():
    one = build_task(tuple(act("look")))
    assert task_key(one) != task_key(dataclasses.replace(one, scenario={"level": 1, "seed": 1}))
    config = configs.load_file(ROOT / "configs" / "textworld_tiny.py")
    configs.check(config)
    assert config.environment.name == "textworld"
