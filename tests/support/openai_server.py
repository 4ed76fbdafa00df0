"""A server that speaks the OpenAI protocol and plays the four roles by driving the scripted explorer.

It sees the requests alone. It reads tools and steps from the prompts, like a model, and answers in text and
JSON. `faults` lists its misbehaviour for the next requests (see `FAULTS`).
"""

import asyncio
import itertools
import json
import re

import numpy as np
from aiohttp import web

from coevolve_jax import envs, event_loop
from coevolve_jax.explorers.base import Episode, Exploration, Goal, Limits
from coevolve_jax.explorers.scripted import abstractor, explorer
from coevolve_jax.types import Call, Context, Observation, Task, Triplet

KEY = "sk-the-key-of-the-tests"
MOST_CALLS = 6  # calls of a task
BFCL = envs.load("bfcl")
SCRIPTED = explorer.Explorer(BFCL.action_pattern)


def message(text, finish="stop", **more):
    return {
        "id": "c",
        "object": "chat.completion",
        "model": "scripted",
        "choices": [
            {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text, **more}}
        ],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120},
    }


def replied(**fields):
    async def answer(request):
        return web.json_response(message(**fields))

    return answer


def status(code, headers=None, body=None):
    async def answer(request):
        return web.json_response(body or {"error": {"message": "no"}}, status=code, headers=headers)

    return answer


async def hang(request):
    await asyncio.sleep(3600)


async def drip(request):
    answer = web.StreamResponse(headers={"Content-Type": "application/json"})
    await answer.prepare(request)
    for _ in range(1000):
        await answer.write(b" ")
        await asyncio.sleep(0.05)
    return answer


