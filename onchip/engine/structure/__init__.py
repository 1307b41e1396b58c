"""Structured output: a grammar allows each next token, so that every finished text follows it.

    response_format, structured_outputs --> Grammar     checked, hashable         grammar.py
    Grammar --another thread, cached--> PendingGrammar  tried in a process first  compiler.py
    PendingGrammar --> TokenMatcher                     a sample's position       automaton.py
    TokenMatchers --packed bits--> logits               on the device             bitmask.py

The automaton is the package llguidance, of the extra `structured`.
"""
