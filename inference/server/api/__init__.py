"""What is on the wire: requests, responses and errors of the API, and how a request is read.

Pydantic models and their translation.
No routes, no thread and no engine belongs here.
"""
