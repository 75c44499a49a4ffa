"""The program graph, its conditions, and its text: printed, and read back."""
