"""The one exception that stands for a mistake in the input rather than in the program."""

from numbers import Integral


class InputError(ValueError):
    """Something the user gave cannot be used; the message is one sentence that names it and the remedy.

    Raised before any measuring starts. The command line prints the message and exits with code 2.
    """


class NotFinite(InputError, RuntimeError):
    """A model's answer holds NaN or infinity: there is no decision."""


def whole(what: str, value, least: int) -> None:
    """Raise InputError where `value` is no whole number, or below `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{what} is {value!r}; give a whole number of {least} or more.")
