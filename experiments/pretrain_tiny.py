"""Makes models/tiny_qwen3: a tiny Qwen3 that is broad and imperfect, as a pre-trained language model is.

It imitates a demonstrator who acts in BFCL's real environment (train split only) and errs in a graded way: every tool
has its own rate and its own habit of error (a wrong argument, a skipped or
swapped call, a sibling tool, giving up early). RL therefore has something to
mend that is more than sampling noise: where the habit is more frequent than the right call, greedy decoding errs too.

    make pretrain

runs it three times, each going on from the last. Seeded. The wall time and what came out stand in README.md.
"""
from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import app, flags
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from coevolve_jax.envs import bfcl
from coevolve_jax.envs.pool import ProcessPool
from coevolve_jax.evolution.scripted import ScriptedExplorer
from coevolve_jax.evolution.reflect import unguided
from coevolve_jax.evolution.validate import synthesize
from coevolve_jax.grpo.logprobs import token_logprobs
from coevolve_jax.grpo.packing import Batch, assign_rows, pack
from coevolve_jax.models import hf_io
from coevolve_jax.models.qwen import Qwen, QwenConfig
from coevolve_jax.rollout.agent import Agent, Limits
from coevolve_jax.rollout.chat import Chat, render_call
from coevolve_jax.rollout.engine import Completion, Request
from coevolve_jax.types import Call, Task, Trajectory

_OUTPUT = flags.DEFINE_string("output", "models/tiny_qwen3", "Folder to write, in Hugging Face format.")
_SEED = flags.DEFINE_integer("seed", 7, "Of the tasks, the demonstrator, the weights and the batches.")
_TASKS = flags.DEFINE_integer("tasks", 8000, "Tasks to demonstrate, each once.")
_STEPS = flags.DEFINE_integer("steps", 1400, "Optimiser steps.")
_TOKENS = flags.DEFINE_integer("tokens", 8192, "Tokens per step, prompts and padding included.")
_START = flags.DEFINE_string("start", None, "Folder of an earlier output to go on from: its tokenizer and weights.")
_RESPELL = flags.DEFINE_float("respell", 0.75, "Share of the demonstrations that are told with other names and numbers.")
_CLEAN = flags.DEFINE_float("clean", 0.7, "Share of the steps, the first ones, on demonstrations without errors.")
_FLAWS = flags.DEFINE_list("flaws", ["0.5", "4.5"], "Beta distribution from which each tool's rate of error is drawn.")
_RATE = flags.DEFINE_float("learning_rate", 3e-3, "Peak of the cosine schedule.")

VOCABULARY = 1280
ROW = 512
LIMITS = Limits(max_length=ROW, max_new_tokens=64, max_observation=160)
LONG = Limits(max_length=16 * ROW, max_new_tokens=8 * ROW, max_observation=160)
MODEL = dict(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4,
             num_key_value_heads=2, head_dim=32, initializer_range=0.06)

DEMO_TOOLSETS = ("GorillaFileSystem", "MessageAPI", "TicketAPI", "TwitterAPI")
DEMO_SHARE = 0.9  # of the tasks; the other four classes share the rest

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# Qwen's control tokens and tool-call JSON; tools as one line each: name(parameter, optional?).
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{% set f = tool.function %}{{ f.name }}(\
{% for p in f.parameters.properties %}{{ p }}{{ '' if p in (f.parameters.required or []) else '?' }}\
{{ ',' if not loop.last }}{% endfor %})
{% endfor %}<|im_end|>
{% endif %}\
{%- for message in messages %}\
{%- if message.role == 'tool' %}<tool_response>{{ message.content }}</tool_response>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}\
{%- endfor %}\
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

# What counts as one piece of text. The scaffolding of a call is one piece, so
# that a call is short to write; a value is cut alike in a query and in JSON, so that it can be copied.
PIECES = "|".join((
    r'\n\{"name": "', r'", "arguments": \{\}\}\n', r'", "arguments": \{"', r'"?\}\}\n',
    r'": "', r'": \["', r'": \[', r'": \{"', r'": \{', r'": ', r'", "', r'\], "', r'\}, "', r', "',
    r'\{"', r'"\}', r'"\]\}?', r'\["', r"assistant\n", r"user\n", r"system\n",
    r"\(\)\n", r"\??\)\n", r"\?,", r" \(", r"\), ", r" '", r"', ", r"'\)", r" ?[A-Za-z_]+", r"[0-9]", r"\s",
    r"[^A-Za-z0-9_\s]",
))


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with Qwen's control tokens, trained on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PIECES), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKUP), special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens(MARKUP)
    fast.chat_template = CHAT_TEMPLATE
    return fast


