"""README.md and ARCHITECTURE.md: their code runs, and what they name exists."""

import inspect
import pickle
import re
from pathlib import Path
from typing import get_args, get_origin

import fastdp
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "ARCHITECTURE.md")
# Named by the pages, but made by the make targets, or another project's.
ELSEWHERE = (".venv", "build/", "Python.h")

FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PATH = re.compile(r"\.?[\w*-]+(/[\w.*-]*)+|[\w*-]+\.(py|md|c|h|cu|cuh|toml|txt)")


def text_of(page):
    return (ROOT / page).read_text()


def blocks(page, language):
    return [body for kind, body in FENCE.findall(text_of(page)) if kind == language]


def spans(page):
    """What stands between single backquotes, outside of fenced blocks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text_of(page)))


def table_below(page, heading):
    """The rows of the first table below a heading, cells without backquotes."""
    section = text_of(page).split(f"\n{heading}\n", 1)[1]
    lines = re.search(r"(^\|.*\n)+", section, re.MULTILINE)[0].splitlines()
    rows = [re.split(r"(?<!\\)\|", line.strip("|")) for line in lines[2:]]
    return [[cell.strip().strip("`").replace("\\|", "|") for cell in row] for row in rows]


def run(code, name):
    namespace = {"__name__": "__main__"}
    exec(compile(code, name, "exec"), namespace)
    return namespace


PYTHON = [(page, body) for page in PAGES for body in blocks(page, "python")]


@pytest.mark.parametrize("page, body", PYTHON, ids=[page for page, _ in PYTHON])
def test_python_blocks_run(page, body):
    if "numpy" in body:
        pytest.importorskip("numpy")
    run(body, page)


def sides(diff):
    lines = diff.splitlines()
    before = [line[1:] for line in lines if not line.startswith("+")]
    after = [line[1:] for line in lines if not line.startswith("-")]
    return "\n".join(before), "\n".join(after)


def test_the_diff_runs_and_changes_no_number():
    (diff,) = blocks("README.md", "diff")
    assert all(line[:1] in ("", " ", "+", "-") for line in diff.splitlines())
    before, after = sides(diff)
    line = "fastdp.DataParallel(model)"
    assert after.count(line) == 1
    # Without a GPU the line as it stands calls the module directly.
    on_two = after.replace(line, 'fastdp.DataParallel(model, device_ids=["cpu", "cpu"])')
    scripts = [after] if torch.cuda.is_available() else [after, on_two]
    torch.manual_seed(3)
    plain = run(before, "README.md")["model"]
    assert type(plain) is torch.nn.DataParallel
    for script in scripts:
        torch.manual_seed(3)
        wrapped = run(script, "README.md")["model"]
        assert isinstance(wrapped, fastdp.DataParallel)
        for got, want in zip(wrapped.parameters(), plain.parameters(), strict=True):
            # Rows of a matrix product may be summed in another order when there are fewer of them.
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert torch.cuda.is_available() or len(wrapped.device_ids) == 2


def anchors_of(page):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)", FENCE.sub("", text_of(page)), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize("page", PAGES)
def test_files_exist(page):
    links = re.findall(r"\]\(([^)\s]+)\)", text_of(page))
    paths = [span for span in spans(page) if PATH.fullmatch(span) and span not in ELSEWHERE]
    assert links or paths
    files = [link.split("#")[0] or page for link in links]
    assert not [path for path in files + paths if not any(ROOT.glob(path.rstrip("/")))]
    anchors = [link.split("#") for link in links if "#" in link]
    assert not [(to, place) for to, place in anchors if place not in anchors_of(to or page)]


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page):
    code = spans(page) + [line for body in blocks(page, "console") for line in body.splitlines()]
    named = {word for text in code for word in re.findall(r"\bmake ([a-z][a-z-]*)", text)}
    assert "test" in named
    targets = re.findall(r"^([a-z][a-z-]*):", text_of("Makefile"), re.MULTILINE)
    assert not named - set(targets)


@pytest.mark.parametrize("page", PAGES)
def test_names_in_the_package_exist(page):
    dotted = re.compile(r"\bfastdp(?:\.\w+)+")
    code = spans(page) + [body for kind in ("python", "diff") for body in blocks(page, kind)]
    for name in {name for text in code for name in dotted.findall(text)}:
        thing = fastdp
        for part in name.split(".")[1:]:
            assert hasattr(thing, part), f"{page} names {name}"
            thing = getattr(thing, part)


@pytest.mark.parametrize("name", fastdp.__all__)
def test_errors_and_warnings_show_the_name_to_catch_them_by(name):
    kind = getattr(fastdp, name)
    if isinstance(kind, type) and issubclass(kind, Exception):
        assert f"{kind.__module__}.{kind.__qualname__}" == f"fastdp.{name}"
        assert pickle.loads(pickle.dumps(kind)) is kind


def test_functions_have_the_arguments_of_their_namesakes():
    (sentence,) = re.findall(r"and the functions ([^:]*?), each with", text_of("README.md"), re.S)
    names = re.findall(r"`fastdp\.(\w+)`", sentence)
    assert len(names) == 5
    parallel = torch.nn.parallel
    for name in [*names, "data_parallel"]:
        home = parallel if hasattr(parallel, name) else parallel.scatter_gather
        assert arguments(getattr(fastdp, name)) == arguments(getattr(home, name)), name
    for name in fastdp.comm.__all__:
        theirs = arguments(getattr(parallel.comm, name))
        assert arguments(getattr(fastdp.comm, name)) == theirs, name


def own_methods(cls, base):
    names = sorted(set(dir(cls)) - set(dir(base)))
    return [n for n in names if n[0] != "_" and inspect.isfunction(inspect.getattr_static(cls, n))]


PUBLIC = [*fastdp.__all__, *(f"comm.{name}" for name in fastdp.comm.__all__)]
PUBLIC += [f"DataParallel.{n}" for n in own_methods(fastdp.DataParallel, torch.nn.DataParallel)]


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_have_a_docstring_and_stand_in_a_page(name):
    thing = fastdp
    for part in name.split("."):
        thing = getattr(thing, part)
    assert (thing.__doc__ or "").strip()
    if inspect.isfunction(thing):
        taken = set(inspect.signature(thing).parameters) - {"self"}
        assert not [word for word in taken if not re.search(rf"\b{word}\b", thing.__doc__)]
    word = re.compile(rf"\b{name.rpartition('.')[2]}\b")
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert any(word.search(page.read_text()) for page in pages)


def test_type_checkers_see_which_module_is_wrapped():
    # Else they ask for an annotation of each wrapper.
    (generic,) = [b for b in fastdp.DataParallel.__orig_bases__ if get_origin(b)]
    (variable,) = get_args(generic)
    module = inspect.signature(fastdp.DataParallel).parameters["module"]
    assert module.annotation == variable.__name__


def arguments(function):
    return [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]


def test_environment_variables_are_those_of_the_table():
    rows = table_below("README.md", "## Environment variables")
    assert [tuple(row) for row in rows] == list(fastdp._C.env_table())


def test_options_are_those_of_the_class():
    parameters = list(inspect.signature(fastdp.DataParallel).parameters.values())[1:]
    rows = table_below("README.md", "## Options")
    assert [(row[0], row[1]) for row in rows] == [(p.name, repr(p.default)) for p in parameters]
    positional = [p.name for p in parameters if p.kind is not inspect.Parameter.KEYWORD_ONLY]
    assert len(positional) == 3
    assert "All but the first three are keyword-only" in text_of("README.md")
