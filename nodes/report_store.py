"""Report store: the reports of past runs, for the nodes behind their samplers."""

from .prompt import ATTENTION, executing, fingerprints, running_prompt, upstream, written
from .report import Report
from .report_text import line

MAX_REPORTS = 512  # a report is a few kilobytes: one word for each block of each evaluation
MODES = ("sage", "sparse", "veda")  # that Nox computes
NO_RUN = (
    "Nox H3 Attention is upstream of this node, but no sampling run with it is known: either the "
    "sampler took no step, or its MODEL is not wired to the guider or sampler."
)

# Reports of sampling runs, by what the sampler was asked. Plain numbers, not on the patch: ComfyUI
# may let go of the model before the saver runs.
_reports: dict[str, Report] = {}


def keep_report(report: Report) -> None:
    """Remember the report of a run for the savers behind its sampler, which executes now."""
    prompt_id, sampler = executing()
    key = fingerprints(running_prompt(prompt_id)).get(written(sampler))
    if key is None:  # nobody could find it
        return
    _reports.pop(key, None)
    _reports[key] = report
    while len(_reports) > MAX_REPORTS:
        del _reports[next(iter(_reports))]


def lines_and_reports(prompt: dict | None, node_id: str) -> tuple[list[str], list[Report]]:
    """What a saver says of the sampling upstream of it: lines for people, and reports.

    Args:
        prompt: The API prompt, {node id: {"class_type", "inputs"}}.
        node_id: The saver.
    """
    prompt = prompt or {}
    nodes, keys = upstream(prompt, node_id), fingerprints(prompt)
    # the first sampler of a chain first
    reports = [_reports[keys[node]] for node in reversed(nodes) if keys[node] in _reports]
    is_asked = any(
        prompt[node].get("class_type") == ATTENTION and prompt[node]["inputs"].get("mode") in MODES
        for node in nodes
    )
    lines = [line(report) for report in reports]
    return ([NO_RUN] if is_asked and not reports else lines), reports
