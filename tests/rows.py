"""Which tests hold fastdp to the behaviours of row_titles.py.

A test says which rows it covers by `@pytest.mark.row("A14", "K24")`; `tests_by_row` reads these
marks from the sources, and test_rows.py asks that no row is without one. `python tests/rows.py`
prints the table, `python tests/rows.py A14` the tests of one row.
"""

import ast
import sys
from pathlib import Path

from row_titles import SAME, TITLES

HERE = Path(__file__).resolve().parent


def _is_mark(node, name, aliases):
    """Whether a call or an attribute is pytest.mark.<name>, or a name bound to it."""
    if isinstance(node, ast.Name):
        return aliases.get(node.id) == name
    return ast.unparse(node) == f"pytest.mark.{name}"


def marks_of(path):
    """{test: rows} of one file: what stands in `row(...)` above each test function."""
    tree = ast.parse(path.read_text())
    aliases = {
        node.targets[0].id: node.value.attr
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Attribute)
        and ast.unparse(node.value).startswith("pytest.mark.")
    }
    found = {}
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        for mark in node.decorator_list:
            if isinstance(mark, ast.Call) and _is_mark(mark.func, "row", aliases):
                rows = [ast.literal_eval(argument) for argument in mark.args]
                found.setdefault(node.name, []).extend(rows)
    return found


def files():
    return sorted([*HERE.glob("test_*.py"), *HERE.glob("programs/test_*.py")])


def tests_by_row(paths=None):
    """{row: ["file::test", ...]}, those of the rows in SAME included."""
    own = {row: [] for row in TITLES}
    for path in paths or files():
        for test, rows in marks_of(path).items():
            for row in rows:
                own.setdefault(row, []).append(f"{path.name}::{test}")
    return {
        row: tests + [test for other in SAME.get(row, ()) for test in own[other]]
        for row, tests in own.items()
    }


def main(wanted):
    covered = tests_by_row()
    for row, title in TITLES.items():
        if wanted and row not in wanted:
            continue
        print(f"{row:4} {title}: {len(covered[row])} tests")
        for test in covered[row] if wanted else ():
            print(f"       {test}")


if __name__ == "__main__":
    main(sys.argv[1:])
