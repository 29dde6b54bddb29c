"""A step is used by one thread at a time, and says so when it is not."""

import functools
from threading import Lock, RLock
from weakref import WeakKeyDictionary

from lab.errors import InputError

_locks: WeakKeyDictionary = WeakKeyDictionary()  # by step, which itself can then be copied
_guard = Lock()


def one_thread(method):
    """A step's method that refuses a second thread while one is in this or another of its methods: its buffers are the
    first one's. Raises InputError there; the first goes on undisturbed."""

    @functools.wraps(method)
    def alone(self, *args, **kwargs):
        with _guard:
            lock = _locks.setdefault(self, RLock())
        if not lock.acquire(blocking=False):
            raise InputError(
                f"The step {self.name!r} is in use by another thread; give each thread a step of its own, or let them wait "
                "for each other."
            )
        try:
            return method(self, *args, **kwargs)
        finally:
            lock.release()

    return alone
