"""Learned dynamics."""
