"""Convert rows to fused bytes and back: the compiled kernel, and its twins in NumPy and Triton.

Read ``dispatch.py`` first, which chooses among them.
"""
