"""Report text: a report in words - for the node, for the log, and in full."""

from __future__ import annotations

from collections.abc import Iterable

from .report import COMPUTED, ROUTED, Report, Timing

LINE_LENGTH = 30  # of a text on a node, which has room for two lines

# How the reasons of a plan's decisions read after a number of calls.
REASONS = {
    "first steps": "in the first steps",
    "last steps": "in the last steps",
    "dense block": "in dense blocks",
    "every tile kept": "with every tile kept",
}
# How kinds of calls read.
KINDS = {
    "sparse": "sparse",
    "veda": "veda",
    "sage": "dense",
    "native": "native",
    "declined": "left to ComfyUI's own attention",
}


def badge(report: Report) -> str:
    """At most two lines of thirty characters: what ran, and how fast."""
    return fit(_what_ran(report), _how_fast(report))


def line(report: Report) -> str:
    """One line, for the log and the saver."""
    kind, share = report.kind, report.kept_share
    word = {"sage": "INT8", "native": "native"}.get(kind, kind)
    kept = f" ({_percent(share)} of tiles)" if share else ""
    parts = [f"{report.count(kind)} of {report.num_calls} attention calls {word}{kept}"]
    parts += [
        f"{report.count(other)} {KINDS[other]} ({_reasons(report, other)})"
        for other in ("sage", "native", "declined")
        if other != kind and report.count(other)
    ]
    parts.append(f"computed by {report.kernel}")
    parts += filter(None, [_times(report), _won(report)])
    return f"Nox {_setting(report)}, {report.request.precision}: {'; '.join(parts)}"


def full(report: Report) -> str:
    """Everything, a sentence a line, for Nox Report."""
    dense = report.dense_steps
    sentences = [
        line(report),
        f"Steps: {report.num_steps}. Evaluations of the model: {report.num_forwards}. "
        f"Blocks: {report.num_layers}.",
    ]
    if report.kind in ROUTED:
        which = f" ({_numbers(dense)})" if dense else ""
        sentences.append(f"Dense steps: {len(dense)} of {report.num_steps}{which}.")
    if report.kept_share is not None:
        kept = _percent(report.kept_share)
        sentences.append(
            f"Kept: {kept} of tile pairs in {report.kind} calls; the rest was skipped."
        )
    for (kind, reason), count in report.calls.items():
        why = "" if reason in (kind, f"mode {kind}") else f", {REASONS.get(reason, reason)}"
        sentences.append(f"Calls: {count} {KINDS[kind]}{why}.")
    sentences += _time(report)
    sentences += [f"Warning: {warning}" for warning in report.warnings]
    return "\n".join(sentences)


def too_slow(timing: Timing) -> str | None:
    """What to do where another mode would be faster; None where none is known to be."""
    if timing.faster is None or timing.main_kind is None:
        return None
    kind, (other, other_ms) = timing.main_kind, timing.faster
    name = {"dense": "ComfyUI's own attention"}.get(other, other)
    lower = {"sparse": "type a lower kept %, or ", "veda": "type a lower veda kept %, or "}
    return (
        f"At this length {kind} is slower than {name}: "
        f"{milliseconds(timing.ms_per_call[kind])} a call against {milliseconds(other_ms)}. "
        f"To save time, {lower.get(kind, '')}choose mode {other}."
    )


def where(step_idx: int, num_steps: int, timing: Timing) -> str:
    """Two lines for the node while a run lasts."""
    times = [f"{kind} {milliseconds(ms)}" for kind, ms in timing.ms_per_call.items()]
    return fit(f"Step {step_idx + 1} of {num_steps}.", ", ".join(times))


def fit(*lines: str) -> str:
    """What a node has room for of each line."""
    return "\n".join(
        text if len(text) <= LINE_LENGTH else text[: LINE_LENGTH - 1] + "~"
        for text in lines
        if text
    )


def milliseconds(time_ms: float) -> str:
    """Such as "0.42 ms", "9.4 ms", "39 ms", "1234 ms"."""
    return f"{_digits(time_ms)} ms"


