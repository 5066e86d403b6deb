"""A check of kernel files against the subset of Python that NKI 0.3 to 0.6 compiles.

The compilers parse a kernel and interpret a subset of Python. Their guides name: values and containers ("NKI Values"),
classes that inherit only from NKIObject ("Class Support"), functions as values, ``for`` over ranges, lists and tuples,
no ``is``, no ``*`` in a signature (migration guide to 0.3). The check also refuses what the guides do not name and no
kernel of nki-library (April 2026), nki-samples or the SDK's examples uses in this dialect: comprehensions, ``lambda``,
``zip``, ``enumerate``, ``sum``, tuples as loop targets, properties, class methods, inner functions, starred arguments.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

STATEMENTS = (
    ast.FunctionDef, ast.Return, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.For, ast.If, ast.Expr, ast.Assert,
)  # fmt: skip
EXPRESSIONS = (
    ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.IfExp, ast.Compare, ast.Call, ast.Constant, ast.Attribute, ast.Subscript,
    ast.Name, ast.List, ast.Tuple, ast.Slice, ast.JoinedStr, ast.FormattedValue,
)  # fmt: skip
PARTS = (
    ast.arguments, ast.arg, ast.keyword, ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.Eq, ast.NotEq,
    ast.Lt, ast.LtE, ast.Gt, ast.GtE,
)  # fmt: skip
BUILTINS = {"range", "len", "min", "max", "divmod", "slice", "isinstance", "tuple", "int", "float", "str"}
ALLOWED_IMPORTS = {"__future__", "typing", "dataclasses", "nki", "nki.isa", "nki.language"}
BASES = {"NKIObject", "nl.NKIObject"}


def problems(source: str, modules: set[str]) -> Iterator[str]:
    """Yield "line: problem" for what is outside of the subset; the file may import from ``modules``."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported = [a.name for a in node.names if a.name not in ALLOWED_IMPORTS | modules]
            yield from (f"{node.lineno}: imports {name}" for name in imported)
        if isinstance(node, ast.ImportFrom) and node.module not in ALLOWED_IMPORTS | modules:
            yield f"{node.lineno}: imports {node.module}"
        if isinstance(node, ast.ClassDef):
            yield from _class(node)
        if isinstance(node, ast.FunctionDef):
            yield from _function(node, _names(tree))


def _names(tree: ast.Module) -> set[str]:
    """Return the functions and classes that a file defines or imports by name."""
    defined = {n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    return defined | {a.asname or a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}


def _class(node: ast.ClassDef) -> Iterator[str]:
    bases = [ast.unparse(base) for base in node.bases]
    if len(bases) != 1 or bases[0] not in BASES or node.keywords:
        yield f"{node.lineno}: class {node.name} must inherit from NKIObject and no other class"
    for decorator in node.decorator_list:
        if ast.unparse(decorator) != "dataclass":
            yield f"{decorator.lineno}: class {node.name} has the decorator {ast.unparse(decorator)}"
    for part in node.body:
        if not isinstance(part, (ast.FunctionDef, ast.AnnAssign, ast.Expr)):
            yield f"{part.lineno}: class {node.name} has a {type(part).__name__}"


def _function(function: ast.FunctionDef, known: set[str]) -> Iterator[str]:
    yield from (f"{d.lineno}: {function.name} has the decorator {ast.unparse(d)}" for d in function.decorator_list)
    parameters = function.args
    if parameters.kwonlyargs or parameters.vararg or parameters.kwarg or parameters.posonlyargs:
        yield f"{function.lineno}: {function.name} has keyword-only, positional-only or variable parameters"
    heads = {id(n.iter.func) for n in ast.walk(function) if isinstance(n, ast.For) and isinstance(n.iter, ast.Call)}
    for statement in function.body:
        for node in ast.walk(statement):
            where = f"{getattr(node, 'lineno', function.lineno)}: "
            if not isinstance(node, (*STATEMENTS, *EXPRESSIONS, *PARTS)) or isinstance(node, ast.FunctionDef):
                yield f"{where}{type(node).__name__} in {function.name}"
            elif isinstance(node, ast.For) and (not isinstance(node.target, ast.Name) or node.orelse):
                yield f"{where}a loop of {function.name} has a tuple as its target or an else"
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                name = node.func.id
                if name not in known | BUILTINS:
                    yield f"{where}{function.name} calls {name}"
                if name == "range" and id(node.func) not in heads:
                    yield f"{where}{function.name} uses range outside the head of a loop"
