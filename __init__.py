"""Nox for MiniMax-H3: what ComfyUI loads. Importing it changes nothing."""

WEB_DIRECTORY = "web"


async def comfy_entrypoint():
    """Give ComfyUI our nodes."""
    # imported here: pytest imports this file too, on machines without ComfyUI
    from .nodes.extension import NoxExtension

    return NoxExtension()
