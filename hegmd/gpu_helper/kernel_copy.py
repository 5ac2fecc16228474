"""Copies within one GPU by its processors, of memory that the driver takes for another GPU's.

The memory of a process that was moved always counts as its first GPU's. A copy between that and memory beside it is
left to the copy engines then, at 450 GB/s where the driver otherwise has the processors do it at 2,000 (H200, 580.159).
The program that they run here is this one, built for chips of compute capability 9.0 by `nvcc -O3 -arch=sm_90 -cubin`
(CUDA 13.0.88; tests/unit/gpu_helper/test_kernel_copy.py builds it again); other chips, and a driver that does not take
or not run it, have the copy engines:

    extern "C" __global__ void __launch_bounds__(512) copy_words(uint4 *to, const uint4 *from, unsigned long long words)
    {
        unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
        unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
        for (; i + 3 * step < words; i += 4 * step) {
            uint4 a = __ldcs(from + i), b = __ldcs(from + i + step);
            uint4 c = __ldcs(from + i + 2 * step), d = __ldcs(from + i + 3 * step);
            __stcs(to + i, a); __stcs(to + i + step, b); __stcs(to + i + 2 * step, c); __stcs(to + i + 3 * step, d);
        }
        for (; i < words; i += step) to[i] = from[i];
    }
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

from hegmd.gpu_helper import cuda

_CAPABILITY = (9, 0)
_NAME = "copy_words"
_WORD_BYTES = 16
_THREADS = 512
# Four for each of an H200's 132 processors.
_BLOCKS = 528


class KernelCopier:
    """Kernel copies on one GPU. Works on any of its streams; the thread's context has to be that GPU's."""

    def __init__(self, context: Any) -> None:
        """Raises CudaError if the driver rejects the program; then nothing of it remains."""
        self._context = context
        cuda.use(context)
        self._module = cuda.load(zlib.decompress(base64.b64decode(_PROGRAM)))
        try:
            self._function = cuda.function_of(self._module, _NAME)
        except cuda.CudaError:
            cuda.unload(self._module)
            raise

    def copy_async(self, target: int, source: int, size_bytes: int, stream: Any) -> None:
        """Queue a copy between addresses of the GPU's context. Raises CudaError."""
        words = 0 if target % _WORD_BYTES or source % _WORD_BYTES else size_bytes // _WORD_BYTES
        if words:
            cuda.launch(self._function, _BLOCKS, _THREADS, stream, (target, source, words))
        done_bytes = words * _WORD_BYTES
        if done_bytes < size_bytes:
            target, source = target + done_bytes, source + done_bytes
            cuda.copy_async(target, self._context, source, self._context, size_bytes - done_bytes, stream)

    def close(self) -> None:
        """Unload the program. No kernel may be running."""
        cuda.use(self._context)
        cuda.unload(self._module)


def processors_of(ordinal: int, context: Any) -> KernelCopier | None:
    """Return the kernel copies of that GPU; None if the chip or the driver does not support the program."""
    try:
        return KernelCopier(context) if cuda.capability(ordinal) == _CAPABILITY else None
    except cuda.CudaError:  # for example on a full GPU: the copy engines need no memory
        return None


def counts_as(address: int, ordinal: int) -> bool:
    """Return True if the driver counts that memory to that GPU, or does not report its GPU."""
    try:
        return cuda.ordinal_of(address) == ordinal
    except cuda.CudaError:
        return True


