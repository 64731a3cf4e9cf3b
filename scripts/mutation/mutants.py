"""Find the one-line changes to try, with the operators of cosmic-ray and one of our own.

cosmic-ray's own command cannot draw a sample, nor choose tests by module. It would also replace each operator
by every other one: `+` by eleven, nearly all of which fail at once. Here each place is changed in one or two
ways that a person might get wrong.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.plugins import get_operator
from parso.python.tree import Keyword
from parso.tree import search_ancestor

OPERATORS = [
    *(
        f"ReplaceComparisonOperator_{change}"
        for change in (
            *("Eq_NotEq", "NotEq_Eq", "Lt_LtE", "LtE_Lt", "Gt_GtE", "GtE_Gt"),
            *("Is_IsNot", "IsNot_Is"),
        )
    ),
    *(
        f"ReplaceBinaryOperator_{change}"
        for change in (
            *("Add_Sub", "Sub_Add", "Mul_Add", "Div_Mul", "FloorDiv_Mul", "Mod_FloorDiv", "Pow_Mul"),
            *("LShift_RShift", "RShift_LShift", "BitAnd_BitOr", "BitOr_BitAnd", "BitXor_BitAnd"),
        )
    ),
    *("ReplaceUnaryOperator_Delete_Not", "ReplaceUnaryOperator_Delete_USub", "AddNot"),
    *("ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer"),
    *("NumberReplacer", "ZeroIterationForLoop"),
]

_LOGS = ("_log.", "log.", "logger.")

Span = tuple[tuple[int, int], tuple[int, int]]
"""From (line, column) to (line, column)."""


class RemoveStatement(Operator):  # type: ignore[misc]
    """Remove a statement that is there for its effect: a call, a raise, or setting an attribute."""

    def mutation_positions(self, node: Any) -> Iterator[Span]:
        """Yield the statement's span."""
        if node.type == "simple_stmt" and _has_effect(node.children[0]):
            yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        """Put `pass` in its place."""
        first = node.children[0]
        node.children[0] = Keyword("pass", first.start_pos, first.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        """Return nothing: cosmic-ray wants it of its plugins."""
        return ()


def _has_effect(statement: Any) -> bool:
    if statement.type == "expr_stmt":
        target, sign = statement.children[0], statement.children[1]
        function: Any = search_ancestor(statement, "funcdef")
        if function is not None and function.name.value == "__init__":
            return False  # without an attribute everything fails
        return bool(target.type == "atom_expr") or (sign.type == "operator" and sign.value != "=")
    return statement.type in ("raise_stmt", "atom_expr", "del_stmt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One change.

    Args:
        path: of the module, below the root.
        line: that the change begins in.
        operator: its name.
        occurrence: which of the places in the module that the operator could change.
    """

    path: str
    line: int
    operator: str
    occurrence: int

    def apply(self, root: Path) -> str:
        """Return the module's text with the change."""
        changed = mutate_code((root / self.path).read_text(), _operator(self.operator), self.occurrence)
        assert changed is not None
        return str(changed)

    def is_valid(self, root: Path) -> bool:
        """Tell whether the change is Python.

        cosmic-ray takes the `*` among parameters for a product, and fails at `except errors.Name`.
        """
        try:
            ast.parse(self.apply(root))
        except (SyntaxError, AttributeError):
            return False
        return True

    def change(self, root: Path) -> tuple[str, str]:
        """Return the lines that change, before and after, without indentation."""
        before, after = (root / self.path).read_text().splitlines(), self.apply(root).splitlines()
        lines = list(difflib.ndiff(before, after))
        removed, added = ("\n".join(x[2:].strip() for x in lines if x.startswith(sign)) for sign in "-+")
        return removed, added


def mutants_of(root: Path, path: str) -> list[Mutant]:
    """Return all changes to try of one module."""
    source = (root / path).read_text()
    left_out = list(_spans_left_out(ast.parse(source)))
    found = []
    nodes = list(ast_nodes(get_ast(source)))
    for name in (*OPERATORS, RemoveStatement.__name__):
        operator = _operator(name)
        positions = (position for node in nodes for position in operator.mutation_positions(node))
        for occurrence, (start, _) in enumerate(positions):
            if not any(begin <= start < end for begin, end in left_out):
                found.append(Mutant(path=path, line=start[0], operator=name, occurrence=occurrence))
    return found


def _spans_left_out(tree: ast.Module) -> Iterator[Span]:
    """Yield what changes no behaviour: annotations, decorators' options, assertions, logs, constants.

    A constant's value is a matter of tuning: no test should fail when a buffer has one byte more.
    """
    for node in ast.walk(tree):
        for part in ("annotation", "returns"):
            if (annotation := getattr(node, part, None)) is not None:
                yield _span(annotation)
        for decorator in getattr(node, "decorator_list", ()):
            yield _span(decorator)
        if isinstance(node, ast.Assert) or (
            isinstance(node, ast.Expr) and ast.unparse(node.value).startswith(_LOGS)
        ):
            yield _span(node)
    for node in tree.body:
        simple = (ast.Constant, ast.BinOp, ast.operator, ast.Name, ast.expr_context, ast.UnaryOp, ast.unaryop)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            types = (ast.Subscript, ast.Tuple, ast.Attribute)  # Callable[[int], None] | bytes
            if all(isinstance(each, (*simple, *types)) for each in ast.walk(node.value)):
                yield _span(node)


def _span(node: Any) -> Span:
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


@cache
def _operator(name: str) -> Operator:
    if name == RemoveStatement.__name__:
        return RemoveStatement()
    return get_operator(f"core/{name}")()
