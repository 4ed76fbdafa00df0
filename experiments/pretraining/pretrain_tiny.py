"""Makes the tiny policies: Qwen3 models that are broad and imperfect, like a pre-trained language model.

They imitate a demonstrator that acts in a family's real environments (train split only). It first acts
without errors, which teaches the policy to read, copy and call. Then, for a short while, it has bad habits
with some tools.

A habit is one kind of error: a wrong argument, a skipped or swapped call, a sibling tool, or giving up early.
It is about as frequent as the right call. So greedy decoding errs too, and RL has more to mend than sampling
noise.

    script under experiments/pretraining/   model of models/       tools with a bad habit
    tiny_qwen3.sh                           tiny_qwen3             a random 45% of the tools
    tiny_qwen3_weak.sh                      tiny_qwen3_weak        ten named tools
    tiny_qwen3_seldom.sh                    tiny_qwen3_seldom      ten named tools; starts from
                                                                   tiny_qwen3_weak
    tiny_qwen3_hints.sh                     none yet               the same ten; starts from
                                                                   tiny_qwen3_seldom, and reads hints
    tiny_qwen3_textworld.sh                 tiny_qwen3_textworld   8 of 13 verbs; starts from tiny_qwen3
    tiny_qwen3_tau2.sh                      tiny_qwen3_tau2        17 of telecom's 43 tools; starts from
                                                                   tiny_qwen3, with another tokenizer

The scripts write to runs/pretrain/. The seeds are fixed. docs/notes/results.md has wall times and results;
docs/notes/textworld.md and docs/notes/tau2.md have those of the last two.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from absl import app, flags
from advice import advise
from corpus import Spelling, batches
from demonstrations import demonstrate
from demonstrator import Demonstrator, drawn_habits, named_habits, to_json
from tiny_tokenizer import SPECIAL, VOCABULARY, carried_over, make_tokenizer
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from coevolve_jax.config import parse_flags
from coevolve_jax.envs.worker_pool import ProcessPool
from coevolve_jax.grpo.logprobs import token_logprobs
from coevolve_jax.grpo.packing import Batch
from coevolve_jax.models import hf_io
from coevolve_jax.models.decoder import Decoder, ModelConfig

_OUTPUT = flags.DEFINE_string("output", "runs/pretrain/clean", "Folder to write, in Hugging Face format.")
_ENVIRONMENT = flags.DEFINE_string(
    "environment", "bfcl", "Environment family to demonstrate: a module of lessons/."
)
_SEED = flags.DEFINE_integer("seed", 7, "Seed of tasks, demonstrator, weights and batches.")
_TASKS = flags.DEFINE_integer("tasks", 12000, "Tasks to demonstrate, each once.")
_STEPS = flags.DEFINE_integer("steps", 1200, "Optimiser steps.")
_TOKENS = flags.DEFINE_integer("tokens", 8192, "Tokens per step, prompts and padding included.")
_START = flags.DEFINE_string(
    "start", None, "Folder of an earlier output to start from: its tokenizer and weights."
)
_NEW_TOKENIZER = flags.DEFINE_bool(
    "new_tokenizer",
    False,
    "With --start: replace its tokenizer by one trained on these demonstrations.",
)
_RESPELL = flags.DEFINE_float(
    "respell", 0.85, "Share of the demonstrations that are retold with other names and numbers."
)
_WEAK = flags.DEFINE_float(
    "weak", 0.0, "Share of the tools (or verbs) that have a bad habit; 0: no errors at all."
)
_WEAK_TOOLS = flags.DEFINE_spaceseplist(
    "weak_tools",
    [],
    "The tools (or verbs) with a bad habit, as NAME:ERROR:RATE separated by spaces; the others never fail.",
)
_HINTS = flags.DEFINE_float("hints", 0.0, "Share of the demonstrations that hold a hint (advice.py).")
_WRONG_HINTS = flags.DEFINE_float("wrong_hints", 0.3, "Share of these hints that are wrong, and not heeded.")
_RATE = flags.DEFINE_float("learning_rate", 0.02, "Peak; constant after a warm-up, then falling linearly.")
_DECAY = flags.DEFINE_float(
    "decay", 0.0, "Share of the steps, the last ones, over which the learning rate falls."
)
_SAVE_EVERY = flags.DEFINE_integer("save_every", 500, "Steps between writings of --output.")
flags.register_multi_flags_validator(
    ["weak", "weak_tools"],
    lambda given: not (given["weak"] and given["weak_tools"]),
    "--weak draws the weak tools and --weak_tools names them: give one of the two.",
)
flags.register_multi_flags_validator(
    ["start", "new_tokenizer"],
    lambda given: given["start"] or not given["new_tokenizer"],
    "--new_tokenizer is for going on from --start: without one the tokenizer is always new.",
)

MODEL = ModelConfig(
    "qwen3",
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=384,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    rope_theta=10_000.0,
    tie_word_embeddings=True,
    max_position_embeddings=8192,
    initializer_range=0.06,
    eos_token_id=SPECIAL.index("<|im_end|>"),
    pad_token_id=SPECIAL.index("<|endoftext|>"),
)


def first_params(tokenizer: PreTrainedTokenizerFast) -> Any:
    """The parameters of --start, or random ones. With --new_tokenizer the embedding is carried over to it."""
    if not _START.value:
        init = jax.jit(lambda key: Decoder(MODEL).init(key, jnp.zeros((1, 8), jnp.int32))["params"])
        return init(jax.random.key(_SEED.value))
    _, params = hf_io.load(_START.value)
    if _NEW_TOKENIZER.value:
        table = params["embed_tokens"]
        rows = carried_over(table["embedding"], AutoTokenizer.from_pretrained(_START.value), tokenizer)
        params = {**params, "embed_tokens": {**table, "embedding": rows}}
    return params


def train(params: Any, data: Iterator[Batch], save: Callable[[Any], object]) -> None:
    """Trains by next-token imitation of the assistant's tokens. All other tokens have a weight of 1/20.

    save: called with the parameters every --save_every steps and at the end.
    """
    model = Decoder(MODEL)
    falling = round(_DECAY.value * _STEPS.value)
    schedule = optax.join_schedules(
        [
            optax.linear_schedule(0.0, _RATE.value, 50),
            optax.constant_schedule(_RATE.value),
            optax.linear_schedule(_RATE.value, 0.0, falling),
        ],
        [50, _STEPS.value - falling],
    )
    # Muon on the matrices, Adam on the embedding and norms: this learns faster here than AdamW on everything.
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
        hidden = model.apply(
            variables, batch.tokens, batch.positions, batch.segment_ids, method=Decoder.hidden
        )
        unembedding, axis = model.apply(variables, method=Decoder.unembedding)
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
    seeds = np.random.SeedSequence(_SEED.value).spawn(5)
    task_rng, skill_rng, script_rng, batch_rng, hint_rng = map(np.random.default_rng, seeds)
    lessons = importlib.import_module(f"lessons.{_ENVIRONMENT.value}")
    limits, row = lessons.LIMITS, lessons.LIMITS.max_length
    named = named_habits(_WEAK_TOOLS.value, lessons.actions())
    drawn = drawn_habits(_WEAK.value, lessons.actions(), skill_rng) if _WEAK.value else {}
    demonstrator = Demonstrator(named or drawn, lessons)
    with ProcessPool(_ENVIRONMENT.value, workers=2, timeout=60.0, python=lessons.PYTHON) as pool:
        tasks = lessons.make_tasks(pool, _TASKS.value, task_rng)
        hinted = [task for task in tasks if hint_rng.random() < _HINTS.value]
        advised = {t.id: advise(t, lessons, _WRONG_HINTS.value, hint_rng) for t in hinted}
        hints = {id: advice.hint for id, advice in advised.items()}
        scripts = [
            demonstrator.messages(own.played, script_rng, own.heeded)
            if (own := advised.get(task.id))
            else demonstrator.messages(task, script_rng)
            for task in tasks
        ]
        if _START.value and not _NEW_TOKENIZER.value:
            tokenizer = AutoTokenizer.from_pretrained(_START.value)
        else:
            # Encode the first demonstrations with a byte tokenizer, and train the real tokenizer on their
            # text.
            rough = make_tokenizer([])
            long = dataclasses.replace(limits, max_length=16 * row, max_new_tokens=8 * row)
            sample = demonstrate(rough, pool, lessons.tools, tasks[:2000], scripts[:2000], long, hints)
            tokenizer = make_tokenizer([str(rough.decode(t.ids)) for t in sample])
        demonstrations = demonstrate(tokenizer, pool, lessons.tools, tasks, scripts, limits, hints)
    fit = [t for t in demonstrations if t.outcome.valid and t.stop == "done"]
    print(
        f"{len(fit)} of {len(tasks)} demonstrations fit {row} tokens (mean "
        f"{np.mean([len(t.ids) for t in fit]):.0f}, "
        f"the assistant's {np.mean([t.mask.sum() for t in fit]):.0f}); "
        f"{np.mean([t.outcome.success for t in fit]):.1%} succeed."
    )
    output = Path(_OUTPUT.value)

    def save(params) -> None:
        hf_io.save(output, MODEL, params, dtype=jnp.bfloat16)
        tokenizer.save_pretrained(output)
        if named:
            (output / "weak_tools.json").write_text(to_json(named))

    rows = _TOKENS.value // row
    user = SPECIAL.index("<|im_start|>")
    spelling = Spelling(tokenizer, lessons.retell)
    data = batches(fit, spelling, user, batch_rng, respell=_RESPELL.value, rows=rows, length=row)
    train(first_params(tokenizer), data, save)
    print(f"Wrote {output} after {(time.time() - started) / 60:.1f} minutes.")


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
