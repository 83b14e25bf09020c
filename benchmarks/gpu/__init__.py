"""GPU kernels: layers of DeepSeek-V3 on one GPU, and the search for their tilings."""
