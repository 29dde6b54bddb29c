"""One process at a time: a lock is a small file that names its holder. The system opens it when the holder ends, however.

Where the system or the file system knows no such locks, nothing is locked.
"""

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from lab.errors import InputError

_mine: dict[Path, list] = {}  # what this process writes: [how often, what opens it again]
_changing = threading.RLock()


@contextmanager
def held(path: Path, note: str, busy: Callable[[str, str], None], keep: bool = False) -> Iterator[None]:
    """Hold the lock file `path`, which says this process's id and `note`, while the block runs.

    Where somebody else holds it, `busy(id, note)` of that one is called ("" where they are not known): it raises, or the
    lock is waited for. The file is removed afterwards, unless it is to be kept. InputError for a link or anything but a
    regular file in its place: what that leads to is another's.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    while True:
        with os.fdopen(_open(path), "rb") as file:
            with suppress(OSError):  # a file system without locks
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    pid, _, other = file.read(1000).decode(errors="replace").partition(" ")
                    busy(pid, other)
                    fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(path, file.fileno()):
                continue  # its holder has removed it between our opening and our holding it
            with suppress(OSError):  # another user's can be locked, not written
                os.ftruncate(file.fileno(), 0)
                os.pwrite(file.fileno(), f"{os.getpid()} {note}".encode(), 0)
            try:
                yield
            finally:
                if not keep:
                    with suppress(OSError):
                        path.unlink()
            return


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samefile(path, file)
    except FileNotFoundError:
        return False


def _open(path: Path) -> int:
    """The lock's file, made if need be, as a descriptor."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            file = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644)
        except PermissionError:  # another user's
            file = os.open(path, os.O_RDONLY | flags)
        told = os.fstat(file)
        if not stat.S_ISREG(told.st_mode) or told.st_nlink > 1:
            os.close(file)
            raise OSError(0, "a link, or no regular file")
    except OSError as error:
        raise InputError(f"Cannot lock {path} ({error.strerror}); remove what is there.") from None
    return file


@contextmanager
def writing(target: Path | str) -> Iterator[None]:
    """Be the one process that writes `target`, a file or a folder, while the block runs.

    InputError, naming the process that writes it, where there is another. A process that writes it already goes on, so
    that a whole command may hold what its parts write one after the other. What is no file or folder (a terminal, a pipe)
    is not locked.
    """
    place = Path(target).resolve()
    if place.exists() and not (place.is_dir() or place.is_file()):
        yield
        return

    def busy(pid: str, _: str) -> None:
        who = f"process {pid}" if pid else "another process"
        raise InputError(f"{target} is being written by {who}; wait until that ends, or choose another place.")

    lock = place / ".lock" if place.is_dir() else place.with_name(f".{place.name}.lock")
    with _changing:
        if lock not in _mine:
            stack = ExitStack()
            stack.enter_context(held(lock, place.name, busy))
            _mine[lock] = [0, stack]
        _mine[lock][0] += 1
    try:
        yield
    finally:
        with _changing:
            _mine[lock][0] -= 1
            if not _mine[lock][0]:
                _mine.pop(lock)[1].close()
