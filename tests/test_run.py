"""python -m fastdp run: what a script finds and how it ends is what plain Python would give it."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

import fastdp
from fastdp import __main__, run

NOTHING = "fastdp: no nn.DataParallel was made, so nothing was replaced\n"


@pytest.fixture
def folder(tmp_path):
    """write(name, code) puts a script there; start(*words) runs Python there."""

    class Folder:
        path = tmp_path

        def write(self, name, code):
            file = tmp_path / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(textwrap.dedent(code))

        def start(self, *words, stdin="", **variables):
            env = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
            done = subprocess.run(
                [sys.executable, *words],
                cwd=tmp_path,
                env=env,
                input=stdin,
                capture_output=True,
                text=True,
                timeout=300,
            )
            return done.returncode, done.stdout, done.stderr

        def same(self, *words, **how):
            """What plain Python and `fastdp run --quiet` both give."""
            plain = self.start(*words, **how)
            assert self.start("-m", "fastdp", "run", "--quiet", *words, **how) == plain
            return plain

    return Folder()


SEES = """
    import sys, __main__
    print(sorted(globals()), __name__, __file__, __package__, type(__loader__), __cached__)
    print(__spec__ and (__spec__.name, __spec__.origin, __spec__.parent), type(__builtins__))
    print(sys.argv, sys.path, sys.flags.safe_path if hasattr(sys.flags, "safe_path") else None)
    print(vars(__main__) is globals(), __doc__, __annotations__, sys.stdin.read())
    x: 1 = 2
    def f(): pass
    print(f.__module__, f.__code__.co_flags, __annotations__, f.__code__.co_filename)
"""


def test_a_script_finds_what_it_always_finds(folder):
    folder.write("sub/sees.py", '"""The script\'s text."""\n' + textwrap.dedent(SEES))
    (folder.path / "link.py").symlink_to("sub/sees.py")
    words = ("./link.py", "--quiet", "-m", "--", "-h", "", "two words")
    code, out, err = folder.same(*words, stdin="some\ninput")
    assert code == 0 and err == ""
    assert f"{folder.path}/./link.py" in out and "'./link.py', '--quiet', '-m', '--', '-h'" in out
    assert f"['{folder.path}/sub', " in out and "some\ninput" in out and "script's text" in out


@pytest.mark.parametrize("program", [["sees.py"], ["-m", "sees"]], ids=["a script", "a module"])
def test_two_dashes_behind_the_program_are_its_own(folder, program):
    folder.write("sees.py", SEES)
    code, out, _ = folder.same(*program, "--", "x", "--")
    assert code == 0 and "'--', 'x', '--']" in out


def test_a_package_finds_what_it_always_finds(folder):
    folder.write("package/__init__.py", "import sys; print('around', sys.argv)")
    folder.write("package/__main__.py", SEES)
    code, out, err = folder.same("-m", "package", "-x", "y")
    assert code == 0 and err == "" and "around ['-m', '-x', 'y']" in out
    assert f"['{folder.path}/package/__main__.py', '-x', 'y'] ['{folder.path}', " in out


