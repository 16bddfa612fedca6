"""Start a ComfyUI checkout (its own main.py, unchanged) on a CPU-only torch.

PyPI's torchvision and torchaudio are linked against CUDA torch; beside a CPU build of torch their
C++ parts cannot load, and ComfyUI imports both at start-up. What it uses of them (transforms,
resampling, mel spectrograms) is plain Python, so this file makes the two imports work without the
C++ parts and then runs main.py. Where they do load, nothing is changed.

    python host_launch.py COMFYUI_CHECKOUT [ComfyUI's options ...]

The process ends when its standard input closes, so that it never outlives the test run.
"""

import importlib
import importlib.util
import os
import runpy
import sys
import threading
import types
from pathlib import Path

_libraries = []  # a torch.library.Library takes its definitions along when collected


def _breaks(package: str) -> bool:
    """Whether a package is installed and its import fails on its C++ part."""
    if package in sys.modules or importlib.util.find_spec(package) is None:
        return False
    try:
        importlib.import_module(package)
    except (OSError, RuntimeError):
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
        return True
    return False


def repair_imports() -> list[str]:
    """Make torchvision and torchaudio importable; returns which needed it."""
    import torch

    repaired = []
    if _breaks("torchvision"):
        # the operators that torchvision registers shapes for at import; declared, never defined
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _libraries.append(library)
        repaired.append("torchvision")
    if _breaks("torchaudio"):
        sys.modules["torchaudio._extension"] = _absent_extension()
        repaired.append("torchaudio")
    return repaired


def _absent_extension() -> types.ModuleType:
    def fail_if_no_align(func):
        def missing(*args, **kwargs):
            raise RuntimeError(f"{func.__name__} needs torchaudio's C++ extension")

        return missing

    extension = types.ModuleType("torchaudio._extension")
    extension._IS_TORCHAUDIO_EXT_AVAILABLE = False
    extension._IS_ALIGN_AVAILABLE = False
    extension.fail_if_no_align = fail_if_no_align
    extension._check_cuda_version = lambda: None
    return extension


class _RepairOnImport:
    """Repairs just before the first import: main.py must run before torch is loaded."""

    done = False

    def find_spec(self, name, path=None, target=None):
        if not self.done and name in ("torchvision", "torchaudio"):
            self.done = True
            repaired = repair_imports()
            if repaired:
                print("host_launch: without the C++ part of " + ", ".join(repaired), flush=True)


def _end_with_parent() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def prepare(checkout: Path) -> None:
    """Make this process able to import a checkout's modules."""
    sys.meta_path.insert(0, _RepairOnImport())
    sys.path.insert(0, str(checkout))
    os.chdir(checkout)


def main(argv: list[str]) -> int:
    """Command line."""
    script = Path(argv[0] if argv else "", "main.py").resolve()
    if not script.is_file():
        print("usage: host_launch.py COMFYUI_CHECKOUT [ComfyUI's options ...]", file=sys.stderr)
        return 2
    threading.Thread(target=_end_with_parent, daemon=True).start()
    prepare(script.parent)
    sys.argv = [str(script), *argv[1:]]
    runpy.run_path(str(script), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
