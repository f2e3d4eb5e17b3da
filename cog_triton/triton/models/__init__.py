"""The code of the text models in ``triton_model_repo``; it runs inside Triton's stub processes."""
