"""Code that runs inside tritonserver's Python stubs, and the engine process that they talk to."""
