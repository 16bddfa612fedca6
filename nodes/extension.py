"""Extension: the list of our nodes."""

from comfy_api.latest import ComfyExtension, io

from . import model_folders
from .attention import NoxAttention
from .chunk_mlp import NoxChunkMLP
from .dense_control import NoxDenseControl
from .load_h3 import NoxLoadH3
from .load_veda_predictor import NoxLoadVedaPredictor
from .report_node import NoxReport
from .save_video import NoxSaveVideo


class NoxExtension(ComfyExtension):
    """Registers the nodes and the folders of our files."""

    async def on_load(self) -> None:
        """Called once, when ComfyUI loads the pack."""
        model_folders.register()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Every node, in the order of the menu."""
        return [
            NoxLoadH3,
            NoxLoadVedaPredictor,
            NoxAttention,
            NoxDenseControl,
            NoxSaveVideo,
            NoxReport,
            NoxChunkMLP,
        ]
