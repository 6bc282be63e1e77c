"""Arguments of a script that depend on the number of ranks: --batch {16//N} --tp {min(2,N)}

    fill(["{16//N}"], {"N": 4, "TMP": "/a/folder"})        # ["4"]

Only whole numbers, names, + - * // %, min and max: nothing is run.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping, Sequence

_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS = {"min": min, "max": max}


class PlaceholderError(ValueError):
    """A placeholder that cannot be computed."""


def fill(arguments: Sequence[str], known: Mapping[str, int | str]) -> list[str]:
    """The arguments with the value of each {...} in its place. {{ and }} stand for braces."""

    def value(found: re.Match) -> str:
        if found[0] in ("{{", "}}"):
            return found[0][0]
        return str(_compute(found[1], known))

    return [re.sub(r"\{\{|\}\}|\{([^{}]+)\}", value, argument) for argument in arguments]


def _compute(words: str, known: Mapping[str, int | str]) -> int | str:
    try:
        return _value(ast.parse(words.strip(), mode="eval").body, known)
    except (SyntaxError, TypeError, ZeroDivisionError, KeyError) as error:
        names = ", ".join(known)
        raise PlaceholderError(
            f"{{{words}}} cannot be computed ({error}): "
            f"whole numbers, {names}, + - * // %, min() and max() can; "
            "write {{ and }} for braces"
        ) from None


def _value(node: ast.expr, known: Mapping[str, int | str]) -> int | str:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        return known[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_number(node.left, known), _number(node.right, known))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _FUNCTIONS[node.func.id](*[_number(each, known) for each in node.args])
    raise SyntaxError(f"{ast.unparse(node)} is not among them")


def _number(node: ast.expr, known: Mapping[str, int | str]) -> int:
    value = _value(node, known)
    if not isinstance(value, int):
        raise TypeError(f"{ast.unparse(node)} is no number")
    return value
