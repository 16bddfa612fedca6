"""Errors: the sentences that a user may read."""


class NoxError(Exception):
    """One plain sentence: what happened, why, and what to do."""


class RequestError(NoxError, ValueError):
    """What was asked for cannot be done."""


class SequenceError(NoxError, ValueError):
    """Tensors or segments do not fit the packed sequence."""


class FileError(NoxError, ValueError):
    """A file is truncated, of the wrong kind, or malformed."""


class NoKernelError(NoxError):
    """No kernel serves a case; the message lists every candidate's reason."""
