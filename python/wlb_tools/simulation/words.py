"""A simulation in words: its assumptions, and the reasons for its result, computed from its parts."""

from __future__ import annotations

import itertools

from wlb_tools.cluster.hardware import GIB
from wlb_tools.cluster.parallel import ParallelLayout
from wlb_tools.cluster.step_time import fp8_gain
from wlb_tools.simulation.outcome import IDLE, Outcome
from wlb_tools.simulation.run import Simulation
from wlb_tools.simulation.scenario import Scenario

FLUSH_WARNING = 0.02
"""If the end of the stream takes a larger share of the time, a comparison depends on the stream's length."""

_MEETINGS = {"step": "once a step", "micro_batch": "in every micro-batch"}
_PAPER_ORDER = ("per_document", "adaptive_cp", "wlb_llm_packing", "wlb_llm")


def premises(simulation: Simulation) -> list[str]:
    """Sentences about what was simulated and the assumptions of the prediction."""
    scenario = simulation.scenario
    thresholds = " and ".join(f"{threshold:,}" for threshold in simulation.thresholds)
    return [
        kernel_sentence(scenario),
        *model_sentences(scenario),
        f"This pipeline ({scenario.pipeline_schedule}, {scenario.micro_batches} micro-batches a step) is idle"
        f" {scenario.equal_bubble:.1%} of its time even if all micro-batches take equally long.",
        f"Assumed: computation hides {scenario.cp_overlap:.0%} of CP, {scenario.tp_overlap:.0%} of TP and"
        f" {scenario.dp_overlap:.0%} of DP communication{_experts(scenario)}. The gains depend on this and on the"
        " number of micro-batches, those of Dynamic-CP most: try other values of cp_overlap, tp_overlap,"
        " num_micro_batches, and other layouts.",
        f"A micro-batch has at most {scenario.limit:,} tokens; "
        + (f"queues hold documents from {thresholds} tokens on." if thresholds else "no queue holds documents."),
    ]


def explanation(simulation: Simulation, shown: str) -> list[str]:
    """Why `shown` is as fast as it is beside the baseline: sentences with numbers of the simulation.

    They say what does not fit, what each kind of method could win of the baseline's time, what that costs, and how much
    the end of the stream takes.
    """
    before, after = simulation.baseline, simulation.outcomes[shown]
    sentences = [*_too_large(simulation), _room(simulation, before)]
    if after is not before:
        sentences.append(_whole_documents(before, after, simulation.speedup(shown)))
        sentences += _more_micro_batches(before, after)
    if all(name in simulation.outcomes for name in _PAPER_ORDER):
        sentences.append(_order(simulation))
    return [*sentences, *_stream_end(simulation)]


def at_start(title: str) -> str:
    """A method's name at the beginning of a sentence; wlb stays as it is."""
    return title if title.startswith("wlb") else title[:1].upper() + title[1:]


def _too_large(simulation: Simulation) -> list[str]:
    """Methods that would run out of memory, which is possible only under a given limit."""
    hardware = simulation.scenario.hardware
    needs = {outcome.title: outcome.memory.total.max() for outcome in simulation.outcomes.values()}
    return [
        f"{at_start(title)} does not fit: it needs {need / GIB:.1f} GiB,"
        f" {(need - hardware.memory_bytes) / GIB:.1f} GiB more than {hardware.name} has."
        for title, need in needs.items()
        if need > hardware.memory_bytes
    ]


def _room(simulation: Simulation, outcome: Outcome) -> str:
    share = {name: float(part.sum()) / outcome.total_seconds for name, part in outcome.attribution.items()}
    communication = sum(share[f"{axis}_communication"] for axis in ("cp", "tp", "ep", "dp"))
    idle = sum(share[name] for name in IDLE)
    floor = simulation.scenario.equal_bubble
    stays = min(idle, (1 - idle - share["dp_communication"]) * floor / (1 - floor))
    return (
        f"{at_start(outcome.title)} spends {communication:.1%} of its time on communication that nothing hides and is"
        f" idle for {idle:.1%}. Equal micro-batches can win back {idle - stays:.1%} of the time; the other"
        f" {stays:.1%} is the pipeline's bubble. Sharding can win back the {share['cp_wait']:.1%} in which GPUs wait"
        " for the slowest context-parallel rank."
    )