def seconds(time_s: float) -> str:
    """Such as "0.42 s", "9.4 s", "39 s", "1234 s"."""
    return f"{_digits(time_s)} s"


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 99.5 or value < 0.01 else f"{value:.2g}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _what_ran(report: Report) -> str:
    """A sentence: the page may put the next line right behind it."""
    kind, share = report.kind, report.kept_share
    if kind in ROUTED and share is not None:
        dense = f"{len(report.dense_steps)}/{report.num_steps} steps dense"
        return _first_that_fits(
            f"{kind} {100 * share:.1f} %, {dense}.",
            f"{kind} {100 * share:.1f}%, {dense}.",
            f"{kind} {100 * share:.0f}%, {dense}.",
        )
    if kind in ROUTED and report.count("sage") == report.num_calls:
        return f"{kind}: all {report.num_calls} calls dense."
    return f"{kind}: {report.count(kind)} of {report.num_calls} calls."


def _how_fast(report: Report) -> str:
    """Or, before anything else, that ComfyUI's own attention stepped in."""
    if report.count("declined"):
        return f"{report.count('declined')} by ComfyUI: see the log"
    timing, saved_s = report.timing, report.seconds_saved
    if timing.main_kind is None:
        return ""
    kernel = "PyTorch" if report.is_reference else "INT8"
    timed = f"{kernel} {milliseconds(timing.ms_per_call[timing.main_kind])}"
    if timing.faster is not None and not report.is_reference:
        other, other_ms = timing.faster
        slower = f"slower than {other}: {milliseconds(other_ms)}"
        return _first_that_fits(f"{timed}, {slower}", slower)
    if saved_s is None:
        return f"{timed} per call"
    won = f"saved {seconds(saved_s)}" if saved_s >= 0 else f"{seconds(-saved_s)} slower"
    return _first_that_fits(f"{timed}/call, {won}", f"{timed}, {won}", won)


def _setting(report: Report) -> str:
    request, veda = report.request, report.veda
    sparse = f"sparse {100 * request.keep_ratio:.0f} %, {request.layout}"
    if request.mode != "veda":
        return sparse if request.mode == "sparse" else request.mode
    if veda is not None:
        note = "" if veda.is_trained_for_it else " (conditions: not trained for)"
        return f"veda {veda.budget}, {veda.predictor}, plan {veda.plan}{note}"
    return f"veda without a plan, so {sparse if report.kind == 'sparse' else 'dense'}"


def _reasons(report: Report, kind: str) -> str:
    """Such as "8 in the first steps, 6 in dense blocks"."""
    return ", ".join(
        f"{count} {REASONS.get(reason, reason)}"
        for (call_kind, reason), count in report.calls.items()
        if call_kind == kind
    )


def _times(report: Report) -> str:
    """Such as "9.4 ms per sparse call, 41 ms per dense call"; "" where nothing was timed."""
    times = report.timing.ms_per_call
    return ", ".join(
        f"{milliseconds(times[kind])} per {KINDS[kind]} call" for kind in COMPUTED if kind in times
    )


def _won(report: Report) -> str:
    """Such as "saved about 62 s"; "" where that is unknown."""
    saved_s = report.seconds_saved
    if saved_s is None:
        return ""
    return f"{'saved' if saved_s >= 0 else 'lost'} about {seconds(abs(saved_s))}"


def _time(report: Report) -> list[str]:
    """What attention took, of how much, and what that saved."""
    timing, attention_s = report.timing, report.attention_s
    sentences = [f"Time: {_times(report)}."] if _times(report) else []
    whole = f"the run took {seconds(timing.seconds)}"
    if attention_s is not None:
        share = min(attention_s / timing.seconds, 1.0)
        whole += f", of which attention about {seconds(attention_s)} ({100 * share:.0f} %)"
    sentences.append(f"In all {whole}.")
    if not _won(report) or timing.dense_ms is None:
        unknown = "unknown, ComfyUI's own attention was not measured at this length"
        return [*sentences, f"Saved: {unknown}."]
    return [
        *sentences,
        f"Against ComfyUI's own attention, which takes {milliseconds(timing.dense_ms)} per call "
        f"here, this run {_won(report)}.",
    ]


def _first_that_fits(*lines: str) -> str:
    """The first line that a node has room for, else the last."""
    return next((text for text in lines if len(text) <= LINE_LENGTH), lines[-1])


def _numbers(numbers: Iterable[int]) -> str:
    """Such as "1-4, 8" for ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
