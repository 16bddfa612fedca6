"""File names: fills in the %...% tokens that ComfyUI's page expands for core's savers only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from .prompt import is_link

_TOKEN = re.compile(r"%([^%]+)%")
# The page's date tokens; longer forms first. yyy alone means nothing there and stays.
_DATE_TOKEN = re.compile(r"dd?|MM?|hh?|mm?|ss?|yyyy|yyy|yy")
_FORBIDDEN = re.compile(r'[<>:"|?*\x00-\x1f\x7f]')  # in a Windows file name
_DEVICE = re.compile(r"(CON|PRN|AUX|NUL|COM\d|LPT\d)(\..*)?", re.IGNORECASE)  # no name there
_MAX_NAME_BYTES = 200  # of 255 that file systems take; the counter and the ending come on top
_MAX_VALUE_LENGTH = 50  # of a widget's value: a whole prompt would not fit, and lose the clip
_MAX_LINKS = 16  # of primitive nodes behind an input that is wired


def resolve_prefix(
    prefix: str,
    prompt: Mapping[str, Any] | None,
    workflow: Mapping[str, Any] | None,
    now: datetime,
) -> str:
    """Fill in %date:FORMAT% and %Node.widget%, then make the name fit for every system.

    Args:
        prefix: as typed; "/" and "\\" separate folders, both come back as "/".
        prompt: the API prompt, node id -> {class_type, inputs, _meta}; gives the values.
        workflow: the page's graph; gives "Node name for S&R" and titles.
        now: local time.

    Returns:
        The prefix with every known token replaced. Core's own (%width%, %year%, ...) and unknown
        ones keep their percent signs. Whether it stays in the output folder is core's check.
    """
    prompt = prompt or {}

    def replace(match: re.Match[str]) -> str:
        token = match[1]
        if token.startswith("date:"):
            # A "/" between date parts makes folders, as it does on the page.
            return _format_date(token.removeprefix("date:"), now)
        node_name, dot, widget = token.rpartition(".")
        value = _widget_value(node_name, widget, prompt, workflow) if dot else None
        if value is None:
            return match[0]
        # A value never makes a folder, also as on the page.
        return re.sub(r"[/\\]", "_", _as_text(value)[:_MAX_VALUE_LENGTH])

    *folders, name = _FORBIDDEN.sub("_", _TOKEN.sub(replace, prefix).replace("\\", "/")).split("/")
    return "/".join([*map(_as_folder, folders), name])


def _as_folder(name: str) -> str:
    """The name of a folder on every system; the file's own gets a number and an ending."""
    if name in ("", ".", ".."):
        return name
    if _DEVICE.fullmatch(name):
        return f"_{name}"
    kept = name.rstrip(". ")  # Windows drops them
    return kept + "_" * (len(name) - len(kept))


def why_not(prefix: str) -> str | None:
    """Why a prefix cannot name a file in the output folder, as a sentence; None if it can."""
    parts = re.split(r"[/\\]", prefix.strip())
    if parts[-1] in ("", "."):
        return "filename_prefix has no name at its end; type one such as video/Nox_H3."
    if not parts[0] or ".." in parts or re.match(r"[A-Za-z]:[/\\]", prefix):
        return (
            f"filename_prefix {prefix[:80]!r} leaves ComfyUI's output folder; type one inside it, "
            f"such as video/Nox_H3."
        )
    try:
        longest = max(len(part.encode()) for part in parts)
    except UnicodeEncodeError:
        return "filename_prefix holds characters that no file name can hold; type it again."
    if longest > _MAX_NAME_BYTES:
        return f"filename_prefix is too long ({longest} bytes); use at most {_MAX_NAME_BYTES}."
    return None


