"""Canonical forms of expressions, bounds of their values, sizes, and digits of indices."""
