"""Whether the kernels are right and fast on the machine that the package meets."""
