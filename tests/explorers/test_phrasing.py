"""The varied wording of rules: values stand in the request, or an earlier answer singles them out."""

import dataclasses
import json
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coevolve_jax import build
from coevolve_jax import config as configs
from coevolve_jax.explorers.scripted import phrasing
from coevolve_jax.loop.initial import explore, task_pool
from coevolve_jax.synthesis.leakage import LeakGuard
from coevolve_jax.synthesis.pipeline import Synthesizer
from coevolve_jax.types import Call, Observation, Triplet, Turn
from tests.support.paths import ROOT

TOOLS = [
    {"function": {"name": "list", "description": "Lists the products."}},
    {"function": {"name": "price", "description": "Changes the price of a product.", "parameters": {}}},
]
RECORDS = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.fixed_dictionaries({"price": st.integers(0, 5), "count": st.integers(0, 5)}),
    min_size=1,
    max_size=6,
)


def step(index, name, arguments, answer):
    return Triplet(index, 0, Call(name, arguments), Observation(json.dumps(answer)))


@given(RECORDS, st.integers(0, 1000), st.booleans())
@settings(max_examples=60)
def test_a_description_leads_to_one_record_and_to_no_other(records, seed, listed):
    name = sorted(records)[seed % len(records)]
    answer = [{"name": k, **v} for k, v in records.items()] if listed else records
    rng = np.random.default_rng(seed)
    said = phrasing.singled_out(name, [step(0, "list", {}, answer)], rng)
    able = {
        f"the {word} {field}"
        for field in ("price", "count")
        for word, best in (("lowest", min), ("highest", max))
        if [k for k, v in records.items() if v[field] == best(r[field] for r in records.values())] == [name]
    }
    assert said in (able if able and len(records) >= phrasing.FEWEST else {""})


def test_the_latest_answer_counts():
    old = {"a": {"n": 1}, "b": {"n": 2}, "c": {"n": 3}}
    new = {"a": {"n": 9}, "b": {"n": 2}, "c": {"n": 3}}
    seen = [step(0, "list", {}, old), step(1, "list", {}, new)]
    said = {phrasing.singled_out("a", seen, np.random.default_rng(s)) for s in range(9)}
    assert said == {"the highest n"}
    assert phrasing.singled_out("b", [step(0, "x", {}, {"a": {"n": 1}, "b": {}, "c": {"n": 2}})], None) == ""


def test_an_answer_that_a_later_call_may_have_changed_describes_nothing():
    """The reproduction's price was raised in between: "the lowest price" is another product by then."""
    listed = step(0, "list", {}, {"mug": {"price": 5}, "pen": {"price": 9}, "cup": {"price": 7}})
    raised = step(1, "set_price", {"product": "mug", "price": 60}, 60)
    other = step(1, "greet", {"customer": "Ada"}, True)
    rng = np.random.default_rng(0)
    assert phrasing.singled_out("mug", [listed, other], rng) == "the lowest price"
    assert phrasing.singled_out("mug", [listed, raised], rng) == ""
    assert phrasing.singled_out("pen", [listed, raised], rng) == ""


@pytest.mark.parametrize(
    "arguments",
    [
        {"products": ["mug"], "by": 50},
        {"prices": {"mug": 50}},
        {"changes": [{"product": "mug", "price": 50}]},
        {"id": 11},
        {"customer": "Ada", "id": 11},
        {"category": "kitchen", "by": 50},
        {"percent": 90},
        {},
    ],
)
def test_a_call_that_names_records_otherwise_or_nothing_may_have_changed_them(arguments):
    kinds = {"mug": (5, 11, "kitchen"), "pen": (9, 12, "desk"), "cup": (7, 13, "kitchen")}
    products = {name: dict(zip(("price", "id", "kind"), values)) for name, values in kinds.items()}
    listed, rng = step(0, "list", {}, products), np.random.default_rng(0)
    later = [step(1, "change", arguments, "done"), step(2, "list", {}, products)]
    assert phrasing.singled_out("mug", [listed, later[0]], rng) == ""
    assert phrasing.singled_out("mug", [listed, *later], rng).startswith("the lowest ")


def test_values_stand_in_the_place_of_their_argument():
    price = step(1, "price", {"product": "mug", "price": 4}, 4)
    texts = {
        phrasing.phrase([], [price], TOOLS, np.random.default_rng(s), lambda call: "") for s in range(30)
    }
    assert len(texts) == len(phrasing.OPENINGS)
    assert all("change the price of product 'mug', with price 4" in text.lower() for text in texts)
    own = phrasing.phrase([], [price], TOOLS, np.random.default_rng(0), lambda call: "make it cheap")
    assert "make it cheap" in own.lower() and "mug" not in own


@pytest.mark.parametrize(
    "request_, arguments, said",
    [
        (
            "set the price of a product",
            {"product": "a price tag", "price": 4},
            "the price of product 'a price tag', with price 4",
        ),
        (
            "sell a product at a price",
            {"product": "a price tag", "price": 4},
            "product 'a price tag' at price 4",
        ),
        (
            "sell a product at a price",
            {"price": 4, "product": "a price tag"},
            "product 'a price tag' at price 4",
        ),
        ("open a file name in a file", {"file": "x", "file_name": "y"}, "file name 'y' in file 'x'"),
        ("open a file name", {"file": "x", "file_name": "y"}, "file name 'y', with file 'x'"),
    ],
)
def test_a_value_never_stands_within_another(request_, arguments, said):
    text = phrasing.clause(Call("do", arguments), request_, [], np.random.default_rng(0))
    assert text.endswith(said)


@pytest.fixture(scope="module")
def varied():
    """Tasks in the shop, worded so, with their scenarios' tools."""
    source = f"source={ROOT / 'examples/shop.py'}:Shop"
    config = configs.load_file(ROOT / "configs" / "tools.py", source)
    config.explorer.wording = "varied"
    family, tasks = build.family(config), task_pool(config)
    with build.env_pool(config) as pool:
        roles = build.explorer(config, None, None)
        synthesizer = Synthesizer(roles, family.tools, pool, config, None)
        explore(synthesizer, tasks, build.scenarios(config), 60, "initial", 0)
    return config, family, list(tasks)


@pytest.mark.slow
def test_each_value_is_said_or_described(varied):
    _, _, tasks = varied
    described = 0
    for task in tasks:
        for turn in task.turns:
            for call in turn.calls:
                for value in call.arguments.values():
                    said = re.search(rf"(?<!\w){re.escape(str(value))}(?!\w)", turn.query)
                    described += not said
                    assert said or re.search(r"the (\w+) with the (lowest|highest) \w+", turn.query)
    assert described >= 3


@pytest.mark.slow
def test_leak_control_refuses_every_task_in_other_words(varied):
    config, family, tasks = varied
    reworded = [
        dataclasses.replace(
            task,
            id=f"again {task.id}",
            turns=tuple(Turn(f"Do number {n}.", turn.calls) for n, turn in enumerate(task.turns)),
        )
        for task in tasks
    ]
    data = config.data
    guard = LeakGuard(
        tasks, data.leak_threshold, features=family.features, call_threshold=data.leak_call_threshold
    )
    assert all(guard.check(task) for task in reworded)
