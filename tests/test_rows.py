"""The table of row_titles.py is complete: each row has tests, each mark names a row, and no test of
a row is left out for another reason than devices or a torch version."""

import ast
import re
import subprocess
import sys

import pytest
import rows
from conftest import MAY_SKIP
from row_titles import IN_C, SAME, TITLES

COVERED = rows.tests_by_row()


@pytest.mark.parametrize("row", TITLES)
def test_row_has_a_test(row):
    assert COVERED[row], f"{row} ({TITLES[row]}) has no test"


def test_every_mark_names_a_row():
    unknown = {row: tests for row, tests in COVERED.items() if row not in TITLES}
    assert not unknown


@pytest.mark.parametrize("path", rows.files(), ids=lambda path: path.name)
def test_marks_are_rows_and_tests(path):
    """Each at least one row; above a function that pytest collects."""
    for test, marked in rows.marks_of(path).items():
        assert test.startswith("test_"), f"{path.name}: {test} is no test"
        assert marked, f"{path.name}: the mark of {test} names no row"
        assert len(set(marked)) == len(marked), f"{path.name}: {test} names a row twice"


def test_rows_that_are_the_same_as_others_are_rows():
    for row, others in SAME.items():
        assert row in TITLES and all(other in TITLES for other in others)
        assert row not in others


@pytest.mark.parametrize("row", IN_C)
def test_tests_in_c_exist(row):
    assert row in TITLES
    for name in IN_C[row]:
        file, test = name.split("::")
        text = (rows.HERE / "c" / file).read_text()
        assert len(re.findall(rf"\b{test}\(", text)) >= 2, f"{name} is not defined and called"


# Of options that no row speaks of.
UNMARKED = {
    "test_any_bucket_size_gives_the_same_numbers",
    "test_options_are_keyword_only_and_checked",
}


def test_every_behaviour_test_has_a_row():
    for path in rows.HERE.glob("test_behaviour_*.py"):
        marked = rows.marks_of(path)
        tests = {
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        }
        assert tests - set(marked) <= UNMARKED, f"{path.name}: {tests - set(marked) - UNMARKED}"


def reasons_to_skip(path):
    """The reasons of skip, skipif and importorskip in one file, as far as they stand there."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name == "pytest.importorskip":
            yield f"without {ast.unparse(node.args[0])}"
        elif name.endswith((".skip", ".skipif")):
            given = [k.value for k in node.keywords if k.arg == "reason"] or node.args[:1]
            if given and isinstance(given[0], ast.Constant):
                yield str(given[0].value)


@pytest.mark.parametrize(
    "path", sorted(rows.HERE.glob("test_behaviour_*.py")), ids=lambda p: p.name
)
def test_behaviour_tests_are_skipped_for_want_of_devices_only(path):
    """Reasons made at run time are looked at when the test is skipped (conftest.py)."""
    assert [why for why in reasons_to_skip(path) if not MAY_SKIP.match(why)] == []


def test_what_is_not_alike_yet_fails_strictly():
    """An xfail says why, and fails when the reason is gone."""
    for path in rows.files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.xfail"):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("strict") == "True" and len(given["reason"]) > 20, path.name


INNER = """
import pytest

@pytest.mark.row("A1")
@pytest.mark.parametrize("why", ["too slow", "needs 2 GPUs", "needs torch 2.9", "", "needs a rest"])
def test_skipped(why):
    pytest.skip(why)

@pytest.mark.row("A1")
@pytest.mark.skipif(True, reason="not today")
def test_left_out():
    pass

def test_of_no_row():
    pytest.skip("too slow")
"""


def test_a_skip_for_another_reason_is_a_failure(tmp_path):
    """The hook of conftest.py, in a run of its own."""
    for name in ("conftest.py", "gpu_lists.py"):
        (tmp_path / name).write_text((rows.HERE / name).read_text())
    (tmp_path / "test_inner.py").write_text(INNER)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfs", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    refused = re.findall(
        r"^the test of a row may not be skipped because: (.+)$", done.stdout, re.MULTILINE
    )
    assert sorted(refused) == ["Skipped", "needs a rest", "not today", "too slow"], done.stdout
    kept = re.findall(r"^SKIPPED \[1\] \S+: (.+)$", done.stdout, re.MULTILINE)
    assert sorted(kept) == ["needs 2 GPUs", "needs torch 2.9", "too slow"]
    assert done.returncode == 1


def test_the_reader_of_marks_sees_each_spelling(tmp_path):
    path = tmp_path / "test_marks.py"
    path.write_text(
        "import pytest\n"
        "row = pytest.mark.row\n"
        '@row("A1", "B2", why="x")\n'
        '@pytest.mark.parametrize("k", [1])\n'
        "def test_one(k): pass\n"
        '@pytest.mark.row("C3")\n'
        "def test_two(): pass\n"
        "def test_three(): pass\n"
        "class TestIt:\n"
        '    @row("D4")\n'
        "    def test_four(self): pass\n"
    )
    assert rows.marks_of(path) == {
        "test_one": ["A1", "B2"],
        "test_two": ["C3"],
        "test_four": ["D4"],
    }
    assert rows.tests_by_row([path])["B2"] == ["test_marks.py::test_one"]
    assert rows.tests_by_row([path])["B1"] == []


def test_the_table_prints(capsys):
    rows.main(["A14"])
    out = capsys.readouterr().out
    assert out.startswith("A14") and "test_behaviour_modules.py::test_batch_norm" in out
    rows.main([])
    assert len(capsys.readouterr().out.splitlines()) == len(TITLES)
