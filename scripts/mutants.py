"""Mutation testing: change the code in one small way, run the tests of that file, and tell which changes they miss.

    python scripts/mutants.py --seed 1 --count 150 --processes 2
    python scripts/mutants.py --count 50 --since v0.1.0  # in the lines that were changed since

Mutants are drawn by a hash of the seed and of what is changed (file, function, line), so that an edit elsewhere draws
the same. Kernels run in Triton's interpreter. The exit status is 1 where a mutant survives that tests/mutants.txt does
not explain, in a line of the mutant as it is printed, " => ", and why no test can tell it from the code.
"""

import argparse
import ast
import contextlib
import copy
import functools
import hashlib
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Loaded once; the process of each mutant is forked from there. None of the project's packages: they are what changes.
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.tensor", "triton", "numpy", "hypothesis", "pytest"]

#: Each stratum's part of the draw, and its files; a file belongs to the first that names it.
STRATA = {
    "checks": (0.15, ["ops/checks.py", "ops/precision.py", "ops/chain.py", "ops/sibling_packages.py"]),
    "kernels": (0.4, ["triton_kernels/*.py"]),
    "operators": (0.25, ["ops/*.py"]),
    "tables": (0.2, ["autotune_configs/*.py"]),
}
#: Files, and functions in them, without mutants, and why.
LEFT_OUT = {
    "*/__init__.py": "names alone",
    "*_hopper.py": "Gluon, which the interpreter does not run; tests on a GPU hold it",
    "ops/fus*.py": "computes nothing: rewrites models",
    "ops/capture.py": "computes nothing: captures calls",
    "autotune_configs/offline.py": "compiles; its tests run without the interpreter",
    "autotune_configs/precompile.py": "compiles; its tests run without the interpreter",
    "autotune_configs/sweep.py time_on_gpu": "runs on a GPU alone",
    "autotune_configs/kernels.py *_starts": "what a sweep tries first is for speed",
    "autotune_configs/heuristics.py _stages": "pipeline stages are for speed",
    "triton_kernels/linear.py tile_place": "the order of tiles is for speed",
}
#: What holds the chains from end to end.
CHAINS = [
    *(f"ops/test_{name}.py" for name in ("modules", "module_options", "operators", "reference")),
    "test_shapes.py",
]
IMAGES = [f"triton_kernels/test_image_{name}.py" for name in ("group_norm", "groups", "operands")]
#: Tests beside a file's own, tests/<folder>/test_<name>.py. The cheapest run first.
TESTS = {
    "triton_kernels/*.py": ["triton_kernels/test_launch.py"],
    "triton_kernels/chain*.py": CHAINS,
    "triton_kernels/convolution_tiling.py": ["ops/test_direct_convolution.py"],
    "triton_kernels/device.py": ["autotune_configs/test_gpus.py", "autotune_configs/test_heuristics.py"],
    "triton_kernels/epilogues.py": ["triton_kernels/test_linear.py", "triton_kernels/test_row_minimum.py", *CHAINS],
    "triton_kernels/grid.py": ["test_grids.py"],
    "triton_kernels/group_norm.py": ["triton_kernels/test_pointwise_pass.py"],
    "triton_kernels/hopper.py": ["ops/test_direct_convolution.py"],
    "triton_kernels/image_group_norm.py": IMAGES,
    "triton_kernels/image_statistics.py": IMAGES,
    "triton_kernels/image_sums.py": IMAGES,
    "triton_kernels/image_tiles.py": ["triton_kernels/test_image_copy.py", *IMAGES],
    "triton_kernels/max_pool.py": ["ops/test_pooling.py"],
    "triton_kernels/pointwise.py": ["triton_kernels/test_tf32.py", "triton_kernels/test_image_copy.py"],
    "triton_kernels/reference.py": ["triton_kernels/test_chain.py", "ops/test_reference.py"],
    "triton_kernels/row_minimum*.py": ["test_grids.py", "test_nonfinite.py"],
    "ops/*.py": ["ops/test_arguments.py"],
    "ops/[afmopr]*.py": CHAINS,
    "ops/calls.py": CHAINS,
    "ops/checks.py": ["ops/test_module_options.py", "ops/test_numbers.py"],
    "ops/chain*.py": ["ops/test_autocast.py", "ops/test_open_norms.py", "test_layouts.py", *CHAINS],
    "ops/*conv*.py": [
        f"ops/test_{name}.py"
        for name in ("conv_transpose2d_gelu_group_norm", "conv2d_group_norm", "direct_convolution", "operators")
    ],
    "ops/contractions.py": CHAINS,
    "ops/fingerprint.py": ["ops/test_compile_caches.py"],
    "ops/layouts.py": ["ops/test_layouts_of_graphs.py"],
    "ops/operators.py": ["ops/test_transforms.py"],
    "ops/passes.py": ["ops/test_conv_transpose2d_gelu_group_norm.py", "test_shapes.py"],
    "ops/pays.py": ["ops/test_backend.py", "ops/test_fuse_pays.py"],
    "ops/plan*.py": ["ops/test_plan.py", "ops/test_plans.py"],
    "ops/precision.py": ["ops/test_autocast.py", "ops/test_gemm.py", "ops/test_saved_tensors.py"],
    "ops/products.py": ["ops/test_gemm.py"],
    "ops/reference.py": ["ops/test_gradcheck.py"],
    "ops/sibling_packages.py": ["ops/test_public_names.py"],
    "ops/submodules.py": ["ops/test_changed_submodules.py"],
    "autotune_configs/chains.py": ["autotune_configs/test_problems.py"],
    "autotune_configs/kernel.py": ["autotune_configs/test_kernels.py"],
    "autotune_configs/siblings.py": ["autotune_configs/test_scripts.py"],
    "autotune_configs/sweep.py": ["autotune_configs/test_sweep_storage.py"],
    "autotune_configs/tables.py": ["autotune_configs/test_lookup.py"],
    "autotune_configs/*.py": [
        f"autotune_configs/test_{name}.py"
        for name in ("chains", "cli", "cli_check", "cli_endings", "cli_sharing", "workloads")
    ],
}