def _whole_documents(before: Outcome, after: Outcome, speedup: float) -> str:
    more = after.flops / before.flops - 1
    cut = [outcome.summary()["documents_cut"] for outcome in (before, after)]
    mfu = after.model_flops_utilization / before.model_flops_utilization
    return (
        f"{at_start(before.title)} cuts {cut[0]:,} documents, {after.title} cuts {cut[1]:,}, which takes {more:+.1%}"
        f" FLOPs for the same tokens. {at_start(after.title)} is {speedup:.3f} times as fast by tokens and {mfu:.3f}"
        " times by FLOPs (MFU)."
    )


def _more_micro_batches(before: Outcome, after: Outcome) -> list[str]:
    """Reasons for speed other than balance: a shorter bubble, and less communication between fewer ranks."""
    if after.micro_batches == before.micro_batches and after.cp_sizes == before.cp_sizes:
        return []
    idle, communication = (
        [
            sum(float(outcome.attribution[part].sum()) for part in parts) / outcome.total_seconds
            for outcome in (before, after)
        ]
        for parts in (IDLE, ("cp_communication",))
    )
    sentence = (
        f"{at_start(after.title)} has {after.micro_batches:.3g} micro-batches a step, {before.title} has"
        f" {before.micro_batches:.3g}. It is idle for {idle[1]:.1%} of its time instead of {idle[0]:.1%}."
    )
    if after.cp_sizes == before.cp_sizes:
        return [sentence]
    sizes = ", ".join(f"{share:.1%} on {size}" for size, share in after.cp_sizes.items())
    return [
        f"{sentence} Share of tokens by ranks in a context-parallel group: {sizes}. Their communication takes"
        f" {communication[1]:.1%} of the time instead of {communication[0]:.1%}."
    ]


def _order(simulation: Simulation) -> str:
    speeds = [simulation.speedup(name) for name in _PAPER_ORDER]
    holds = all(a < b for a, b in itertools.pairwise(speeds))
    found = ", ".join(
        f"{simulation.outcomes[name].title} {speed:.3f}" for name, speed in zip(_PAPER_ORDER, speeds, strict=True)
    )
    return f"The order of gains in the WLB-LLM paper {'holds' if holds else 'does not hold'} here: {found}."


def _stream_end(simulation: Simulation) -> list[str]:
    shares = {outcome.title: outcome.flush_share for outcome in simulation.outcomes.values()}
    title, most = max(shares.items(), key=lambda item: item[1])
    if most > FLUSH_WARNING:
        return [
            f"Warning: the stream is short. Its last steps, which empty the queues, take {most:.1%} of the time"
            f" ({title}), so the comparison says more about the length of the stream than about the methods. Give it"
            " more documents."
        ]
    return [f"The last steps of the stream, which empty the queues, take at most {most:.1%} of the time ({title})."]


def describe(scenario: Scenario) -> str:
    """A model on a cluster in one line."""
    layout, context = scenario.layout, scenario.context
    sizes = ", ".join(f"{name} {getattr(layout, name.lower())}" for name in ("TP", "CP", "PP", "DP"))
    window = f"{context // 1024}K" if context % 1024 == 0 else f"{context:,}"
    return f"{scenario.model.name}, {window} context, {layout.world_size} x {scenario.hardware.name} ({sizes})"


def kernel_sentence(scenario: Scenario) -> str:
    """Sentence about the source of attention times, with a warning if they are of another GPU."""
    source = scenario.attention.source
    label = "measured on a GPU" if source.startswith("measured") else "an assumption, measured nowhere"
    warning = f" Warning: that is another GPU than {scenario.hardware.name}." if scenario.measured_elsewhere else ""
    return f"Every time is predicted. Attention times come from {source} ({label}).{warning}"


