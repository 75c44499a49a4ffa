"""The ops of the attngraph dialect, their reference kernels, and the registry of kernels."""
