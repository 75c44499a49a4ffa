"""Context parallel: the tokens of whole sequences divided among ranks."""
