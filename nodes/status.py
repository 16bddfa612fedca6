"""Status: tells the user, in the log and on the node."""

import logging
import time

import torch

from ..nox_kernels.errors import NoKernelError, one_line
from ..nox_kernels.plan import Plan
from ..nox_kernels.veda.bundle_info import BundleInfo
from . import report_text
from .prompt import executing
from .report import COMPUTED, Report, VedaUse
from .run import Run, pick_kernel
from .session import Session

log = logging.getLogger("nox")

BADGE_EVENT = "nox.badge"  # for web/badge.js
PROGRESS_INTERVAL_S = 0.5  # so that a fast run does not flood the page


def show(node_id: str, text: str) -> None:
    """Put a short text on a node of the page, which shows it while that node's graph is open."""
    if (server := _server()) is not None:
        server.send_progress_text(text, node_id)


def show_badge(node_id: str, text: str) -> None:
    """Put at most two lines of thirty characters on a node, and on the subgraphs around it.

    The page does not show a node's text on these; our own event lets our extension do that.
    """
    show(node_id, text)
    if (server := _server()) is not None:
        server.send_sync(BADGE_EVENT, {"node": node_id, "text": text})


def _server():
    """What the page is connected to; None where ComfyUI runs without one."""
    from server import PromptServer

    return getattr(PromptServer, "instance", None)


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
    show(node_id, report_text.fit(f"keeps {info.target_budget}; {sizes}.", second))


def refuse_geometry(node_id: str) -> None:
    """Say on the node why the run that starts now will not."""
    show_badge(
        node_id, report_text.fit("Veda does not know this size.", "The error says which it knows.")
    )


def describe_plan(run: Run, plan: Plan) -> None:
    """Say before a run what was decided for its clip."""
    request = plan.request
    if plan.veda_plan is None:
        if request.mode == "veda":
            instead = "mode sparse" if plan.routed_layers else "ComfyUI's own attention"
            lines = report_text.fit("Veda does not know this size.", f"{instead} runs.")
            show_badge(run.node_id, lines)
        return
    use = VedaUse.of(plan, run.session.predictor.model.info)
    share = f"{100 * plan.kept_share:.1f} %"
    log.info(
        "Nox: Veda plan %s fits this clip; a budget of %s, all told %s of tile pairs%s.",
        use.plan,
        use.budget,
        share,
        f" ({use.provenance})" if use.provenance else "",
    )
    target, _ = run.session.predictor.model.info.budgets(request.veda_keep_ratio)
    tail = " of tile pairs in all." if use.is_trained_for_it else ", conditions untrained."
    show_badge(run.node_id, report_text.fit(f"{use.plan} fits: {target}.", f"{share}{tail}"))


def announce(session: Session, node_id: str, device: torch.device) -> None:
    """Say before a run what the user should know: that another attention, or a slow one, runs.

    Once in a prompt, when the node executes; or, where that is cached, when sampling starts.
    """
    prompt_id, _ = executing()
    if session.announced_in == prompt_id:
        return
    session.announced_in = prompt_id

    was_built = False

    def building(_: str) -> None:  # the log has the compiler's words
        nonlocal was_built
        if not was_built:
            was_built = True
            show_badge(node_id, "Building kernels for your GPU,\nonce: under a minute.")

    try:
        kernel = pick_kernel(session, device, torch.bfloat16, building)
    except NoKernelError as error:
        log.warning("Nox: ComfyUI's own attention will run: %s.", error)
        show_badge(node_id, "ComfyUI's own attention:\nsee the log for the reason")
        return
    if was_built:
        show_badge(node_id, "Kernels for your GPU are built")
    if kernel.note:
        log.warning(
            "Nox: mode %s computes on the %s. For speed, choose mode dense.",
            session.request.mode,
            kernel,
        )
        show_badge(node_id, "PyTorch reference: slow.\nFor speed choose mode dense.")


def progress(run: Run, step_idx: int) -> None:
    """Say on the node where a run stands, as often as a reader can follow."""
    now_s = time.perf_counter()
    if now_s - run.shown_s < PROGRESS_INTERVAL_S:
        return
    run.shown_s = now_s
    text = report_text.where(step_idx, run.schedule.num_steps, run.timing)
    show_badge(run.node_id, text)


def report(node_id: str, result: Report) -> None:
    """Say what a run did: one line in the log, the badge on the node."""
    computed = sum(result.count(kind) for kind in (*COMPUTED, "native"))
    level = logging.INFO if computed else logging.ERROR
    log.log(level, "%s", report_text.line(result))
    show_badge(node_id, report_text.badge(result))
