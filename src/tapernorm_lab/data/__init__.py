"""From text to token ids: corpora, tokenizers, token streams and blocks. The package itself imports no module."""
