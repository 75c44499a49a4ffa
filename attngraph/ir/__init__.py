"""The representation of a program: expressions, the ops of our dialect, graphs and their text."""
