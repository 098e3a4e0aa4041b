"""Where keys and values live between steps: page ids, the prefix tree, arrays, recurrent state, disk.

`pages` and `prefix` do the bookkeeping in plain integers and never load MLX; the other modules hold the
arrays those integers point into.
"""
