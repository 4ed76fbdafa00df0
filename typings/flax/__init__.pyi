"""Leaves flax untyped: pyright cannot follow a module's lifted methods and the trees that they return."""

from typing import Any

def __getattr__(name: str) -> Any: ...