#: What has these names sets how long a call takes, not what it computes: sizes of blocks, limits found by timing; and
#: text.
SPEED = re.compile(
    r"num_warps|num_stages|programs|flatten|maxsize|_?(block|group_m|rows_per)(_\w+)?|_?(BLOCK|GROUP_M|ROWS_PER)(_\w+)?"
    r"|(FEWEST|SHALLOWEST)_\w+|_NEAR|_WORTHWHILE|_MARGIN|_ENDS|_FLOPS|_\w+_TILES|help"
)
#: Likewise: promises to the compiler.
HINTS = {"tl.assume", "tl.multiple_of", "tl.max_contiguous"}
#: Only a GPU runs what hangs on these conditions, and what follows a return that hangs on such a one.
COMPILED, UNTIL_COMPILED = re.compile(r"INTERPRETED|'cuda'"), re.compile(r"_?INTERPRETED$|.* != 'cuda'")

#: What takes the place of an operator, by the names of their classes in ``ast``.
OPERATORS = {
    **{"Add": ["Sub"], "Sub": ["Add"], "Mult": ["Add"], "Div": ["Mult"], "FloorDiv": ["Mod"], "Mod": ["FloorDiv"]},
    **{"Pow": ["Mult"], "MatMult": ["Mult"], "BitAnd": ["BitOr"], "BitOr": ["BitAnd"], "BitXor": ["BitOr"]},
    **{"LShift": ["RShift"], "RShift": ["LShift"], "And": ["Or"], "Or": ["And"]},
    **{"Lt": ["LtE", "GtE"], "LtE": ["Lt", "Gt"], "Gt": ["GtE", "LtE"], "GtE": ["Gt", "Lt"]},
    **{"Eq": ["NotEq"], "NotEq": ["Eq"], "Is": ["IsNot"], "IsNot": ["Is"], "In": ["NotIn"], "NotIn": ["In"]},
}
RENAMED = {"minimum": "maximum", "min": "max", "any": "all", "zeros": "ones", "zeros_like": "ones_like"}
RENAMED |= {new: old for old, new in RENAMED.items()}
RENAMED |= {"float64": "float32", "float32": "float16", "int64": "int32"}
CONVERSIONS = {"to", "contiguous", "float", "detach", "clone"}
SYMMETRIC = {"min", "max", "minimum", "maximum"}