class Demonstrator:
    """Knows the reference of a task and plays it, with its errors, as assistant messages."""

    HABITS = ("wrong_argument", "sibling_tool", "skip", "swap", "give_up")

    def __init__(self, rng: np.random.Generator, flaws: tuple[float, float]):
        docs = {t: bfcl.tools(Task("", "bfcl", (t,), {})) for t in bfcl.TOOLSETS}
        self._parameters = {
            d["function"]["name"]: tuple(d["function"]["parameters"]["properties"]) for ds in docs.values() for d in ds
        }
        self._siblings = {}
        for ds in docs.values():
            names = [d["function"]["name"] for d in ds]
            for name in names:
                others = [n for n in names if n != name]
                overlap = lambda n: len(set(self._parameters[n]) & set(self._parameters[name]))
                self._siblings[name] = max(others, key=lambda n: (overlap(n), n))
        # Graded skill: most tools go well, some go wrong more often than right.
        self.error_rate = {name: float(rng.beta(*flaws)) for name in sorted(self._parameters)}
        self._habit = {name: str(rng.choice(self.HABITS, p=(0.4, 0.25, 0.15, 0.1, 0.1))) for name in sorted(self._parameters)}

    def messages(self, task: Task, rng: np.random.Generator | None) -> list[str]:
        """What the assistant says in turn: one message per call, and one that ends each user turn; rng None: no errors."""
        said = []
        for turn in task.turns:
            calls = turn.calls if rng is None else self._play(turn.calls, task, rng)
            said += [render_call(c) for c in calls] + ["Done."]
        return said

    def _play(self, calls: Sequence[Call], task: Task, rng: np.random.Generator) -> list[Call]:
        played = list(calls)
        i = 0
        while i < len(played):
            call = played[i]
            if rng.random() < self.error_rate[call.name]:
                habit = self._habit[call.name]
                if habit == "skip" or (habit == "swap" and i + 1 == len(played)):
                    del played[i]
                    continue
                if habit == "give_up":
                    return played[:i]
                if habit == "swap":
                    played[i : i + 2] = [played[i + 1], call]
                    i += 1
                elif habit == "sibling_tool":
                    name = self._siblings[call.name]
                    known = {k: v for k, v in call.arguments.items() if k in self._parameters[name]}
                    played[i] = Call(name, known)
                else:
                    played[i] = self._wrong_argument(call, task, rng)
            i += 1
        return played

    def _wrong_argument(self, call: Call, task: Task, rng: np.random.Generator) -> Call:
        if not call.arguments:
            return Call(self._siblings[call.name], {})
        key = str(rng.choice(sorted(call.arguments)))
        value = call.arguments[key]
        others = [v for c in task.calls for v in c.arguments.values() if type(v) is type(value) and v != value]
        if others:
            wrong = others[int(rng.integers(len(others)))]
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            wrong = value + 1
        elif isinstance(value, str) and " " in value:
            wrong = value.split(" ")[0]
        else:
            return Call(call.name, {k: v for k, v in call.arguments.items() if k != key})
        return Call(call.name, {**call.arguments, key: wrong})


class DemonstrationEngine:
    """Plays scripts through the agent loop: the n-th session says the n-th script. Not a policy."""

    def __init__(self, chat: Chat, scripts: Sequence[Sequence[str]], encode):
        self._lines = [[encode(m) + list(chat.stop_ids) for m in s] for s in scripts]
        self._said = [0] * len(scripts)

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        out = []
        for r in requests:
            ids = np.asarray(self._lines[r.session][self._said[r.session]], np.int32)
            self._said[r.session] += 1
            finish = "stop" if len(ids) <= r.sampling.max_new_tokens else "length"
            out.append(Completion(ids, np.zeros(len(ids), np.float32), finish, np.zeros(len(ids), np.int32)))
        return out

    def release(self, sessions) -> None:
        pass


def demonstrate(
    tokenizer, pool, tasks: Sequence[Task], scripts: Sequence[Sequence[str]], limits: Limits
) -> list[Trajectory]:
    """The scripts acted out in the real environment, through the agent loop that RL uses."""
    chat = Chat(tokenizer)
    engine = DemonstrationEngine(chat, scripts, lambda m: tokenizer.encode(m, add_special_tokens=False))
    agent = Agent(engine, chat, pool, bfcl.tools, limits, concurrency=256)
    return agent.rollouts([(task, 0, 0) for task in tasks], temperature=1.0)


