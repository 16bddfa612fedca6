"""Layout files: the layouts that a user can choose, shipped ones and files of models/nox_layouts."""

import os

import folder_paths

from ..nox_kernels.errors import RequestError
from ..nox_kernels.layout import RASTER
from ..nox_kernels.layout_table import LayoutTable, raster_table, read_table, uniform_table
from ..nox_kernels.request import WINDOWS

FOLDER = "nox_layouts"
EXTENSION = ".json"


def register_folder() -> None:
    """Make models/nox_layouts known; a user's extra_model_paths.yaml may have done so before."""
    folder_paths.add_model_folder_path(FOLDER, os.path.join(folder_paths.models_dir, FOLDER))
    # a new key starts without extensions, which would list every file
    folder_paths.folder_names_and_paths[FOLDER][1].add(EXTENSION)


def layout_names() -> list[str]:
    """What the layout widget offers."""
    return [WINDOWS, RASTER, *folder_paths.get_filename_list(FOLDER)]


def load_table(name: str, num_layers: int, num_heads: int) -> LayoutTable:
    """The table behind a name of `layout_names`, for a model of this size.

    Raises:
        RequestError: There is no such file, or it is for a model of another size.
        FileError: The file is not a layout table.
    """
    if name == WINDOWS:
        return uniform_table(num_layers, num_heads)
    if name == RASTER:
        return raster_table(num_layers, num_heads)
    path = folder_paths.get_full_path(FOLDER, name)
    if path is None:
        raise RequestError(
            f"Layout {name!r} is not in models/{FOLDER}. Choose {WINDOWS} or {RASTER}, or put the file there."
        )
    table = read_table(path)
    table.check_model(num_layers, num_heads)
    return table
