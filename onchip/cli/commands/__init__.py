"""A file for each command: its options, and the order of its work. torch is imported only when the
command runs.
"""
