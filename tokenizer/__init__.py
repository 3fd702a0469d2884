"""Pretokenization: read a corpus, train or load a tokenizer, write a token store."""
