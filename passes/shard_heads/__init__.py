"""Tensor parallel: heads, hidden units and the vocabulary divided among ranks."""
