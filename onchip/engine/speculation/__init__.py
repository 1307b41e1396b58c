"""Speculative decoding: several tokens of a sample in one step, with the outputs of decoding.

    known tokens   ... a b c
    drafts                   d e f           proposed by ngram.py or draft.py
    step               c d e f               one chunk of 1 + 3 tokens
    sampled              d e x y             row i samples what follows the i-th token
    result         ... a b c d e x           x replaces f; y is dropped, and the slot of f

Several drafts may follow one token: they form a tree (tree.py), and one path of it is accepted.

A draft is accepted if the sampler samples the same token in its place. So the tokens are those of
decoding without drafts, whatever the sampling parameters and the drafts.
"""
