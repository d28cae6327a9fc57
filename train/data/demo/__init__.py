"""A seeded generator of small chat conversations: the demo corpus.

It is for training a tiny target model from nothing and for asking it
questions whose answers can be checked.  All text comes from the templates
here.  It knows nothing of tokenizers, chat templates, models or training: it
gives plain messages, and takes back plain answers.
"""

from .corpus import CHECKABLE, WORKLOADS, bucket, check, conversations, prompts
from .shapes import Conversation

__all__ = ["CHECKABLE", "WORKLOADS", "Conversation", "bucket", "check", "conversations", "prompts"]