def make_tasks(pool, count: int, rng: np.random.Generator) -> list[Task]:
    """Validated tasks in scenes of the train split, from unguided exploration; one or two tool classes on offer."""
    scenes = {t: [s for s in bfcl.scenes("train") if t in s.toolsets] for t in bfcl.TOOLSETS}
    others = [t for t in bfcl.TOOLSETS if t not in DEMO_TOOLSETS]
    tasks: dict[str, Task] = {}
    contexts_made = 0
    with tqdm(total=count, desc="tasks", unit="task") as bar:
        while len(tasks) < count:
            contexts = []
            for _ in range(64):
                toolset = str(rng.choice(DEMO_TOOLSETS if rng.random() < DEMO_SHARE else others))
                scene = scenes[toolset][rng.integers(len(scenes[toolset]))]
                offered = {toolset, str(rng.choice(scene.toolsets))} if rng.random() < 0.3 else {toolset}
                scene = dataclasses.replace(scene, toolsets=tuple(t for t in scene.toolsets if t in offered))
                contexts.append(unguided(scene, f"pretrain-{contexts_made}"))
                contexts_made += 1
            made, _ = synthesize(
                ScriptedExplorer(bfcl.tools), pool, contexts, rounds=2, steps=10, per_context=4, rng=rng,
                kind="initial", first_id=5 * contexts_made,
            )
            before = len(tasks)
            for task in made:
                tasks.setdefault(json.dumps([task.toolsets, [c.to_json() for c in task.calls]]), task)
            bar.update(min(len(tasks), count) - before)
    return list(tasks.values())[:count]


