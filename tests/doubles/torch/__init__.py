"""Double of torch: what a compiled model asks when it is loaded."""
