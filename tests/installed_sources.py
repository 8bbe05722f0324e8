"""Installed sources as syntax trees: what importing would take a quarter of a minute to tell."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path


def source(package: str, path: str) -> ast.Module:
    """A file of an installed package, which is not imported."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.origin is not None, f"{package} is not installed"
    file = Path(found.origin).parent / path
    assert file.is_file(), f"{package} has no {path} any more"
    return ast.parse(file.read_text(encoding="utf-8"))


def definitions(package: str, path: str) -> dict[str, ast.AST]:
    """Classes, functions and methods (as ``Class.method``) of a module."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    found: dict[str, ast.AST] = {}
    for node in source(package, path).body:
        if isinstance(node, kinds):
            found[node.name] = node
            for child in getattr(node, "body", []):
                if isinstance(child, kinds):
                    found[f"{node.name}.{child.name}"] = child
    return found
