"""The page at ``/`` of the OpenAI port, with which to try the model."""
