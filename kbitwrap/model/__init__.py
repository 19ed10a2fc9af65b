"""Reading a live model: its modules, tensors, names, roles and quantization.

Nothing here changes one.
"""
