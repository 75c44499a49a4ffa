"""Compiled models as files: what a folder holds, and when it may be used again."""
