"""The scripted explorer's choices: the next call, its probability, and the goals that it forms."""

import dataclasses
import json
from collections import Counter

import numpy as np
import pytest

from coevolve_jax.explorers.base import Episode, Goal, Limits
from coevolve_jax.explorers.evidence import signature
from coevolve_jax.explorers.plans import fulfilled, upcoming
from coevolve_jax.explorers.scripted import arguments
from coevolve_jax.explorers.scripted.abstractor import (
    SIZE_SHARES,
    TURN_SHARES,
    Abstractor,
    candidates,
    describe,
    instruction,
    propose_goals,
    turn_shares,
    word,
)
from coevolve_jax.explorers.scripted.arguments import NOUNS, OPTIONAL, Bank, draw, fill, harvest_state, vary
from coevolve_jax.explorers.scripted.explorer import (
    Explorer,
    changes,
    choose,
    preferences,
    remedies,
    retry,
)
from coevolve_jax.explorers.scripted.tools import allows, named_values, toolbox
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.types import Call, Observation, Triplet
from tests.support.explorer_cases import exploration, file_task

DRAWS = 3000


def pattern(call):
    return call.name


def schema(name, required=(), optional=(), **described):
    properties = {p: {"type": "string", **described.get(p, {})} for p in (*required, *optional)}
    return {
        "type": "function",
        "function": {"name": name,
            "parameters": {"type": "object", "properties": properties, "required": list(required)}},
    }  # fmt: skip


def step(index, name, arguments=None, error=None, round=0):
    answer = Observation(error or "{}", error is not None)
    return Triplet(index, round, Call(name, arguments or {}), answer)


def episode(signal=None, focus=(), history=(), round=0, options=(), avoid=(), tools=(), task=None, seed=0):
    context = dataclasses.replace(
        unguided(task or file_task(), "c"), signal=signal, focus_pattern=focus, avoid=avoid
    )
    return Episode(context, tools, tuple(history), round, np.random.default_rng(seed), options)


# Exploration


def test_the_reference_goes_on_behind_its_actions_whatever_their_arguments():
    a, b, c = (Call(name, {"x": 1}) for name in "abc")
    said = lambda *names: [step(i, name, {"x": i + 7}) for i, name in enumerate(names)]
    after = lambda *names: upcoming([a, b, a, c], said(*names), pattern)
    assert [after(), after("a"), after("a", "z", "b"), after("b")] == [a, b, a, a]
    assert [after("a", "b", "a"), after("a", "b", "a", "c"), after(*"abacz")] == [c, None, None]


def test_a_plan_is_fulfilled_by_its_calls_as_they_are_and_by_any_call_of_a_named_action_in_order():
    steps = [step(i, name, {"x": x}) for i, (name, x) in enumerate([("a", 1), ("b", 1), ("a", 2), ("c", 9)])]
    a, other = Call("a", {"x": 2}), Call("a", {"x": 3})
    assert fulfilled([a, "c"], steps, pattern) == (2, 3)
    assert fulfilled(["a", "b", a], steps, pattern) == (0, 1, 2)
    assert fulfilled(["b", "a", "c"], steps, pattern) == (1, 2, 3)
    assert fulfilled([other], steps, pattern) == fulfilled(["c", "a"], steps, pattern) == ()
    assert fulfilled([], steps, pattern) == ()


def planned(e, *plan):
    return dataclasses.replace(e, context=dataclasses.replace(e.context, plan=plan))


def test_the_plan_comes_first_and_then_free_exploration():
    a, b = Call("a", {"x": 2}), Call("b", {"x": 0})
    e = lambda *history: planned(episode(options=options(a=9, b=1, c=1), history=history), a, "b")
    assert {choose(e(), pattern) == a for _ in range(20)} == {True}
    assert {choose(e(step(0, "a", {"x": 2})), pattern) == b for _ in range(20)} == {True}
    done = e(step(0, "a", {"x": 2}), step(1, "b", {"x": 0}))
    assert {choose(done, pattern).name for _ in range(200)} == set("abc")
    away = planned(episode(options=options(b=2, c=1)), a)  # the action is not on offer yet
    assert {choose(away, pattern).name for _ in range(200)} == set("bc")
    alike = planned(episode(options=options(a=2, b=1)), Call("a", {"x": 77}))  # only its action is
    assert {choose(alike, pattern).name for _ in range(50)} == {"a"}


def test_a_plan_for_tools_is_followed_as_it_is_and_its_actions_are_filled():
    tools = [schema("open_file", ["file"]), schema("lock"), schema("paint")]
    call = Call("open_file", {"file": "never seen"})
    e = planned(episode(tools=tools), call, "lock", "no such tool")
    explorer, history, made = Explorer(pattern), [], []
    for n in range(2):
        (chosen,) = explorer.act([dataclasses.replace(e, history=tuple(history))])
        made.append(chosen)
        history.append(step(n, chosen.name, chosen.arguments))
    assert made == [call, Call("lock", {})]
    assert explorer.act([dataclasses.replace(e, history=tuple(history))])[0].name in ("open_file", "paint")


