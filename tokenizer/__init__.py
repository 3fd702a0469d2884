"""Text -> tokens: read a corpus, make a tokenizer, write a token store."""
