"""Measuring: acceptance, speed and losslessness of a drafter on an engine, ours or vLLM.

It runs engines and fills a report.
No format of a report and no training belongs here.
"""
