"""Expressions and score programs: the language in which an attention's scores are written."""
