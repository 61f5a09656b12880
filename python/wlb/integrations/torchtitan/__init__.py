"""wlb's plans in torchtitan's `Trainer`.

    from wlb.integrations.torchtitan import balance

    def my_config() -> Trainer.Config:
        config = llama3_8b()                      # or any other of torchtitan's
        return balance(config, documents=documents, max_tokens=65536)

`balance` returns a configuration with a `WlbDataLoader`, and a trainer whose context- and pipeline-parallel ranks take
micro-batches of unequal length, cut document by document.
"""

from wlb.integrations.versions import check_version

check_version("torchtitan")  # before imports that an older version does not have

from wlb.integrations.torchtitan.balance import balance  # noqa: E402
from wlb.integrations.torchtitan.context_parallel import DocumentAttention  # noqa: E402
from wlb.integrations.torchtitan.loader import WlbDataLoader  # noqa: E402

__all__ = ["DocumentAttention", "WlbDataLoader", "balance"]
