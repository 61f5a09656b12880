"""The option names of the core as types. A test compares them with the core's own lists."""

from typing import Literal

Generation = Literal["a100", "h100", "h200", "b200", "h20", "l40s", "mi300x"]
GroupSizes = Literal["powers_of_two", "any"]
Leftover = Literal["error", "return"]
Method = Literal["original", "fixed_length", "var_length", "refined"]
OnBacklog = Literal["warn", "error"]
Oversize = Literal["error", "split", "truncate"]
Passes = Literal["forward", "backward", "forward_backward"]
Release = Literal["fifo", "adaptive"]
RoundOrder = Literal["given", "light_ends", "heaviest_first"]
RoundOversize = Literal["error", "alone"]
RoundTogether = Literal["step", "rank", "micro_batch"]
Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "interleaved_zero_bubble", "zbv", "dualpipev"]
StepSamples = Literal["in_order", "even"]
Strategy = Literal["auto", "per_sequence", "per_document", "hybrid", "contiguous", "adaptive"]
StreamMethod = Literal["var_length", "refined"]
Sync = Literal["step", "micro_batch"]
Together = Literal["rank", "micro_batch"]
Unit = Literal["seconds", "flops"]
