"""The sides of scripts/bench_peers.py, each a process of its own.

worker.py runs in the environment of a peer too: what it imports of this project, it imports on our
side alone."""
