"""Errors: the sentences that a user may read."""


class NoxError(Exception):
    """One plain sentence: what happened, why, and what to do."""


class RequestError(NoxError, ValueError):
    """What was asked for cannot be done."""


class SequenceError(NoxError, ValueError):
    """Tensors or segments do not fit the packed sequence."""


class FileError(NoxError, ValueError):
    """A file is truncated, of the wrong kind, or malformed."""


class BuildError(NoxError):
    """A kernel's image can be neither found nor compiled."""


class DriverError(NoxError):
    """The NVIDIA driver is missing, or refused something."""


class NoKernelError(NoxError):
    """No kernel serves a case; the message lists every candidate's reason."""


def one_line(text: str, limit: int = 40) -> str:
    """A file's own words for a log or a node: printable, on one line, and not without end."""
    shown = "".join(char if char.isprintable() else " " for char in text[: limit + 1])
    return shown if len(text) <= limit else f"{shown[:limit]}..."


def quote(value: object, limit: int = 40) -> str:
    """A file's own value inside a message, in quotes where it is text."""
    return f"'{one_line(value, limit)}'" if isinstance(value, str) else one_line(repr(value), limit)
