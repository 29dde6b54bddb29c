"""Mistakes in the input rather than in the program, and how they are told."""

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral


class InputError(ValueError):
    """Something the user gave cannot be used; the message is one sentence that names it and the remedy.

    Raised before any measuring starts, save `NotFinite`. The command line prints the message and exits with code 2.
    """


class NotFinite(InputError, RuntimeError):
    """A model's answer holds NaN or infinity: there is no decision."""


def whole(what: str, value, least: int) -> None:
    """Raise InputError where `value` is no whole number, or below `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{what} is {value!r}; give a whole number of {least} or more.")


@contextmanager
def foreign(said: str) -> Iterator[None]:
    """The border to another's code or file: what is raised inside, `sys.exit()` too, is an InputError of one line that
    begins with `said`. An InputError passes as it is."""
    try:
        yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        kind, text = type(error).__name__, (str(error).splitlines() or [""])[0]
        raise InputError(f"{said} ({kind}: {text})." if text else f"{said} ({kind}).") from error
