"""Triton kernels for the quantised products and the attention of decode.

`formats` is the table of block formats and needs no Triton; `choice` says what runs here and is the one door for the
rest of the head. A family of kernels is a file: `matvec`, `tiles`, `attention`, `rope`. All of them have a counterpart
in plain torch, which is their reference, and which computes wherever they cannot.
"""
