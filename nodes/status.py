"""Status: tells the user, in the log and on the node."""

import logging

from .run import Report

log = logging.getLogger("nox")


def show(node_id: str, text: str) -> None:
    """Put a short text on a node of the page: two lines of thirty characters at most."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is not None:
        server.send_progress_text(text, node_id)


def report(node_id: str, result: Report) -> None:
    """Say what a run did: one line in the log, the badge on the node."""
    computed = result.count("sparse") + result.count("sage") + result.count("native")
    level = logging.INFO if computed else logging.ERROR
    log.log(level, "%s", result.line)
    show(node_id, result.badge)
