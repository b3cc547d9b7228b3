"""The one error that trainkit raises."""


class TrainkitError(ValueError):
    """A request that cannot be carried out exactly.

    Its text names the thing, the rule, the value received, and what to do.
    """
