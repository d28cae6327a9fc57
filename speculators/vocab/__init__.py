"""Vocabularies: reduced draft vocabularies, the bytes of tokens, maps between two tokenizers.

They work on ids, tensors and tokenizers.
Models and training data belong elsewhere.
"""
