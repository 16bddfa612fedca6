"""Say what importing the pack and listing its nodes changes in ComfyUI's process: one JSON object.

python import_check.py COMFYUI_CHECKOUT PACK_FOLDER
"""

import asyncio
import importlib.util
import json
import os
import random
import sys
from pathlib import Path

import host_launch


def snapshot() -> dict[str, object]:
    """Everything that other nodes and later runs depend on, by name."""
    import comfy.cli_args
    import comfy.ldm.minimax.model
    import comfy.ldm.modules.attention
    import comfy.model_patcher
    import comfy.samplers
    import numpy as np
    import torch

    state: dict[str, object] = {f"cli {k}": repr(v) for k, v in vars(comfy.cli_args.args).items()}
    state |= {f"env {name}": value for name, value in os.environ.items()}
    modules = (
        comfy.ldm.modules.attention,
        comfy.ldm.minimax.model,
        comfy.model_patcher,
        comfy.samplers,
    )
    for module in modules:
        for name, value in vars(module).items():
            state[f"{module.__name__}.{name}"] = id(value)
            if isinstance(value, type):
                # methods are looked up through the class: the same object unless replaced
                members = {f"{module.__name__}.{name}.{k}": id(v) for k, v in vars(value).items()}
                state |= members
    registry = comfy.ldm.modules.attention.REGISTERED_ATTENTION_FUNCTIONS
    state |= {f"registered {name}": id(value) for name, value in registry.items()}
    state |= {
        "torch threads": torch.get_num_threads(),
        "torch dtype": torch.get_default_dtype(),
        "torch tf32": torch.backends.cuda.matmul.allow_tf32,
        "torch precision": torch.get_float32_matmul_precision(),
        "torch deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch random": torch.get_rng_state().sum().item(),
        "numpy random": repr(np.random.get_state()[2]),
        "python random": hash(random.getstate()),
        "folder": os.getcwd(),
        "modules path": tuple(sys.path),
    }
    return state


def load_pack(folder: Path) -> list[str]:
    """Import as ComfyUI does: by path, under the path as name; returns the node ids."""
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)

    async def list_nodes():
        extension = await module.comfy_entrypoint()
        await extension.on_load()
        return await extension.get_node_list()

    return [node.GET_SCHEMA().node_id for node in asyncio.run(list_nodes())]


def main(argv: list[str]) -> int:
    """Command line."""
    checkout, pack = (Path(argument).resolve() for argument in argv)
    host_launch.prepare(checkout)
    sys.argv[1:] = ["--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.sd  # what nodes import of ComfyUI may load anything of it

    before = snapshot()
    nodes = load_pack(pack)
    after = snapshot()
    changed = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    print(json.dumps({"nodes": nodes, "num_watched": len(before), "changed": changed}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
