"""Trainers of Hugging Face on wlb's plans: transformers' `Trainer`, TRL's `SFTTrainer` and what is made of them.

Two lines, once the trainer is made as always::

    from wlb.integrations.huggingface import balance

    trainer = balance(trainer, max_tokens=65536)
    trainer.train(resume_from_checkpoint=...)

What keeps documents apart is the model's attention, by `attn_implementation`:

- `"sdpa"`, `"eager"`, `"flex_attention"` find the documents in `position_ids`, but only without an `attention_mask` and
  without a cache. A model called with `use_cache=True`, the default of most configurations, silently attends across
  documents; so micro-batches say `use_cache=False`, and have no mask. `sdpa` and `eager` make a mask, tokens x tokens.
- `"flash_attention_2"` and `"flash_attention_3"` (on a GPU only) take `cu_seq_lens_q/k` and `max_length_q/k`.

`sdpa` and `eager` are tested on CPU with gradients, `flex_attention` forward and uncompiled (no backward on CPU);
flash attention needs a GPU and is not.
Layers that are no attention (convolutions, state-space layers) mix documents unless the model says otherwise.
"""

from wlb.integrations.huggingface.balance import balance
from wlb.integrations.huggingface.balancing import balancing
from wlb.integrations.huggingface.loader import MicroBatchCallback, MicroBatchLoader
from wlb.integrations.streams import streams_of

__all__ = ["MicroBatchCallback", "MicroBatchLoader", "balance", "balancing", "streams_of"]
