"""Memory sums: does a model fit a GPU, with which quantization and tensor parallelism."""
