"""Prompt: reads the API prompt that ComfyUI executes, {node: {"class_type", "inputs"}}."""

import hashlib
import json
from collections import deque

# ComfyUI is imported inside the functions: file names are read from a prompt without it.

ATTENTION = "NoxAttention"


def is_link(value) -> bool:
    """Whether an input comes by wire: [node, number of its output]."""
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def written(node_id: str) -> str:
    """The node of the prompt behind one that a node made while it ran: "10" for "10.0.0.1"."""
    return str(node_id).partition(".")[0]


def executing() -> tuple[str, str]:
    """(prompt, node) that ComfyUI executes now."""
    from comfy_execution.utils import get_executing_context

    context = get_executing_context()
    return (context.prompt_id, context.node_id) if context is not None else ("", "")


def running_prompt(prompt_id: str) -> dict:
    """The API prompt that runs under an id; {} where ComfyUI does not tell."""
    from server import PromptServer

    server = getattr(PromptServer, "instance", None)
    if server is None:
        return {}
    running, _ = server.prompt_queue.get_current_queue_volatile()
    return next((prompt for _, item_id, prompt, *_ in running if item_id == prompt_id), {})


def upstream(prompt: dict, start: str) -> list[str]:
    """A node, and those that its wires come from, nearer ones before others.

    A Nox H3 Attention ends its way: the last one of a chain wins, what stands before it says nothing.
    """
    nodes, queue = [], deque([written(start)])
    while queue:
        node = queue.popleft()
        if node in nodes or node not in prompt:
            continue
        nodes.append(node)
        if prompt[node].get("class_type") != ATTENTION:
            inputs = prompt[node].get("inputs", {})
            queue.extend(str(value[0]) for value in inputs.values() if is_link(value))
    return nodes


def attention_node(executed: str) -> str:
    """The Nox H3 Attention behind the sampler that executes now.

    Args:
        executed: The one whose output the sampler got. ComfyUI gives the output of one node to
            another that asks the same, such as to itself after it moved into a subgraph.
    """
    prompt_id, sampler = executing()
    prompt = running_prompt(prompt_id)
    nodes = [
        node for node in upstream(prompt, sampler) if prompt[node].get("class_type") == ATTENTION
    ]
    return executed if executed in nodes else next(iter(nodes), executed)


def fingerprints(prompt: dict) -> dict[str, str]:
    """What each node of a prompt is asked: its class and inputs, and those of all upstream of it.

    Two nodes with one fingerprint do the same, whatever their numbers; ComfyUI's own cache works
    like this.
    """
    known: dict[str, str] = {}
    for start in prompt:
        path = [start]
        while path:  # by hand: a chain of nodes may be longer than Python's recursion
            node = path[-1]
            inputs = prompt[node].get("inputs", {})
            sources = [value[0] for value in inputs.values() if is_link(value)]
            above = [up for up in sources if up in prompt and up not in known and up not in path]
            if above:
                path.append(above[0])
                continue
            path.pop()
            asked = {
                name: [known.get(value[0], value[0]), value[1]] if is_link(value) else value
                for name, value in inputs.items()
            }
            text = json.dumps([prompt[node].get("class_type"), asked], sort_keys=True, default=repr)
            known[node] = hashlib.sha256(text.encode()).hexdigest()
    return known
