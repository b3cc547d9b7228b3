"""The one error that trainkit raises, and how to see more of it."""


class TrainkitError(ValueError):
    """A request that cannot be carried out exactly.

    Its text names the thing, the rule, the value received, and what to do.
    """


TRACEBACK = "TRAINKIT_TRACEBACK"
"""The environment variable that lets the command show where an error was raised."""