def why_no_folder(prefix: str, root: str) -> str | None:
    """Why a prefix cannot be saved below the folder root, as a sentence; None if it can.

    The deepest folder that exists decides: those below it are made on the way.
    """
    folder = os.path.dirname(os.path.abspath(os.path.join(root, prefix.replace("\\", "/"))))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        what = "a link to nowhere" if os.path.islink(folder) else "a file"
        return f"Videos cannot be saved below {folder} because it is {what}; move it away."
    if os.path.lexists(root) and not _is_inside(folder, root):
        return (  # ComfyUI's rule
            f"Videos cannot be saved in {folder} because it is a link that leaves the folder "
            f"{root}; choose another filename_prefix."
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        return (
            f"Videos cannot be saved in {folder} because it is not writable; check its permissions."
        )
    return None


def _is_inside(folder: str, root: str) -> bool:
    folder, root = os.path.realpath(folder), os.path.realpath(root)
    try:
        return os.path.commonpath([folder, root]) == root
    except ValueError:  # another drive of Windows
        return False


def _format_date(pattern: str, now: datetime) -> str:
    parts = {"d": now.day, "M": now.month, "h": now.hour, "m": now.minute, "s": now.second}

    def replace(match: re.Match[str]) -> str:
        token = match[0]
        if token[0] != "y":
            return str(parts[token[0]]).zfill(len(token))
        year = f"{now.year:04}"
        return {"yyyy": year, "yy": year[2:]}.get(token, token)

    return _DATE_TOKEN.sub(replace, pattern)


def _widget_value(
    node_name: str, widget: str, prompt: Mapping[str, Any], workflow: Mapping[str, Any] | None
) -> Any:
    """Value of the first node of that name that has the widget; None if there is none."""
    for node_id in _ids_named(node_name, prompt, workflow):
        value = prompt[node_id].get("inputs", {}).get(widget)
        for _ in range(_MAX_LINKS):
            if not is_link(value):
                break
            # A primitive node (Int, Float, String) behind the input holds its value in "value".
            value = prompt.get(str(value[0]), {}).get("inputs", {}).get("value")
        if value is not None and not isinstance(value, (list, dict)):
            return value
    return _primitive_value(node_name, workflow) if widget == "value" else None


def _primitive_value(node_name: str, workflow: Mapping[str, Any] | None) -> Any:
    """Value of the page's own Primitive node of that name, which no prompt holds."""
    for _, node in _drawn_nodes(workflow or {}):
        names = ((node.get("properties") or {}).get("Node name for S&R"), node.get("title"))
        if node.get("type") == "PrimitiveNode" and node_name in names:
            values = node.get("widgets_values")
            return values[0] if isinstance(values, list) and values else None
    return None


def _ids_named(
    node_name: str, prompt: Mapping[str, Any], workflow: Mapping[str, Any] | None
) -> list[str]:
    """Ids in the prompt whose node goes by this name, the most specific kind of name first."""
    drawn = dict(_drawn_nodes(workflow)) if workflow else {}
    ranked = []
    for node_id, node in prompt.items():
        page_node = drawn.get(node_id, {})
        names = (
            (page_node.get("properties") or {}).get("Node name for S&R"),
            page_node.get("title"),
            (node.get("_meta") or {}).get("title"),
            node.get("class_type"),
            node_id,
        )
        if node_name in names:
            ranked.append((names.index(node_name), node_id))
    return [node_id for _, node_id in sorted(ranked, key=lambda item: item[0])]


def _drawn_nodes(workflow: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(API id, node) of every node of the page's graph; inside a subgraph ids read outer:inner."""
    subgraphs = {
        graph.get("id"): graph for graph in (workflow.get("definitions") or {}).get("subgraphs", ())
    }

    def walk(nodes: Any, path: str, above: frozenset) -> Iterator[tuple[str, Mapping[str, Any]]]:
        for node in nodes or ():
            node_id = f"{path}{node.get('id')}"
            yield node_id, node
            kind = node.get("type")
            if kind in subgraphs and kind not in above:  # a graph that holds itself would not end
                yield from walk(subgraphs[kind].get("nodes"), f"{node_id}:", above | {kind})

    yield from walk(workflow.get("nodes"), "", frozenset())


def _as_text(value: Any) -> str:
    """The value as the page prints it: true, 1 for 1.0, 0.5."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)
