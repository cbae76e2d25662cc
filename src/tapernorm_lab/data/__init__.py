"""Text to token streams: corpora, tokenizer, memory-mapped tokens. Import the module you need; none is loaded here."""
