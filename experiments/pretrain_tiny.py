"""Makes models/tiny_qwen3: a tiny Qwen3 that is broad and imperfect, as a pre-trained language model is.

It imitates a demonstrator who acts in BFCL's real environment (train split only): first without errors, which
teaches to read, copy and call, then for a short while with bad habits. Most tools go well; each of the others has
one habit of error (a wrong argument, a skipped or swapped call, a sibling tool, giving up early) that is about as
frequent as the right call, so greedy decoding errs too and RL has something to mend that is more than sampling noise.

    make pretrain

runs both stages, the second going on from the first. Seeded. The wall time and what came out stand in docs/results.md.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from absl import app, flags
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from coevolve_jax.envs import bfcl
from coevolve_jax.envs.bfcl.toolsets import TOOLSETS
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.explorers import scripted
from coevolve_jax.explorers.base import Limits as TaskLimits
from coevolve_jax.grpo.logprobs import token_logprobs
from coevolve_jax.grpo.packing import Batch, assign_rows, pack
from coevolve_jax.models import hf_io
from coevolve_jax.models.qwen import Qwen, QwenConfig
from coevolve_jax.rollout.agent import Agent, Job, Limits
from coevolve_jax.rollout.chat import Chat, render_call
from coevolve_jax.rollout.engine import Completion, Request
from coevolve_jax.synthesis.explore import unguided
from coevolve_jax.synthesis.pipeline import synthesize
from coevolve_jax.types import Call, Sample, Task, Trajectory

_OUTPUT = flags.DEFINE_string("output", "runs/pretrain/clean", "Folder to write, in Hugging Face format.")
_SEED = flags.DEFINE_integer("seed", 7, "Of the tasks, the demonstrator, the weights and the batches.")
_TASKS = flags.DEFINE_integer("tasks", 12000, "Tasks to demonstrate, each once.")
_STEPS = flags.DEFINE_integer("steps", 1200, "Optimiser steps.")
_TOKENS = flags.DEFINE_integer("tokens", 8192, "Tokens per step, prompts and padding included.")
_START = flags.DEFINE_string(
    "start", None, "Folder of an earlier output to go on from: its tokenizer and weights."
)
_RESPELL = flags.DEFINE_float(
    "respell", 0.85, "Share of the demonstrations that are told with other names and numbers."
)
_WEAK = flags.DEFINE_float("weak", 0.0, "Share of the tools that have a bad habit; 0: no errors at all.")
_RATE = flags.DEFINE_float("learning_rate", 0.02, "Peak; constant after a warm-up, then falling linearly.")
_DECAY = flags.DEFINE_float(
    "decay", 0.0, "Share of the steps, the last ones, over which the learning rate falls."
)
_SAVE_EVERY = flags.DEFINE_integer("save_every", 500, "Steps between writings of --output.")

VOCABULARY = 1280
ROW = 512
LIMITS = Limits(max_length=ROW, max_new_tokens=64, max_observation=160)
LONG = Limits(max_length=16 * ROW, max_new_tokens=8 * ROW, max_observation=160)
MODEL = dict(
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    initializer_range=0.06,
)

DEMO_TOOLSETS = ("GorillaFileSystem", "MessageAPI", "TicketAPI", "TwitterAPI")
DEMO_SHARE = 0.9  # of the tasks; the other four classes share the rest

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# Qwen's control tokens and tool-call JSON; tools as one line each: name parameter optional?
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{% set f = tool.function %}{{ f.name }}\
{% for p in f.parameters.properties %} {{ p }}{{ '' if p in (f.parameters.required or []) else '?' }}{% endfor %}

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
PIECES = "|".join(
    (
        r'\n\{"name": "',
        r'", "arguments": \{\}\}\n',
        r'", "arguments": \{"',
        r'"?\}\}\n',
        r'": "',
        r'": \["',
        r'": \[',
        r'": \{"',
        r'": \{',
        r'": ',
        r'", "',
        r'\], "',
        r'\}, "',
        r', "',
        r'\{"',
        r'"\}',
        r'"\]\}?',
        r'\["',
        r"assistant\n",
        r"user\n",
        r"system\n",
        r"\?",
        r" \(",
        r"\), ",
        r" '",
        r"', ",
        r"'\)",
        r" ?[A-Za-z_]+",
        r"[0-9]",
        r"\s",
        r"[^A-Za-z0-9_\s]",
    )
)


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with Qwen's control tokens, trained on texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKUP),
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.add_tokens(MARKUP)
    fast.chat_template = CHAT_TEMPLATE
    return fast


class Demonstrator:
    """Knows the reference of a task and plays it, with its errors, as assistant messages."""

    HABITS = ("wrong_argument", "sibling_tool", "skip", "swap", "give_up")

    def __init__(self, rng: np.random.Generator, weak: float):
        docs = {t: bfcl.tools(Task("", "bfcl", bfcl.scenario([t]))) for t in TOOLSETS}
        self._parameters = {
            d["function"]["name"]: tuple(d["function"]["parameters"]["properties"])
            for ds in docs.values()
            for d in ds
        }
        self._siblings = {}
        for ds in docs.values():
            names = [d["function"]["name"] for d in ds]
            for name in names:
                others = [n for n in names if n != name]
                overlap = lambda n: len(set(self._parameters[n]) & set(self._parameters[name]))
                self._siblings[name] = max(others, key=lambda n: (overlap(n), n))
        names = sorted(self._parameters)
        weak_tools = set(rng.permutation(names)[: round(weak * len(names))])
        self.error_rate = {
            n: float(rng.uniform(0.4, 0.8) if n in weak_tools else rng.uniform(0, 0.08)) for n in names
        }
        self._habit = {n: str(rng.choice(self.HABITS, p=(0.4, 0.25, 0.15, 0.1, 0.1))) for n in names}

    def messages(self, task: Task, rng: np.random.Generator | None) -> list[str]:
        """What the assistant says in turn: one message per call, and one that ends each user turn (rng None: without errors)."""
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
        others = [
            v for c in task.calls for v in c.arguments.values() if type(v) is type(value) and v != value
        ]
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

    batches = True

    def __init__(self, chat: Chat, scripts: Sequence[Sequence[str]], encode):
        self._lines = [[encode(m) + list(chat.stop_ids) for m in s] for s in scripts]
        self._said = [0] * len(scripts)

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
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
    return agent.rollouts([Job(task, 0, 0) for task in tasks], temperature=1.0)


def make_tasks(pool, count: int, rng: np.random.Generator) -> list[Task]:
    """Validated tasks in scenarios of the train split, from unguided exploration; one or two tool classes on offer."""
    scenarios = {t: [s for s in bfcl.scenarios("train") if t in s.scenario["toolsets"]] for t in TOOLSETS}
    others = [t for t in TOOLSETS if t not in DEMO_TOOLSETS]
    roles = scripted.make(None, bfcl.tools)
    tasks: dict[str, Task] = {}
    contexts_made = 0
    with tqdm(total=count, desc="tasks", unit="task") as bar:
        while len(tasks) < count:
            contexts = []
            for _ in range(64):
                toolset = str(rng.choice(DEMO_TOOLSETS if rng.random() < DEMO_SHARE else others))
                scenario = scenarios[toolset][rng.integers(len(scenarios[toolset]))]
                offered = (
                    {toolset, str(rng.choice(scenario.scenario["toolsets"]))}
                    if rng.random() < 0.3
                    else {toolset}
                )
                scenario = dataclasses.replace(
                    scenario,
                    scenario={
                        **scenario.scenario,
                        "toolsets": [t for t in scenario.scenario["toolsets"] if t in offered],
                    },
                )
                contexts.append(unguided(scenario, f"pretrain-{contexts_made}"))
                contexts_made += 1
            verdicts, _ = synthesize(
                roles,
                bfcl.tools,
                pool,
                contexts,
                TaskLimits(proposals=4),
                rounds=2,
                steps=10,
                rng=rng,
                kind="initial",
                first_id=5 * contexts_made,
            )
            before = len(tasks)
            for task in (v.task for v in verdicts if v.task is not None):
                tasks.setdefault(
                    json.dumps([task.scenario["toolsets"], [c.to_json() for c in task.calls]]), task
                )
            bar.update(min(len(tasks), count) - before)
    return list(tasks.values())[:count]


class Spelling:
    """Retells a demonstration with other names and numbers: each value is exchanged wherever it occurs.

    Without this the policy learns the names of the train split by heart instead of learning to copy.
    """

    QUOTED = re.compile(r"'([^'\"\\\n]{2,})'")  # a value in a query
    WORD = re.compile(r"[A-Za-z]{2,}")
    NUMBER = re.compile(r"(?<![A-Za-z_])[0-9]+")  # not the 1 of file_name1

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        ids = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
        self._start, self._end = ids
        (self._assistant,) = tokenizer.encode("assistant\n", add_special_tokens=False)

    def respell(self, trajectory: Trajectory, rng: np.random.Generator) -> Trajectory:
        head, *rest = re.split(r"(?=<\|im_start\|>user\n)", self._tokenizer.decode(trajectory.ids))
        text = "".join(rest)
        # Longest first: a value may be part of another.
        for value in sorted(set(self.QUOTED.findall(text)), key=lambda v: (-len(v), v)):
            other = self.WORD.sub(lambda m: self._word(m.group(), rng), value)
            for quote in "'\"":
                text = text.replace(quote + value + quote, quote + other + quote)
            if len(value) > 3:  # in a longer answer of the environment
                text = re.sub(rf"\b{re.escape(value)}\b", lambda _: other, text)
        digits = str.maketrans("123456789", "".join(rng.permutation(list("123456789"))))
        text = self.NUMBER.sub(lambda m: m.group().translate(digits), text)
        return self._encode(trajectory, head + text)

    def _word(self, word: str, rng: np.random.Generator) -> str:
        """Another word, made of syllables, with the capitals of this one."""
        pick = lambda letters: letters[rng.integers(len(letters))]
        syllable = lambda: (
            pick("bcdfghjklmnprstvwz") + pick("aeiouy") + pick(("", "", "n", "r", "st", "l", "ck", "m"))
        )
        other = "".join(syllable() for _ in range(rng.integers(1, 4)))
        return other.upper() if word.isupper() else other.title() if word[0].isupper() else other

    def _encode(self, trajectory: Trajectory, text: str) -> Trajectory:
        """The text as a trajectory; the assistant's messages are the policy's."""
        ids = np.asarray(self._tokenizer.encode(text, add_special_tokens=False), np.int32)
        opened = np.flatnonzero((ids[:-1] == self._start) & (ids[1:] == self._assistant)) + 2
        mask = np.zeros(len(ids), bool)
        for begin in opened:
            mask[begin : begin + 1 + np.flatnonzero(ids[begin:] == self._end)[0]] = True
        return dataclasses.replace(
            trajectory,
            ids=ids,
            mask=mask,
            logprobs=np.zeros(len(ids), np.float32),
            versions=np.where(mask, 0, -1).astype(np.int32),
        )


def conversations(trajectories: Sequence[Trajectory], user: int) -> list[Trajectory]:
    """Joins demonstrations that begin with the same list of tools to conversations of at most ROW tokens.

    A list of tools is as long as the task under it; joined, it is read once for several tasks.

    Args:
      user: id of the token with which the first user turn begins, right after the list; the second of its kind.
    """
    groups: dict[bytes, list[tuple[Trajectory, int]]] = {}
    for t in trajectories:
        head = int(np.flatnonzero(t.ids == user)[1])
        groups.setdefault(t.ids[:head].tobytes(), []).append((t, head))
    joined = []
    for group in groups.values():
        head = group[0][1]
        for row in assign_rows([len(t.ids) - head for t, _ in group], ROW - head):
            first, *rest = (group[i][0] for i in sorted(row))  # sorted: as shuffled, not longest first
            join = lambda name: np.concatenate(
                [getattr(first, name), *(getattr(t, name)[head:] for t in rest)]
            )
            joined.append(
                dataclasses.replace(first, **{k: join(k) for k in ("ids", "mask", "logprobs", "versions")})
            )
    return joined


def batches(
    trajectories: Sequence[Trajectory], spelling: Spelling, user: int, rng: np.random.Generator
) -> Iterator[Batch]:
    """Batches of a fixed shape, one conversation a row, epoch after epoch."""
    rows = _TOKENS.value // ROW
    while True:
        shuffled = [trajectories[i] for i in rng.permutation(len(trajectories))]
        spelt = [spelling.respell(t, rng) if rng.random() < _RESPELL.value else t for t in shuffled]
        joined = conversations([t for t in spelt if len(t.ids) <= ROW], user)
        order = rng.permutation(len(joined))
        for start in range(0, len(order) - rows + 1, rows):
            chosen = [joined[i] for i in order[start : start + rows]]
            # Some are short enough to share a row; the batch keeps its shape.
            samples = [Sample(t, np.ones(len(t.ids), np.float32)) for t in chosen]
            yield pack(samples, row_length=ROW, rows_per_microbatch=rows, max_rows=rows)


def train(config: QwenConfig, data: Iterator[Batch], save) -> None:
    """Next-token imitation of the assistant's tokens, with a twentieth of the weight on the rest.

    save: called with the parameters every --save_every steps and at the end.
    """
    model = Qwen(config)
    if _START.value:
        _, params = hf_io.load(_START.value)
    else:
        init = jax.jit(lambda key: model.init(key, jnp.zeros((1, 8), jnp.int32))["params"])
        params = init(jax.random.key(_SEED.value))
    falling = round(_DECAY.value * _STEPS.value)
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, _RATE.value, 50),
            optax.constant_schedule(_RATE.value),
            optax.linear_schedule(_RATE.value, 0.0, falling),
        ],
        [50, _STEPS.value - falling],
    )
    # Muon on the matrices, Adam on the embedding and the norms: learns faster here than AdamW on everything.
    matrices = lambda p: jax.tree.map(
        lambda x: optax.contrib.MuonDimensionNumbers(1, 2) if x.ndim == 3 else None, p
    )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            schedule,
            adam_learning_rate=lambda i: schedule(i) / 4,
            adam_b2=0.95,
            muon_weight_dimension_numbers=matrices,
        ),
    )

    def loss_fn(params, batch: Batch):
        variables = {"params": params}
        hidden = model.apply(variables, batch.tokens, batch.positions, batch.segment_ids, method=Qwen.hidden)
        unembedding, axis = model.apply(variables, method=Qwen.unembedding)
        logprobs, _ = token_logprobs(
            hidden.reshape(-1, hidden.shape[-1]),
            unembedding,
            batch.targets.reshape(-1),
            vocab_axis=axis,
            chunk=_TOKENS.value,
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
    bar = tqdm(range(1, _STEPS.value + 1), desc="imitation", unit="step")
    for i, batch in zip(bar, data):
        params, opt_state, loss = step(params, opt_state, Batch(*(x[0] if x.ndim else x for x in batch)))
        losses.append(float(loss))
        if i % 10 == 0:
            bar.set_postfix(nats_per_assistant_token=f"{np.mean(losses[-50:]):.3f}")
        if i % _SAVE_EVERY.value == 0 or i == _STEPS.value:
            save(params)


def main(_) -> None:
    started = time.time()
    seeds = np.random.SeedSequence(_SEED.value).spawn(4)
    task_rng, skill_rng, script_rng, batch_rng = map(np.random.default_rng, seeds)
    with ProcessPool("bfcl", workers=2) as pool:
        tasks = make_tasks(pool, _TASKS.value, task_rng)
        demonstrator = Demonstrator(skill_rng, _WEAK.value)
        scripts = [demonstrator.messages(task, script_rng if _WEAK.value else None) for task in tasks]
        if _START.value:
            tokenizer = AutoTokenizer.from_pretrained(_START.value)
        else:
            # A byte tokenizer reads the first demonstrations; the real one is trained on what they look like.
            rough = make_tokenizer([])
            sample = demonstrate(rough, pool, tasks[:2000], scripts[:2000], LONG)
            tokenizer = make_tokenizer([rough.decode(t.ids) for t in sample])
        demonstrations = demonstrate(tokenizer, pool, tasks, scripts, LIMITS)
    fit = [t for t in demonstrations if t.outcome.valid and t.stop == "done"]
    print(
        f"{len(fit)} of {len(tasks)} demonstrations fit {ROW} tokens (mean "
        f"{np.mean([len(t.ids) for t in fit]):.0f}, the assistant's {np.mean([t.mask.sum() for t in fit]):.0f}); "
        f"{np.mean([t.outcome.success for t in fit]):.1%} succeed."
    )
    config = QwenConfig(
        "qwen3",
        vocab_size=VOCABULARY,
        rope_theta=10_000.0,
        tie_word_embeddings=True,
        max_position_embeddings=8192,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **MODEL,
    )
    user = tokenizer.convert_tokens_to_ids("<|im_start|>")
    output = Path(_OUTPUT.value)

    def save(params) -> None:
        hf_io.save(output, config, params, dtype=jnp.bfloat16)
        tokenizer.save_pretrained(output)

    train(config, batches(fit, Spelling(tokenizer), user, batch_rng), save)
    print(f"Wrote {output} after {(time.time() - started) / 60:.1f} minutes.")


if __name__ == "__main__":
    app.run(main)
