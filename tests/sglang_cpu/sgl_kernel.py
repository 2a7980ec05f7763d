"""Stands in for sgl_kernel, whose builds are for CUDA. On a CPU SGLang imports its names, and calls one: the hash of a
request's seed and a token's position."""

import torch

__version__ = "0.4.10"
_MASK = 0xFFFFFFFF


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is a stand-in")

    kernel.__name__ = name
    return kernel


def _rotated(x, r):
    return ((x << r) | (x >> (32 - r))) & _MASK


def _mixed(h, k):
    k = (_rotated((k * 0xCC9E2D51) & _MASK, 15) * 0x1B873593) & _MASK
    return (_rotated(h ^ k, 13) * 5 + 0xE6546B64) & _MASK


def murmur_hash32(seed, positions, col_indices):
    """As sglang.kernels.ops.sampling.murmur_hash computes it on a GPU; not compared with one."""
    seed = seed.view(torch.int64)[:, None]
    h = _mixed(torch.zeros_like(seed), seed & _MASK)
    h = _mixed(h, (seed >> 32) & _MASK)
    h = _mixed(h, positions.long()[:, None] & _MASK)
    h = _mixed(h, col_indices.long()[None, :] & _MASK) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _MASK
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _MASK
    return (h ^ (h >> 16)).to(torch.uint32)


_LIBRARY = torch.library.Library("sgl_kernel", "FRAGMENT")
_LIBRARY.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor col_indices) -> Tensor")
_LIBRARY.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