def test_what_a_context_asks_for_narrows_the_limits_and_never_widens_them():
    limits = Limits(3, min_calls=2, max_calls=6, max_turns=3)
    of = lambda **asked: limits.of(dataclasses.replace(unguided(file_task(), "c"), **asked))
    assert of() == limits
    assert (of(calls=(3, 4)).min_calls, of(calls=(3, 4)).max_calls) == (3, 4)
    assert (of(calls=(1, 9)).min_calls, of(calls=(1, 9)).max_calls) == (2, 6)
    assert (of(calls=(8, 8)).min_calls, of(calls=(8, 8)).max_calls) == (6, 6)
    assert (of(turns=2).min_turns, of(turns=2).max_turns) == (2, 2)
    assert (of(turns=9).min_turns, of(turns=9).max_turns) == (3, 3)


@pytest.mark.parametrize("round, share", [(0, 0.25), (2, 0.65)])
def test_later_rounds_vary_the_task_more_often(round, share):
    e = episode(round=round)
    assert np.mean([changes(e) for _ in range(DRAWS)]) == pytest.approx(share, abs=0.03)


def weights(e):
    found = Counter(choose(e, pattern).name for _ in range(DRAWS))
    return {name: found[name] / DRAWS for name in "abc"}


def options(**times):
    return tuple(Call(name, {"x": i}) for name, n in times.items() for i in range(n))


def test_an_option_is_as_likely_as_its_action_and_not_as_the_ways_to_do_it():
    many = options(a=9, b=1, c=1)
    plain = weights(episode(options=many))
    assert plain == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3}, abs=0.03)
    focused = weights(episode("rare", ("b",), options=many))
    assert focused == pytest.approx({"a": 1 / 6, "b": 4 / 6, "c": 1 / 6}, abs=0.03)
    seen = weights(episode(options=many, history=[step(0, "c", {"x": 5})]))  # the action, by another call
    assert seen == pytest.approx({"a": 1 / 2.3, "b": 1 / 2.3, "c": 0.3 / 2.3}, abs=0.03)
    made = weights(episode(options=many, history=[step(0, "c", {"x": 0})]))
    assert made == pytest.approx({"a": 1 / 2.03, "b": 1 / 2.03, "c": 0.03 / 2.03}, abs=0.03)
    barred = episode(options=options(a=1, b=1), avoid=('a({"x": 0}): no',))
    assert {choose(barred, pattern).name for _ in range(20)} == {"b"}
    assert choose(episode(options=options(a=1), avoid=('a({"x": 0}): no',)), pattern) is None


@pytest.mark.parametrize("round, varied", [(0, 0.25), (2, 0.65)])
def test_an_unsteady_task_goes_on_by_its_reference_or_by_another_way_to_do_the_same(round, varied):
    """Mostly by the reference call itself; 15% of the draws are as free as without a signal."""
    many = options(a=4, b=1)
    e = episode("boundary", round=round, options=many, task=file_task(many[1], many[4]))
    found = Counter(signature(choose(e, pattern)) for _ in range(DRAWS))
    for call in many:
        ways = 4 if call.name == "a" else 1
        wanted = 0.15 / 2 / ways  # both actions are equally likely
        wanted += 0.85 * varied / 4 * (call.name == "a") + 0.85 * (1 - varied) * (call == many[1])
        assert found[signature(call)] / DRAWS == pytest.approx(wanted, abs=0.03), call


BOX = toolbox(
    [
        schema("open_file", ["file"]),
        schema("close_file", ["file"]),
        schema("post", ["message"]),
        schema("lock"),
        schema("paint"),
    ]
)
NEXT_TO = ("close_file",)  # tools that share a required parameter or a word with open_file


@pytest.mark.parametrize("tried", [(), ("close_file", "paint")])
@pytest.mark.parametrize("round", [0, 2])
@pytest.mark.parametrize("signal", ["forgetting", "boundary", "rare"])
def test_guided_exploration_weighs_focus_neighbours_and_the_rest(signal, round, tried):
    history, focus = [step(i, name) for i, name in enumerate(tried)], ("open_file", "lock")
    found = preferences(episode(signal, focus, history, round), BOX)
    share = {"forgetting": 0.2 + 0.2 * round, "boundary": 0.3, "rare": 0.5}[signal]
    on = {"open_file": 3.0 if signal == "rare" else 1.0, "lock": 1.0}  # the first is the rare one itself
    fresh = {name: 0.3 if name in tried else 1.0 for name in BOX}
    for name, weight in zip(BOX, found, strict=True):
        wanted = 0.05 * fresh[name] / sum(fresh.values())
        wanted += (1 - share) * on.get(name, 0) / sum(on.values())
        wanted += share * fresh[name] * (name in NEXT_TO) / len(NEXT_TO)
        assert weight == pytest.approx(wanted), name


@pytest.mark.parametrize("signal", ["forgetting", "boundary", "rare", "drop_call"])
def test_every_round_weighs_the_focus_above_what_is_not_next_to_it(signal):
    apart = {"post", "lock", "paint"}
    for round in range(21):
        found = dict(zip(BOX, preferences(episode(signal, ("open_file",), round=round), BOX).tolist()))
        assert all(weight >= 0 for weight in found.values()), round
        assert found["open_file"] > 0.2 and all(found["open_file"] > 5 * found[n] for n in apart), round
        far = {name: tool for name, tool in BOX.items() if name not in NEXT_TO}
        alone = dict(zip(far, preferences(episode(signal, ("open_file",), round=round), far).tolist()))
        assert all(alone["open_file"] > 5 * alone[n] for n in apart), round


