"""A client of a model, a question that the server of openai_server.py answers, and the settings for both."""

import json

import pytest
from ml_collections import ConfigDict

from coevolve_jax.explorers import llm
from coevolve_jax.explorers.llm.explorer import Action
from coevolve_jax.llm.prompting import Question
from tests.support.openai_server import OpenAIServer

TOOL = {
    "name": "ls",
    "description": "Lists.",
    "parameters": {"type": "object", "properties": {}, "required": []},
}
EXPLORE = 'Round 1.\nAnswer with a JSON object that is your next action:\n"tool"'
ASKED = Question("The tools\n" + json.dumps(TOOL), EXPLORE, 1)


@pytest.fixture
def server():
    with OpenAIServer() as server:
        yield server


def settings_of(server, **changes):
    quick = {"base_url": server.url, "cache": "", "timeout": 60.0, "patience": 0.01, "attempts": 2}
    return ConfigDict({**llm.DEFAULTS, **quick, **changes})


def says(name):
    """A server's `wrap` that puts a name into its answers."""
    return lambda text: text.replace("Let me try.", name)


def who(client, seed=1):
    (answer,) = client.ask("explore", [ASKED._replace(seed=seed)], Action)
    return answer and answer.thought
