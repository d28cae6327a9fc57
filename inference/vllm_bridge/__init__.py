"""Real vLLM as an engine, in a process of its own: started, asked, read.

`worker.py` runs there as a script and imports nothing of this project.
Nothing that is loaded into vLLM belongs here, but for `connectors/`.
"""