def test_later_rounds_leave_a_forgotten_focus_until_a_fifth_is_left():
    on = lambda round: preferences(episode("forgetting", ("lock",), round=round), BOX)[3] - 0.05 / 5
    assert [on(round) for round in (0, 1, 2, 3, 4, 20)] == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_free_exploration_prefers_what_it_has_not_tried():
    free = preferences(episode(history=[step(0, "post")]), BOX)
    assert dict(zip(BOX, free.tolist())) == {
        "open_file": 1,
        "close_file": 1,
        "post": 0.3,
        "lock": 1,
        "paint": 1,
    }
    elsewhere = preferences(episode("rare", ("not offered",)), BOX)
    assert elsewhere.tolist() == [1.0] * 5


def test_half_of_a_tools_name_in_an_error_is_a_remedy_and_the_likest_login_comes_first():
    box = toolbox(
        [schema(n) for n in ("lockDoors", "startEngine", "message_login", "ticket_login", "send_message")]
    )
    named = lambda name, text: [t.name for t in remedies(step(0, name, error=text), box)]
    assert named("startEngine", "the doors are open") == ["lockDoors"]
    assert named("startEngine", "the engine is cold") == []  # a tool is no remedy for itself
    assert named("send_message", "please log in") == ["message_login"]
    assert named("startEngine", "please log in") == ["message_login", "ticket_login"]


def test_values_may_be_known_for_one_tool_alone():
    known = {"query": ["a"], "write.query": ["b"]}
    box, bank = toolbox([schema("read", ["query"]), schema("write", ["query"])]), Bank((), known=known)
    rng = np.random.default_rng(0)
    made = [fill(box[name], bank, rng) for name in ("read", "write") for _ in range(30)]
    made += [vary(Call("write", {"query": "x"}), box["write"], bank, rng) for _ in range(30)]
    drawn = {(c.name, c.arguments["query"]) for c in made if c.arguments["query"] in ("a", "b")}
    assert drawn == {("read", "a"), ("write", "b")}


def test_what_failed_is_made_again_once_its_remedy_worked():
    tools = [schema("lockDoors"), schema("drive", ["place"]), schema("park", ["place"])]
    box, bank = toolbox(tools), Bank((), known={"place": ["Rome"]})
    rng = np.random.default_rng(0)
    first = step(0, "drive", {"place": "Oslo"}, "lock the doors")
    later = step(1, "park", {"place": "Bonn"}, "lock the doors")
    helped = step(2, "lockDoors")
    again = lambda *history: retry(history, box, bank, rng)
    assert again(first, helped) == Call("drive", {"place": "Oslo"})
    assert again(first, later, helped) == Call("park", {"place": "Bonn"})  # the latest one
    assert again(first, later) is None and again() is None and again(helped) is None
    named = step(1, "park", {"place": "Bonn"}, "lock the doors of Bonn")  # its own argument was wrong
    drawn = [again(named, helped) for _ in range(60)]
    assert {c.name for c in drawn} == {"park"} and sum(c.arguments["place"] == "Rome" for c in drawn) > 30


def test_a_call_is_made_once_in_a_round_and_never_what_is_to_be_avoided():
    tools = [schema("ls"), schema("pwd")]
    act = lambda **how: Explorer(pattern).act([episode(tools=tools, seed=s, **how) for s in range(30)])
    assert {c.name for c in act()} == {"ls", "pwd"}
    assert {c and c.name for c in act(history=[step(0, "ls")])} <= {"pwd", None}
    assert {c and c.name for c in act(avoid=("pwd({}): no",))} <= {"ls", None}
    assert set(act(history=[step(0, "ls"), step(1, "pwd")])) == {None}


def test_values_are_those_of_the_scenario_at_hand_also_where_two_have_one_name():
    explorer, tools = Explorer(pattern), [schema("go", ["place"])]
    for place in ("Oslo", "Rome"):
        task = dataclasses.replace(file_task(), scenario={"initial_state": {}, "values": {"place": [place]}})
        calls = explorer.act([episode(tools=tools, task=task, seed=s) for s in range(40)])
        drawn = Counter(c.arguments["place"] for c in calls)
        assert drawn[place] > 20 and not drawn["Oslo" if place == "Rome" else "Rome"]


# Arguments


def parameter(name, description=""):
    (found,) = toolbox([schema("use", [name], **{name: {"description": description}})])["use"].params
    return found


def weighed(bank, param):
    values, weights = bank.weigh(param)
    return dict(zip(values, weights.tolist(), strict=True))


