"""Model folders: ours under ComfyUI's models/, each with the kind of file it lists."""

import os

import folder_paths

LAYOUTS = "nox_layouts"
PREDICTORS = "veda_predictors"
EXTENSIONS = {LAYOUTS: ".json", PREDICTORS: ".safetensors"}


def register() -> None:
    """Make them known; a user's extra_model_paths.yaml may have done so before."""
    for folder, extension in EXTENSIONS.items():
        folder_paths.add_model_folder_path(folder, os.path.join(folder_paths.models_dir, folder))
        # a new key starts without extensions, which would list every file
        folder_paths.folder_names_and_paths[folder][1].add(extension)
