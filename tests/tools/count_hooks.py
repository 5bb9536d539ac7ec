# SPDX-License-Identifier: Apache-2.0
"""How many lines of code does a model need for its hooks?

``python tests/tools/count_hooks.py [folder of models]`` prints a table, one row a model class.

Counted for a class: the lines of its body, and of every helper of its file that it uses, directly
or through another (functions, constants, mixins; a helper that no class uses counts for each).
A helper imported from a private module beside it (``models/_*.py``) counts too while no other
family imports it: moving a line to where it is not counted does not make it shared. Not counted:
blank lines, comments, docstrings, imports and the ``class`` line.
"""

import ast
import sys
import tokenize
from collections.abc import Iterable
from pathlib import Path

MODELS = Path(__file__).resolve().parents[2] / "vllm" / "vit_cudagraph" / "models"
LIMIT = 20
WHOLE_TOWERS = {
    "OpenPanguVLForConditionalGeneration": 60,
    "Ovis2_5": 60,
    "KananaVForConditionalGeneration": 30,
    "Qwen3OmniMoeThinkerForConditionalGeneration": 60,
    "DotsOCRForCausalLM": 60,
    "LlavaOnevision2ForConditionalGeneration": 60,
    "Cosmos3EdgeForConditionalGeneration": 60,
}
"""Limits of classes whose tower makes its metadata inside its own forward: its loop over blocks is
among their hooks."""
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def family_files(folder: Path = MODELS) -> list[Path]:
    """The files of ``folder`` that hold models: one a family, without private modules."""
    return sorted(path for path in folder.glob("*.py") if not path.name.startswith("_"))


def _lines(node: ast.AST) -> set[int]:
    """Lines between the first and the last of ``node``, decorators included."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return set(range(first, node.end_lineno + 1))


def _code_lines(path: Path, tree: ast.Module) -> set[int]:
    """Line numbers that carry code: no blank lines, comments, docstrings, imports."""
    code: set[int] = set()
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type not in _NO_CODE:
                code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        is_text = (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            code -= _lines(node)
    return code


def _definitions(tree: ast.Module) -> dict[str, ast.stmt]:
    """Top-level statements of a module by the names they bind; imports left out.

    A statement that binds nothing (a registration call, an ``if``) gets a name of its own.
    """
    found: dict[str, ast.stmt] = {}
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = node
            continue
        stored = [
            inner.id
            for inner in ast.walk(node)
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
        ]
        for name in stored or [f"<line {node.lineno}>"]:
            found[name] = node
    return found


def _own_lines(node: ast.stmt, code: set[int]) -> set[int]:
    """Code lines of a definition; of a class, those of its body."""
    parts = node.body if isinstance(node, ast.ClassDef) else [node]
    return code & set().union(*map(_lines, parts))


def _used(names: Iterable[str], definitions: dict[str, ast.stmt]) -> set[str]:
    """``names`` and every definition reached from them by name."""
    reached: set[str] = set()
    waiting = [name for name in names if name in definitions]
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached.add(name)
            inner = {node.id for node in ast.walk(definitions[name]) if isinstance(node, ast.Name)}
            waiting += inner & definitions.keys()
    return reached


def _private_imports(path: Path) -> dict[tuple[str, str], str]:
    """(private module of the same folder, name in it) -> local name, for what ``path`` imports."""
    found = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").rpartition(".")[2]
            if module.startswith("_") and (path.parent / f"{module}.py").is_file():
                found.update({(module, a.name): a.asname or a.name for a in node.names})
    return found


def _private_lines(path: Path, local_names: set[str]) -> int:
    """Lines of the private modules' definitions that ``local_names`` use and no other family."""
    imports = _private_imports(path)
    others = {name for other in family_files(path.parent) if other != path
              for name in _private_imports(other)}  # fmt: skip
    total = 0
    for module in {module for module, _ in imports}:
        source = path.parent / f"{module}.py"
        tree = ast.parse(source.read_text(encoding="utf-8"))
        definitions, code = _definitions(tree), _code_lines(source, tree)
        shared = _used((name for where, name in others if where == module), definitions)
        mine = (n for (where, n), local in imports.items() if where == module
                and local in local_names)  # fmt: skip
        names = _used(mine, definitions) - shared
        total += len(set().union(*(_own_lines(definitions[name], code) for name in names)))
    return total


def hook_lines(path: Path) -> dict[str, int]:
    """Code lines of the hooks of each public class in the file ``path``, by class name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    definitions, code = _definitions(tree), _code_lines(path, tree)
    classes = [
        name
        for name, node in definitions.items()
        if isinstance(node, ast.ClassDef) and not name.startswith("_")
    ]
    unused = definitions.keys() - _used(classes, definitions)
    counts = {}
    for name in classes:
        reached = _used([name], definitions) | unused
        lines: set[int] = set().union(*(_own_lines(definitions[part], code) for part in reached))
        names = {
            node.id
            for part in reached
            for node in ast.walk(definitions[part])
            if isinstance(node, ast.Name)
        }
        counts[name] = len(lines) + _private_lines(path, names)
    return counts


def main() -> int:
    """Print the table; 1 when a class is above the limit or there is none."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else MODELS
    counts = {
        (path.stem, name): lines
        for path in family_files(folder)
        for name, lines in hook_lines(path).items()
    }
    for (family, name), lines in counts.items():
        print(f"{family:<20} {name:<48} {lines:>3}")
    return int(not counts or bool(above(counts)))


def above(counts: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """Classes, by family and name, with more lines than they may have."""
    return {key: n for key, n in counts.items() if n > WHOLE_TOWERS.get(key[1], LIMIT)}


if __name__ == "__main__":
    sys.exit(main())
