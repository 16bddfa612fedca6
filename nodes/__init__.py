"""Nox's ComfyUI nodes: the only code that imports ComfyUI."""
