"""The behaviours that fastdp is held to, by row, and which tests hold it to them.

A row is a kind of report about torch.nn.DataParallel, or one of torch's own tests of it. A test
says which rows it covers by `@pytest.mark.row("A14", "K24")`; `tests_by_row` reads these marks from
the sources, and test_rows.py asks that no row is without one. `python tests/rows.py` prints the
table, `python tests/rows.py A14` the tests of one row.
"""

import ast
import sys
from pathlib import Path

# Rows are numbered from 1 within their section.
SECTIONS = {
    "A": (
        "What a replica holds",
        (
            "parameters() of a replica lists its parameters, with a graph to the base",
            "ParameterList and ParameterDict in a replica",
            "streams, events and generators as attributes; custom operators in forward",
            "wrap, move and optimizer in any order",
            "a module that spans devices is refused, with their names",
            "a tensor kept as a plain attribute is shared, not moved; an error names it",
            "modules hidden in a list, dict or tuple are shared; an error names ModuleList",
            "bound methods, lambdas and closures made in __init__",
            "forward patched on the instance",
            "attributes rebound in forward are lost, containers are shared",
            "replicas keep their identity, so caches by id hold",
            "only replica 0's in-place changes of a buffer stay",
            "a buffer rebound in forward is lost",
            "BatchNorm: each chunk's own statistics, running ones from chunk 0",
            "SyncBatchNorm without a process group",
            "forward hooks run once per replica; edits are seen at once",
            "hooks edited inside forward",
            "module backward hooks per replica, tensor hooks once on the sum",
            "weight_norm, old and new",
            "spectral_norm: vectors persist, two forwards before one backward",
            "parametrizations and pruning",
            "recurrent nets: flat weights, no warning",
            "weights deleted and set in forward (weight drop)",
            "lazy modules are refused until they are initialised",
            "deepcopy and save of replicas",
            "functional_call and weights swapped from outside",
            "what a custom Function's backward stores on a replica is lost",
        ),
    ),
    "B": (
        "Inputs",
        (
            "constants do not raise the number of replicas",
            "chunk sizes are those of chunk, also where fewer chunks come out",
            "0-dim tensors are refused, or given whole on request",
            "keyword arguments only, with empty containers",
            "no arguments; constants only",
            "a batch or a chunk of one sample",
            "an empty batch runs once",
            "lists and tuples are recursed, the shortest decides",
            "a list of strings or objects goes whole to each; split on request",
            "a list of images is cut through the images; own scatter helps",
            "dictionaries and their like",
            "objects are handed over by identity",
            "own scatter; own chunk sizes",
            "tensors without a batch are cut too; given whole on request",
            "another dim",
            "PackedSequence is refused by name",
            "padded lengths that differ between chunks",
            "a subclass that walks the steps by hand on lists of items",
            "inputs from anywhere, of any layout",
            "gradients to the input, second ones too",
        ),
    ),
    "C": (
        "Outputs",
        (
            "scalars become a vector, with torch's warning",
            "mean of means on uneven chunks; weighted by chunk on request",
            "a loss over the batch sees its chunk only",
            "dictionaries: type and order kept, unequal ones refused",
            "named tuples",
            "dataclasses and ModelOutput",
            "None on all is None, on some an error",
            "numbers and bools become a list, one per replica",
            "strings become a list, one per replica",
            "lists of unequal length are refused",
            "nested containers keep their types",
            "shapes that do not fit: the error names path and shapes",
            "outputs left where they are; losses summed on request",
            "output_device in each spelling",
            "every dtype, layout and size of outputs",
        ),
    ),
    "D": (
        "Gradients",
        (
            "unused parameters get zeros; None on request",
            "frozen and thawed parameters",
            "gradient penalty, derivatives of any order",
            "autograd.grad for the base's parameters",
            "backward and zero_grad inside forward",
            "several forwards, one backward, whatever happens to the weights between",
            "backward in any order, retain_graph",
            "accumulation sums exactly",
            "every write to the weights is seen",
            "parameters, children, dtypes replaced between calls are seen",
            "tied weights stay tied; one sum",
            "wrapping and running leave the base's parameters as they are",
            "sparse gradients of embeddings",
            "sparse parameters",
            "gradients have their parameter's strides",
            "activation checkpointing, both kinds, inside and outside",
            "inf and nan pass; zero_grad in both styles",
        ),
    ),
    "E": (
        "Precision, compilers, transforms",
        (
            "complex stays complex",
            "many dtypes in one model; tensor subclasses",
            "autocast reaches replicas",
            "autocast's dtype and cache flag reach replicas",
            "a step warns of nothing",
            "GradScaler sees inf from any replica",
            "models in half, single and double precision",
            "torch.compile inside and outside",
            "scripted and traced modules",
            "script and export of the wrapper are refused as by torch",
            "function transforms and forward mode are refused or right",
        ),
    ),
    "F": (
        "The wrapper as an object",
        (
            "names have the prefix module.",
            "attributes are not forwarded; on request they are",
            "other methods run on the module; on request in parallel",
            "pickle, deepcopy and save",
            "a real subclass with torch's attributes",
            "weights that left the first device: torch's error",
            "device_ids in any order",
            "bad device_ids: the error says which and what there is",
            "no GPU, one device, an empty list: a direct call",
            "a repeated id is several replicas on one device",
            "wrappers inside wrappers",
            "libraries that wrap by themselves",
            "train, eval, no_grad and inference_mode",
            "devices that fastdp does not know",
        ),
    ),
    "G": (
        "Memory",
        (
            "no more on the first device than there must be",
            "devices that are not listed stay untouched",
            "no leak, no cycle",
            "usable after an out-of-memory error",
        ),
    ),
    "H": (
        "Copies between devices",
        (
            "a pair of GPUs that cannot copy: found at the start, host copies instead",
            "copies that come out wrong are noticed",
            "calls that synchronise a device beside training",
            "two wrappers at once",
            "many devices, none with peer access",
            "unlike GPUs: torch's warning",
            "fork and DataLoader workers",
            "the caller's streams",
        ),
    ),
    "I": (
        "Threads, errors, random numbers",
        (
            "an error names replica and device and keeps its traceback",
            "errors with odd constructors",
            "Ctrl-C",
            "the host's random numbers in threads",
            "dropout on several replicas",
            "thread-local state",
            "user code that is not made for threads",
        ),
    ),
    "J": (
        "Speed",
        (
            "replicas persist; many tiny parameters cost few operations",
            "replicas run at once; little work per replica",
            "copies are fresh at every call",
            "the first call",
            "one process, also in scripts without a main guard",
            "a word when devices stay idle",
        ),
    ),
    "K": (
        "torch's own tests (names as there)",
        (
            "test_data_parallel_buffers_requiring_grad",
            "test_data_parallel_rnn",
            "test_data_parallel_lazy_linear",
            "test_parallel_apply",
            "test_parallel_apply_autocast",
            "test_parallel_apply_passes_exception",
            "test_data_parallel_multiple_input",
            "test_data_parallel_small_back",
            "test_data_parallel_model_device",
            "test_data_parallel_model_no_refcycles",
            "test_data_parallel_no_grad",
            "test_data_parallel",
            "test_data_parallel_sparse",
            "test_data_parallel_nested_output",
            "test_data_parallel_nested_input",
            "test_data_parallel_module_zero_inputs",
            "test_data_parallel_device_args",
            "test_data_parallel_function_deletion",
            "test_scatter_cpu, test_scatter_gpu",
            "test_data_parallel_complex",
            "test_gather_cpu, test_gather_gpu",
            "test_gather_different_len_dicts",
            "test_replicate",
            "test_replicate_buffers",
            "test_zero_grad",
            "test_autocast",
            "test_save_replica_module",
            "test_strided_grad_layout",
            "test_parameter_list_dict_replica",
            "test_data_parallel_module",
            "test_data_parallel_module_kwargs_only",
            "test_data_parallel_module_kwargs_only_empty_list, _empty_dict, _empty_tuple",
        ),
    ),
    "L": (
        "Seen in public code",
        (
            "a buffer with a graph",
            "gradients that enter a replica's graph anywhere",
            "the four steps patched, overridden or walked by hand",
            "replicas that wait for each other",
            "other iterable outputs",
            "constants and None add no replicas",
            "lists as attributes are shared with the base",
            "dictionaries are rebuilt for each replica",
            "the wrapper as a child; two wrappers with shared parts",
            "moves and casts under a live optimizer",
            "the functional form",
            "parts without gradient; nets frozen in turn; ties to the outside",
            "outputs that are views or inputs",
        ),
    ),
    "X": (
        "Bad inputs and parity",
        (
            "input by keyword only",
            "no arguments",
            "empty tuple, list, dict",
            "nested arguments",
            "arguments that are no tensors",
            "strings",
            "0-dim parameters",
            "scalar outputs are stacked",
            "dict outputs with other keys",
            "None as output",
            "batch of none, smaller than the devices, uneven",
            "input on the host",
            "module on another device",
            "non-contiguous, channels_last, expanded, overlapping inputs",
            "mixed dtypes",
            "sparse embedding gradients",
            "complex",
            "nan and inf",
            "devices in another order",
            "torch.device objects",
            "devices that repeat",
            "devices out of range",
            "one device",
            "output on the host by -1",
            "GPUs without peer access",
            "parts of one GPU (MIG)",
            "the current device changed by user code",
            "a call while a CUDA graph is captured",
            "recurrent nets with flat weights, and without gradients",
            "weight_norm",
            "spectral_norm; state set on replicas",
            "buffers that need a gradient",
            "BatchNorm's running statistics",
            "hooks",
            "shared and tied parameters",
            "parameters frozen, unused, added or removed after wrapping",
            "zero_grad in a replica warns",
            "saving a replica",
            "deepcopy, pickle, state_dict",
            "lazy modules",
            "parametrizations",
            "compiled modules",
            "checkpointed modules",
            "double backward after the graph's names are gone",
            "retain_graph",
            "backward twice",
            "gradient accumulation",
            "zero_grad with set_to_none",
            "gradient layout over two steps",
            "autocast and no_grad in threads",
            "anomaly mode",
            "custom Functions",
            "hooks that raise",
            "an error in replica k",
            "several replicas fail at once",
            "an interrupt while waiting",
            "out of memory, then a smaller batch",
            "CUDA_LAUNCH_BLOCKING=1",
            "expandable segments without peer grants",
        ),
    ),
}

