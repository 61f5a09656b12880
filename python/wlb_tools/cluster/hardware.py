"""GPUs and the links between them: data sheets, and the part of it that software reaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from wlb._choices import Generation
from wlb._core import PEAK_FLOPS, CostModel
from wlb._errors import check_integer, check_positive, error
from wlb._shown import explained
from wlb.models import ModelConfig

GIB = 2**30


@explained
@dataclass(frozen=True, kw_only=True)
class Link:
    """One level of the network, on which sending `n` bytes takes `latency + n / bandwidth`.

    Args:
        latency: seconds of a hop.
        bandwidth: bytes/s that one GPU sends while it receives as many.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        check_positive("latency", self.latency)
        check_positive("bandwidth", self.bandwidth)


@explained
@dataclass(frozen=True, kw_only=True)
class Hardware:
    """A cluster of one kind of GPU.

    Args:
        name: for reports.
        peak_flops: dense bf16 FLOP/s of a GPU.
        memory_bytes: memory of a GPU, as the driver reports it.
        gpus_per_node: number of GPUs that NVLink joins.
        intra_node: NVLink.
        inter_node: InfiniBand or RoCE, with a network card for each GPU.
        launch_latency: seconds of a collective before anything is sent.
        gemm_efficiency: share of the peak that the linear part of a layer reaches, with element-wise work.
        attention_efficiency: attention's FLOP rate relative to that of the linear part; assumed as in `preset`.
        fp8_gain: how many times as fast the linear part of a layer is with FP8 matrix products; None: no FP8.
        host_bandwidth: bytes/s between a GPU and its host's memory, each way.
        host_memory_bandwidth: bytes/s of the host's memory, for each GPU.

    Raises:
        WlbError: naming the first value that is not positive, or of another type.
    """

    name: str
    peak_flops: float
    memory_bytes: int
    gpus_per_node: int
    intra_node: Link
    inter_node: Link
    launch_latency: float = 8.4e-6
    gemm_efficiency: float = 0.65
    attention_efficiency: float = 0.85
    fp8_gain: float | None = 1.4
    host_bandwidth: float = 48e9
    host_memory_bandwidth: float = 61e9

    def __post_init__(self) -> None:
        check_positive("peak_flops", self.peak_flops)
        check_integer("memory_bytes", self.memory_bytes, minimum=1)
        check_integer("gpus_per_node", self.gpus_per_node, minimum=1)
        for name in ("intra_node", "inter_node"):
            if not isinstance(getattr(self, name), Link):
                raise error(name, f"= {getattr(self, name)!r}: must be a Link", value=getattr(self, name))
        for name in ("attention_efficiency", "launch_latency", "gemm_efficiency", "fp8_gain", *_HOST):
            value = getattr(self, name)
            if value is not None or name != "fp8_gain":
                check_positive(name, value)
        if self.attention_efficiency > 10:
            message = "must be at most 10: it is a ratio of two rates, such as 0.55, not a percentage"
            value = self.attention_efficiency
            raise error("attention_efficiency", f"= {value!r}: {message}", value=value)

    @classmethod
    def preset(cls, name: str) -> Hardware:
        """A GPU by name, in nodes as its vendor builds them; use ``dataclasses.replace`` for other values.

        =======  ============  ===========  =========  ============  ==========  =============  =========
        name     dense bf16    memory       GPUs/node  NVLink, GB/s  of it used  network        attention
        =======  ============  ===========  =========  ============  ==========  =============  =========
        a100     312 TFLOP/s   81,920 MiB   8          300           12 x 20.0   HDR, 200 Gb/s  0.90
        h100     989 TFLOP/s   81,559 MiB   8          450           18 x 20.6   NDR, 400 Gb/s  0.85
        h200     989 TFLOP/s   143,771 MiB  8          450           18 x 20.6   NDR, 400 Gb/s  0.85
        b200     2.25 PFLOP/s  183,359 MiB  8          900           18 x 40.1   NDR, 400 Gb/s  0.93
        gb200    2.5 PFLOP/s   189,471 MiB  72         900           18 x 40.1   NDR, 400 Gb/s  0.84
        =======  ============  ===========  =========  ============  ==========  =============  =========

        ==========  ============  ===========  =========  ============  ==========  =============  =========
        name        dense bf16    memory       GPUs/node  links, GB/s   of it used  network        attention
        ==========  ============  ===========  =========  ============  ==========  =============  =========
        a100-40gb   312 TFLOP/s   40,960 MiB   8          300           12 x 20.0   HDR, 200 Gb/s  0.90
        h800        989 TFLOP/s   81,559 MiB   8          200           8 x 20.6    NDR, 400 Gb/s  0.85
        h20         148 TFLOP/s   97,871 MiB   8          450           18 x 20.6   NDR, 400 Gb/s  0.85
        l40s        362 TFLOP/s   46,068 MiB   8          32 (PCIe)     1 x 24.0    EDR, 100 Gb/s  0.90
        b300        2.25 PFLOP/s  275,040 MiB  8          900           18 x 40.1   XDR, 800 Gb/s  0.93
        gb300       2.5 PFLOP/s   265,121 MiB  72         900           18 x 40.1   XDR, 800 Gb/s  0.84
        mi300x      1.31 PFLOP/s  196,592 MiB  8          448           7 x 50.0    NDR, 400 Gb/s  0.46
        ==========  ============  ===========  =========  ============  ==========  =============  =========

        Names are case-insensitive. SXM modules, except L40S (PCIe) and MI300X (OAM); GB/s and Gb/s each way. Sources:

        - The second table: data sheets of A100 40GB, H800, H20 and L40S (362 dense), of HGX B300 and GB300 NVL72
          (memory of the latter: 20 TB for 72), and of AMD Instinct MI300X (1,307.4 dense; 7 links of 64 GB/s each
          way). H800 has 8 of H100's links. Of PCIe 4.0 x16 three quarters are used, of Infinity Fabric 0.78:
          assumptions.
        - FLOP/s, NVLink: NVIDIA's data sheets, without sparsity: A100 80GB (2021), H100 and H200 Tensor
          Core GPU, HGX B200 (36 PFLOP/s sparse for 8) and GB200 NVL72 (360 PFLOP/s sparse for 72).
        - Memory: "memory total" of nvidia-smi; a data sheet's 80 GB are 80 GiB less what the driver keeps.
        - NVLink used: what NCCL counts on for a link of that generation (``SM80_NVLINK_BW`` = 20.0,
          ``SM90`` = 20.6, ``SM100`` = 40.1, in its `src/graph/topo.h`) times the number of links.
        - Network: NVIDIA DGX A100, H100, H200, B200 and GB200 NVL72 have one card of that speed a GPU; 96 % of it used,
          as NCCL counts (12 GB/s for 100 Gb/s, ``NET_BW`` in the same file).
        - Latencies: NCCL's model of its ring with the Simple protocol (`src/graph/tuning.cc`, 2.18 and later): 8.4 us
          a collective, 3.4 us a hop on NVLink, 14 us a hop on the network.
        - Efficiencies are assumptions; `wlb profile` measures seconds that take their place
          (`wlb_tools.stage_seconds`, `wlb.CostModel.from_profile`). Of the peak, 65 % is what a transformer
          layer's matrix multiplications and element-wise work reach together where the multiplications alone reach 75
          to 80 %.
        - Attention (`attention_efficiency`, relative to those 65 %): forward and backward of causal documents of 8,192
          tokens by `wlb.KernelModel.analytic`, which is FlashAttention-2's published rate on an A100,
          FlashAttention-3's on a H100 and FlashAttention-4's on a B200. Documents of 2,048 tokens are at 0.83 of that,
          those of 128K at 1.07; flash-attn 2 on a H100 reaches 0.55. A cluster with communication that nothing hides
          has a higher ratio, since that is part of the rest: `wlb_tools.Scenario.fitted_efficiency`.

        - FP8 (`fp8_gain`): 1.4 is assumed of all but A100, which has none: torchtitan's Llama 3.1 8B goes from 6,667 to
          8,532 tokens a second on 8 H100 with it (`docs/performance.md`), which is 1.4 without attention and the output
          projection.
        - Host: three quarters of a PCIe 4.0 (A100, L40S) or 5.0 link, or of half of a Grace CPU's NVLink-C2C; and four
          fifths of the memory bandwidth of the CPUs in DGX A100, H100, B200 and B300, GB200 and EPYC 9004 machines,
          divided by the GPUs. They count where the optimizer is offloaded.

        Raises:
            WlbError: there is no such name.
        """
        known = _PRESETS.get(name.lower().replace("_", "-")) if isinstance(name, str) else None
        if known is None:
            raise error("name", f"{name!r}: must be one of {', '.join(_PRESETS)}", value=name)
        return known

    @property
    def flops_per_second(self) -> float:
        """FLOP/s of the linear part of a layer."""
        return self.peak_flops * self.gemm_efficiency

    def cost_model(self, model: ModelConfig) -> CostModel:
        """Cost of documents on one of these GPUs, in seconds: the model's FLOPs at the assumed rates.

        Good enough to begin with, because a packer needs only the ratio of attention to the rest. Measured costs are
        better: `wlb.CostModel.from_profile`.
        """
        return model.cost_model(attention_efficiency=self.attention_efficiency, flops_per_second=self.flops_per_second)


