"""Commands of an image's ./result: load, push, inspect; see cli."""
