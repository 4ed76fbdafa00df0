"""Fakes for tests of the loop: a policy that is a number, roles that play with lamps, in-process worlds.

Each is a function of its arguments. The loop of the package and the loop of reference_loop.py share `write`,
the roles and the lamps, and nothing else.
"""

import hashlib
import itertools
import re
import threading

import numpy as np

from coevolve_jax.explorers.base import Proposal, Roles
from coevolve_jax.rollout.engine import Completion
from coevolve_jax.rollout.tool_call_format import ParsedCall
from coevolve_jax.types import Call, Context, Observation, Turn
from tests.support.families import lamps

START = 7  # the weights before RL
BLUNDERS = "level level level lamp lamp unknown malformed none none smash spin long abort".split()


def noise(*key) -> float:
    """A number in [0, 1), a function of the key."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=4).digest()) / 2**32


class Chat:
    """A chat format whose tokens are characters.

    A query stands in <>, answers in []. Each message begins with a mark of its own and ends with a full stop.
    The mark is a character above 255 and tells which rollout wrote the message.
    """

    stop_ids, notes = (ord("."),), ()

    def writing(self, calls):
        return self

    def prompt(self, tools, query, system="", examples=()):
        return [*map(ord, ",".join(t["function"]["name"] for t in tools)), *self.user(query)]

    def user(self, query):
        return list(map(ord, f"<{query}>"))

    def observations(self, texts):
        return list(map(ord, f"[{'|'.join(texts)}]"))

    def message(self, calls):
        return [0x100, *map(ord, "; ".join(map(lamps.text, calls))), *self.stop_ids]

    def decode(self, ids):
        return "".join(map(chr, ids))

    def parse(self, ids):
        body = self.decode(ids)[1:-1]
        calls = [(text, lamps.call(text)) for text in body.split("; ")] if body else []
        return [ParsedCall(text, call, "" if call else "malformed") for text, call in calls]


CHAT = Chat()


def write(weights, version, ids, seed, temperature) -> Completion:
    """One assistant message of a policy: mostly the next calls of the query, sometimes a blunder."""
    said = CHAT.decode(ids)
    query, _, since = said[said.rindex("<") + 1 :].partition(">")
    asked = query.split("; ")
    done = sum(len(m.split("; ")) for m in re.findall("[\u0100-\uffff]([^.]*)[.]", since))
    key = (weights, query, done, temperature, temperature and seed)  # greedy decoding ignores the seed
    skill = noise("skill", weights, query)
    skill = 0.1 if skill < 0.2 else 1.0 if skill < 0.5 else 0.8
    at_once = 1 + (noise("at once", *key) < 0.2)
    body, finish = "; ".join(asked[done : done + at_once]), "stop"
    if noise("luck", *key) >= skill:
        blunder = BLUNDERS[int(noise("blunder", *key) * len(BLUNDERS))]
        body = {
            "level": "set a 1", "lamp": "set b 2", "unknown": "look zz", "malformed": "??", "none": "",
            "smash": "smash a", "spin": "spin a", "long": "look look look", "abort": "",
        }[blunder]  # fmt: skip
        finish = {"long": "length", "abort": "abort"}.get(blunder, "stop")
    new = [0x100 + int(noise(seed, len(ids)) * 2000), *map(ord, body), *CHAT.stop_ids]
    if finish == "abort":
        new = new[:1]
    # A served engine may answer with outdated weights; the first token tells which.
    ages = np.zeros(len(new), np.int32)
    ages[0] = noise("age", version, seed, len(ids)) < 0.03
    return Completion(
        np.asarray(new, np.int32),
        np.asarray([-noise("p", *key, i) for i in range(len(new))], np.float32),
        finish,
        np.maximum(version - ages, 0).astype(np.int32),
        "gone" if finish == "abort" else "",
    )


def next_weights(weights, learned) -> int:
    """Weights after an update: a function of the token ids that it learned from."""
    return int(noise(weights, sorted(learned)) * 2**32) if learned else weights


class Lamplighter:
    """The four roles of an explorer. Each draws from the generator that it is given."""

    def __init__(self, tell=lambda *event: None):
        self.tell = tell

    def reflect(self, evidence):
        self.tell("evidence", [as_rows(e) for e in evidence])
        return [
            Context(
                f"{e.signal.kind}/{e.signal.step}/{e.task.id}/{e.signal.rollout_index}",
                e.signal.kind,
                e.task,
                focus_pattern=e.trajectory.actions,
            )
            for e in evidence
        ]

    def act(self, episodes):
        return [self._act(e) for e in episodes]

    def _act(self, e):
        chance, level = e.rng.random(), int(e.rng.integers(3))
        if chance < 0.06:
            return None
        name = "fly" if chance < 0.1 else e.tools[e.rng.integers(len(e.tools))]["function"]["name"]
        known = [*e.context.task.scenario["lamps"], *(["zz"] if chance > 0.93 else [])]
        lamp = known[e.rng.integers(len(known))]
        if e.context.focus_pattern and chance < 0.6:
            name, lamp = e.context.focus_pattern[e.rng.integers(len(e.context.focus_pattern))].split(" ")
        return Call(name, {"lamp": lamp, **({"level": level} if name == "set" else {})})

    def abstract(self, explorations, limits, shorten):
        return [[p for _ in range(limits.proposals) if (p := self._propose(x, limits))] for x in explorations]

    def _propose(self, x, limits):
        """Proposes a piece of a round in a few turns, sometimes with a fault."""
        if not x.triplets or x.rng.random() < 0.1:
            return None
        first = x.triplets[x.rng.integers(len(x.triplets))]
        size, fault = int(x.rng.integers(1, limits.max_calls + 1)), x.rng.random()
        piece = [t for t in x.triplets if t.round == first.round and t.index >= first.index][:size]
        calls, seen = [t.call for t in piece], [t.observation for t in piece]
        if fault < 0.1:
            calls[-1] = Call("fly" if fault < 0.05 else "smash", {"lamp": "a"})
        elif fault < 0.2:
            seen[-1] = Observation("level 9")
        ends = sorted({*x.rng.integers(1, len(calls) + 1, size=limits.max_turns - 1).tolist(), len(calls)})
        turns = [calls[a:b] for a, b in itertools.pairwise([0, *ends])]
        return Proposal(
            x.context,
            f"{len(calls)} calls",
            tuple(Turn("; ".join(map(lamps.text, part)), tuple(part)) for part in turns),
            tuple(t.index for t in piece),
            tuple(seen),
            (),
        )

    def judge(self, proposals, answered):
        """Says for each turn why its answers differ from those of exploration."""
        opinions = []
        for p, own in zip(proposals, answered, strict=True):
            wanted, row = iter(p.observations), []
            for answers in own:
                row.append(None if list(answers) == [next(wanted) for _ in answers] else "result_differs")
            opinions.append(row)
        return opinions

    def roles(self):
        return Roles("lamplighter", self, self, self, self)


def as_rows(e):
    """Evidence as plain values, without tokens, which a checkpoint does not keep."""
    return e.signal.to_json(), e.task.id, [t.to_json() for t in e.group.trajectories]


class Worlds:
    """envs.base.EnvPool in this process."""

    busy, size = 0.0, 1

    def __init__(self):
        self.worlds, self.count, self.lock = {}, 0, threading.Lock()

    def reset(self, tasks):
        with self.lock:
            env_ids = range(self.count, self.count + len(tasks))
            self.count += len(tasks)
        for env_id, task in zip(env_ids, tasks):
            self.worlds[env_id] = lamps.make()
            self.worlds[env_id].reset(task)
        return list(env_ids)

    def step(self, env_ids, calls):
        return [[self.worlds[s].step(c) for c in row] for s, row in zip(env_ids, calls, strict=True)]

    def options(self, env_ids):
        return [[] for _ in env_ids]

    def end_turn(self, env_ids):
        for s in env_ids:
            self.worlds[s].end_turn()

    def score(self, env_ids):
        return [self.worlds[s].score() for s in env_ids]

    def close(self, env_ids):
        for s in env_ids:
            del self.worlds[s]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        assert error[0] or not self.worlds, "worlds that nobody closed"


class Engine:
    """rollout.engine.Engine. Its output depends on the weights that it received last."""

    def __init__(self, weights, batches, tell):
        self.weights, self.version, self.batches, self.tell = int(weights), 0, batches, tell

    async def generate(self, requests):
        return [
            write(self.weights, self.version, r.ids.tolist(), r.seed, r.sampling.temperature)
            for r in requests
        ]

    def update_weights(self, params, version):
        self.weights, self.version = int(params), version
        self.tell("engine", self.weights, version)

    def release(self, conversation_ids):
        pass

    def close(self):
        pass


class Learner:
    """grpo.learner.Learner whose policy is a number and whose update reports the batch's content."""

    routing, scores, keeps_reference, score, aim, influence = (0, 0), False, True, None, None, None

    def __init__(self, model_config, config, reference, *, temperature, mesh, seed, tell):
        self.abstract_state, self.tell = np.zeros((), np.uint32), tell
        tell("learner", temperature, seed)

    def flops(self, batch, updates):
        return 0.0

    def init(self, params):
        return params

    def policy(self, state, dtype):
        return state

    policy_to_save = policy

    def update(self, state, batch, old_logprobs):
        learned = unpack(batch)
        self.tell("update", learned)
        state = self.as_params(next_weights(int(state), [ids for ids, *_ in learned]))
        return state, {"finite": np.asarray(True), "loss": np.asarray(float(len(learned)))}

    @staticmethod
    def as_params(number):
        import jax

        return jax.device_put(np.uint32(number))


def unpack(batch):
    """One tuple per trajectory, sorted by token ids.

    Each holds (token ids, whether the policy wrote them, advantages, log-probabilities, and ages where the
    batch has them).
    """
    found = []
    for r in np.ndindex(batch.tokens.shape[:2]):
        for segment in range(1, batch.segment_ids[r].max(initial=0) + 1):
            here = batch.segment_ids[r] == segment
            mask = batch.mask[r][here]
            found.append(
                (
                    tuple(batch.tokens[r][here].tolist()),
                    # A batch stores a token's values one place earlier, where it is predicted
                    (False, *mask[:-1].tolist()),
                    batch.advantages[r][here][mask].tolist(),
                    batch.sampler_logprobs[r][here][mask].tolist(),
                    batch.ages[r][here][mask].tolist() if batch.ages.size else [],
                )
            )
    return sorted(found)
