"""Nox's attention: torch and CUDA, without ComfyUI. Importing it does nothing."""
