"""How kernels are compiled, launched and given memory on GPUs. Knows nothing of what the kernels compute."""
