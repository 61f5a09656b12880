"""A plugin for axolotl.

In its YAML::

    plugins:
      - wlb.integrations.axolotl.BalancePlugin
    wlb:
      max_tokens: 65536

Arguments under `wlb:` are those of `wlb.integrations.huggingface.balance`.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from wlb._errors import error
from wlb.integrations.huggingface import balance
from wlb.integrations.versions import OLDEST
from wlb.torch.training import takes_keywords


class Options(BaseModel):
    """The options that the plugin adds to axolotl's configuration.

    Attributes:
        wlb: arguments of `balance`.
    """

    wlb: dict[str, Any] | None = None


class BalancePlugin(BasePlugin):
    """Balances the trainer that axolotl has made."""

    def get_input_args(self) -> str:
        """Import path of the class that describes the plugin's options.

        Raises:
            wlb.WlbError: this axolotl does not call plugins after it made its trainer, so it would train without a
                plan.
        """
        if not hasattr(BasePlugin, "post_trainer_create"):
            found = version("axolotl")
            raise error(
                "axolotl",
                f"is {found}, whose plugins have no post_trainer_create: take {OLDEST['axolotl']}",
                value=found,
            )
        return f"{__name__}.{Options.__name__}"

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        """Called by axolotl before it trains.

        Raises:
            wlb.WlbError: nothing stands under `wlb:`, sample packing is on, or what `balance` raises.
        """
        if not cfg.wlb:
            raise error("wlb", "is missing in the configuration: give it max_tokens, what a rank's memory holds")
        # axolotl averages losses over micro-batches and then over ranks, if the model's `forward` takes `**kwargs`.
        # Such models divide by the number of labels of the step if they get it. The check before training proves that
        # this is right.
        model = trainer.accelerator.unwrap_model(trainer.model)
        trainer.model_accepts_loss_kwargs = getattr(model, "accepts_loss_kwargs", takes_keywords(model))
        trainer.args.average_tokens_across_devices = True
        balance(trainer, **cfg.wlb)
