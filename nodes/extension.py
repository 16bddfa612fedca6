"""Extension: the list of our nodes."""

from comfy_api.latest import ComfyExtension, io

from . import layout_files
from .attention import NoxAttention
from .dense_control import NoxDenseControl
from .load_h3 import NoxLoadH3
from .save_video import NoxSaveVideo


class NoxExtension(ComfyExtension):
    """Registers the nodes and the folder of layout tables."""

    async def on_load(self) -> None:
        """Called once, when ComfyUI loads the pack."""
        layout_files.register_folder()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Every node, in the order of the menu."""
        return [NoxLoadH3, NoxAttention, NoxDenseControl, NoxSaveVideo]
