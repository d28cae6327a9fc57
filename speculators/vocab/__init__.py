"""Reduced vocabularies, the bytes of tokens, maps between tokenizers. It knows no model."""