def presets() -> list[str]:
    """Names that `Hardware.preset` knows."""
    return list(_PRESETS)


def _preset(
    name: str,
    generation: Generation,
    *,
    peak_flops: float | None = None,
    mebibytes: int,
    gpus: int,
    links: int,
    link: float,
    network: float,
    attention: float,
    host: tuple[float, float] = (48, 61),
) -> tuple[Hardware, Generation]:
    """`link` and `host` in GB/s, `network` in Gb/s; `peak_flops` where it is not that of its generation."""
    hardware = Hardware(
        name=name,
        peak_flops=peak_flops or PEAK_FLOPS[generation],
        memory_bytes=mebibytes * 2**20,
        gpus_per_node=gpus,
        intra_node=Link(latency=3.4e-6, bandwidth=links * link * 1e9),
        inter_node=Link(latency=14e-6, bandwidth=0.96 * network / 8 * 1e9),
        attention_efficiency=attention,
        fp8_gain=None if generation == "a100" else 1.4,
        host_bandwidth=host[0] * 1e9,
        host_memory_bandwidth=host[1] * 1e9,
    )
    return hardware, generation


_HOST = ("host_bandwidth", "host_memory_bandwidth")
_PCIE4: dict[str, Any] = {"host": (24, 41)}
_HOPPER: dict[str, Any] = {"gpus": 8, "links": 18, "link": 20.6, "network": 400, "attention": 0.85}
_BLACKWELL: dict[str, Any] = {"links": 18, "link": 40.1, "network": 400}
_NVL72 = _BLACKWELL | {"gpus": 72, "attention": 0.84, "peak_flops": 2.5e15, "host": (169, 205)}
_CDNA3: dict[str, Any] = {"gpus": 8, "links": 7, "link": 50.0, "network": 400, "attention": 0.46, "host": (48, 92)}
_GPUS = (
    _preset("a100", "a100", mebibytes=81920, gpus=8, links=12, link=20.0, network=200, attention=0.90, **_PCIE4),
    _preset("h100", "h100", mebibytes=81559, **_HOPPER),
    _preset("h200", "h200", mebibytes=143771, **_HOPPER),
    _preset("b200", "b200", mebibytes=183359, gpus=8, attention=0.93, host=(48, 72), **_BLACKWELL),
    _preset("gb200", "b200", mebibytes=189471, **_NVL72),
    _preset("a100-40gb", "a100", mebibytes=40960, gpus=8, links=12, link=20.0, network=200, attention=0.90, **_PCIE4),
    _preset("h800", "h100", mebibytes=81559, **_HOPPER | {"links": 8}),
    _preset("h20", "h20", mebibytes=97871, **_HOPPER),
    _preset("l40s", "l40s", mebibytes=46068, gpus=8, links=1, link=24.0, network=100, attention=0.90, **_PCIE4),
    _preset("b300", "b200", mebibytes=275040, gpus=8, attention=0.93, host=(48, 82), **_BLACKWELL | {"network": 800}),
    _preset("gb300", "b200", mebibytes=265121, **_NVL72 | {"network": 800}),
    _preset("mi300x", "mi300x", mebibytes=196592, **_CDNA3),
)
_PRESETS = {hardware.name: hardware for hardware, _ in _GPUS}
GENERATIONS = {hardware.name: generation for hardware, generation in _GPUS}
"""Generation of each GPU, which chooses the defaults of `KernelModel.analytic`."""