async def broken_off(request):
    body = json.dumps(message("{}")).encode()
    answer = web.StreamResponse(
        headers={"Content-Length": str(len(body)), "Content-Type": "application/json"}
    )
    await answer.prepare(request)
    await answer.write(body[: len(body) // 2])
    request.transport.abort()
    return answer


async def html(request):
    return web.Response(text="<html><body>Sign in</body></html>", content_type="text/html")


async def no_choices(request):
    return web.json_response({**message(""), "choices": []})


async def enormous(request):
    return web.json_response(message("x" * 10_000_000))


async def packed(request):
    answer = web.json_response(message("x" * 10_000_000))
    answer.enable_compression(web.ContentCoding.gzip, strategy=9)
    return answer


def encoded(code):
    """Answers with a charset whose codec gives no text."""

    async def answer(request):
        headers = {"Content-Type": "application/json; charset=hex"}
        return web.Response(body=b'{"error": {"message": "no"}}', status=code, headers=headers)

    return answer


# Misbehaviour -> (the client's name for it, whether the client tries again, the behaviour).
FAULTS = {
    "429": ("rate_limited", True, status(429)),
    "429 for an hour": ("rate_limited", True, status(429, {"Retry-After": "3600"})),
    "500": ("server_error", True, status(500)),
    "401": ("unauthorized", False, status(401)),
    "400": ("bad_request", False, status(400)),
    "hang": ("deadline", True, hang),
    "drip": ("deadline", True, drip),
    "broken off": ("unreachable", True, broken_off),
    "truncated": ("truncated", False, replied(text='{"tool": "ls", "argu', finish="length")),
    "wrong schema": ("wrong_schema", False, replied(text='{"action": 7}')),
    "no JSON": ("no_json", False, replied(text="Sure! I would call ls.")),
    "half a JSON": ("no_json", False, replied(text='{"tool": "ls", "arguments": {"a": }')),
    "half a character": ("no_json", False, replied(text="\ud800")),
    "lone surrogate": ("no_json", False, replied(text='{"tool": "\\ud800", "arguments": {}}')),
    "deep": ("no_json", False,
        replied(text='{"tool": "ls", "arguments": ' + '{"a":' * 5000 + "1" + "}" * 5001)),
    "html": ("no_protocol", False, html),
    "charset=hex": ("no_protocol", False, encoded(200)),
    "400, charset=hex": ("bad_request", False, encoded(400)),
    "no choices": ("no_choices", True, no_choices),
    "given up": ("given_up", True, replied(text='{"tool": "ls", "argu', finish="abort")),
    "error in the choice": ("given_up", True, replied(text="", finish="error")),
    "10 MB": ("too_large", False, enormous),
    "10 MB, packed": ("too_large", False, packed),
    "empty": ("empty", False, replied(text="")),
    "content filter": ("content_filter", False, replied(text="", finish="content_filter")),
    "refusal": ("refusal", False, replied(text=None, refusal="I cannot help with that.")),
    "tool call": (
        "tool_call",
        False,
        replied(text=None, finish="tool_calls",
            tool_calls=[{"id": "t", "type": "function", "function": {"name": "ls", "arguments": "{}"}}]),
    ),
    "reasoning only": ("reasoning_only", False, replied(text=None, reasoning_content='{"tool": "ls"}')),
}  # fmt: skip


SERVES = {"scripted-1": "the/scripted-one"}


class OpenAIServer:
    """A context manager; url is its base URL. port: 0 for a free one.

    seen: bodies of the requests. delay: seconds before each answer. always: a fault for every request, a name
    of FAULTS. wrap: changes the text of each answer. model: who answers. serves: the models that it lists, id
    -> root; None: it has no list.
    """

    def __init__(self, delay=0.0, serves=SERVES, port=0):
        self.serves, self.port = serves, port
        self.faults: list[str] = []
        self.seen: list[dict] = []
        self.keys: set[str] = set()
        self.always, self.delay = "", delay
        self.wrap = lambda text: text
        self.model = Model()
        self.under_way = self.most_under_way = 0

    def __enter__(self):
        event_loop.run(self._start())
        return self

    def __exit__(self, *exc):
        event_loop.run(self._runner.cleanup())

    async def _start(self):
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self._handle)
        app.router.add_get("/v1/models", self._list)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def _list(self, request):
        if self.serves is None:
            return web.json_response({"error": {"message": "no such path"}}, status=404)
        rows = [
            {"id": id, "object": "model", **({"root": root} if root else {})}
            for id, root in self.serves.items()
        ]
        return web.json_response({"object": "list", "data": rows})

    async def _handle(self, request):
        body = await request.json()
        self.seen.append(body)
        self.keys.add(request.headers.get("Authorization", ""))
        fault = self.always or (self.faults.pop(0) if self.faults else "")
        if fault:
            return await FAULTS[fault][2](request)
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            await asyncio.sleep(self.delay)
            return web.json_response(message(self.wrap(self.model.answer(body))))
        finally:
            self.under_way -= 1


class Model:
    """Answers the messages of a request.

    spoil: a fault in every proposed task, one of SPOILT or "two_goals". With one of SPOILT the user's words
    differ from the named steps, where they can. worded: by query, what it asks for. spoiled: the queries that
    have the fault.
    """

    def __init__(self):
        self.spoil, self.worded, self.spoiled = "", {}, set()

    def answer(self, body):
        """Answers a request. The question tells which role is asked."""
        system, user = (m["content"] for m in body["messages"][:2])
        play = {
            '"focus_pattern"': self.reflect,
            '"tool"': self.explore,
            '"tasks"': self.abstract,
            '"turns"': self.judge,
            '"answer"': self.say,
        }
        wanted = user.rpartition("Answer with a JSON object")[2]
        role = next(role for name, role in play.items() if name in wanted)
        role = self.solve if system.startswith("You are an agent") else role
        return role(system, user, np.random.default_rng(body["seed"]))

    def reflect(self, system, user, rng):
        names = re.search(r"out of: (.*);", user)[1].split(", ")
        failed = [row["tool"] for row in steps(user) if row.get("failed")]
        focus = [
            name for name in dict.fromkeys([*failed, *(row["tool"] for row in steps(user))]) if name in names
        ]
        said = {
            "summary": "It called " + ", ".join(row["tool"] for row in steps(user)),
            "failure_cause": "a failed call" if failed else "",
            "instability_pattern": "",
            "focus_pattern": focus[:12],
            "avoid": [f"do not fail at {name}" for name in failed[:12]],
        }
        return "Here is what I see.\n```json\n" + json.dumps(said, indent=1) + "\n```"

    def explore(self, system, user, rng):
        focus = re.search(r"Tools in focus: (.*)", user)
        focus = tuple(focus[1].split(", ")) if focus else ()
        context = Context("c", "oracle" if focus else None, Task("s", "bfcl", {}), focus_pattern=focus)
        history = tuple(
            Triplet(i, 0, Call(r["tool"], r["arguments"]), Observation(r["answer"], bool(r.get("failed"))))
            for i, r in enumerate(steps(user))
        )
        lines = [json.loads(line) for line in user.splitlines() if line.startswith('{"tool": ')]
        options = [Call(row["tool"], row["arguments"]) for row in lines]
        (call,) = SCRIPTED.act([Episode(context, schemas(system), history, 0, rng, options)])
        return action(call)

    def abstract(self, system, user, rng):
        rounds = [steps(part) for part in re.split(r"^Round \d+,", user, flags=re.MULTILINE)[1:]]
        triplets = tuple(
            Triplet(
                r["step"], n, Call(r["tool"], r["arguments"]), Observation(r["answer"], bool(r.get("failed")))
            )
            for n, rows in enumerate(rounds)
            for r in rows
        )
        named = lambda found: tuple(found[1].split(", ")) if found else ()
        focus, must = (
            named(re.search(f"{w}: (.*)", user)) for w in ("Prefer tasks with", "Every task must use")
        )
        context = Context("c", "oracle", Task("s", "bfcl", {}), focus_pattern=focus, must=must)
        exploration = Exploration(context, schemas(system), triplets, rng)
        limits = Limits(int(re.search(r"Make up to (\d+)", user)[1]))
        goals = abstractor.propose_goals(exploration, limits, BFCL.action_pattern)
        if self.spoil == "two_goals":
            many = abstractor.propose_goals(exploration, Limits(12), BFCL.action_pattern)
            pairs = itertools.starmap(joined, itertools.combinations(many, 2))
            goals = [both for both in pairs if both][: limits.proposals]
        if found := re.search(r"what was planned: steps ([\d, ]*\d)(?:, and then others up to (\d+))?", user):
            goals = [*goals[: limits.proposals - 1], following(exploration, *found.groups())]  # named last
        tasks = []
        for goal in goals:
            said = self.said(goal, rng)
            query = abstractor.word(said, exploration.tools, rng, BFCL.wording)
            self.worded[" ".join(query.split())] = said
            if self.spoil == "two_goals" or said != [t.call for t in triplets if t.index in goal.wanted]:
                self.spoiled.add(query)
            turns = [{"query": query, "steps": list(goal.wanted)}]
            tasks.append({"description": "Do it.", "difficulty": min(5, len(said)), "turns": turns})
        return "I made these:\n" + json.dumps({"tasks": tasks})

    def said(self, goal, rng):
        """The calls that the user's words ask for: those of the goal, but for the fault."""
        steps = goal.exploration.triplets
        said = [t.call for t in steps if t.index in goal.wanted]
        able = [i for i, call in enumerate(said) if any(isinstance(v, str) for v in call.arguments.values())]
        if self.spoil == "missing_step":  # the reference lacks a step that the user asks for
            said += [
                t.call
                for t in steps
                if t.call not in said and not t.observation.error and t.call.name in CHANGING
            ][:1]
        elif self.spoil in ("wrong_argument", "not_said") and able:
            i = able[rng.integers(len(able))]
            name = next(k for k, v in said[i].arguments.items() if isinstance(v, str))
            changed = dict(said[i].arguments)
            if self.spoil == "wrong_argument":
                changed[name] = "another " + changed[name]
            else:  # not_said: nobody can know it
                del changed[name]
            said[i] = Call(said[i].name, changed)
        return said

    def solve(self, system, user, rng):
        """Solves a task like an able agent that knows the words alone; it makes up what they leave out."""
        requests = re.findall(r"^\d+\. (.*)$", user, flags=re.MULTILINE)
        said, done = self.worded[requests[-1]], len(steps(user))
        if done >= len(said):
            return action(None)
        (tool,) = [t for t in schemas(system) if t["function"]["name"] == said[done].name]
        arguments = dict(said[done].arguments)
        for name in tool["function"]["parameters"]["required"]:
            arguments.setdefault(name, f"something{rng.integers(1000)}")
        return action(Call(said[done].name, arguments))

    def judge(self, system, user, rng):
        count = int(re.search(r"each of the (\d+) turns", user)[1])
        return json.dumps({"turns": [{"thought": "Fine.", "reason": "ok"}] * count})

    def say(self, system, user, rng):
        """Answers a strategy: a grade, a yes, a demand, or a sentence that names what it was asked about."""
        wanted = user.rpartition('"answer"')[2]
        if "whole number" in wanted:
            return json.dumps({"answer": str(rng.integers(1, 11))})
        if named := re.search(r"and holds (\S+) (?:in digits|as it)", wanted):
            return json.dumps({"answer": f"Said of {named[1]}."})
        tools = ", ".join(dict.fromkeys(row["tool"] for row in objects(user) if "tool" in row))
        return json.dumps({"answer": "yes" if '"yes"' in wanted else f"Said of {tools or 'it'}."})


CHANGING = (
    "mkdir",
    "touch",
    "create_ticket",
    "post_tweet",
    "send_message",
    "add_contact",
    "comment",
    "mention",
)
SPOILT = ("missing_step", "wrong_argument", "not_said")


def following(exploration, planned, least):
    """The goal of the planned steps and, up to the least number, of those that came after them."""
    steps, wanted = exploration.triplets, [int(n) for n in planned.split(", ")]
    round = steps[wanted[-1]].round
    later = [t.index for t in steps[wanted[-1] + 1 :] if t.round == round and not t.observation.error]
    return Goal(exploration, (*wanted, *later[: max(0, int(least or 0) - len(wanted))]))


def joined(one, other):
    """Two unrelated goals of one round as one goal; None where they share steps or are too long."""
    steps = one.exploration.triplets
    (round,) = {steps[i].round for i in one.wanted}
    apart = {steps[i].round for i in other.wanted} == {round} and not set(one.wanted) & set(other.wanted)
    wanted = sorted({*one.wanted, *other.wanted})
    return Goal(one.exploration, tuple(wanted)) if apart and len(wanted) <= MOST_CALLS else None


def action(call):
    said = {"tool": call.name, "arguments": dict(call.arguments)} if call else {"tool": "", "arguments": {}}
    return json.dumps({"thought": "Let me try.", **said})


def schemas(system):
    return [{"type": "function", "function": row} for row in objects(system) if "parameters" in row]


def objects(text):
    """The objects of a prompt's lines of JSON."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            found.append(json.loads(line))
    return found


def steps(text):
    return [row for row in objects(text) if "step" in row]
