"""Prints a task's prompt exactly as the model sees it, with control tokens, and counts its tokens by part.

    python experiments/show_prompt.py --model=models/tiny_qwen3 --benchmark=bfcl --task=multi_turn_base_3
    python experiments/show_prompt.py --model=QWEN --benchmark=bfcl --protocol=official \\
        --task=multi_turn_miss_func_0
    python experiments/show_prompt.py --config=configs/textworld_tiny.py --split=development \\
        --task=quest_development_1_1000000

The messages of later user turns follow the prompt, each as it is fed when the turn before has ended. The
model folder needs no weights.
"""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from absl import flags
from ml_collections import config_flags

from coevolve_jax.config import command_line

_CONFIG = config_flags.DEFINE_config_file(
    "config", None, "Config file, for its model and its environment family.", lock_config=True
)
_MODEL = flags.DEFINE_string("model", None, "Hugging Face folder with a tokenizer; none: the config's.")
_BENCHMARK = flags.DEFINE_string("benchmark", None, "An environment family; none: the config's.")
_TASK = flags.DEFINE_string("task", None, "Id of the task, such as multi_turn_base_3.", required=True)
_SPLIT = flags.DEFINE_string(
    "split",
    None,
    "Split that has the task; none: all, or the config's eval_split where no split is called so.",
)
_PROTOCOL = flags.DEFINE_string(
    "protocol", "", "A named protocol of the benchmark; BFCL: official, steps_30. None: as in training."
)
_FORMAT = flags.DEFINE_enum(
    "tool_call_format",
    None,
    ["json", "llama3", "python"],
    "How the policy writes calls; none: the config's, or the chat template's.",
)
_PYTHON = flags.DEFINE_string(
    "python", None, "Interpreter of the environment family; none: the config's, or this one."
)


def show() -> None:
    config = _CONFIG.value
    folder = _MODEL.value or (config and config.model)
    name = _BENCHMARK.value or (config and config.environment.name)
    if not folder or not name:
        raise ValueError("Give --model and --benchmark, or a --config that has both.")
    from coevolve_jax import envs
    from coevolve_jax.rollout.chat import Chat, load_tokenizer

    ours = config is not None and name == config.environment.name
    python = (config.environment.python if ours else "") if _PYTHON.value is None else _PYTHON.value
    family = envs.load(name, python)
    settings = {
        **(config.environment.to_dict() if ours else {}),
        **family.settings(family.categories, _PROTOCOL.value),
    }
    split, found = _tasks(family, settings)
    tasks = {task.id: task for task in found}
    if not tasks:
        remedy = "let its class define get_reward(self) and return the request from reset, or "
        raise ValueError(
            f"The environment {name} has no tasks of its own in --split={split}: "
            f"{remedy * (name == 'tools')}choose another split."
        )
    if _TASK.value not in tasks:
        ids = list(tasks)
        raise ValueError(
            f"There is no task {_TASK.value!r} in the split {split} of {name}: "
            f"its {len(ids)} ids go from {ids[0]} to {ids[-1]}."
        )
    task, tokenizer = tasks[_TASK.value], load_tokenizer(folder)
    chat, written = Chat(tokenizer), _FORMAT.value or (config and config.rollout.tool_call_format)
    if written:
        chat = chat.writing(written)
    tools = family.tools(task)
    control = set(tokenizer.get_added_vocab().values())
    begins = next(i for i in chat.user("") if i in control)  # begins each message

    def prompt_of(tools) -> tuple[list[int], list[int]]:
        """Returns the prompt's ids, and the lengths of the system's part, the query, and the opening."""
        prompt = chat.prompt(tools, task.turns[0].query, task.system, task.examples)
        user, opening = [i for i, token in enumerate(prompt) if token == begins][-2:]
        return prompt, [user, opening - user, len(prompt) - opening]

    (prompt, lengths), (_, bare) = prompt_of(tools), prompt_of(())
    in_query = lengths[1] - bare[1] > lengths[0] - bare[0]  # the template says which part has the tools
    later = [chat.user(turn.query) for turn in task.turns[1:]]
    print(chat.decode(prompt))
    for i, ids in enumerate(later):
        print(f"\n{f' after turn {i + 1} of {len(task.turns)} ':=^100}\n{chat.decode(ids)}")
    print(f"\n{' tokens ':=^100}")
    with_tools = f" and {len(tools)} tools"
    counts = {
        "system" + with_tools * (not in_query): lengths[0],
        "user" + with_tools * in_query: lengths[1],
        "assistant's turn opens": lengths[2],
    }
    counts["the prompt"] = len(prompt)
    counts |= {f"after turn {i + 1}": len(ids) for i, ids in enumerate(later)}
    for part, count in counts.items():
        print(f"{part:>28} {count:>8,}")


def _tasks(family, settings: dict) -> tuple[str, list]:
    """Returns the split that --split names or implies, and its tasks."""
    if _SPLIT.value:
        return _SPLIT.value, family.tasks(_SPLIT.value, settings)
    try:
        return "all", family.tasks("all", settings)
    except ValueError:
        if "eval_split" not in settings:
            raise
        return settings["eval_split"], family.tasks(settings["eval_split"], settings)


if __name__ == "__main__":
    command_line.start(show)
