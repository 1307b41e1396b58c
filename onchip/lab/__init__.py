"""The interactive page: `page` is it, `record` writes its data from real executions, `serve` shows
it on the loopback with the Python pool behind its playground.
"""