def test_values_weigh_by_their_names_and_by_what_the_round_has_shown():
    folders = {"docs": {"file": "plan"}, "misc": {"file": "memo"}}
    bank, file = Bank(harvest_state({"disk": {"root": folders}})), parameter("file")
    # The key has the parameter's name (3) and all its words (2), below two names (1 + 2 * 0.3).
    assert weighed(bank, file) == pytest.approx({"docs": 0, "misc": 0, "plan": 5 / 1.6, "memo": 5 / 1.6})
    later = bank.extended([step(0, "cd", {"folder": "docs"}), step(1, "rm", {"file": "memo"}, "no")])
    entered, failed = 4 * 5 / 1.6, 0.2 * 5 / 1.6
    assert weighed(later, file) == pytest.approx({"docs": 0, "misc": 0, "plan": entered, "memo": failed})
    shown = 3 * 5 / 1.3  # an argument of this round, below the arguments as a whole
    assert weighed(later, parameter("folder"))["docs"] == pytest.approx(shown)
    towns = {"home_city": "Oslo", "city_town_village": "Bonn", "river": "Rhine"}
    hinted = weighed(Bank(harvest_state({"map": towns})), parameter("place", "Any city, town or village."))
    assert hinted == pytest.approx({"Oslo": 0.7, "Bonn": 2 * 0.7, "Rhine": 0})  # two hints count, at most


def test_names_of_records_and_of_people_are_values_and_other_keys_are_not():
    lists = {"users": {"Alice": "u1", "Bob": "u2"}, "owner": {"name": "Eve", "town": "Oslo"}}
    values = weighed(Bank(harvest_state({"desk": lists})), parameter("user"))
    assert values.keys() == {"Alice", "Bob", "u1", "u2", "Eve", "Oslo"}
    assert values["Alice"] == 2 and values["u1"] == pytest.approx(2 / 1.3)
    deep = Bank(harvest_state({"house": {"root": {"garden": {"gate": {"code": "k9"}}}}}))
    code = {name: weighed(deep, parameter(name)).get("k9") for name in ("code", "gate", "garden", "root")}
    below_three = 1 + 3 * 0.3  # only the nearest of the three names above a value says what it is
    assert code == pytest.approx({"code": 5 / below_three, "gate": 2 / below_three, "garden": 0, "root": 0})


@pytest.mark.parametrize(
    "text", [str(10**400), '{(0, 1): "x"}', "{1, 2}", "{1: 'x', 'a': 2}", "[{2}]", "1e999", "b'x'", "..."]
)
def test_no_answer_stops_exploration(text):
    found = list(arguments.harvest(arguments.json_value(text), "answer"))
    for entry in found:
        for kind in ("string", "integer", "number"):
            value = arguments.cast(entry.value, kind)
            assert value is None or json.loads(json.dumps(value)) == value
    assert arguments.json_value("[('a', 1), {'b': None}]") == [["a", 1], {"b": None}]


def test_a_long_text_gives_five_of_its_words_to_search_for():
    text = "The seventh quartz stone was lost before another winter, they said in 1910."
    words, wanted = ("seventh", "quartz", "stone", "lost", "before"), parameter("pattern")
    assert weighed(Bank(harvest_state({"disk": {"note": text}})), wanted) == dict.fromkeys(words, 2.0)
    shown = Triplet(0, 0, Call("cat", {}), Observation(text))
    assert weighed(Bank(()).extended([shown]), wanted) == dict.fromkeys(words, 3 * 2.0)


def test_a_value_is_drawn_by_the_square_of_its_weight_and_at_times_invented():
    bank, place = Bank(harvest_state({"map": {"place": "Oslo"}})), parameter("place")
    bank = bank.extended([step(0, "go", {"place": "Rome"})])
    oslo, rome = 5.0, 3 * 5 / 1.3
    assert weighed(bank, place) == pytest.approx({"Oslo": oslo, "Rome": rome})
    rng = np.random.default_rng(0)
    found = Counter(draw(place, bank, rng) for _ in range(DRAWS))
    assert found.pop("Oslo") / DRAWS == pytest.approx(0.95 * oslo**2 / (oslo**2 + rome**2), abs=0.02)
    assert found.pop("Rome") / DRAWS == pytest.approx(0.95 * rome**2 / (oslo**2 + rome**2), abs=0.02)
    assert found and set(found) <= set(NOUNS)


@pytest.mark.parametrize(
    "key, name, text, weight, share",
    [
        ("place", "place", "", 5, 0.95),
        ("town", "town_map", "", 1, 0.8),  # one of two words
        ("home_city", "place", "Any city.", 0.7, 0.2),
        ("message", "message", "", 5, 0.1),  # what is written is mostly new
        ("river", "place", "", 0, 0.0),
    ],
)
def test_a_value_is_trusted_as_far_as_its_name_fits(key, name, text, weight, share):
    bank, param = Bank(harvest_state({"map": {key: "Qaanaaq"}})), parameter(name, text)
    assert weighed(bank, param) == {"Qaanaaq": pytest.approx(weight)}
    rng = np.random.default_rng(0)
    drawn = sum(draw(param, bank, rng) == "Qaanaaq" for _ in range(DRAWS))
    assert drawn / DRAWS == pytest.approx(share, abs=0.03)


