"""Status: tells the user, in the log and on the node."""

import logging

import torch

from ..nox_kernels.errors import NoKernelError
from .prompt import executing
from .run import pick_kernel
from .session import Report, Session

log = logging.getLogger("nox")


def show(node_id: str, text: str) -> None:
    """Put a short text on a node of the page: two lines of thirty characters at most."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is not None:
        server.send_progress_text(text, node_id)


def announce(session: Session, device: torch.device) -> None:
    """Say before a run what the user should know: that another attention, or a slow one, runs.

    Once in a prompt, when the node executes; or, where that is cached, when sampling starts.
    """
    prompt_id, _ = executing()
    if session.announced_in == prompt_id:
        return
    session.announced_in = prompt_id
    try:
        kernel = pick_kernel(session, device, torch.bfloat16)
    except NoKernelError as error:
        log.warning("Nox: ComfyUI's own attention will run: %s.", error)
        show(session.node_id, "ComfyUI's own attention:\nsee the log for the reason")
        return
    if kernel.note:
        log.warning(
            "Nox: mode %s computes on the %s. For speed, choose mode dense.",
            session.request.mode,
            kernel,
        )
        show(session.node_id, "PyTorch reference: slow\nfor speed choose mode dense")


def report(node_id: str, result: Report) -> None:
    """Say what a run did: one line in the log, the badge on the node."""
    computed = result.count("sparse") + result.count("sage") + result.count("native")
    level = logging.INFO if computed else logging.ERROR
    log.log(level, "%s", result.line)
    show(node_id, result.badge)
