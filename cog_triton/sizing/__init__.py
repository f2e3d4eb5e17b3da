"""Memory sums: does a model fit a GPU, and with which quantization and tensor parallelism."""
