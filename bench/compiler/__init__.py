"""What compilers make of the kernels, without a GPU."""