ENDS = {
    "3": ("import sys; print(sys.path); sys.exit(3)", 3),
    "text": ("import sys; sys.exit('said at the end')", 1),
    "error": (
        """
        import sys, threading
        def outer(n):
            try:
                {}[n]
            except KeyError as error:
                raise ValueError("a \\u00e9 b") from error
        def last():
            threading.main_thread().join()
            print("a last thread")
        threading.Thread(target=last).start()
        sys.excepthook = lambda *a, old=sys.excepthook: (print("hooked"), old(*a))
        outer(3)
        """,
        1,
    ),
    "interrupt": (
        """
        import os, signal, time
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(20)
        """,
        -signal.SIGINT,
    ),
    "syntax": ("x = (\n", 1),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_script_ends_as_it_always_ends(folder, end):
    script, code = ENDS[end]
    folder.write("ends.py", script)
    # With that, no folder of the script's is put before what is on the path.
    safe = {"PYTHONSAFEPATH": "1"} if end == "3" else {}
    got, out, err = folder.same("ends.py", **safe)
    assert got == code and "fastdp" not in err and "runpy" not in err
    if end == "error":
        assert err.count("in outer") == 2 and err.count("in <module>") == 1
        assert out == "hooked\na last thread\n" and "direct cause" in err


def test_a_failing_package_shows_its_own_frames(folder):
    folder.write("broken/__init__.py", "import json; json.loads('{')")
    folder.write("broken/__main__.py", "")
    code, out, err = folder.start("-m", "fastdp", "run", "-m", "broken")
    frames = [text for text in err.splitlines() if text.startswith("  File")]
    assert code == 1 and out == "" and "JSONDecodeError" in err
    assert f'"{folder.path}/broken/__init__.py", line 1' in frames[0]
    assert not [frame for frame in frames if "fastdp" in frame or "importlib" in frame]


TRAINS = """
    import os, pickle, sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader
    import a_library

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, i):
            return torch.full((3,), float(i)).double()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(3, 2).double()
            self.calls = []
        def forward(self, x):
            self.calls.append(len(x))
            return self.lin(x)

    def main():
        model = nn.DataParallel(Net(), device_ids=["cpu", "cpu"])
        early = a_library.wrap(model.module)
        loader = DataLoader(Samples(), 4, num_workers=1, multiprocessing_context="spawn")
        for batch in loader:
            out = model(batch)
            torch.nn.parallel.data_parallel(model.module, batch, ["cpu", "cpu"])
            out.sum().backward()
        assert torch.equal(early(batch), model.module(batch))
        twin = pickle.loads(pickle.dumps(model))
        assert type(twin) is nn.DataParallel and type(twin.module) is Net
        print(sorted(model.module.calls), model.module.lin.weight.grad[0].tolist())
        names = "TRANSPORT", "UNUSED_GRAD", "BUCKET_BYTES"
        print(*[os.environ["FASTDP_" + name] for name in names])
        print(model.unused_grad, model.bucket_bytes, sys.argv[1:])
        sys.stdout.flush()  # or the child writes it, too
        if os.fork() == 0:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
        sys.exit(5)

    if __name__ == "__main__":
        main()
"""


def test_a_training_script_with_spawned_workers(folder):
    folder.write("train.py", TRAINS)
    folder.write(
        "a_library.py",
        """
        from torch.nn.parallel import DataParallel

        def wrap(module, kind=DataParallel):
            return kind(module, ["cpu"] * 4)
        """,
    )
    options = ("--transport", "host", "--unused-grad=none", "--bucket-bytes", "4096")
    code, out, err = folder.start("-m", "fastdp", "run", *options, "train.py", "--epochs", "2")
    assert code == 5, err
    # Two batches by the wrapper and by the function, halved; then the library's four and a plain
    # call of the module itself.
    calls, variables, rest = out.splitlines()
    assert calls == "[1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2, 4] [28.0, 28.0, 28.0]"
    assert variables == "host none 4096"
    assert rest == "none 4096 ['--epochs', '2']"
    train, library = folder.path / "train.py", folder.path / "a_library.py"
    lines = train.read_text().splitlines()
    at = {
        text: n
        for n, line in enumerate(lines, 1)
        for text in ("nn.DataParallel(", "data_parallel(", "pickle.loads")
        if text in line
    }
    said = [line for line in err.splitlines() if "use of fork() may lead to" not in line]
    assert [line for line in said if line.strip() != "if os.fork() == 0:"] == [
        "fastdp: nn.DataParallel was replaced in 4 places",
        f"  {train}:{at['nn.DataParallel(']}: DataParallel, 2 replicas",
        f"  {library}:5: DataParallel, 4 replicas",
        f"  {train}:{at['data_parallel(']}: data_parallel (2 times)",
        f"  {train}:{at['pickle.loads']}: DataParallel (loaded or copied), 2 replicas",
    ]


def test_the_report_comes_last_and_on_stderr(folder):
    folder.write(
        "says.py", "import atexit, sys; atexit.register(print, 'bye', file=sys.stderr); exit()"
    )
    assert folder.start("-m", "fastdp", "run", "says.py") == (0, "", "bye\n" + NOTHING)
    folder.write("shuts.py", "import sys; sys.stderr.close()")
    assert folder.start("-m", "fastdp", "run", "shuts.py") == (0, "", "")


@pytest.fixture
def unpatched(monkeypatch):
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    yield
    fastdp.patch().undo()


@pytest.mark.parametrize(
    "words, code, text",
    [
        (["nope.py"], 2, "can't open file '{cwd}/nope.py': [Errno 2] No such file or directory"),
        (["."], 2, "can't open file '{cwd}/.': [Errno 21] Is a directory"),
        (["-m", "nope"], 1, "No module named nope"),
        (["-m", "nope.inside", "x"], 1, "No module named nope.inside"),
        (["-m", "email"], 1, "No module named email.__main__"),
    ],
)
def test_what_cannot_be_run(unpatched, capsys, tmp_path, monkeypatch, words, code, text):
    monkeypatch.chdir(tmp_path)
    assert __main__.main(["run", *words]) == code
    text = text.format(cwd=tmp_path)
    assert capsys.readouterr() == ("", f"fastdp run: {text}\n")


@pytest.mark.parametrize(
    "words, text",
    [
        ([], "the following arguments are required: program"),
        (["-m"], "the following arguments are required: program"),
        (["--transport", "pigeon", "x.py"], "argument --transport: invalid choice: 'pigeon'"),
        (["--bucket-bytes", "many", "x.py"], "argument --bucket-bytes: invalid int value: 'many'"),
        (["--quie", "x.py"], "unrecognized arguments: --quie"),
        (["--"], "the following arguments are required: program"),
    ],
)
def test_bad_options(unpatched, capsys, words, text):
    with pytest.raises(SystemExit) as end:
        __main__.main(["run", *words])
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and text in err and "usage: python -m fastdp run" in err


def test_options_are_those_of_the_table(unpatched):
    _, variables = run._parser()
    assert {"transport", "unused_grad", "bucket_bytes"} <= set(variables) <= set(run._OPTIONS)
    names = [name for name, *_ in fastdp._C.env_table()]
    assert set(variables.values()) <= set(names)


def test_the_table_of_commands(capsys):
    for words in ([], ["--help"], ["help"]):
        assert __main__.main(words) == 0
        out, err = capsys.readouterr()
        assert err == "" and "usage: python -m fastdp <command>" in out
        for name, command in __main__.COMMANDS.items():
            assert f"  {name} " in out and command.sentence in out
    assert __main__.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{fastdp.__version__}\n"
    assert __main__.main(["rum"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "there is no command 'rum'" in err and "usage" in err
