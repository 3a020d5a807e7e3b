"""Starts a run with the compiled programs of an earlier one: neither traces nor compiles them.

They are the train step and the program that creates the state. JAX's compilation cache is keyed by the lowered program,
so a start still traces and lowers it: half a second for a small model, several for a large one. An entry of this
cache is named for all that a program depends on but its source code (recipe, devices, options, environment), and lists
each file of source code that was loaded when it was compiled. It is used without tracing if none of them changed,
and after tracing if the lowered program is the same.

Entries are in the directory `programs` of JAX's cache. Both hold machine code, so an entry that another user wrote is
not used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax import monitoring

import paxcli
from paxcli.errors import ConfigError, first_line
from paxcli.log import log
from paxcli.metrics.goodput import process_age
from paxcli.programs.executable import UNREADABLE, list_dependencies
from paxcli.programs.own_code import INSTALLED, find_own_code, module_files
from paxcli.programs.serialization import LoadedProgram, SerializedProgram
from paxcli.training.instrument import CompiledProgram, Programs, ProgramSpec
from paxcli.training.session import Session

_MOST_BYTES = 2**30  # of all entries together
_ENVIRONMENT = ("CUDA_", "FLAX_", "JAX_", "LIBTPU_", "NVIDIA_", "TPU_", "XLA_")
_PROCESSOR = ("model name", "flags", "Features")  # lines of /proc/cpuinfo


class KeptPrograms(Programs):
    """Has programs from the cache, and compiles those that it lacks.

    Without a local cache, with several processes, or with code that is not of an installed package, all are compiled.
    """

    def prepare(self, session: Session, program: ProgramSpec) -> Callable[[], CompiledProgram]:
        """Finds the program in the cache, or lowers it. What this returns loads or compiles it, in any thread."""
        entry = _find_entry(session, program)
        if entry is None:
            return super().prepare(session, program)
        if entry.files and entry.files == _stat(entry.files):
            return lambda: entry.load(session) or _lower(session, program, _Entry(entry.path))()
        return _lower(session, program, entry)


def _lower(session: Session, program: ProgramSpec, entry: _Entry) -> Callable[[], CompiledProgram]:
    with session.active():  # in any thread
        lowered = program.lower()
    checksum = _checksum(str(lowered.compiler_ir()).encode())

    def compile_program() -> CompiledProgram:
        if checksum == entry.lowered and (kept := entry.load(session)):
            entry.save(entry.read())
            return kept
        with cache_hits() as hits:
            compiled = lowered.compile(compiler_options=program.options or None)
        if not hits:  # XLA cannot serialize a program for a CPU that it has deserialized
            entry.save_program(checksum, compiled)
        return compiled

    return compile_program


@contextlib.contextmanager
def cache_hits() -> Iterator[list[str]]:
    """A list that gets an item for each program that this thread finds in JAX's cache, inside the `with` block."""
    thread, hits = threading.get_ident(), []

    def on_event(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits" and threading.get_ident() == thread:
            hits.append(event)

    monitoring.register_event_listener(on_event)
    try:
        yield hits
    finally:
        monitoring.unregister_event_listener(on_event)


@dataclasses.dataclass
class _Entry:
    """A program in the cache: a file of a line that describes it, as JSON, and the executable. At first, no file.

    Attributes:
      path: The file.
      lowered: Checksum of the lowered program.
      facts: Of the `SerializedProgram`.
      files: Time and size of each file that the program may depend on.
    """

    path: Path
    lowered: str = ""
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    files: dict[str, list[int]] = dataclasses.field(default_factory=dict)

    def read(self) -> bytes:
        """The executable."""
        return self.path.read_bytes().partition(b"\n")[2]

    def load(self, session: Session) -> LoadedProgram | None:
        """The program, ready to run; None if its file is damaged, or not for this machine."""
        try:
            program = SerializedProgram.from_facts(self.facts, self.read())
            os.utime(self.path)  # the ones that were not used for longest are removed first
            return LoadedProgram(program, session) if program else None
        except UNREADABLE as error:
            log.warning("A program is compiled again: %s cannot be loaded: %s", self.path, first_line(error))
            return None

    def save_program(self, lowered: str, compiled: jax.stages.Compiled) -> None:
        """Saves a program that was just compiled, unless it cannot be serialized."""
        try:
            program = SerializedProgram.of(compiled)
        except ConfigError as error:
            log.info("A compiled program is not kept for the next start: %s", error.message)
            return
        self.lowered, self.facts = lowered, program.facts
        self.save(program.executable)

    def save(self, executable: bytes) -> None:
        """Saves the executable, with the files of the modules that are loaded now, and all of pax.

        A file that changed while this process ran gets no time: the program may be of its content before.
        """
        if find_own_code():
            return
        of_pax = {str(file) for file in Path(paxcli.__file__).parent.rglob("*.*") if "__pycache__" not in file.parts}
        began = (time.time() - process_age()) * 1e9
        found = _stat(sorted({*module_files().values(), *of_pax, INSTALLED}))
        self.files = {file: status if status[0] < began else [] for file, status in found.items()}
        described = {name: value for name, value in dataclasses.asdict(self).items() if name != "path"}
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # the disk may be full, which the first checkpoint will report
            self.path.parent.mkdir(mode=0o700, exist_ok=True)
            temporary.write_bytes(json.dumps(described).encode() + b"\n" + executable)
            temporary.replace(self.path)
            _remove_oldest(self.path.parent)
        with contextlib.suppress(OSError):  # moved, or never written: the directory may be another user's
            temporary.unlink()


def _find_entry(session: Session, program: ProgramSpec) -> _Entry | None:
    """The entry for a program, perhaps still empty; None if none is to be kept or used."""
    settings = dict(jax.config.values)
    directory = settings["jax_compilation_cache_dir"] or ""
    is_local = settings["jax_enable_compilation_cache"] and directory and "://" not in directory
    checks_results = settings["jax_debug_nans"] or settings["jax_debug_infs"]  # only JAX's own programs do
    if not is_local or checks_results or jax.process_count() > 1 or find_own_code():
        return None
    depends = {
        "program": [program.name, program.options],
        "session": list_dependencies(session),
        "state": [str(leaf) for leaf in jax.tree.leaves(session.abstract)],
        "settings": settings,
        "environment": {name: os.environ[name] for name in os.environ if name.startswith(_ENVIRONMENT)},
        "software": [sys.version, jaxlib.__version__, session.mesh.devices.flat[0].client.platform_version],
        "processor": _processor(),
    }
    path = Path(directory) / "programs" / _checksum(json.dumps(depends, sort_keys=True, default=str).encode())
    try:
        with path.open("rb") as file:
            is_own = os.fstat(file.fileno()).st_uid == os.getuid()
            return _Entry(path, **json.loads(file.readline())) if is_own else None
    except UNREADABLE:
        return _Entry(path)


def _processor() -> list[str]:
    """Model and features of the first processor, which programs for a CPU use."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().partition("\n\n")[0].splitlines() if file.exists() else []
    return [line for line in lines if line.startswith(_PROCESSOR)]


def _stat(files: Iterable[str]) -> dict[str, list[int]]:
    """Time of change and size of each file, by which Python tests its own bytecode too; zeros for one that is gone."""
    found = dict.fromkeys(files, [0, 0])
    for file in found:
        with contextlib.suppress(OSError):
            status = os.stat(file)
            found[file] = [status.st_mtime_ns, status.st_size]
    return found


def _remove_oldest(directory: Path) -> None:
    """Removes the entries that were not used for longest, until the others take at most 1 GiB."""
    files = sorted(directory.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > _MOST_BYTES:
            file.unlink(missing_ok=True)


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
