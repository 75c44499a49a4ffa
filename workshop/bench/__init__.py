"""Measuring: time and peak memory of callables, side by side in one run."""
