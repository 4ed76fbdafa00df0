"""Asks a model questions, each in a conversation of its own, and prints what it answers and how fast.

    python experiments/ask.py --model=models/smollm2-135m-instruct "What is 17 + 25?" "Say hello."

The in-process engine generates. A first token, which is not timed, compiles its programs for conversations of
the first question's size. The sizes are 256 tokens, 512, 1024 and so on. The first answer that needs another
size is timed with the compiling.
"""

import asyncio
import dataclasses
import os
import sys
import time
from contextlib import closing

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import numpy as np
from absl import app, flags, logging

from coevolve_jax import shipped
from coevolve_jax.config import command_line
from coevolve_jax.llm.prompting import visible
from coevolve_jax.rollout.engine import EngineError

_MODEL = flags.DEFINE_string("model", None, "Hugging Face model folder.", required=True)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 is greedy.", lower_bound=0.0)
_NEW = flags.DEFINE_integer("max_new_tokens", 128, "Tokens of one answer.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the sampling.", lower_bound=0)


def main(argv) -> None:
    if len(argv) < 2:
        start = shipped.command("ask")
        sys.exit(f'Error: name at least one question: {start} --model=FOLDER "QUESTION"; see --help.')
    logging.set_verbosity(logging.WARNING)
    with command_line.exits(FloatingPointError, EngineError):
        ask(argv[1:])


def ask(questions: list[str]) -> None:
    from coevolve_jax import build
    from coevolve_jax.rollout.engine import Completion, Request, Sampling, check_logprobs
    from coevolve_jax.rollout.native.engine import NativeEngine

    policy = build.policy(_MODEL.value)
    chat = policy.chat
    sampling = Sampling(_TEMPERATURE.value, _NEW.value, chat.stop_ids)
    prompts = [np.asarray(chat.prompt((), question), np.int32) for question in questions]
    longest = max(map(len, prompts)) + _NEW.value
    if longest > policy.config.max_position_embeddings:
        raise ValueError(
            f"A question with its answer may take {longest} tokens, and {_MODEL.value} reads "
            f"{policy.config.max_position_embeddings}: shorten it, or lower --max_new_tokens."
        )
    engine = NativeEngine(
        policy.config,
        policy.params,
        slots=1,
        max_length=longest,
        max_new_tokens=_NEW.value,
        seed=_SEED.value,
    )

    def answer_to(i: int, sampling: Sampling) -> Completion:
        (answer,) = asyncio.run(engine.generate([Request(i, prompts[i], sampling, seed=i)]))
        engine.release([i])
        check_logprobs([answer])
        return answer

    with closing(engine):
        answer_to(0, dataclasses.replace(sampling, max_new_tokens=1))
        for i, question in enumerate(questions):
            start = time.monotonic()
            answer = answer_to(i, sampling)
            seconds = time.monotonic() - start
            ended = answer.finish == "stop"
            said = chat.decode(answer.ids[:-1] if ended else answer.ids)
            print(f"\n> {question}\n{visible(said).expandtabs()}")
            print(
                f"[{len(answer.ids)} tokens in {seconds:.1f} s, {len(answer.ids) / seconds:.0f} a second"
                f"{'' if ended else '; cut, see --max_new_tokens'}]"
            )


if __name__ == "__main__":
    app.run(main, flags_parser=command_line.parse_flags)
