"""Does a job name files that stay behind? Found in its code and its arguments before it is sent.

Looks at the texts in the script and in the modules of the working directory that it imports: those that are the path of a
file or folder there, relative to the working directory or to the code's own folder. Paths that are put together while the
job runs are not seen, but for `Path("a") / "b"`. Nothing is imported or run.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from raytrain.cluster.submit.upload import OURS, RUNS, Upload

LONGEST_PATH = 255


def left_behind(upload: Upload, script: str, arguments: Sequence[str]) -> list[str]:
    """What the job will look for and not find, one line each.

    Args:
        upload: of `survey`.
        script: path below the root.
        arguments: of the job.
    """
    code = _code(upload.root, script)
    named = [(f"{file} line {line} {verb}", name) for file in code for line, verb, name in _names(upload.root, file)]
    for word in arguments:
        text = word.partition("=")[2] if word.startswith("-") else word
        named += [(f"the argument {word} names", name) for name in _existing(upload.root, text, upload.root)]
    missing = [(who, name) for who, name in named if upload.why_not(name) and not _is_for_results(name)]
    return list(dict.fromkeys(f"{who} {name}, which {_cure(upload, name)}" for who, name in missing))


def _cure(upload: Upload, name: str) -> str:
    reason = upload.why_not(name)
    if reason == OURS:
        return f"is not uploaded: use --include {Path(name).parts[0]}, or keep it where all nodes reach it"
    return f"{reason} leaves out: take it out of that, or keep it where all nodes reach it"


def _is_for_results(name: str) -> bool:
    return Path(name).parts[:1] == (RUNS,)


def _code(root: Path, script: str) -> list[str]:
    """The script and what it imports from the working directory, as paths below it; raytrain itself is not looked at."""
    found, todo = [], [script]
    while todo:
        name = todo.pop()
        if name not in found and Path(name).parts[0] != "raytrain":
            found.append(name)
            todo += [inner for _, inner in _imports(root, name)]
    return found


def _names(root: Path, file: str) -> Iterator[tuple[int, str, str]]:
    """What a file imports and names, with the line: paths below the root."""
    for line, name in _imports(root, file):
        yield line, "imports", name
    for line, text in sorted(_texts(_parsed(root / file))):
        yield from ((line, "names", name) for name in _existing(root, text, root, (root / file).parent))


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):  # the job will say it
        return ast.Module([], [])


def _texts(module: ast.Module) -> Iterator[tuple[int, str]]:
    """All texts of a module, with the line; what is put together is told as a whole."""
    todo: list[ast.AST] = [module]
    while todo:
        node = todo.pop()
        if text := _text(node):
            yield getattr(node, "lineno", 0), text
        else:
            todo += ast.iter_child_nodes(node)


def _text(node: ast.AST) -> str:
    """A text, or a path that is put together from texts, as far as it is known: 'a/b' for Path("a") / "b"."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Path":
        return "/".join(map(_text, node.args))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div) and (left := _text(node.left)):
        return f"{left}/{_text(node.right)}" if _text(node.right) else ""
    return ""


def _existing(root: Path, text: str, *bases: Path) -> Iterator[str]:
    """The path below the root that a text stands for, if it is one; a bare word is not taken for a path."""
    if not ("/" in text or "." in text) or "\n" in text or "\0" in text or "://" in text or len(text) > LONGEST_PATH:
        return
    for base in dict.fromkeys(bases):
        path = Path(base, text)
        if path.is_relative_to(root) and ".." not in path.parts and path != root and path.exists():
            yield str(path.relative_to(root))
            return


def _imports(root: Path, file: str) -> Iterator[tuple[int, str]]:
    """Modules of the working directory that a file imports, as paths below it, with the line."""
    folder = Path(file).parent
    for node in ast.walk(_parsed(root / file)):
        if isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = ".".join((root / file).relative_to(root).parts[: -node.level]) if node.level else ""
            module = ".".join(filter(None, (start, node.module)))
            dotted = [module, *(f"{module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in dotted:
            for base in dict.fromkeys((folder, Path())):
                yield from ((node.lineno, str(path)) for path in _modules(base, name) if (root / path).is_file())


def _modules(base: Path, dotted: str) -> Iterator[Path]:
    """Files that importing 'a.b' may run: a/__init__.py, a/b.py, a/b/__init__.py, a.py."""
    parts = [part for part in dotted.split(".") if part]
    for end in range(1, len(parts) + 1):
        path = base.joinpath(*parts[:end])
        yield from (path.with_suffix(".py"), path / "__init__.py")
