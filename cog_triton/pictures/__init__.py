"""Images of requests: their formats and bounds, without decoding them."""
