"""Text processing: tokenizer, detokenizer, stop strings, chat and prompt templates, sampling."""
