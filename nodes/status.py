"""Status: tells the user, in the log and on the node."""

import logging

import torch

from ..nox_kernels.errors import NoKernelError, one_line
from ..nox_kernels.plan import Plan
from ..nox_kernels.veda.bundle_info import BundleInfo
from .prompt import executing
from .run import pick_kernel
from .session import Report, Session, VedaUse

log = logging.getLogger("nox")


def show(node_id: str, text: str) -> None:
    """Put a short text on a node of the page: two lines of thirty characters at most."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is not None:
        server.send_progress_text(text, node_id)


def describe_predictor(node_id: str, info: BundleInfo) -> None:
    """Say what a predictor is, on the node that loaded it."""
    sizes = f"{len(info.plans)} size{'s' if len(info.plans) > 1 else ''}"
    log.info(
        "Nox: Veda predictor %s keeps %s and knows %s%s.",
        info.name,
        info.target_budget,
        sizes,
        f" ({info.provenance})" if info.provenance else "",
    )
    kind, step = (one_line(info.metadata.get(key, "")) for key in ("source_weights", "step"))
    weights = [f"{kind} weights" if kind else "", f"step {step}" if step else ""]
    second = ", ".join(filter(None, weights))
    show(node_id, _lines(f"keeps {info.target_budget}; {sizes}.", second))


def refuse_geometry(session: Session) -> None:
    """Say on the node why the run that starts now will not."""
    show(session.node_id, _lines("Veda does not know this size.", "The error says which it knows."))


def describe_plan(session: Session, plan: Plan) -> None:
    """Say before a run what was decided for its clip, and what speaks against it."""
    for warning in plan.warnings:
        log.warning("Nox: %s", warning)
    request = plan.request
    if plan.veda_plan is None:
        if request.mode == "veda":
            instead = "mode sparse" if plan.routed_layers else "ComfyUI's own attention"
            lines = _lines("Veda does not know this size.", f"{instead} runs.")
            show(session.node_id, lines)
        return
    use = VedaUse.of(plan, session.predictor.model.info)
    share = f"{100 * plan.kept_share:.1f} %"
    log.info(
        "Nox: Veda plan %s fits this clip; a budget of %s, all told %s of tile pairs%s.",
        use.plan,
        use.budget,
        share,
        f" ({use.provenance})" if use.provenance else "",
    )
    target, _ = session.predictor.model.info.budgets(request.veda_keep_ratio)
    tail = " of tile pairs in all." if use.is_trained_for_it else ", conditions untrained."
    show(session.node_id, _lines(f"{use.plan} fits: {target}.", f"{share}{tail}"))


def _lines(*lines: str) -> str:
    """At most thirty characters each, as the node has room for."""
    return "\n".join(line if len(line) <= 30 else line[:29] + "~" for line in lines if line)


def announce(session: Session, device: torch.device) -> None:
    """Say before a run what the user should know: that another attention, or a slow one, runs.

    Once in a prompt, when the node executes; or, where that is cached, when sampling starts.
    """
    prompt_id, _ = executing()
    if session.announced_in == prompt_id:
        return
    session.announced_in = prompt_id

    def compiling(_: str) -> None:  # the log has the words
        show(session.node_id, "Compiling GPU kernels:\nonce, under a minute.")

    try:
        kernel = pick_kernel(session, device, torch.bfloat16, compiling)
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
        show(session.node_id, "PyTorch reference: slow.\nFor speed choose mode dense.")


def report(node_id: str, result: Report) -> None:
    """Say what a run did: one line in the log, the badge on the node."""
    computed = sum(result.count(kind) for kind in ("sparse", "veda", "sage", "native"))
    level = logging.INFO if computed else logging.ERROR
    log.log(level, "%s", result.line)
    show(node_id, result.badge)