def model_sentences(scenario: Scenario) -> list[str]:
    """Sentences about what was assumed when the model's configuration was read."""
    return [f"Assumed of the model: {each}." for each in scenario.model.assumptions]


def _packer_costs(scenario: Scenario) -> str:
    if scenario.cost_model is None:
        rate = scenario.hardware.attention_efficiency
        return f"FLOPs, attention at {rate:g} of the linear part's rate (assumed)"
    return "given"


def assumptions(scenario: Scenario) -> dict[str, str]:
    """Assumptions of the predictions in words; the first says whether attention was measured."""
    hardware, layout = scenario.hardware, scenario.layout
    layers = layout.layers_of_stages(scenario.model).tolist()
    memory = hardware.memory_bytes / GIB
    return {
        "attention": f"{scenario.attention.source}, {scenario.attention.num_heads} heads of a GPU",
        "linear part": (
            f"{hardware.gemm_efficiency:.0%} of {hardware.peak_flops / 1e12:,.0f} TFLOP/s (assumed)"
            if scenario.linear is None
            else f"measured: {scenario.profile}"
        )
        + (f"; in FP8 {fp8_gain(layout, hardware):g} times as fast (assumed)" if layout.fp8 != "none" else ""),
        "packer's costs": _packer_costs(scenario),
        "links": f"{hardware.intra_node.bandwidth / 1e9:.0f} GB/s between {hardware.gpus_per_node} GPUs of a node,"
        f" {hardware.inter_node.bandwidth / 1e9:.0f} GB/s between nodes",
        "hidden communication": f"CP {scenario.cp_overlap:.0%} of {scenario.cp_keys} keys,"
        f" TP {scenario.tp_overlap:.0%}, DP {scenario.dp_overlap:.0%}, transfers between stages"
        f" {scenario.p2p_overlap:.0%}{_experts(scenario)}",
        "pipeline": f"{scenario.pipeline_schedule}, {layout.pp} ranks x {layout.virtual_stages} stages,"
        f" {scenario.micro_batches} micro-batches a step",
        "data parallelism": f"ranks wait for each other {_MEETINGS[scenario.waiting]}",
        "memory": f"{memory:.1f} GiB, {scenario.reserved_bytes / GIB:g} of them reserved; {_savings(layout)}",
        **({"layers of the stages": ", ".join(map(str, layers))} if len(set(layers)) > 1 else {}),
        "S_max": f"{scenario.limit:,} tokens ({'given' if scenario.max_tokens is not None else 'what fits'})",
        "noise": f"{scenario.noise:.1%} of every pass, seed {scenario.noise_seed}" if scenario.noise else "none",
        "not modelled": "optimizer step on the GPU, kernel launches between layers, stragglers, loading",
    }


def _savings(layout: ParallelLayout) -> str:
    """The settings of a layout that save memory."""
    replicas, layers = layout.dp_replicate, layout.recompute_layers
    said = [
        f"fsdp {layout.fsdp}{f' in {replicas} replicas' if replicas > 1 else ''}",
        f"recompute {layout.recompute}{'' if layers is None else f' of the first {layers} layers of a stage'}",
    ]
    if layout.fp8 != "none":
        said.append(f"fp8 {layout.fp8}")
    if layout.lora_rank:
        said.append(f"LoRA adapters of rank {layout.lora_rank}")
    if layout.offload_optimizer:
        said.append(f"{layout.offload_optimizer:.0%} of the optimizer's state offloaded")
    return ", ".join(said)


def _experts(scenario: Scenario) -> str:
    """Assumptions about expert parallelism, if there is any."""
    if scenario.layout.ep == 1:
        return ""
    busiest = f"{scenario.expert_imbalance:g} times the visits of the mean EP rank"
    return f"; {scenario.ep_overlap:.0%} of EP communication, and the busiest has {busiest}"
