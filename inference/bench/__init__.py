"""`draftsmith bench`: how fast an OpenAI-compatible server answers, with drafting and without.

options.py   every option, declared once
datasets.py  prompts
load.py      one measurement: arrivals, streams, results under vLLM's names, acceptance
compare.py   measurements with drafting and without
advice.py    from gains to the K of every batch size
command.py   the command, and what it prints
certify.py   whether a server that drafts writes what one without writes

No package of an engine is imported here: any server can be measured. Sweeps, traces and goals of
service are what aiperf, guidellm and `vllm bench serve` measure.
"""
