"""Checks that a change of words changed no code: two versions' syntax trees differ in docstrings alone.

    python tests/support/same_code.py REF                compares the files here with those of the commit REF
    python tests/support/same_code.py REF --messages     lets the texts of `raise` statements differ too

Comments are in no syntax tree. It names each file whose code differs; then the exit status is 1.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Words(ast.NodeTransformer):
    """Removes docstrings and, with `messages`, the texts of `raise` statements."""

    def __init__(self, messages: bool):
        self._messages = messages

    def visit(self, node: ast.AST) -> ast.AST:
        self.generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and body:
            first = body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                node.body = body[1:]  # pyright: ignore[reportAttributeAccessIssue]
        if self._messages and isinstance(node, ast.Raise) and node.exc:
            node.exc = _without_texts(node.exc)
        return node


def _without_texts(tree: ast.expr) -> ast.expr:
    """The expression with empty texts. Expressions inside f-strings stay, in order."""

    class Texts(ast.NodeTransformer):
        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            return ast.Constant("") if isinstance(node.value, str) else node

        def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
            values = [self.visit(v) for v in node.values if isinstance(v, ast.FormattedValue)]
            return ast.JoinedStr(values) if values else ast.Constant("")

    return Texts().visit(tree)


def code(source: str, messages: bool = False) -> str:
    """The syntax tree of a file without its words."""
    return ast.dump(Words(messages).visit(ast.parse(source)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("ref", help="a commit")
    parser.add_argument(
        "--messages", action="store_true", help="let the texts of raise statements differ too"
    )
    arguments = parser.parse_args()
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    changed = git("diff", "--name-only", arguments.ref, "--", "*.py").stdout.split()
    differ = []
    for name in changed:
        path = ROOT / name
        before = subprocess.run(
            ["git", "show", f"{arguments.ref}:{name}"], cwd=ROOT, capture_output=True, text=True, check=False
        )
        if before.returncode or not path.exists():
            differ.append(f"{name} is only in one of the two")
        elif code(before.stdout, arguments.messages) != code(path.read_text(), arguments.messages):
            differ.append(f"{name} has other code")
    print("\n".join(differ) or f"{len(changed)} files differ in words alone")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
