"""The one exception that stands for a mistake in the input rather than in the program."""


class InputError(ValueError):
    """Something the user gave cannot be used; the message is one sentence that names it and the remedy.

    Raised before any measuring starts. The command line prints the message and exits with code 2.
    """
