"""fastdp/_C.pyi tells editors and type checkers what the extension has: neither more nor less."""

import ast
from pathlib import Path

import pytest

from fastdp import _C

STUB = ast.parse((Path(_C.__file__).parent / "_C.pyi").read_text())
CLASSES = {
    node.name: node
    for node in STUB.body
    if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
}


def told(body):
    """The names that the statements of a stub give."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.AnnAssign):
            yield node.target.id


def public(names):
    return {name for name in names if not name.startswith("_")}


def test_the_module():
    assert public(told(STUB.body)) == public(vars(_C))


@pytest.mark.parametrize("name", CLASSES)
def test_each_class(name):
    found = vars(getattr(_C, name))
    inherited = set().union(*map(dir, getattr(_C, name).__bases__))
    assert public(told(CLASSES[name].body)) == {k for k in public(found) if k not in inherited}
