"""Measures attngraph and looks for what breaks it: `python -m workshop COMMAND ...`, from a checkout.

Not in the wheel. It uses the public API, and looks behind it where a measurement needs that.
"""
