"""Shapes of models: from a Hugging Face config, by name, or layer by layer.

A shape gives the inputs of planning: the cost of a document, the number of parameters, the bytes of activations, keys
and
values. `blocks` defines the parts of a block; `attention`, `recurrent`, `feed_forward` and `streams` are the kinds of
blocks; `layers` combines them; `encoder` is an encoder of images; `config` is the whole model. `hugging_face` reads
configs by `keys`, `text_families` and `image_families`. A model of no family here is `built` by transformers and
counted
as `counted` blocks. `presets` has models by name.
"""

from wlb.models.attention import Attention, BlockIndexer, Indexer, LatentAttention
from wlb.models.blocks import Block, Mask, Matrix
from wlb.models.config import ModelConfig
from wlb.models.counted import CountedBlock
from wlb.models.encoder import ImageEncoder
from wlb.models.feed_forward import FeedForward
from wlb.models.layers import Layer
from wlb.models.presets import preset_named, presets
from wlb.models.recurrent import GatedDeltaNet, KimiDeltaAttention, LightningAttention, Mamba1, Mamba2
from wlb.models.streams import HyperConnection, NGramEmbedding

__all__ = [
    "Attention",
    "Block",
    "BlockIndexer",
    "CountedBlock",
    "FeedForward",
    "GatedDeltaNet",
    "HyperConnection",
    "ImageEncoder",
    "Indexer",
    "KimiDeltaAttention",
    "LatentAttention",
    "Layer",
    "LightningAttention",
    "Mamba1",
    "Mamba2",
    "Mask",
    "Matrix",
    "ModelConfig",
    "NGramEmbedding",
    "preset_named",
    "presets",
]
