"""Layout files: the layouts that a user can choose, shipped ones and files of models/nox_layouts."""

import folder_paths

from ..nox_kernels.errors import RequestError
from ..nox_kernels.layout_table import PRESETS, LayoutTable, preset_table, read_table
from ..nox_kernels.request import WINDOWS
from .model_folders import LAYOUTS

SHIPPED = {WINDOWS: "uniform"} | {name: name for name in PRESETS if name != "uniform"}


def layout_names() -> list[str]:
    """What the layout widget offers."""
    return [*SHIPPED, *folder_paths.get_filename_list(LAYOUTS)]


def load_table(name: str, num_layers: int, num_heads: int) -> LayoutTable:
    """The table behind a name of `layout_names`, for a model of this size.

    Raises:
        RequestError: There is no such file, or the table is for a model of another size.
        FileError: The file is not a layout table.
    """
    if name in SHIPPED:
        return preset_table(SHIPPED[name], num_layers, num_heads)
    path = folder_paths.get_full_path(LAYOUTS, name)
    if path is None:
        raise RequestError(
            f"Layout {name!r} is not in models/{LAYOUTS}. Choose {WINDOWS}, or put the file there."
        )
    table = read_table(path)
    table.check_model(num_layers, num_heads)
    return table
