"""Calibration of the variance on held-out points."""
