"""Cures in models that other people wrote: attached, saved, loaded and removed; and the tokens of inner layers."""
