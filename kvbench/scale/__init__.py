"""Sweeps over many pairs: what each pair needs, one worker per pair, on this machine or through Ray.

The work itself is the command line's own commands; this part plans them, hands them out, and keeps a record per pair.
"""
