"""The one error a person using the tool can mend."""


class UserError(Exception):
    """Bad input: the message is one line that says what is wrong, where, and what to do.

    The command line prints it and exits with status 2; it never becomes a traceback unless ``--debug`` is given.
    """