def test_optional_arguments_are_given_at_times_and_never_at_their_default():
    flag = {"flag": {"type": "string", "enum": ["on", "off"], "default": "off"}}
    need = {"need": {"type": "string", "enum": ["on", "off"], "default": "off"}}
    tool = toolbox([schema("set", ["need"], ["flag"], **flag, **need)])["set"]
    rng = np.random.default_rng(0)
    drawn = [fill(tool, Bank(()), rng).arguments for _ in range(DRAWS)]
    assert all("need" in a for a in drawn) and {"on", "off"} <= {a["need"] for a in drawn}
    assert not any(a.get("flag") == "off" for a in drawn)
    given = np.mean([a.get("flag") == "on" for a in drawn])
    assert given == pytest.approx(OPTIONAL * 0.9 * 0.5, abs=0.03)


def test_an_object_has_all_fields_that_it_needs_and_one_or_two_drawn_ones():
    fields = {name: {"type": "boolean"} for name in "abcd"}
    described = {"type": "object", "properties": fields, "required": ["b"]}
    (param,) = toolbox([schema("set", ["x"], x=described)])["set"].params
    rng = np.random.default_rng(0)
    found = Counter(tuple(draw(param, Bank(()), rng)) for _ in range(DRAWS))
    pairs = [("a", "b"), ("b", "c"), ("b", "d")]
    assert set(found) == {("b",), *pairs, ("a", "b", "c"), ("a", "b", "d"), ("b", "c", "d")}
    assert found["b",] / DRAWS == pytest.approx(1 / 2 / 4, abs=0.03)
    for pair in pairs:  # drawn alone, or with the needed one
        assert found[pair] / DRAWS == pytest.approx(1 / 2 / 4 + 1 / 2 / 6, abs=0.03)


@pytest.mark.parametrize(
    "described, sound",
    [
        ({"type": ["integer", "string"]}, lambda x: isinstance(x, int)),
        ({"type": ["null", "boolean"]}, lambda x: isinstance(x, bool)),
        (
            {"anyOf": [{"type": "null"}, {"type": "integer"}, {"type": "object"}]},
            lambda x: isinstance(x, int),
        ),
        (
            {"type": "array", "items": {"type": ["integer", "string"]}},
            lambda x: all(isinstance(i, int) for i in x),
        ),
        (
            {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "boolean"}]},
            lambda x: len(x) == 2 and type(x[0]) is int and type(x[1]) is bool,
        ),
        (
            {"type": "object", "additionalProperties": {"type": "integer"}},
            lambda x: 1 <= len(x) <= 2 and all(isinstance(v, int) for v in x.values()),
        ),
        ({"type": "object"}, lambda x: x == {}),
    ],
)
def test_a_value_is_of_the_first_type_that_its_schema_allows(described, sound):
    (param,) = toolbox([schema("set", ["x"], x=described)])["set"].params
    rng = np.random.default_rng(0)
    assert all(sound(draw(param, Bank(()), rng)) for _ in range(100))


@pytest.mark.parametrize(
    "kind, text, low, high, unit",
    [
        ("integer", "A level from 3 to 6.", 3, 6, 1),
        ("integer", "Any between 0 and 30, a multiple of 10.", 0, 30, 10),
        ("number", "A share between 0 and 1.", 0, 1, 0.1),
        ("number", "Degrees, from -4 to 4.", -4, 4, 1),
        ("integer", "Between 1 and 4.", 1, 4, 1),
        ("integer", "From 998 to 1,000.", 998, 1000, 1),
        ("integer", "From 6 to 3, downwards.", 3, 6, 1),
    ],
)
def test_a_number_with_a_range_is_one_of_its_steps_and_often_its_end(kind, text, low, high, unit):
    (drawn,) = toolbox([schema("set", ["x"], x={"type": kind, "description": text})])["set"].params
    rng, bank = np.random.default_rng(0), Bank(())
    found = Counter(draw(drawn, bank, rng) for _ in range(DRAWS))
    steps = [round(low + unit * i, 2) for i in range(round((high - low) / unit) + 1)]
    assert sorted(found) == steps and {type(x) for x in found} == {int if kind == "integer" else float}
    for x in steps:
        wanted = 0.6 / len(steps) + 0.4 * (x == high)
        assert found[x] / DRAWS == pytest.approx(wanted, abs=0.03)


