"""Plot: the times and errors of a bench as a picture, from its JSON."""

from ..errors import RequestError

OURS, PEERS = "#0072b2", "#bbbbbb"  # told apart by colour-blind eyes too (Okabe and Ito)
SETS = {"normal": "#0072b2", "strong": "#e69f00", "outlier": "#cc79a7"}


def draw(results: dict, path: str) -> None:
    """Draw a panel of times for each S, and one of errors where every set was measured.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        RequestError: Nothing was measured.
    """
    from matplotlib.figure import Figure

    if not results["runs"]:
        raise RequestError("Nothing was measured, so there is nothing to draw.")
    timed = [run for run in results["runs"] if run["set"] == results["runs"][0]["set"]]
    compared = [run for run in results["runs"] if run["num_rows"] == results["compared_rows"]]
    compared = compared or timed[:1]  # where that size did not fit into memory
    # Without pyplot there is no global state to leave behind.
    figure = Figure(figsize=(6 * (len(timed) + 1), 5), dpi=110, layout="constrained")
    figure.suptitle(
        f"Attention of {results['request']['num_heads']} heads, {results['machine']['device']}"
    )
    panels = figure.subplots(1, len(timed) + 1, squeeze=False)[0]
    for axes, run in zip(panels[:-1], timed, strict=True):
        calls = _calls(run)
        names = [entry["name"] for entry in calls]
        colours = [OURS if name.startswith("nox") else PEERS for name in names]
        bars = axes.barh(names, [entry["median_ms"] for entry in calls], color=colours)
        axes.bar_label(bars, fmt="%.4g", padding=3, fontsize=8)
        axes.margins(x=0.15)
        axes.invert_yaxis()
        axes.set_title(f"S = {run['num_rows']:,}, set {run['set']}")
        axes.set_xlabel("ms of a complete call, median; less is better")
    _draw_errors(panels[-1], compared)
    figure.savefig(path)


def _draw_errors(axes, runs: list[dict]) -> None:
    names = list(dict.fromkeys(entry["name"] for run in runs for entry in _calls(run)))
    height = 0.8 / len(runs)
    for idx, run in enumerate(runs):
        errors = {entry["name"]: entry["quality"]["error"] for entry in _calls(run)}
        places = [names.index(name) + idx * height for name in errors]
        values = [0.0 if error is None else error for error in errors.values()]
        axes.barh(places, values, height, label=run["set"], color=SETS[run["set"]])
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names)
    axes.invert_yaxis()
    axes.legend(title="set")
    axes.set_title(f"S = {runs[0]['num_rows']:,}")
    axes.set_xlabel("relative error against float64; less is better")


def _calls(run: dict) -> list[dict]:
    return [e for e in run["contenders"] if not e["is_part"] and e["reason"] is None]
