"""Shapes of models: from a Hugging Face config, by name, or layer by layer.

A shape gives the inputs of planning: the cost of a document, the number of parameters, the bytes of activations, keys
and values. `blocks` defines the parts of a block; `attention` and `feed_forward` are its kinds; `layers` combines them;
`encoder` is an encoder of images; `config` is the whole model. `hugging_face` reads configs by `keys`: families that
are a line each in `text_families` and `image_families`. `built` has transformers build any other model. `forward` runs
it on shapes alone, `weights` and `visible` say what its matrices are and which keys its queries see, and `reader` makes
layers of them, of `counted` blocks where no other kind describes a module. `presets` has models by name.
"""

from wlb.models.attention import Attention, Indexer, LatentAttention
from wlb.models.blocks import Block, Mask, Matrix
from wlb.models.config import ModelConfig
from wlb.models.counted import CountedBlock
from wlb.models.encoder import ImageEncoder
from wlb.models.feed_forward import FeedForward
from wlb.models.layers import Layer
from wlb.models.presets import preset_named, presets

__all__ = [
    "Attention",
    "Block",
    "CountedBlock",
    "FeedForward",
    "ImageEncoder",
    "Indexer",
    "LatentAttention",
    "Layer",
    "Mask",
    "Matrix",
    "ModelConfig",
    "preset_named",
    "presets",
]
