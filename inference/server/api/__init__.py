"""The API on the wire: requests, answers and errors as pydantic models, and how a request is
parsed.

Routes, threads and engines belong elsewhere.
"""
