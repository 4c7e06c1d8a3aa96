"""A half as a file: what it holds, how it is written, and how it is read without running anything that it says.

In import order::

    atoms       arguments, sizes and nested structures as data, and back
    ops         which ops a file may name, and with what arguments
    weights     tensors in a file, by memory map
    form        a plan of one side as data, and back
    save        a side of a split becomes a file
"""
