"""On PYTHONPATH, hides from a process what only the tests install: PyTorch, which takes a second to import."""

import sys

sys.modules["torch"] = None
