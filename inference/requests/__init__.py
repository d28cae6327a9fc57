"""One request: its text so far, its response, its detokenizer, and the order requests are served
in.

Plain state that the engine advances.
No model, no cache and no protocol belongs here.
"""
