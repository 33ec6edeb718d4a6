"""Rows as users give them and as training takes them."""
