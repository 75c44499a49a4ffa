"""From C source to a loaded library: the system's compiler, and a cache of compiled libraries.

The cache is a folder of the user (`$ATTNGRAPH_CACHE`, else `$XDG_CACHE_HOME/attngraph`, else
`~/.cache/attngraph`), which must be owned by the user and closed to others; otherwise a temporary folder of
this process is used. An entry's name
is a hash of everything that it depends on (source, compiler, flags, processor), and the file ends in a digest
of its contents, so that a truncated or changed file is compiled again. Files are written, then renamed into
place.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path

from attngraph.ir import cache_folder

_log = logging.getLogger("attngraph.codegen.cpu")
_DIGEST = hashlib.sha256().digest_size
ENTRIES = 512
"""Libraries kept in the folder (some 30 KiB each); the least recently used are removed first."""
_lock = threading.Lock()
FLAGS = (
    "-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd",
    "-fPIC", "-shared",
)  # fmt: skip
"""Optimised for this processor. NaN and infinities keep their meaning: there is no -ffast-math."""


class CompilerError(Exception):
    """No library could be compiled; the message has the command and its output."""


@functools.cache
def compiler() -> tuple[str, ...]:
    """The C compiler's command: `$CC`, else cc, gcc or clang from PATH. Raises CompilerError: there is
    none."""
    asked = shlex.split(os.environ.get("CC", ""))
    names = [asked] if asked else [["cc"], ["gcc"], ["clang"]]
    for command in names:
        path = shutil.which(command[0])
        if path is not None:
            return (path, *command[1:])
    tried = f"$CC is {asked[0]}" if asked else "tried cc, gcc and clang"
    raise CompilerError(f"no C compiler: {tried}, not found on the path")


@functools.cache
def _identity() -> str:
    """Everything besides the source that the machine code depends on."""
    try:
        version = subprocess.run(
            [*compiler(), "--version"], capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise CompilerError(f"{shlex.join(compiler())} does not run: {error}") from error
    processor = platform.machine() + platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        processor += next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        pass
    return "\n".join((*compiler(), version, *FLAGS, platform.system(), processor))


def folder() -> Path:
    """The folder of compiled libraries: the user's cache if only the user may access it, else a temporary
    one."""
    found = cache_folder.wanted()
    try:
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = cache_folder.why_not_safe(found)
    except OSError as error:
        reason = str(error)
    return found if reason is None else Path(_temporary(str(found), reason).name)


@functools.cache
def _temporary(wanted: str, reason: str) -> tempfile.TemporaryDirectory[str]:
    _log.warning("compiled libraries are not kept in %s: %s", wanted, reason)
    return tempfile.TemporaryDirectory(prefix="attngraph-")


@functools.cache
def machine() -> str:
    """A digest of the compiler and the processor that kernels are made with and for."""
    try:
        return hashlib.sha256(_identity().encode()).hexdigest()[:16]
    except CompilerError as problem:
        return f"no compiler: {problem}"


def begin(source: str) -> None:
    """Compile a source in the background, beside others, as far as the machine has processors. `build` waits
    for it, and raises what fails."""
    path = _entry(source)
    made, is_ours = _claimed(path)
    if is_ours:
        threading.Thread(target=_in_turn, args=(source, path, made), name="attngraph-cc").start()


def build(source: str) -> tuple[ctypes.CDLL, float]:
    """The library of a source, from the cache or compiled now, and the seconds that compiling took (0 if
    cached). Raises CompilerError: there is no compiler, it failed, or the compiled library does not load."""
    path = _entry(source)
    made, is_ours = _claimed(path)
    if is_ours:
        _make(source, path, made)
    seconds = made.result()
    with contextlib.suppress(OSError):
        os.utime(path)  # marks it as used; this fails in a read-only folder, which is fine
    try:
        found = ctypes.CDLL(str(path))
    except OSError as error:
        raise CompilerError(f"{path} does not load: {error}") from error
    lacking = [name for name in _exported(source) if not hasattr(found, name)]
    if lacking:
        raise CompilerError(
            f"{shlex.join(compiler())} ended well, and its library {path} lacks {', '.join(lacking)}"
        )
    return found, seconds


def settle() -> None:
    """Wait for what is compiled in the background: beside it nothing is measured well."""
    for made in list(_under_way.values()):
        wait([made])


_EXPORTED = re.compile(r"(?:const )?\w+ (attngraph_\w+)\b")
_under_way: dict[Path, Future[float]] = {}
"""Libraries that are being made: the seconds that each took."""
_processors = threading.BoundedSemaphore(os.cpu_count() or 1)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_under_way.clear)  # their threads are the parent's


def _exported(source: str) -> Iterator[str]:
    """What a source defines for us under no condition."""
    depth = 0
    for line in source.splitlines():
        depth += line.startswith("#if") - line.startswith("#endif")
        if not depth and (found := _EXPORTED.match(line)):
            yield found[1]


def _claimed(path: Path) -> tuple[Future[float], bool]:
    """The library at this path, when it is there, and whether the caller has to make it."""
    with _lock:
        if path in _under_way:
            return _under_way[path], False
        made = _under_way[path] = Future()
        return made, True


def _in_turn(source: str, path: Path, made: Future[float]) -> None:
    with _processors:
        _make(source, path, made)


def _make(source: str, path: Path, made: Future[float]) -> None:
    """Compile a source unless its library is there."""
    start, seconds = time.perf_counter(), 0.0
    try:
        if not _is_whole(path):
            _compile(source, path)
            seconds = time.perf_counter() - start
            _log.info("compiled %s in %.2f s", path.name, seconds)
            _make_room(path.parent)
    except BaseException as problem:
        made.set_exception(problem)
    else:
        made.set_result(seconds)
    finally:
        with _lock:
            _under_way.pop(path, None)


def _make_room(where: Path) -> None:
    """Remove the least recently used libraries. Processes that have them loaded are not affected."""
    with contextlib.suppress(OSError):  # another process may be doing the same
        entries = sorted(where.glob("*.so"), key=lambda path: path.stat().st_mtime)
        for path in entries[:-ENTRIES]:
            path.unlink(missing_ok=True)


def _entry(source: str) -> Path:
    return folder() / (hashlib.sha256(f"{_identity()}\n{source}".encode()).hexdigest()[:32] + ".so")


def _is_whole(path: Path) -> bool:
    """Whether a library exists, belongs to the user and matches its digest."""
    try:
        with path.open("rb") as file:
            if hasattr(os, "getuid") and os.fstat(file.fileno()).st_uid != os.getuid():
                return False
            data = file.read()
    except OSError:
        return False
    return len(data) > _DIGEST and hashlib.sha256(data[:-_DIGEST]).digest() == data[-_DIGEST:]


def _compile(source: str, path: Path) -> None:
    """Make the library of a source. Raises CompilerError: the compiler fails, or makes no file, or none can
    be written."""
    command = [*compiler(), *FLAGS, "-x", "c", "-", "-o"]
    try:
        with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as work:
            made = Path(work) / path.name
            command += [str(made), "-lm"]
            done = subprocess.run(
                command, input=source, capture_output=True, text=True, timeout=300, check=False
            )
            if done.returncode != 0:
                raise CompilerError(f"{shlex.join(command)} failed: {done.stderr.strip()[-2000:]}")
            data = made.read_bytes()
            with made.open("ab") as file:
                file.write(hashlib.sha256(data).digest())
            made.chmod(0o700)
            made.replace(path)
    except subprocess.SubprocessError as error:
        raise CompilerError(f"{shlex.join(command)}: {error}") from error
    except OSError as error:
        raise CompilerError(f"{shlex.join(compiler())} made no library {path}: {error}") from error