@pytest.mark.parametrize(
    "described, least, most",
    [
        ({"type": "integer", "minimum": 1, "maximum": 3}, 1, 3),
        ({"type": "integer", "exclusiveMinimum": 2.5, "exclusiveMaximum": 9}, 4, 8),
        ({"type": "integer", "minimum": 40}, 41, 50),
        ({"type": "integer", "maximum": 5}, 1, 5),
        ({"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}, 1, 10),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, 0.1, 1),
        ({"type": "number", "minimum": 0.001, "maximum": 0.005}, 0.001, 0.005),
        ({"type": "number", "description": "From 0.1 to 5.0."}, 0.1, 5.0),
    ],
)
def test_a_number_keeps_the_range_of_its_schema_and_of_its_description(described, least, most):
    (param,) = toolbox([schema("set", ["x"], x=described)])["set"].params
    bank = Bank(harvest_state({"shop": {"x": 10**6, "low": -(10**6)}}))
    rng = np.random.default_rng(0)
    empty = Bank(()) if "description" in described or param.high is None else bank
    found = {draw(param, empty, rng) for _ in range(300)}
    assert (min(found), max(found)) == (least, most) and all(allows(described, x) for x in found)


def test_a_constant_is_always_drawn_and_numbers_may_be_listed_by_a_description():
    described = {"type": "object", "properties": {"kind": {"const": "pickup"}}, "required": ["kind"]}
    (kind,) = toolbox([schema("set", ["x"], x=described)])["set"].params
    listed = toolbox([schema("set", ["x"], x={"type": "integer", "description": "One of: 5, 10, 20."})])
    rng = np.random.default_rng(0)
    assert all(draw(kind, Bank(()), rng) == {"kind": "pickup"} for _ in range(100))
    assert listed["set"].params[0].choices == (5, 10, 20)


@pytest.mark.parametrize(
    "text",
    [
        "One of: red, green or blue.",
        "One of: red, green, and blue.",
        "One of: red, green, blue. Default red.",
        "One of: red, green, blue; else nothing.",
        "One of: red, green (as grass), blue (as the sky).",
        'One of: "red", "green", "blue". Not "white".',
    ],
)
def test_a_description_lists_values_in_several_ways(text):
    assert named_values(text) == ("red", "green", "blue")


@pytest.mark.parametrize(
    "value, sound",
    [
        ({"lines": [{"item": "tea", "count": 3}], "kind": "post"}, True),
        ({"lines": [{"item": "tea", "count": 4}]}, False),
        ({"lines": [{"item": "gin", "count": 1}]}, False),
        ({"kind": "harbor"}, False),
        ({"way": "by"}, True),
        ({"way": 2}, True),
        ({"way": 1}, False),
        ({"way": None}, True),
        ({"pair": [1, "a"]}, True),
        ({"pair": [0, "a"]}, False),
        ({"unknown": 5}, True),
        ({"far": 0.0}, False),
    ],
)
def test_a_schema_allows_values_at_all_levels_and_a_goal_has_no_others(value, sound):
    line = {"properties": {"item": {"enum": ["tea", "jam"]}, "count": {"minimum": 1, "maximum": 3}}}
    parts = {
        "lines": {"type": "array", "items": line},
        "kind": {"const": "post"},
        "way": {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 2}, {"type": "null"}]},
        "pair": {"type": "array", "prefixItems": [{"minimum": 1}, {}]},
        "far": {"exclusiveMinimum": 0},
    }
    tool = schema("order")
    tool["function"]["parameters"]["properties"] = parts
    made = step(0, "order", value)
    assert candidates([made], lambda call: "", [tool]) == [made] * sound
    assert allows({"enum": 3, "minimum": "x", "items": 1, "properties": []}, [{}]) is True


def test_a_step_that_was_put_back_makes_no_task_where_its_schema_excludes_its_value():
    """The wanted call's answer depends on another one, which shortening puts back."""
    tool = schema("order", optional=("item",), item={"enum": ["tea", "jam"]})
    for value, sound in (("tea", True), ("ink", False)):
        before, wanted = step(0, "order", {"item": value}), step(1, "order", {"item": "jam"})
        explored = exploration(file_task(), [before, wanted], tools=(tool,))
        back = lambda goals: [dataclasses.replace(goal, steps=(before, wanted), asked=(1,)) for goal in goals]
        limits = Limits(proposals=1, min_calls=1, max_turns=1)
        (made,) = Abstractor(pattern, lambda call: "").abstract([explored], limits, back)
        assert len(made) == sound


def test_values_that_are_named_for_an_array_of_numbers_are_its_items():
    tool = schema("clean", ("rooms",), rooms={"type": "array", "items": {"type": "integer"}})
    param = toolbox([tool])["clean"].params[0]
    for named in ("rooms", "clean.rooms"):
        bank, rng = Bank((), known={named: [101, 202, 303]}), np.random.default_rng(0)
        drawn = [draw(param, bank, rng, "clean") for _ in range(200)]
        known = sum(n in (101, 202, 303) for each in drawn for n in each) / sum(map(len, drawn))
        assert 0.7 < known < 0.95 and all(len(set(each)) == len(each) for each in drawn)
    free = [draw(param, Bank(()), np.random.default_rng(0), "clean") for _ in range(20)]
    assert all(1 <= n <= 10 for each in free for n in each)


@pytest.mark.parametrize("kind, least, most", [("integer", 1, 10), ("number", 1, 95)])
def test_a_number_without_a_range_is_small_and_positive(kind, least, most):
    (free,) = toolbox([schema("set", ["x"], x={"type": kind})])["set"].params
    found = {draw(free, Bank(()), rng) for rng in [np.random.default_rng(0)] for _ in range(DRAWS)}
    assert (min(found), max(found)) == (least, most)
    assert {type(x) for x in found} == {int if kind == "integer" else float}


