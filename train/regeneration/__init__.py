"""Responses written by the target for training data, in this process or at endpoints; stored and
reused.

regenerate.py    the entry: conversations.py makes the prompts, job.py keeps the account
endpoint*.py     one server, the pool of servers, and the conversations written there
store.py         responses on disk; record.py describes them
"""
