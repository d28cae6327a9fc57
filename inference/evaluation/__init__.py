"""Measuring: acceptance, speed and losslessness of a drafter on an engine, ours or vLLM.

It runs engines and gathers raw measurements.
The format of a report (inference/report) and training do not belong here.
"""
