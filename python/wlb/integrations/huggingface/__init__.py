"""wlb's plans in Hugging Face's trainers: transformers' `Trainer`, TRL's `SFTTrainer` and classes derived from them.

Two lines after the trainer was made::

    from wlb.integrations.huggingface import balance

    trainer = balance(trainer, max_tokens=65536)
    trainer.train(resume_from_checkpoint=...)

The model's attention keeps documents apart, depending on `attn_implementation`:

- `"sdpa"`, `"eager"`, `"flex_attention"` find the documents in `position_ids`, but only without an `attention_mask` and
  without a cache. With `use_cache=True`, the default of most configurations, a model attends across documents without
  an error. So micro-batches have `use_cache=False` and no mask. `sdpa` and `eager` make a mask of tokens x tokens.
- `"flash_attention_2"` and `"flash_attention_3"` (on a GPU only) take `cu_seq_lens_q/k` and `max_length_q/k`.

Tests on CPU cover `sdpa` and `eager` with gradients, and `flex_attention` forward and uncompiled (it has no backward on
CPU), but not flash attention, which needs a GPU.
Layers other than attention (convolutions, state-space layers) mix documents unless the model prevents it.
"""

from wlb.integrations.huggingface.balance import balance
from wlb.integrations.huggingface.balancing import balancing
from wlb.integrations.huggingface.loader import MicroBatchCallback, MicroBatchLoader
from wlb.integrations.streams import streams_of

__all__ = ["MicroBatchCallback", "MicroBatchLoader", "balance", "balancing", "streams_of"]
