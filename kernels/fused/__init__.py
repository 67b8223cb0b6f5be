"""Triton twins of the kernels, for CUDA: same names, same signatures. Nothing on the CPU path imports them."""
