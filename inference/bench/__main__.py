"""`python -m draftsmith.inference.bench …`: the same as `draftsmith bench`."""

from draftsmith.inference.bench.bench_command import register
from draftsmith.inference.console import run_alone

run_alone("draftsmith bench", register)
