"""Incremental parsers of answers: text in, content, reasoning and tool calls out, without IO."""
