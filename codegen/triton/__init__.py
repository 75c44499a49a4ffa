"""The Triton backend. (Kernels are registered here as they come.)"""
