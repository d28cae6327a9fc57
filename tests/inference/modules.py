"""`make_llm`, until every file imports it from tests/support/engines.py."""

from tests.support.engines import make_llm

__all__ = ["make_llm"]
