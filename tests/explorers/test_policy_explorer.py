"""The policy as its own explorer: answers that fit a schema by construction, failures, runs, resumption."""

import dataclasses
import json

import hypothesis.strategies as st
import jax
import jsonschema
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as examples
from ml_collections import ConfigDict

from coevolve_jax import build, envs, event_loop
from coevolve_jax import config as configs
from coevolve_jax.envs import bfcl
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.explorers import policy as explorer
from coevolve_jax.explorers.llm.abstractor import Tasks
from coevolve_jax.explorers.llm.explorer import Action
from coevolve_jax.explorers.llm.reflector import Reflection
from coevolve_jax.explorers.llm.validator import Judgement
from coevolve_jax.explorers.policy.client import FAULTS, Client
from coevolve_jax.llm.answers import read
from coevolve_jax.llm.prompting import Question
from coevolve_jax.records.workdir import fork
from coevolve_jax.rollout.engine import Completion, EngineError, Request, Sampling
from coevolve_jax.rollout.native.engine import NativeEngine
from coevolve_jax.rollout.native.grammar import Grammars
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.synthesis.pipeline import SynthesisRequest, Synthesizer
from coevolve_jax.synthesis.task_pool import TaskPool
from coevolve_jax.testing.engine import Subject
from coevolve_jax.testing.explorer import check_explorer
from coevolve_jax.train import train
from tests.loop.test_train import comparable
from tests.strategies.test_strategies import rows, settings
from tests.support.openai_server import Model
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

TINY = ROOT / "models" / "tiny_qwen3"
FORMS = (Action, Reflection, Tasks, Judgement)
PROMPT = np.arange(40, 60, dtype=np.int32)


@pytest.fixture(scope="module")
def policy():
    return build.policy(TINY)


@pytest.fixture(scope="module")
def engine(policy):
    return NativeEngine(
        policy.config, policy.params, slots=4, seed=1, max_length=256, max_new_tokens=96,
        tokenizer=policy.tokenizer
    )  # fmt: skip


@pytest.fixture(scope="module")
def pool():
    with ProcessPool("bfcl", workers=2, timeout=60.0) as pool:
        yield pool


def generate(engine, requests):
    try:
        return event_loop.run(engine.generate(requests))
    finally:
        engine.release([r.conversation_id for r in requests])


def request(schema, seed, new=96, temperature=1.0, conversation_id=0):
    return Request(
        conversation_id, PROMPT, Sampling(temperature, new, (2,), schema and json.dumps(schema)), seed
    )


# Constrained decoding

WORDS = st.text(alphabet='ab"\\ é\u2028😀{', max_size=4)
EXACT = 2**53  # llguidance reads a schema's numbers as doubles: RFC 8259, section 6, promises no more
SMALL = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "number"}),
    st.integers(-20, 20).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 7}),
    st.integers(0, 6).map(lambda most: {"type": "string", "maxLength": most}),
    st.lists(WORDS | st.integers(-EXACT, EXACT) | st.none(), min_size=1, max_size=3).map(
        lambda values: {"enum": values}
    ),
)


def larger(schemas):
    closed = lambda fields, needed: {
        "type": "object",
        "properties": fields,
        "required": sorted(fields)[:needed],
        "additionalProperties": False,
    }
    objects = st.builds(closed, st.dictionaries(WORDS, schemas, max_size=3), st.integers(0, 3))
    lists = st.builds(lambda s, n: {"type": "array", "items": s, "maxItems": n}, schemas, st.integers(0, 3))
    return objects | lists | st.lists(schemas, min_size=1, max_size=2).map(lambda each: {"anyOf": each})


def random_weights(params, seed, scale):
    """Weights of no particular policy; a larger scale gives surer nonsense."""
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    return jax.tree.unflatten(tree, [scale * rng.standard_normal(x.shape, np.float32) for x in leaves])


def test_an_answer_that_ends_fits_its_schema(policy, engine):
    """Any weights fit the schema; a truncated answer is the beginning of one that fits."""
    ended = 0

    @examples(max_examples=15)
    @example({"type": "boolean"}, 0, 0.02, 1.0)  # its answers end
    @given(
        st.recursive(SMALL, larger, max_leaves=5) | st.sampled_from(FORMS),
        st.integers(0, 10**6),
        st.sampled_from((0.02, 0.3)),
        st.sampled_from((0.0, 0.7, 1.0)),
    )
    def fits(wanted, seed, scale, temperature):
        nonlocal ended
        engine.update_weights(random_weights(policy.params, seed, scale), 1)
        schema = wanted if isinstance(wanted, dict) else wanted.model_json_schema()
        requests = [request(schema, seed + i, temperature=temperature, conversation_id=i) for i in range(4)]
        for c in generate(engine, requests):
            check_answer(policy.chat.decode(c.ids), c, wanted, schema)
            ended += c.finish == "stop"

    fits()
    assert ended


