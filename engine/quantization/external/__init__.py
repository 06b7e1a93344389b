"""Quantised checkpoints that other tools made, read into ``QuantizedWeight``: GPTQ, AWQ and compressed-tensors."""

from engine.quantization.external.detect import METHODS, open_quantized, read_layout
from engine.quantization.external.fields import Layout

__all__ = ["METHODS", "Layout", "open_quantized", "read_layout"]