_PROGRAM = (
    "eNrtGFtoHFX0zGt3NtlkJkm7D7LbbGUDKbTbrQ1pC4JJH5ZCq6JQpFC20+ymG9wXs5M4GyPdVCkKUvz0U8QPv/wPiAiWNpQgfvSj+CGl5KP4"
    "VVF/pLqe+5jZmdndSkVEsAcm557nPfc87s7k6qmzL4mCsKACAxG+AgG6UB5n+PNRhuULEJqHo6DAPGhEM9csNy3TMi7jysGtqgcXmuVa0YZc"
    "rW6VcrXVnPXmcm2p3qUXVzi9mnMXi/Vqw7AgZ5VsC4lGq/BW3Sw2XaUgr1k2zFJxANcsNUvmKi7ykCuWLq9cKSyZRrUEKKj0MAw/h8RiVCpX"
    "TKNRplTDrFt1q9XgsnqtaRk1K+/d+ingP5w8J2uvV0vVXH1pqVmy8gOyWijUVguu/rlT5wpMv5AvGJVlo/mPpj0Q5tNWYB8+EnZvEI5RfqiH"
    "f5Hyoz38j/HZ66Fljm/jk/lkpEf/IfUj9/ATAuEP9fBnkT+ud/dt89BepPqjPfodhKxnTQD3WydYi2602zOgdjbaMypdMp39A3Lk7CWfxT/M"
    "Vtb5pUAi+hCf78IAL58/c/LMQuZE3WzgvcGAqKEI5vC5RBgNy8YOOLFSNDKkMZcrhrVcr2Wser3S3J/B0peMZilz6HAuvz9znqDc0aNwfGW5"
    "UswsolGBskzy9yCzL5m5w3Ozz88eOTRbyMMBw1wsZ5rVwrF85kA1MzebYTGS++yhFIzxAlwj5zqoUnmGrMfYmp53vLsWI/iIAoiKAlJYEET0"
    "JYYEkIfVbs2PyMxfPMrvTh3g0V6XFog3D00BaelVrOFkG6SCIMgpFT7CtmhgS8pKlDihOSSPvIf1i5RMgDykAoYEuojrOdmNk9SR4D84/p3j"
    "xxyfdO91ALVPra+9LXRo+xHhAw2SLV5J0tzPjcLmmkwajsm3NfimxWdnmsmzpkQ36sCNMLHfXMPmeR8ZQ8zfqRbAfYl2lQQ/arhfmMZF/WVH"
    "YXpdDis0vhsabE0hLYZl5k9j/pC6xv3d0iBrRyTiriPifjsaTNshUhqcLKS3iBzCJHcRkcUTXYcQaefGpUfDhM6aaRov1b9F5bRfwXDkQOUK"
    "kd/T4HTkpjMVNP6sHUvr3fPKm2t4kOvd826u4eK9Lp2042laRewl6t+eFD32oK9HYyQVnfs/aXgeWV+PxYYo/TOhUT4SJ3Xv7FxVCZ20kyLx"
    "JxF/N4k8Hh+m8o4K35L4dRp/FFh+suYYpUec/Uw5Osn2C8MdDTZauk7jS49G4VOsp62MkPwlQ6PA9FXZ1d8i+lHZ1X9A9COKX3+X6vWftXdH"
    "XPmOpm+0VNW1nyH+5F0ufZnYp2KuPc1Xwlfv6y2IkfzJaTzizgLqx8Q0yxfqT6F+Ou6PR0+5/ki+zDjtRswXcH+pqOPvwQbaj6X99uO69/yo"
    "r6uuviRk7YkxV/8OlY/LrlwRp+0U7c8Yzf8U+ovumnTipf1MfwIgzftVNNOQIgFqrH+ypkrrl6L1PIh0hA22U197ZDfb/waweYiJbFydeUhQ"
    "//HuPMTceSD9ZcbGWTy/Un8oT7jzQOOLT/DzCXAX5+GDIr1bOp13cR5egYUW+OYD7dPeeXvifOwE5u97Dc5FIDBvqmfepuSkHenO0xbpf1l1"
    "54fSSsSdl23aX7xf99D+1tdVdcinH4kMe+ZLN9O8n5z+BYn+9PF+8J1vq/f+wPqrrP74431vAfO17ckXni+Qr9Otx1351xokWp7L+X9AP4Nn"
    "8G+AAOw1JgjzHE8IvfpeGB5g/w5XfOMv7Cf4O1gQ7nHmI8972pDnXS3B8Rd9fBLY4kGV4cn77+Pv5cEw8vyT5LOAvtzn+yjM8uVzfZcrZjit"
    "8NiD9mcYagTj/4UrOt8u0oD9XwP6M9Jjn1D89oPir/H95wP8F7h927N/tI/9DyynPft/qfjPH4zfqeM25wX3v6/46yxxvWD9L/Ka9nyhhvzf"
    "bM6rervP96rap4fb0cHz4oXfOO/4APsZT1f1y1+I85z/J/X7DvZi1RPH37VToF/C/PlysNcu9IS8BCEY5yA7Jz8Oduz+BBHvl1Q="
)
