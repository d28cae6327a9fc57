"""Responses written by the target for training data, in this process or at servers; stored and
reused.

regenerate.py      the entry: whose responses are requested, which are stored, who writes the others
conversations.py   the prompts of a conversation, turn by turn, and the account of a run
writers.py         what a writer does, and the one of this process; servers.py: OpenAI's protocol
store.py           responses on disk, and the record of a run
"""
