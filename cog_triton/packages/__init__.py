"""Packages that serving needs and this installation lacks: fetched by hash, in the cache."""
