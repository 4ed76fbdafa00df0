"""tau2's tool `calculate` without eval: numbers, + - * / and parentheses."""

from __future__ import annotations

import ast
import operator

MAX_EXPRESSION = 100  # characters: this also bounds the digits of a result and the depth of the tree
_BINARY = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_UNARY = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """Returns the value as text, rounded to two decimals: "2 + 2" gives "4.0".

    ValueError for anything but such an expression. ZeroDivisionError for a division by zero.
    """
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
