"""Depth maps read from a frozen encoder."""
