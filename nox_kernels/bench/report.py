"""Report: the tables of a bench, from its JSON."""

from .contenders import ACCURATE, CUDNN
from .timing import median

SAGE = "sageattention per_warp"
NONE = "-"


def report(results: dict) -> str:
    """Markdown of everything in bench.json but its raw samples."""
    machine, asked = results["machine"], results["request"]
    lines = ["# Bench of attention calls", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    lines += [
        f"- {asked['num_heads']} heads of 128, bfloat16, q, k and v views of one buffer [S, 3, H, 128]",
        f"- medians of {asked['repeats']} runs, fewer where a call is slow (column runs), in turns, "
        "on a GPU with its L2 cache flushed before each",
        "- time is of the complete call; a peer may leave its result in an order that a host still "
        "has to copy, and is not charged for it",
        "- TFLOPS and share count the pairs of tiles that are computed; share is of the time that "
        "both matrix products would take at this run's ceilings",
        "- error: mean relative L2 error per row against float64, 64 rows of every head; sparse and "
        "veda against float64 over the keys that they keep",
        "",
        "## Ceilings",
        "",
    ]
    lines += _table(
        ("", "rate", "median ms"),
        [
            (
                name,
                f"{of['rate']:,.4g} {of['unit']}" if of["rate"] else f"none: {of['reason']}",
                _number(median(of["samples_ms"])),
            )
            for name, of in results["ceilings"].items()
        ],
    )
    for run in results["runs"]:
        lines += _run(run, asked["num_heads"], results["ceilings"])
    for run in results["skipped"]:
        lines += ["", f"## S = {run['num_rows']:,}, set {run['set']}", "", run["reason"]]
    return "\n".join(lines) + "\n"


def _run(run: dict, num_heads: int, ceilings: dict) -> list[str]:
    entries = run["contenders"]
    measured = [entry for entry in entries if entry["reason"] is None]
    calls = [entry for entry in measured if not entry["is_part"]]
    parts = [entry for entry in measured if entry["is_part"]]
    absent = [entry for entry in entries if entry["reason"] is not None]
    flops = 4 * run["num_rows"] ** 2 * num_heads * 128
    lines = ["", f"## S = {run['num_rows']:,}, set {run['set']}", ""]
    lines += [f"{run['clip']}. {_clocks(run['gpu'])}.", ""]
    medians = {entry["name"]: entry["median_ms"] for entry in calls}
    lines += _table(
        (
            *("call", "median ms", "min..max", "runs", "x cuDNN's time", "x sageattention's"),
            *("x nox sage's", "TFLOPS", "share", "host ms", "extra MB", "kept"),
            *("error", "cosine", "worst cosine", "error against dense"),
        ),
        [
            (
                *_times(entry),
                *(_ratio(entry["median_ms"], medians.get(bar)) for bar in (CUDNN, SAGE, ACCURATE)),
                *_rates(entry, flops, ceilings),
                _number(entry["host_ms"]),
                _megabytes(entry),
                f"{100 * entry['kept_share']:.1f} %",
                *_quality(entry["quality"]),
            )
            for entry in calls
        ],
    )
    lines += [""]
    lines += _table(
        ("part of a Nox call", "median ms", "min..max", "runs", "TFLOPS", "share", "host ms"),
        [
            (*_times(entry), *_rates(entry, flops, ceilings), _number(entry["host_ms"]))
            for entry in parts
        ],
    )
    notes = [f"- {entry['name']}: {entry['note']}" for entry in calls]
    lines += ["", "Computed by:", "", *notes]
    if absent:
        reasons = [f"- {entry['name']}: {entry['reason']}" for entry in absent]
        lines += ["", "Not measured:", "", *reasons]
    return lines


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    line = "| {} |".format
    rule = "|---|" + "---:|" * (len(head) - 1)
    return [line(" | ".join(head)), rule, *(line(" | ".join(row)) for row in rows)]


def _number(value: float | None) -> str:
    return NONE if value is None else f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def _times(entry: dict) -> tuple[str, ...]:
    samples = entry["samples"]["device_ms"]
    spread = f"{_number(min(samples))}..{_number(max(samples))}"
    return entry["name"], _number(entry["median_ms"]), spread, str(len(samples))


def _ratio(value: float, bar: float | None) -> str:
    return f"{value / bar:.3f}" if bar else NONE


def _rates(entry: dict, flops: float, ceilings: dict) -> tuple[str, str]:
    """TFLOPS, and the share of the time that its matrix products need at the ceilings."""
    if entry["products"] is None:
        return NONE, NONE
    done = flops * entry["kept_share"]
    seconds = entry["median_ms"] / 1e3
    rates = [ceilings[product]["rate"] for product in entry["products"]]
    tflops = f"{done / seconds / 1e12:,.4g}"
    if None in rates:
        return tflops, NONE
    floor_s = sum(done / 2 / (rate * 1e12) for rate in rates)
    return tflops, f"{100 * floor_s / seconds:.1f} %"


def _megabytes(entry: dict) -> str:
    num_bytes = entry["samples"]["peak_extra_bytes"]
    return NONE if num_bytes is None else f"{num_bytes / 2**20:,.0f}"


def _quality(quality: dict) -> tuple[str, ...]:
    digits = {"error": 4, "cosine": 5, "worst_cosine": 5}
    shown = (
        "not finite" if quality[key] is None else f"{quality[key]:.{places}f}"
        for key, places in digits.items()
    )
    dense_error = quality.get("dense_error")
    return *shown, NONE if dense_error is None else f"{dense_error:.4f}"


def _clocks(gpu: dict) -> str:
    if "sm_mhz" not in gpu:
        return f"Clocks unknown: {gpu['reason']}"
    names = {"sm_mhz": "SM {} MHz", "memory_mhz": "memory {} MHz", "power_w": "{} W"}
    names["temperature_c"] = "{} C"
    shown = (
        text.format(f"{gpu[key]['median']:.0f} ({gpu[key]['min']:.0f}..{gpu[key]['max']:.0f})")
        for key, text in names.items()
    )
    return f"GPU while running, median (lowest..highest): {', '.join(shown)}"
