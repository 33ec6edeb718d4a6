"""Predictive distributions and their scores."""
