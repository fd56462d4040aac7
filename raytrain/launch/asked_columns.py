"""Which columns do the hooks of a task ask for, and does each source have them?

Reads the hooks' text and runs nothing, so that a wrong name, or a column that cannot become a tensor, is found before any
worker starts. Only what a hook asks for in any case counts, not what stands in a branch, a loop or a function of its own:
workers find that in their warm-up. Pure, but for reading the text.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from raytrain.data.source import Source, left_out_column, missing_column
from raytrain.task import Task

SIMPLE = ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr, ast.Return, ast.Import, ast.ImportFrom
COMPREHENSIONS = ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp


def check_asked_columns(task: Task, sources: Mapping[str, Source]) -> None:
    """Checks the columns that the first hook to see a batch asks for: `transform`, or without one `loss` and `metrics`.

    Raises:
        DataError: a source does not have a column, or it cannot become a tensor.
    """
    is_own = type(task).transform is not Task.transform
    for name in ("transform",) if is_own else ("loss", "metrics"):
        for column in asked_columns(getattr(task, name)):
            for source_name, source in sources.items():
                if column in source.columns or (name == "metrics" and source_name == "train"):
                    continue
                where = f"{type(task).__name__}.{name}, with source {source_name!r}"
                if column in source.left_out:
                    raise left_out_column(where, column, source.left_out[column])
                raise missing_column(where, column, source.columns)


def asked_columns(hook: Callable[..., Any]) -> list[str]:
    """The names that a hook always asks its batch for, as in `batch["x"]`; none where its text is not at hand."""
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(hook))).body[0]
        batch = list(inspect.signature(hook).parameters)[-1]
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):
        return []
    if not isinstance(parsed, ast.FunctionDef) or parsed.decorator_list:
        return []
    return list(dict.fromkeys(_asked(parsed.body, batch)))


def _asked(body: Iterable[ast.stmt], batch: str) -> Iterator[str]:
    """Names in statements that always run: up to the first branch or loop, or where others may have changed the batch."""
    for statement in body:
        if isinstance(statement, ast.With):
            yield from _asked(statement.body, batch)
        if not isinstance(statement, SIMPLE):
            return
        nodes = list(ast.walk(statement))
        asked = [node for node in nodes if isinstance(node, ast.Subscript) and _is(node.value, batch)]
        if sum(_is(node, batch) for node in nodes) > len(asked):  # it is given away, or a method of it is called
            return
        for node in _evaluated(statement):
            name = node.slice.value if node in asked and isinstance(node.slice, ast.Constant) else None
            if isinstance(name, str) and isinstance(node.ctx, ast.Load):
                yield name
        if not all(isinstance(node.ctx, ast.Load) for node in asked):
            return


def _evaluated(node: ast.AST) -> Iterator[Any]:
    """A node, and those below it that are evaluated in any case."""
    yield node
    below: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Lambda):
        below = ()
    elif isinstance(node, COMPREHENSIONS):
        below = [node.generators[0].iter]
    elif isinstance(node, ast.IfExp):
        below = [node.test]
    elif isinstance(node, ast.BoolOp):
        below = node.values[:1]
    for child in below:
        yield from _evaluated(child)


def _is(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
