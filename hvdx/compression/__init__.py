"""What of a tensor travels: one codec a file; `Compression` lists them under the names Horovod uses."""

from __future__ import annotations

from hvdx.compression.codec import Codec, check_codec
from hvdx.compression.half import Bf16Codec, Fp16Codec
from hvdx.compression.none import NoneCodec


class Compression:
    """The codecs: `none` (default), `fp16` and `bf16`."""

    none: Codec = NoneCodec()
    fp16: Codec = Fp16Codec()
    bf16: Codec = Bf16Codec()


__all__ = ["Codec", "Compression", "check_codec"]