# Rows of X that say what other rows say too: the tests of all of these are theirs.
SAME = {
    "X1": ["B4", "K31"], "X2": ["B5", "K16"], "X3": ["B4", "K32"], "X4": ["B8", "K15"],
    "X5": ["B1", "B12"], "X6": ["B9", "C9"], "X8": ["C1"], "X9": ["C4", "K22"], "X10": ["C7"],
    "X11": ["B1", "B2", "B7"], "X12": ["B19"], "X13": ["F6", "K9"], "X15": ["C15", "E2"],
    "X16": ["D13", "K13"], "X17": ["E1", "K20"], "X18": ["D17"], "X20": ["K17"], "X21": ["F10"],
    "X22": ["F8"], "X23": ["F9"], "X24": ["C14"], "X25": ["H5"], "X29": ["A22", "K2"],
    "X30": ["A19"], "X32": ["K1"], "X33": ["A14", "K24"], "X34": ["A16", "A17", "A18"],
    "X35": ["D11"], "X36": ["D1", "D2", "D10"], "X37": ["D5", "K25"], "X38": ["A25", "K27"],
    "X39": ["A25", "F1", "F4"], "X40": ["A24", "K3"], "X41": ["A21"], "X42": ["E8"],
    "X43": ["D16"], "X44": ["D3", "K18"], "X45": ["D7"], "X46": ["D7"], "X47": ["D8"],
    "X48": ["D17"], "X49": ["D15", "K28"], "X50": ["E3", "E4", "K5", "K11"], "X51": ["I6"],
    "X54": ["I1", "K6"], "X55": ["I1"], "X56": ["I3"], "X57": ["G4"],
}  # fmt: skip

# Rows with tests in C too: on simulated devices, which show what the host cannot.
IN_C = {
    "H1": ["test_context.c::test_bad_peer", "test_transports.c::test_stall"],
    "H2": ["test_context.c::test_bad_peer"],
    "H5": ["test_context.c::test_transport", "fake_device.c::test_peers"],
}

TITLES = {
    f"{letter}{number}": title
    for letter, (_, titles) in SECTIONS.items()
    for number, title in enumerate(titles, 1)
}
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
