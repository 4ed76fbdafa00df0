"""On PYTHONPATH, hides from a process what only the tests install: PyTorch, a second to import."""

from importlib.machinery import PathFinder

_find_spec = PathFinder.find_spec


def find_spec(name, path=None, target=None):
    return None if name == "torch" else _find_spec(name, path, target)


PathFinder.find_spec = staticmethod(find_spec)
