"""Plans from :mod:`wlb` in a torch training step: data, context-parallel attention, unequal pipelines, loss.

Everything here receives plans and runs them on torch.distributed; nothing here decides who gets what.
"""
