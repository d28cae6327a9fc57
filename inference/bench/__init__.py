"""`draftsmith bench`: a load generator for OpenAI-compatible servers, in the shape of `vllm bench
serve`.

options.py   every option, declared once
datasets.py  prompts
run.py       one measurement: arrivals, streams, counters
figures.py   outcomes to figures, under vLLM's names
compare.py   measurements with drafting and without; servers.py starts the servers
advice.py    from speeds to the K of every batch size
tables.py    terminal output

No room of an engine is imported here: any server can be measured.
"""