def check_answer(text, c, wanted, schema):
    """wanted: a form or a schema. schema: as JSON."""
    assert c.finish in ("stop", "length") and np.isfinite(c.logprobs).all() and (c.logprobs < 1e-6).all()
    if c.finish == "length":
        assert len(c.ids) == 96 and 2 not in c.ids
    elif isinstance(wanted, dict):
        jsonschema.validate(json.loads(text.removesuffix("<|im_end|>")), schema)
    else:
        assert read(text.removesuffix("<|im_end|>"), wanted)


def test_log_probabilities_are_those_among_what_is_allowed(policy, engine):
    engine.update_weights(policy.params, 0)
    schema = json.dumps(Judgement.model_json_schema())
    (c,) = generate(engine, [request(Judgement.model_json_schema(), 3, new=40, temperature=0.7)])
    ids = np.concatenate([PROMPT, c.ids])
    logits = Subject(engine, policy).logprobs(ids)[len(PROMPT) - 1 : -1] / 0.7
    answer = Grammars(policy.tokenizer, policy.config.vocab_size).begin(schema, (2,))
    for token, row, told in zip(c.ids, logits, c.logprobs, strict=True):
        words = np.zeros(-(-len(row) // 32), np.uint32)
        answer.allow(words)
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: len(row)].astype(bool)
        assert allowed[token] and not allowed.all()
        assert told == pytest.approx(row[token] - np.log(np.exp(row[allowed]).sum()), abs=1e-4)
        answer.take(int(token))


def test_requests_without_a_schema_get_the_same_bits_beside_requests_with_one(policy, engine):
    engine.update_weights(policy.params, 0)
    free = [request(None, 7, new=24, conversation_id=0), request(None, 8, new=40, conversation_id=1)]
    bound = [
        request(Action.model_json_schema(), i, new=30, conversation_id=2 + i) for i in range(4)
    ]  # more than slots
    alone, together = generate(engine, free), generate(engine, [free[0], *bound, free[1]])
    for a, b in zip(alone, (together[0], together[-1]), strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
    for c, again in zip(together[1:-1], generate(engine, bound), strict=True):
        np.testing.assert_array_equal(c.ids, again.ids)


def test_new_weights_do_not_lose_the_thread_of_an_answer(policy, engine):
    """The tokens written before the new weights count."""
    engine.update_weights(policy.params, 0)
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 20, "maxItems": 20}
    asked = request(schema, 5)
    assert event_loop.run(engine.advance([asked])) == [None]
    engine.update_weights(random_weights(policy.params, 1, 0.3), 9)
    (c,) = generate(engine, [asked])
    assert len(json.loads(policy.chat.decode(c.ids[:-1]))) == 20 and set(np.unique(c.versions)) == {0, 9}


def test_what_cannot_be_heeded_is_refused(policy, engine):
    with pytest.raises(ValueError, match="The JSON schema .*cannot be heeded.*simplify it"):
        generate(engine, [request({"type": "rocket"}, 0)])
    endless = dataclasses.replace(request({}, 0), sampling=Sampling(1.0, 8, (), "{}"))
    with pytest.raises(ValueError, match="a JSON schema and no stop id"):
        generate(engine, [endless])
    plain = NativeEngine(policy.config, policy.params, slots=4, seed=1, max_length=64, max_new_tokens=8)
    with pytest.raises(ValueError, match="this engine does not constrain"):
        generate(plain, [request({}, 0, new=8)])
    with pytest.raises(ValueError, match="config.explorer.json_schema is True.*set it to False"):
        Client(ConfigDict(explorer.DEFAULTS), policy.chat, plain)


def test_a_policy_that_gives_no_probabilities_ends_nothing(policy, engine):
    engine.update_weights(jax.tree.map(lambda x: x * np.nan, policy.params), 3)
    (c,) = generate(engine, [request({"type": "boolean"}, 0)])
    assert c.finish == "abort" and "doesn't satisfy the grammar" in c.reason
    engine.update_weights(policy.params, 0)


# The client

ASKED = Question("You answer.", "Answer with JSON.", 1)


class Saying:
    """An engine that gives these answers in turn, whatever the request."""

    batches, constrains = True, True

    def __init__(self, policy, *answers):
        self.chat, self.tokenizer, self.answers, self.seen = policy.chat, policy.tokenizer, list(answers), []

    async def generate(self, requests):
        self.seen += requests
        return [self.completion(self.answers.pop(0)) for _ in requests]

    def completion(self, answer):
        if isinstance(answer, Exception):
            raise answer
        text, finish = answer if isinstance(answer, tuple) else (answer, "stop")
        tokens = self.tokenizer.encode(text) + list(self.chat.stop_ids)
        ids = np.asarray(tokens if finish == "stop" else tokens[:-1], np.int32)
        return Completion(ids, np.zeros(len(ids), np.float32), finish, np.zeros(len(ids), np.int32), "why")

    def release(self, conversation_ids):
        pass


def section(**changes):
    return ConfigDict({**explorer.DEFAULTS, "max_length": 200, "max_tokens": 32, **changes})


@pytest.mark.parametrize(
    "kind, answer",
    [
        ("truncated", ('{"tool": "l', "length")), ("abort", ("", "abort")),
        ("abort", EngineError("no server")), ("empty", "  "),
        ("no_json", "I would call ls."), ("no_json", '{"tool": }'), ("wrong_schema", '{"action": 7}'),
        ("too_long", None),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_counted_under_its_name_and_ends_nothing(policy, kind, answer):
    said = Saying(policy, *([answer] if answer is not None else []), '{"tool": "ls"}')
    client, long = Client(section(), policy.chat, said), ASKED._replace(user="word " * 200)
    assert client.ask("explore", [ASKED if answer is not None else long], Action) == [None]
    faults = {k: v for k, v in client.costs.items() if "faults" in k}
    assert kind in FAULTS and faults == {f"llm_faults/{kind}": 1}
    assert client.ask("explore", [long, ASKED], Action) == [None, Action(tool="ls")]


def test_a_question_that_leaves_room_for_its_answer_is_asked_and_a_longer_one_is_not(policy):
    size = len(policy.chat.question(ASKED.system, ASKED.user))
    for room, answer in ((32, Action(tool="ls")), (31, None)):
        said = Saying(policy, '{"tool": "ls"}')
        client = Client(section(max_length=size + room), policy.chat, said)
        assert client.ask("explore", [ASKED], Action) == [answer]
        assert [len(r.ids) for r in said.seen] == ([size] if answer else [])
        assert client.costs["llm_faults/too_long"] == (answer is None)


def test_books_and_what_the_engine_is_asked(policy):
    said = Saying(policy, '{"tool": "ls"}', "no", '{"tool": ""}')
    client = Client(section(temperature=0.5), policy.chat, said)
    client.ask("explore", [ASKED, ASKED._replace(seed=9)], Action)
    client.ask("judge", [ASKED], Action)
    assert client.ask("judge", [], Action) == []
    r = said.seen[1]
    assert r.seed == 9 and r.sampling.temperature == 0.5 and r.sampling.max_new_tokens == 32
    assert json.loads(r.sampling.json_schema) == Action.model_json_schema()
    assert policy.chat.decode(r.ids) == (
        "<|im_start|>system\nYou answer.<|im_end|>\n<|im_start|>user\nAnswer with JSON.<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert len({r.conversation_id for r in said.seen}) == 3 and max(r.conversation_id for r in said.seen) < 0
    costs = client.costs
    assert costs["llm_requests/explore"] == 2 and costs["llm_tokens_in/judge"] == len(r.ids)
    assert costs["llm_tokens"] == sum(n for key, n in costs.items() if key.startswith("llm_tokens_"))
    Client(section(json_schema=False), policy.chat, said).ask("judge", [], Action)


# The roles


class Able(Saying):
    """A stand-in for a capable policy.

    It decodes the question from its tokens and answers like tests/support/openai_server.py.
    """

    def __init__(self, policy):
        super().__init__(policy)
        self.model = Model()

    async def generate(self, requests):
        self.seen += requests
        return [self.completion(self.model.answer(self.body(r))) for r in requests]

    def body(self, r):
        _, system, user, _ = self.chat.decode(r.ids).split("<|im_start|>")
        texts = [part.partition("\n")[2].removesuffix("<|im_end|>\n") for part in (system, user)]
        return {"messages": [{"content": text} for text in texts], "seed": r.seed}


def config_of(**changes):
    config = configs.load_file(ROOT / "configs" / "bfcl_tiny.py", "explorer=policy")
    return configs.override(config, {"model": str(TINY), **changes})


def test_the_roles_keep_their_contract(policy, pool):
    roles = explorer.make(config_of(), envs.load("bfcl"), policy.chat, Able(policy))
    check_explorer(roles, bfcl.tools, pool, bfcl.scenarios("train")[:10], deterministic=False)
    assert roles.costs["llm_requests/judge"] > 0 and not any("faults" in key for key in roles.costs)


@pytest.mark.parametrize("name", ["policy", "llm"])
def test_any_role_can_be_left_to_rules(policy, tmp_path, name):
    able = Able(policy)
    whole = {
        "explorer.name": name,
        **({"explorer.cache": "", "explorer.attempts": 1} if name == "llm" else {}),
    }
    for part in configs.PARTS:
        config = configs.override(config_of(), {**whole, f"explorer.{part}": "scripted"})
        configs.check(config)
        roles = build.explorer(config, policy, able)
        ours = {role: "scripted" not in type(getattr(roles, role)).__module__ for role in configs.PARTS[:4]}
        assert ours == {role: role != part for role in ours} and roles.name == name
        assert (roles.initial is not None) == (part == "initial")
    config.explorer.validator = "gpt"
    with pytest.raises(
        ValueError, match=f"config.explorer.validator is 'gpt': it must be {name} or scripted"
    ):
        configs.check(config)


def test_without_a_policy_there_is_nobody_to_ask():
    with pytest.raises(ValueError, match="config.explorer.name is 'policy', which asks the policy .* choose"):
        build.explorer(config_of())


def test_an_evolution_beside_training_would_ask_another_policy():
    config = config_of(**{"evolution.async_steps": 2})
    with pytest.raises(
        ValueError, match="config.evolution.async_steps is 2: it must be 0 where the explorer is policy"
    ):
        configs.check(config)


# Runs


def run_config(**changes):
    config = settings("coevolve")
    return configs.override(
        config,
        {"seed": 1, "explorer.name": "policy", "explorer.initial": "scripted", "explorer.max_tokens": 12,
            "explorer.max_length": 1024, "steps": 3,
         "evolution.every": 1, "evolution.rounds": 2, "evolution.steps": 5, **changes},
    )  # fmt: skip


@pytest.mark.nightly
def test_a_run_whose_policy_plays_two_roles_ends_in_the_same_bits_when_it_is_killed(tmp_path, monkeypatch):
    """The policy reflects and judges (badly); rules act and abstract. All is redone with the same weights."""
    config = run_config(**{"explorer.explorer": "scripted", "explorer.abstractor": "scripted"})
    real, asked = Client.ask, []

    def ask(self, role, *arguments):
        answers = real(self, role, *arguments)
        asked.append(role)
        if len(asked) == kill_at:
            raise KeyboardInterrupt
        return answers

    monkeypatch.setattr(Client, "ask", ask)
    kill_at = None
    train(config, tmp_path / "whole")
    grown = [t["lineage"]["explorer"] for t in rows(tmp_path / "whole", "tasks.jsonl")]
    assert "policy" in grown[8:] and set(grown[:8]) == {"scripted"}
    costs = json.loads((tmp_path / "whole" / "ledger.json").read_text())["costs"]
    assert costs["explorer/llm_requests/reflect"] > 0 and costs["explorer/judge_silent"] > 0
    assert costs["explorer/llm_faults/truncated"] > 0

    assert asked.count("reflect") == 2 and asked[-1] == "judge"
    config = fork(tmp_path / "whole", 1, tmp_path / "killed")  # before the last evolution
    kill_at = asked[::-1].index("reflect") + 1  # in that evolution, after it reflected
    asked.clear()
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "killed")
    assert asked[0] == "reflect" and asked[-1] == "judge"
    kill_at = None
    train(config, tmp_path / "killed")
    want, got = comparable(tmp_path / "whole"), comparable(tmp_path / "killed")
    for name in want:
        assert got[name] == want[name], name


@pytest.mark.nightly
def test_a_policy_that_can_do_nothing_makes_no_tasks_and_no_trouble(policy, pool):
    """The tiny policy plays all roles: its answers have the right form or are truncated, and name no tool."""
    config = config_of(**{"explorer.max_tokens": 24, "explorer.max_length": 2048, "evolution.rounds": 1})
    engine, tasks = build.engine(config, policy), TaskPool()
    made = Synthesizer(build.explorer(config, policy, engine), bfcl.tools, pool, config, None)
    scenarios = bfcl.scenarios("train", {"toolsets": ("TicketAPI",)})[:3]
    contexts = [unguided(s, f"c{n}") for n, s in enumerate(scenarios)]
    stats = made.synthesize(
        tasks, contexts, SynthesisRequest(wanted=2, kind="signal", step=4, rng=np.random.default_rng(0))
    )
    costs = made.roles.costs
    assert (stats.added, stats.proposed) == (0, 0) and costs["llm_requests/explore"] >= 9
    failed = {k.partition("/")[2]: n for k, n in costs.items() if "faults/" in k or "refused/" in k}
    assert sum(failed.values()) >= 9 - stats.environment_steps
    assert failed.keys() <= {"no_such_tool", "truncated"}