def test_a_variant_changes_one_argument_and_keeps_the_others():
    tool = toolbox([schema("mv", ["source", "target"])])["mv"]
    call, rng = Call("mv", {"source": "a", "target": "b"}), np.random.default_rng(0)
    bank = Bank((), known={"source": ["x"], "target": ["y"]})
    for _ in range(50):
        made = vary(call, tool, bank, rng)
        assert made.arguments.keys() == call.arguments.keys()
        assert sum(made.arguments[k] != v for k, v in call.arguments.items()) == 1
    assert vary(Call("mv", {}), tool, bank, rng) == Call("mv", {})


# Goals


def walk(*names, round=0, start=0):
    return [step(start + i, name, {"x": start + i}, round=round) for i, name in enumerate(names)]


def goals(triplets, focus=(), must=(), limits=None, seed=0):
    explored = exploration(file_task(), triplets, seed)
    context = dataclasses.replace(explored.context, focus_pattern=focus, must=must)
    found = propose_goals(
        dataclasses.replace(explored, context=context), limits or Limits(200, 2, 4), pattern
    )
    return [goal.wanted for goal in found]


def test_goals_have_every_size_that_is_allowed_and_come_from_one_round():
    triplets = [*walk(*"abcdef"), *walk(*"gh", round=1, start=6), *walk("i", round=2, start=8)]
    found = goals(triplets)
    assert {len(wanted) for wanted in found} == {2, 3, 4} and len(set(found)) == len(found)
    assert all(wanted == tuple(sorted(wanted)) for wanted in found)
    assert (6, 7) in found and not any(8 in wanted for wanted in found)  # one step is too few
    assert all(max(wanted) < 6 or min(wanted) >= 6 for wanted in found)
    assert {len(w) for w in goals(walk(*"abc"))} == {2, 3} and goals(walk("a")) == goals([]) == []


def test_goals_of_a_usual_size_are_as_frequent_as_their_share_and_others_rare():
    triplets = walk(*"abcdefgh")
    sizes = Counter(len(w) for s in range(DRAWS) for w in goals(triplets, limits=Limits(1, 1, 8), seed=s))
    for size in range(1, 9):
        wanted = SIZE_SHARES.get(size, 0.01) / (sum(SIZE_SHARES.values()) + 3 * 0.01)
        assert sizes[size] / DRAWS == pytest.approx(wanted, abs=0.03), size
    assert 0 < sizes[1] + sizes[7] + sizes[8] < 0.05 * DRAWS


@pytest.mark.parametrize("least, first", [(2, (1, 3)), (3, (1, 3, 4)), (5, None)])
def test_a_plan_that_is_too_short_for_a_task_is_gone_on_with(least, first):
    """After its last step; where no good step is left, other goals stand in."""
    explored = exploration(file_task(), walk(*"abcde"), 0)
    context = dataclasses.replace(explored.context, plan=("b", "d"))
    explored = dataclasses.replace(explored, context=context)
    found = [g.wanted for g in propose_goals(explored, Limits(9, least, least), pattern)]
    if first:
        assert found[0] == first and all(len(w) == least for w in found)
    else:
        assert found[0] == (1, 3, 4) and found[1:] == [(0, 1, 2, 3, 4)]


def test_goals_turn_to_the_focus_and_hold_what_they_must():
    triplets = walk(*"abcdefgh")
    limits = Limits(1, 2, 2)
    share = lambda focus: np.mean(
        [0 in w for seed in range(600) for w in goals(triplets, focus, (), limits, seed)]
    )
    assert share(()) == pytest.approx(2 / 8, abs=0.06)
    assert share(("a",)) == pytest.approx(4 / 11 + 7 / 11 * 4 / 10, abs=0.06)
    assert all(7 in wanted for wanted in goals(triplets, must=("h",)))
    assert all(
        {6, 7} & set(w) == {6, 7} or len(w) == 1
        for w in goals(triplets, must=("h",), focus=("g",), limits=Limits(9, 8, 8))
    )
    assert goals(triplets, must=("z",)) == []
    twice, must = walk(*"aabbcd"), ("b", "c", "d")
    for limits in (Limits(3, 2, 3), Limits(3, 3, 4)):  # all must be there, and nothing of it is replaced
        found = [w for seed in range(200) for w in goals(twice, (), must, limits, seed)]
        assert found and all({4, 5} <= set(w) and {2, 3} & set(w) for w in found)
        assert all(limits.min_calls <= len(w) <= limits.max_calls for w in found)
    assert goals(triplets, must=("a", "b", "c"), limits=Limits(9, 2, 2)) == []


def test_a_step_that_failed_was_made_before_or_is_too_long_to_say_is_no_part_of_a_goal():
    good, twice = step(0, "a", {"x": "v"}), step(1, "a", {"x": "v"})
    failed, long, listed = (
        step(2, "b", error="no"),
        step(3, "c", {"x": "y" * 41}),
        step(4, "d", {"x": ["z" * 39]}),
    )
    edge = step(5, "e", {"x": "y" * 40})
    assert candidates([good, twice, failed, long, listed, edge], lambda call: "") == [good, edge]
    said = lambda call: "say c" if call.name == "c" else ""
    assert candidates([good, long, listed], said) == [good, long]
    assert candidates([long], lambda call: "w" * 41) == []


