"""Responses written by the target, for data to be learnt from: by our engine or over HTTP.

What is written is stored, and found again.
No training belongs here.
"""
