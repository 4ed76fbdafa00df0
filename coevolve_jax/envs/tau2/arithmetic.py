"""tau2's tool `calculate` without eval: numbers, + - * / and parentheses."""

from __future__ import annotations

import ast
import operator

MAX_EXPRESSION = 100  # characters, which bound the digits of a result and the depth of the tree too
_BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """The value, rounded to two decimals, as text: "2 + 2" is "4.0". ValueError for what is no such expression, and
    ZeroDivisionError."""
    if len(expression) > MAX_EXPRESSION:
        raise ValueError(
            f"The expression has {len(expression)} characters: at most {MAX_EXPRESSION} are allowed"
        )
    if not set(expression) <= set("0123456789+-*/(). "):
        raise ValueError("Invalid characters in expression")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, RecursionError, MemoryError):
        raise ValueError("Invalid expression") from None
    return str(round(float(_value(tree.body)), 2))


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        return _BINARY[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError("Use the operators +, -, * and / only")