def changes(node: Any) -> Iterator[tuple[str, Any, Any]]:
    """What a change is called, the node it takes away (this one, or its condition), and what comes in its place."""

    def changed(**fields):
        new = copy.copy(node)
        vars(new).update(fields)
        return new

    def others(op):
        old = type(op).__name__
        return [(f"{old} to {new}", getattr(ast, new)()) for new in OPERATORS[old]]

    match node:
        case ast.BinOp(op=op) | ast.AugAssign(op=op) | ast.BoolOp(op=op):
            for what, new in others(op):
                yield what, node, changed(op=new)
        case ast.Compare(ops=ops):
            for place, op in enumerate(ops):
                for what, new in others(op):
                    yield what, node, changed(ops=[*ops[:place], new, *ops[place + 1 :]])
        case ast.UnaryOp(op=op, operand=operand):
            yield f"{type(op).__name__} removed", node, operand
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            if not isinstance(test, ast.Compare | ast.UnaryOp):
                yield "condition negated", test, ast.UnaryOp(ast.Not(), test)
        case ast.Constant(value=bool(value)):
            yield f"{value} to {not value}", node, ast.Constant(not value)
        case ast.Constant(value=int(value)):
            for number in {value + 1, max(0, value - 1)} - {value}:
                yield f"{value} to {number}", node, ast.Constant(number)
        case ast.Constant(value=float(value)):
            for number in [value * 1.01, value * 2.0] if value else [1.0]:
                yield f"{value} to {number}", node, ast.Constant(number)
        case ast.Subscript(slice=ast.Tuple(elts=axes)):
            yield "axes reversed", node, changed(slice=ast.Tuple(axes[::-1]))
        case ast.Name(id=name) if name in RENAMED:
            yield f"{name} to {RENAMED[name]}", node, changed(id=RENAMED[name])
        case ast.Attribute(attr=name) if name in RENAMED:
            yield f"{name} to {RENAMED[name]}", node, changed(attr=RENAMED[name])
        case ast.Call(func=function, args=arguments, keywords=keywords):
            name = ast.unparse(function).split(".")[-1]
            if name in CONVERSIONS and isinstance(function, ast.Attribute):
                yield f"{name} removed", node, function.value
            for place, (one, two) in enumerate(pairwise(arguments)):
                if name not in SYMMETRIC and type(one) is type(two):  # of one kind, they may be confused
                    swapped = [*arguments[:place], two, one, *arguments[place + 2 :]]
                    yield f"arguments {place} and {place + 1} swapped", node, changed(args=swapped)
            for keyword in keywords:
                # The interpreter, too, has 0 where a load's mask is off.
                is_default = keyword.arg == "other" and ast.unparse(keyword.value) in ("0", "0.0")
                if keyword.arg and not SPEED.fullmatch(keyword.arg) and not is_default:
                    gone = {keyword.arg} | ({"other"} if keyword.arg == "mask" else set())  # which needs the mask
                    left = [each for each in keywords if each.arg not in gone]
                    yield f"{keyword.arg} removed", node, changed(keywords=left)
    match node:
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Break() | ast.Continue() | ast.AugAssign():
            yield "removed", node, ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "removed", node, ast.Pass()


def changes_nothing(node: Any) -> bool:
    """Text, what only a GPU runs, and what is for speed."""
    match node:
        case ast.If(test=test) | ast.IfExp(test=test):
            return COMPILED.search(ast.unparse(test)) is not None
        case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
            return all(SPEED.fullmatch(name) for name in ast.unparse(target).strip("()").split(", "))
        case ast.keyword(arg=str(name)):
            return SPEED.fullmatch(name) is not None
        case ast.Expr(value=ast.Call(func=function)):
            return ast.unparse(function) in HINTS
    return isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom)