def value_tokens(tokenizer, tasks: Sequence[Task]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that occur in argument values and in no tool name, documentation or markup: (of words, digits 1 to 9)."""
    encode = lambda text: set(tokenizer.encode(text, add_special_tokens=False))
    inside, outside = set(), encode("\n".join(bfcl_listing()))
    for task in tasks:
        values = [str(v) for c in task.calls for v in c.arguments.values()]
        for value in values:
            inside |= encode(value)
        for turn in task.turns:
            text = turn.query
            for value in sorted(values, key=len, reverse=True):
                text = text.replace(value, "")
            outside |= encode(text)
    digits = [tokenizer.convert_tokens_to_ids(str(d)) for d in range(1, 10)]
    kept = {*outside, *digits, tokenizer.convert_tokens_to_ids("0"), *tokenizer.get_added_vocab().values()}
    return np.array(sorted(inside - kept)), np.array(digits)


def bfcl_listing() -> list[str]:
    """Name and parameters of every tool, as text."""
    docs = [d["function"] for t in bfcl.TOOLSETS for d in bfcl.tools(Task("", "bfcl", (t,), {}))]
    return [f"{d['name']}({','.join(d['parameters']['properties'])})" for d in docs]


def respell(trajectory: Trajectory, values: tuple[np.ndarray, ...], rng: np.random.Generator) -> Trajectory:
    """The same demonstration about other names and numbers: value tokens are exchanged, each wherever it occurs.

    Without this the policy learns the names of the train split by heart instead of learning to copy.
    """
    table = np.arange(VOCABULARY, dtype=np.int32)
    for tokens in values:
        table[tokens] = rng.permutation(tokens)
    return dataclasses.replace(trajectory, ids=table[trajectory.ids])


def batches(
    trajectories: Sequence[Trajectory], values: tuple[np.ndarray, ...], rng: np.random.Generator
) -> Iterator[Batch]:
    """Packed batches of a fixed shape, epoch after epoch."""
    rows = _TOKENS.value // ROW
    while True:
        order = rng.permutation(len(trajectories))
        for start in range(0, len(order), 256):
            window = order[start : start + 256]
            filled = assign_rows([len(trajectories[i].ids) for i in window], ROW)
            filled = [filled[i] for i in rng.permutation(len(filled))]
            # One row of slack: packing a choice of rows anew may need one more.
            for first in range(0, len(filled) - rows + 2, rows - 1):
                chosen = [trajectories[window[i]] for row in filled[first : first + rows - 1] for i in row]
                chosen = [respell(t, values, rng) if rng.random() < _RESPELL.value else t for t in chosen]
                yield pack(
                    chosen, np.ones(len(chosen)), row_length=ROW, rows_per_microbatch=rows, max_rows=rows
                )


def train(
    config: QwenConfig,
    clean: Sequence[Trajectory],
    flawed: Sequence[Trajectory],
    values: tuple[np.ndarray, ...],
    rng: np.random.Generator,
) -> dict:
    """Next-token imitation of the assistant's tokens (a twentieth of the weight on the rest): first of clean
    demonstrations, which teach to read, copy and call, then of flawed ones, which teach how this demonstrator errs."""
    model = Qwen(config)
    if _START.value:
        _, params = hf_io.load(_START.value)
    else:
        init = jax.jit(lambda key: model.init(key, jnp.zeros((1, 8), jnp.int32))["params"])
        params = init(jax.random.key(_SEED.value))
    schedule = optax.warmup_cosine_decay_schedule(0.0, _RATE.value, 50, _STEPS.value, _RATE.value * 0.02)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.01))

    def loss_fn(params, batch: Batch):
        variables = {"params": params}
        hidden = model.apply(variables, batch.tokens, batch.positions, batch.segment_ids, method=Qwen.hidden)
        logprobs, _ = token_logprobs(
            lambda h: model.apply(variables, h, method=Qwen.unembed),
            hidden.reshape(-1, hidden.shape[-1]), batch.targets.reshape(-1), chunk=_TOKENS.value,
        )
        follows = jnp.pad(batch.segment_ids[:, 1:] == batch.segment_ids[:, :-1], ((0, 0), (0, 1)))
        text = follows & (batch.segment_ids > 0) & ~batch.mask
        weights = (batch.mask + 0.05 * text).reshape(-1)
        own = jnp.sum(jnp.where(batch.mask.reshape(-1), logprobs, 0)) / jnp.sum(batch.mask)
        return -jnp.sum(weights * logprobs) / jnp.sum(weights), -own

    @jax.jit
    def step(params, opt_state, batch):
        (_, own), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, own

    opt_state = optimizer.init(params)
    losses = []
    bar = tqdm(range(_STEPS.value), desc="imitation", unit="step")
    first = round(_CLEAN.value * _STEPS.value)
    data = itertools.chain(itertools.islice(batches(clean, values, rng), first), batches(flawed, values, rng))
    for _, batch in zip(bar, data):
        params, opt_state, loss = step(params, opt_state, Batch(*(x[0] if x.ndim else x for x in batch)))
        losses.append(float(loss))
        if len(losses) % 10 == 0:
            bar.set_postfix(nats_per_assistant_token=f"{np.mean(losses[-20:]):.3f}")
    return params


def main(_) -> None:
    started = time.time()
    seeds = np.random.SeedSequence(_SEED.value).spawn(4)
    task_rng, skill_rng, script_rng, batch_rng = map(np.random.default_rng, seeds)
    with ProcessPool(workers=2) as pool:
        tasks = make_tasks(pool, _TASKS.value, task_rng)
        demonstrator = Demonstrator(skill_rng, tuple(map(float, _FLAWS.value)))
        right = [demonstrator.messages(task, None) for task in tasks]
        flawed = [demonstrator.messages(task, script_rng) for task in tasks]
        if _START.value:
            tokenizer = AutoTokenizer.from_pretrained(_START.value)
        else:
            # A byte tokenizer reads the first demonstrations; the real one is trained on what they look like.
            rough = make_tokenizer([])
            sample = demonstrate(rough, pool, tasks[:2000], flawed[:2000], LONG)
            tokenizer = make_tokenizer([rough.decode(t.ids) for t in sample])
        demonstrations = [demonstrate(tokenizer, pool, tasks, scripts, LIMITS) for scripts in (right, flawed)]
    right, flawed = ([t for t in d if t.outcome.valid and t.stop == "done"] for d in demonstrations)
    print(f"{len(flawed)} of {len(tasks)} flawed demonstrations fit {ROW} tokens (mean "
          f"{np.mean([len(t.ids) for t in flawed]):.0f}); {np.mean([t.outcome.success for t in flawed]):.1%} succeed "
          f"({np.mean([t.outcome.success for t in right]):.1%} of those without errors).")
    config = QwenConfig(
        "qwen3", vocab_size=VOCABULARY, rope_theta=10_000.0, tie_word_embeddings=True, max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, **MODEL,
    )
    params = train(config, right, flawed, value_tokens(tokenizer, tasks), batch_rng)
    output = Path(_OUTPUT.value)
    hf_io.save(output, config, params, dtype=jnp.bfloat16)
    tokenizer.save_pretrained(output)
    print(f"Wrote {output} after {(time.time() - started) / 60:.1f} minutes.")


if __name__ == "__main__":
    app.run(main)
