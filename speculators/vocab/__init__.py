"""Vocabularies: reduced draft vocabularies, the bytes of tokens, maps between two tokenizers.

They know ids, tensors and tokenizers.
No model and no training data belongs here.
"""