@dataclass(frozen=True)
class Mutant:
    """The bytes from ``start`` to ``end`` of a file become ``text``. ``key`` tells no place in the file, so that it
    stays the same while the line and its function do."""

    key: str
    file: str
    line: int
    start: int
    end: int
    text: str


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """All mutants of a file."""
    lines = source.splitlines(keepends=True)
    found: list[Mutant] = []
    occurrences: Counter[str] = Counter()

    def offset(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + column

    def visit(node: Any, scope: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            scope = node.name if scope == "module" else f"{scope}.{node.name}"
        if changes_nothing(node) or matches(f"{file} {scope}", LEFT_OUT):
            return
        for what, old, new in changes(node):
            if (text := ast.unparse(new)) != ast.unparse(old):
                name = f"{file} {scope}: {lines[old.lineno - 1].decode().strip()} [{what}"
                occurrences[name] += 1
                span = offset(old.lineno, old.col_offset), offset(old.end_lineno, old.end_col_offset)
                text = f"({text})" if isinstance(old, ast.expr) else text
                found.append(Mutant(f"{name}, {occurrences[name]}]", file, old.lineno, *span, text))
        for name, value in ast.iter_fields(node):
            # Nor are there mutants of an error's text: the statement stands for it.
            if name in ("annotation", "returns", "decorator_list", "exc", "msg"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    visit(child, scope)
                    if isinstance(child, ast.If) and isinstance(child.body[-1], ast.Return):
                        if UNTIL_COMPILED.match(ast.unparse(child.test)):
                            break

    visit(ast.parse(source), "module")
    return found


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


@functools.cache
def changed_lines(file: str, since: str) -> set[int]:
    """The numbers of a file's lines that a commit has not."""
    command = ["git", "diff", "--unified=0", since, "--", file]
    text = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    hunks = re.findall(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", text, re.MULTILINE)
    return {int(first) + place for first, count in hunks for place in range(int(count or 1))}


def all_mutants(tree: Path) -> dict[str, list[Mutant]]:
    """By stratum."""
    found: dict[str, list[Mutant]] = {stratum: [] for stratum in STRATA}
    for path in sorted(tree.glob("*/*.py")):
        file = path.relative_to(tree).as_posix()
        strata = [name for name, (_, patterns) in STRATA.items() if matches(file, patterns)]
        if strata and not matches(file, LEFT_OUT):
            found[strata[0]] += mutants_of(file, path.read_bytes())
    return found


def draw(mutants: dict[str, list[Mutant]], seed: int, count: int) -> dict[str, list[Mutant]]:
    """``count`` of them, or a few more as each stratum's part is rounded up."""

    def rank(mutant: Mutant) -> bytes:
        return hashlib.sha256(f"{seed} {mutant.key}".encode()).digest()

    return {name: sorted(each, key=rank)[: math.ceil(STRATA[name][0] * count)] for name, each in mutants.items()}


def tests_of(file: str, tree: Path) -> list[str]:
    folder, name = file.split("/")
    others = [test for pattern, tests in TESTS.items() if fnmatch(file, pattern) for test in tests]
    found = [f"tests/{test}" for test in dict.fromkeys([f"{folder}/test_{name}", *others])]
    return [test for test in found if (tree / test).is_file()] or sys.exit(f"TESTS names no tests of {file}")


def run_pytest(tree: Path, tests: list[str], log: Path) -> None:
    """The process of a mutant: all that it says goes into the log, and all that it writes into its own tree."""
    os.setsid()
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(tree)
    home = str(tree / "home")
    os.environ.update(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1", HOME=home, XDG_CACHE_HOME=home)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(tree))
    import pytest

    sys.exit(int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", "not gpu and not offline", *tests])))


class Runner:
    """Runs tests in copies of the tree as it was at the start."""

    def __init__(self, folder: Path):
        self.source, self.folder = folder / "source", folder
        shutil.copytree(ROOT, self.source, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "results"))
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(PRELOADED)
        self.seconds: dict[str, float] = {}

    def run(self, tests: list[str], mutant: Mutant | None = None, limit: float | None = None) -> tuple[str, str]:
        """("survived", "killed" or "timed out", the end of what pytest said)"""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            tree, log = Path(folder) / "tree", Path(folder) / "log"
            shutil.copytree(self.source, tree)
            if mutant:
                source = (tree / mutant.file).read_bytes()
                changed = source[: mutant.start] + mutant.text.encode() + source[mutant.end :]
                (tree / mutant.file).write_bytes(changed)
            process = self.context.Process(target=run_pytest, args=(tree, tests, log))
            process.start()
            process.join(limit)
            assert process.pid is not None
            outcome = {None: "timed out", 0: "survived"}.get(process.exitcode, "killed")
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what it has started
            process.join()
            return outcome, log.read_text(errors="replace")[-3000:]

    def run_unchanged(self, test: str) -> None:
        begin = time.monotonic()
        outcome, output = self.run([test])
        if outcome != "survived":
            sys.exit(f"{test} fails, or tests nothing here, without a change:\n{output}")
        self.seconds[test] = time.monotonic() - begin

    def run_mutant(self, mutant: Mutant) -> str:
        tests = sorted(tests_of(mutant.file, self.source), key=self.seconds.__getitem__)
        begin = time.monotonic()
        outcome, _ = self.run(tests, mutant, limit=60 + 5 * sum(self.seconds[test] for test in tests))
        print(f"{outcome:9} {time.monotonic() - begin:5.0f} s  {mutant.key}", flush=True)
        return outcome


def report(drawn: dict[str, list[Mutant]], outcomes: dict[str, str], explained: dict[str, str]) -> None:
    columns = ["killed", "timed out", "explained", "survived"]
    print("\n" + "".join(f"{name:>11}" for name in ["", "mutants", *columns]))
    for stratum, mutants in [*drawn.items(), ("all", sum(drawn.values(), []))]:
        counts = Counter(outcomes[mutant.key] for mutant in mutants)
        print(f"{stratum:>11}{len(mutants):11}" + "".join(f"{counts[name]:11}" for name in columns))
    for mutant in sum(drawn.values(), []):
        if outcomes[mutant.key] in ("survived", "explained"):
            print(f"\n{outcomes[mutant.key]}: {mutant.key}\n    {mutant.text}\n    {explained.get(mutant.key, '')}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=150, help="how many mutants are drawn (default 150)")
    parser.add_argument("--only", default="", help="of those, only mutants whose line, as printed, has this text")
    parser.add_argument("--since", default="", help="a commit: only mutants of lines that it has not")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many run at once")
    parser.add_argument("--list", action="store_true", help="print the draw, and run nothing")
    options = parser.parse_args()
    begin = time.monotonic()
    lines = (ROOT / "tests" / "mutants.txt").read_text().splitlines()
    explained = dict(line.split(" => ") for line in lines if not line.startswith("#"))
    known = all_mutants(ROOT)
    changed = {
        stratum: [each for each in mutants if not options.since or each.line in changed_lines(each.file, options.since)]
        for stratum, mutants in known.items()
    }
    drawn = {
        stratum: [mutant for mutant in mutants if options.only in mutant.key]
        for stratum, mutants in draw(changed, options.seed, options.count).items()
    }
    mutants = sum(drawn.values(), [])
    if options.list:
        print("\n".join(mutant.key for mutant in mutants))
        return 0

    os.environ.update(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    to_run = [mutant for mutant in mutants if mutant.key not in explained]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as threads:
        runner = Runner(Path(folder))
        tests = dict.fromkeys(test for mutant in to_run for test in tests_of(mutant.file, ROOT))
        list(threads.map(runner.run_unchanged, tests))
        print(f"{len(tests)} files of tests pass unchanged, in {time.monotonic() - begin:.0f} s", flush=True)
        ran = dict(zip([mutant.key for mutant in to_run], threads.map(runner.run_mutant, to_run), strict=True))
    report(drawn, dict.fromkeys(explained, "explained") | ran, explained)
    for key in explained.keys() - {mutant.key for mutant in sum(known.values(), [])}:
        print(f"\nstale: {key}")
    print(f"\nseed {options.seed}, {len(mutants)} mutants, {(time.monotonic() - begin) / 60:.0f} minutes")
    return int("survived" in ran.values())


if __name__ == "__main__":
    sys.exit(main())
