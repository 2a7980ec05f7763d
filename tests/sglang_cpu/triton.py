"""Stands in for triton, which takes 1 GB: a kernel can be defined, but not launched. SGLang itself has such a stub for
machines of Apple."""

from mock_package import become_mock


def cdiv(a, b):
    return -(-a // b)


def next_power_of_2(n):
    return 1 << max(0, int(n) - 1).bit_length()


become_mock(__name__, "3.9.0")