def test_a_proposal_for_each_different_solution_within_the_limits():
    triplets = walk(*"abcdef")
    explored = exploration(file_task(), triplets, tools=[schema(name) for name in "abcdef"])
    sizes = [(0, 1), (0, 1), (0,), (0, 1, 2, 3), (1, 2, 3, 4, 5)]
    many = [Goal(explored, own, tuple(triplets[i] for i in own), (0,)) for own in sizes]
    maker = Abstractor(pattern, lambda call: f"do {call.name}")
    (proposals,) = maker.abstract([explored], Limits(5, 2, 4, 3), lambda wanted: [*many, None][: len(wanted)])
    assert [p.triplets for p in proposals] == [(0, 1), (0, 1, 2, 3)]
    for p in proposals:
        assert p.calls == tuple(triplets[i].call for i in p.triplets) and all(turn.calls for turn in p.turns)
        assert p.asked == (0,) and len(p.turns) <= 3


def turns_of(limits, calls):
    """Shares of tasks by their number of turns, with so many calls."""
    triplets, found = walk(*"abcdefgh"[:calls]), Counter()
    maker = Abstractor(pattern, lambda call: f"do {call.name}")
    for seed in range(DRAWS // 3):
        explored = exploration(file_task(), triplets, seed, tools=[schema(name) for name in "abcdefgh"])
        solved = lambda wanted: [Goal(explored, g.wanted, tuple(triplets), (0,)) for g in wanted]
        (proposals,) = maker.abstract([explored], limits, solved)
        found.update(len(p.turns) for p in proposals)
    return {n: found[n] / found.total() for n in sorted(found)}


@pytest.mark.parametrize("most, calls, turns", [(1, 8, 1), (3, 8, 3), (6, 8, 6), (6, 4, 4)])
def test_tasks_have_up_to_the_most_turns_and_each_further_turn_is_rarer(most, calls, turns):
    shares = (0.6, 0.3, 0.1, 0.05, 0.025, 0.0125)[:turns]
    wanted = {n: share / sum(shares) for n, share in enumerate(shares, 1)}
    assert turns_of(Limits(1, calls, calls, most), calls) == pytest.approx(wanted, abs=0.05)


def test_a_number_of_turns_that_a_context_asks_for_is_the_only_one():
    assert turns_of(Limits(1, 8, 8, 5, min_turns=5), 8) == {5: 1.0}


@pytest.mark.parametrize("most", [1, 2, 3])
def test_shares_of_up_to_three_turns_are_as_listed(most):
    assert turn_shares(most).tolist() == list(TURN_SHARES[:most])


def test_a_message_joins_its_requests_in_one_of_three_ways_and_tells_all_arguments():
    tools = [schema("open_file", ["name", "mode"]), schema("list_all")]
    tools[0]["function"]["description"] = "Opens a file. It must exist."
    calls = [Call("open_file", {"name": "it's", "mode": 2}), Call("list_all", {})]
    rng = np.random.default_rng(0)
    found = Counter(word(calls, tools, rng, lambda call: "") for _ in range(DRAWS))
    ways = (
        "First open a file{}, then list all.",
        "Open a file{}. After that list all.",
        "Open a file{}; list all.",
    )
    styles = (""" (name "it's", mode 2)""", """ with name "it's" and mode 2""")
    wanted = {way.format(style): 1 / 6 for way in ways for style in styles}
    assert {text: n / DRAWS for text, n in found.items()} == pytest.approx(wanted, abs=0.03)
    own = {word(calls[::-1], tools, rng, lambda call: "look" * (call.name == "list_all")) for _ in range(99)}
    assert f"First look, then open a file{styles[0]}." in own and not any("list all" in text for text in own)
    assert word(calls[1:], tools, rng, lambda call: "") == "List all."


def test_a_goal_in_words():
    assert describe(["a", "b", "c"], (1,)) == "Reach the state after a, c and report what b returns"
    assert describe(["a", "b"], ()) == "Reach the state after a, b"
    assert describe(["a", "b"], (0, 1)) == "Report what a, b returns"


def test_an_instruction_is_cut_only_where_it_is_too_long():
    fits = "Find every single file here that has a name with these letters in it"
    assert len(fits.split()) == 14 and instruction(fits + ".") == "find" + fits[4:]
    assert instruction(fits + " now.") == "find every single file here"


@pytest.mark.parametrize(
    "third, base",
    [
        ("Goes to a room", "go to a room"),
        ("Searches it", "search it"),
        ("Pushes it", "push it"),
        ("Fixes it", "fix it"),
        ("Applies it", "apply it"),
        ("Ties it", "tie it"),
        ("Passes it", "pass it"),
        ("Closes it", "close it"),
        ("Caches it", "cache it"),
        ("Focuses it", "focus it"),
        ("This tool lends", "this tool lends"),
        ("Status of it", "status of it"),
        ("Canvas of it", "canvas of it"),
        ("Get (i.e. fetch) it. At once", "get (i.e. fetch) it"),
        ("Creates an event and returns its id", "create an event and return its id"),
        ("Lists users and groups", "list users and groups"),
    ],
)
def test_an_instruction_is_an_imperative(third, base):
    assert instruction(f"{third}.") == base
