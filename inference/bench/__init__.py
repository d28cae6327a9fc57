"""`draftsmith bench` and `certify`: how fast an OpenAI-compatible server answers, with drafting and
without, and whether its drafting is lossless.

No package of an engine is imported here: any server can be measured. Sweeps, traces and goals of
service are what aiperf, guidellm and `vllm bench serve` measure.
"""
