"""`draftsmith bench`: load on a server that speaks as OpenAI's do, in the shape of `vllm bench serve`.

datasets.py   what is asked
load.py       when it is asked: arrivals, and how many at a time
client.py     one request and its stream, timed; what the server counts
figures.py    outcomes to figures, under vLLM's names
run.py        one measurement: the above in their order
compare.py    measurements with drafting and without, side by side; servers.py starts the servers for it
flags.py      the command line; tables.py what it prints

Nothing here knows an engine: the server may be anybody's.
"""
