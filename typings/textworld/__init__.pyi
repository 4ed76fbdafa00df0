"""What the environment family uses of TextWorld, which has a virtual environment of its own."""

from typing import Any

from textworld import generator as generator

class GameOptions:
    seeds: int
    nb_rooms: int
    nb_objects: int
    quest_length: int
    path: str

class Game:
    objective: str
    walkthrough: list[str]
    quests: list[Any]
    def serialize(self) -> dict: ...
    @classmethod
    def load(cls, filename: str) -> Game: ...

class EnvInfos:
    def __init__(self, **requested: bool) -> None: ...

class GameState:
    feedback: str
    raw: str
    won: bool
    facts: list[Any]
    admissible_commands: list[str]

class Environment:
    def seed(self, seed: int) -> int: ...
    def reset(self) -> GameState: ...
    def step(self, command: str) -> tuple[GameState, int, bool]: ...
    def close(self) -> None: ...

def start(path: str, request_infos: EnvInfos) -> Environment: ...
