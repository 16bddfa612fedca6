"""Bench: measures our modes and every installed peer, interleaved in one process."""
