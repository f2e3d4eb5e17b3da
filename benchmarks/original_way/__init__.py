"""Baseline: the original cog-triton's serving path, rewritten from its algorithm.

Over the same real Triton, the same mock engine and the same Cog as ours: httpx reads the ensemble's
events line by line, every event is parsed as JSON, its ids are appended to an array, the whole of
it is decoded again, and the text that is new is what is left after the text before.
"""
