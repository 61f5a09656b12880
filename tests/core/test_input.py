"""Every bad argument is an error that names argument, index and value; every harmless form is accepted."""

import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import wlb
from tests.plain import plain

COST = wlb.CostModel(attention=1.0, linear=1.0)
SIZES: dict[str, Any] = {"num_micro_batches": 2, "max_tokens": 1000, "cost_model": COST}


def packer(**settings: Any) -> wlb.Packer:
    return wlb.Packer(**({"release": "fifo"} | SIZES | settings))


TAKES_LENGTHS: dict[str, Callable[[Any], Any]] = {
    "pairs": wlb.pairs,
    "cost": COST.cost,
    "attention_cost": COST.attention_cost,
    "linear_cost": COST.linear_cost,
    "pack": lambda lengths: wlb.pack(lengths, **SIZES),
    "push": lambda lengths: packer().push(lengths),
    "shard": lambda lengths: wlb.shard(lengths, cp_size=2),
    "batch_offsets": lambda lengths: wlb.batch_offsets(lengths, tokens_per_batch=50),
    "split_documents": lambda lengths: wlb.split_documents(lengths, max_document_tokens=50),
    "tune": lambda lengths: wlb.tune(lengths, num_queues=2, **SIZES),
    "tune_price": lambda lengths: wlb.tune(lengths, **SIZES),
    "from_assignment": lambda lengths: wlb.Packing.from_assignment(lengths, [0, 0, 0], **SIZES),
}

BAD_ENTRIES: dict[str, tuple[Any, int, Any]] = {
    "zero": ([5, 0, 7], 1, 0),
    "negative": ([5, -3, 7], 1, -3),
    "first of several": ([5, 6, -1, 0], 2, -1),
    "over int32": ([5, 2**31, 7], 1, 2**31),
    "over int64": ([5, 2**63, 7], 1, 2**63),
    "far over int64": ([5, 2**100, 7], 1, 2**100),
    "far below int64": ([5, -(2**100), 7], 1, -(2**100)),
    "uint64": (np.array([5, 2**64 - 1, 7], np.uint64), 1, 2**64 - 1),
    "big-endian": (np.array([5, -3, 7], ">i8"), 1, -3),
    "strided": (np.array([5, 9, 6, 9, 0, 9])[::2], 2, 0),
    "fraction": ([5, 2.5, 7], 1, 2.5),
    "float array": (np.array([5.0, 2.5, 7.0]), 1, 2.5),
    "infinite": ([5, float("inf"), 7], 1, float("inf")),
    "bool among objects": (np.array([5, True, 7], object), 1, True),
}

BAD_WHOLES: dict[str, Any] = {
    "None": None,
    "string": "567",
    "strings": ["5", "6"],
    "bytes": b"567",
    "bools": [True, True],
    "bool array": np.array([True, True]),
    "None inside": [5, None, 7],
    "ragged": [[5], [6, 7]],
    "2-D": [[5, 6], [7, 8]],
    "2-D array": np.ones((2, 2), np.int64),
    "objects": np.array([object(), object()]),
    "complex": [5, 6j],
    "dict": {5: 6},
    "set": {5, 6},
    "datetime": np.array(["2020-01-01"], dtype="datetime64[D]"),
    "timedelta": np.array([5, 6], dtype="timedelta64[s]"),
    "timedelta that numpy lists as integers": np.array([5, 6], dtype="timedelta64[ns]"),
    "masked": np.ma.array([5, 6, 7], mask=[False, True, False]),
    "structured": np.array([(1, 2)], dtype=[("a", "i4"), ("b", "i4")]),
    "function": len,
    "generator": (n for n in (5, 6)),
    "map": map(int, "56"),
}

# What people pass by mistake, and the words of the error that mend it.
MISTAKES: dict[str, tuple[Any, str]] = {
    "generator": ((n for n in (5, 6)), "list(x)"),
    "mapping": ({"a": 5}, "list(x.values())"),
    "tokens of documents": ([[5, 6], [7]], "[len(x) for x in ...]"),
    "equally many tokens": ([[5, 6], [7, 8]], "[len(x) for x in ...]"),
    "texts": (["one text", "another"], "not a text"),
    "cu_seqlens": (np.array([0, 5, 11], np.int32), "np.diff(cu_seqlens)"),
}


@pytest.mark.parametrize("function", TAKES_LENGTHS)
@pytest.mark.parametrize("case", BAD_ENTRIES)
def test_a_bad_length_is_named(function: str, case: str) -> None:
    lengths, index, value = BAD_ENTRIES[case]
    with pytest.raises(wlb.WlbError) as raised:
        TAKES_LENGTHS[function](lengths)
    error = raised.value
    assert (error.argument, error.index, error.value) == ("lengths", index, value)
    assert isinstance(error, ValueError)
    number = str(value) if isinstance(value, int) else f"{value:g}"
    assert all(part in str(error) for part in ("lengths", str(index), number))


@pytest.mark.parametrize("function", TAKES_LENGTHS)
@pytest.mark.parametrize("case", BAD_WHOLES)
def test_what_is_no_list_of_lengths(function: str, case: str) -> None:
    with pytest.raises(wlb.WlbError) as raised:
        TAKES_LENGTHS[function](BAD_WHOLES[case])
    assert raised.value.argument == "lengths"
    assert "lengths" in str(raised.value)


@pytest.mark.parametrize("case", MISTAKES)
def test_the_error_of_a_common_mistake_mends_it(case: str) -> None:
    lengths, remedy = MISTAKES[case]
    with pytest.raises(wlb.WlbError) as raised:
        wlb.shard(lengths, cp_size=2)
    assert raised.value.argument == "lengths"
    assert remedy in str(raised.value)


def test_a_model_or_its_name_is_no_cost_model() -> None:
    model = wlb.ModelConfig.preset("llama2-7b")
    for given, remedy in ((model, ".cost_model()"), ("llama2-7b", "ModelConfig.preset")):
        with pytest.raises(TypeError) as raised:
            wlb.pack([5], **SIZES | {"cost_model": given})
        assert remedy in str(raised.value)


@pytest.mark.parametrize("function", TAKES_LENGTHS)
def test_nan_is_named(function: str) -> None:
    with pytest.raises(wlb.WlbError) as raised:
        TAKES_LENGTHS[function]([5, NAN, 7])
    assert (raised.value.argument, raised.value.index) == ("lengths", 1)
    assert np.isnan(raised.value.value)


@pytest.mark.parametrize("function", [name for name in TAKES_LENGTHS if name != "pairs"])
def test_a_single_number_is_no_list_of_lengths(function: str) -> None:
    for scalar in (5, np.int64(5), np.array(5)):
        with pytest.raises(wlb.WlbError) as raised:
            TAKES_LENGTHS[function](scalar)
        assert raised.value.argument == "lengths"


@pytest.mark.parametrize("costs", [[5, 6j, 7], np.array([5j, 6, 7]), ["5", "6", "7"], [True, False, True], [None] * 3])
def test_what_is_no_list_of_costs(costs: Any) -> None:
    with pytest.raises(wlb.WlbError, match=r"^costs = .*: must be real numbers, not ") as raised:
        wlb.pack([5, 6, 7], num_micro_batches=2, max_tokens=1000, costs=costs)
    assert raised.value.argument == "costs"


@pytest.mark.parametrize("bad", [0, -1, 2**31, 2**100, 2.5, float("nan"), "5", None, True])
def test_pairs_of_one_bad_length(bad: Any) -> None:
    with pytest.raises(wlb.WlbError) as raised:
        wlb.pairs(bad)
    assert raised.value.argument == "lengths"


BASE = [100, 7, 30, 7]
DTYPES = ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", ">i2", ">i4", ">i8", ">u8"]


def read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "lengths",
    [
        *(np.array(BASE, dtype) for dtype in DTYPES),
        np.repeat(BASE, 3)[::3],
        np.array(BASE[::-1])[::-1],
        np.array([BASE, BASE]).T[:, 0],
        read_only(np.array(BASE)),
        read_only(np.array(BASE, ">i4")),
        np.frombuffer(b"\0" + np.array(BASE, "i8").tobytes(), "i1")[1:].view("i8"),
        tuple(BASE),
        range(100, 101),
        [np.int64(100), np.int32(7), 30, np.uint8(7)],
        [np.uint64(100), np.uint64(7)],
        pytest.param(memoryview(np.array(BASE, "i8").tobytes()).cast("q"), id="memoryview"),
    ],
    ids=repr,
)
def test_harmless_forms_of_lengths(lengths: Any) -> None:
    plainly = [int(length) for length in lengths]
    assert plainly == BASE[: len(plainly)]
    assert plain(wlb.pack(lengths, **SIZES)) == plain(wlb.pack(plainly, **SIZES))
    assert plain(packer().push(lengths)) == plain(packer().push(plainly))
    assert wlb.shard(lengths, cp_size=3).digest() == wlb.shard(plainly, cp_size=3).digest()
    assert wlb.pairs(lengths).tolist() == [wlb.pairs(length) for length in plainly]
    assert COST.cost(lengths).tolist() == COST.cost(plainly).tolist()


@pytest.mark.parametrize("empty", [[], (), np.array([], np.int32), np.array([]), range(0)], ids=repr)
def test_no_lengths_at_all(empty: Any) -> None:
    assert wlb.pack(empty, **SIZES).num_tokens == 0
    assert packer().push(empty).num_tokens == 0
    shard = wlb.shard(empty, cp_size=3)
    assert shard.num_tokens == 0
    assert shard.rank(2).cu_seqlens_q.tolist() == [0]
    assert wlb.pairs(empty).shape == COST.cost(empty).shape == (0,)
    assert wlb.batch_offsets(empty, tokens_per_batch=5).tolist() == [0]
    assert [array.size for array in wlb.split_documents(empty, max_document_tokens=5)] == [0, 0, 0]


FLOPS = {"hidden_size": 8, "ffn_hidden_size": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 8}
TABLE = {"attention_seconds": [1.0, 2.0], "linear_seconds": [1.0, 2.0]}
RATES = {"attention": 1.0, "linear": 1.0}
LENGTHS = [10, 20, 30, 40]
NAN, INF = float("nan"), float("inf")
NO_SIZE = [0, -1, -(2**63), 2**63, 2**100, -(2**100), 1.5, NAN, "2"]
NO_INT32_SIZE = [*NO_SIZE, 2**31]


def pack(**arguments: Any) -> wlb.Packing:
    return wlb.pack(LENGTHS, **arguments)


def analytic(generation: Any, **arguments: Any) -> wlb.KernelModel:
    return wlb.KernelModel.analytic(generation, **arguments)


def shard(**arguments: Any) -> wlb.Shard:
    return wlb.shard(LENGTHS, **arguments)


def split_by_packer(lengths: list[int], max_document_tokens: int) -> wlb.Packing:
    return packer(max_document_tokens=max_document_tokens, oversize="split").push(lengths)


def tune(**arguments: Any) -> wlb.TuneResult:
    return wlb.tune(LENGTHS, **({"num_queues": 2} | arguments))


def tune_price(**arguments: Any) -> wlb.TuneResult:
    return wlb.tune(LENGTHS, **arguments)


def tables(**arguments: Any) -> wlb.CostModel:
    return wlb.CostModel.from_tables(**({"lengths": [10, 20]} | TABLE | arguments))


def assign(**arguments: Any) -> wlb.Packing:
    return wlb.Packing.from_assignment(LENGTHS, **({"assignment": [0, 0, 1, 1]} | SIZES | arguments))


# (function, its good arguments, the name of the bad one, bad values)
BAD_ARGUMENTS: list[tuple[Callable[..., Any], dict[str, Any], str, list[Any]]] = [
    (pack, SIZES, "num_micro_batches", NO_INT32_SIZE),
    (pack, SIZES, "max_tokens", NO_INT32_SIZE),
    (pack, SIZES, "method", ["best", ""]),
    (pack, SIZES, "global_batches", [2]),
    (pack, SIZES | {"method": "fixed_length"}, "global_batches", [*NO_SIZE, 2**62]),
    (packer, {}, "num_micro_batches", NO_INT32_SIZE),
    (packer, {}, "max_tokens", NO_INT32_SIZE),
    (
        packer,
        {},
        "outlier_thresholds",
        [[20, 10], [10, 10], [0, 10], [-5], [1001], [2**100], [1.5], ["5"], 5],
    ),
    (packer, {"max_document_tokens": 100}, "outlier_thresholds", [[101], [100, 101]]),
    (packer, {}, "release", ["lifo", ""]),
    (packer, {"release": "adaptive"}, "delay_price", [-0.01, NAN, INF, -INF]),
    (packer, {"release": "adaptive"}, "outlier_thresholds", [[10]]),
    (packer, {}, "delay_price", [0.03, -0.01, NAN, INF]),
    (packer, {"release": "adaptive"}, "delay_price", [10**400, True]),
    (packer, {"release": "adaptive"}, "max_step_cost", [0.0, -1.0, NAN, INF, 10**400, True]),
    (packer, {}, "max_step_cost", [1.5]),
    (tune_price, SIZES, "max_step_cost", [0.0, -1.0, NAN, INF]),
    (packer, {}, "tokens_per_batch", [*NO_SIZE, 10**9]),
    (packer, {}, "max_delay", [-1, 2**63, 2**100, 1.5, "2"]),
    (packer, {}, "max_document_tokens", [*NO_INT32_SIZE, 1001]),
    (packer, {}, "oversize", ["drop", ""]),
    (packer, {}, "method", ["best", "", "original", "var_length_fast"]),
    (shard, {"cp_size": 2}, "cp_size", NO_INT32_SIZE),
    (shard, {"cp_size": 2}, "strategy", ["zigzag", ""]),
    (shard, {"cp_size": 2}, "causal", ["yes", 1, None]),
    (shard, {"cp_size": 2}, "max_imbalance", [0.5, NAN, INF, "1", True]),
    *((shard, {"cp_size": 2, "strategy": each}, "max_imbalance", [1.1]) for each in ("per_document", "per_sequence")),
    (shard, {"cp_size": 2, "strategy": "hybrid"}, "hybrid_threshold", [-1, 2**63, 2**100, 1.5, "2", None]),
    (shard, {"cp_size": 2, "strategy": "adaptive"}, "kernel_model", [None]),
    (shard, {"cp_size": 2, "strategy": "adaptive"}, "cp_seconds_per_key", [-1e-9, 1.1e-3, NAN, INF, "1", True, None]),
    (shard, {"cp_size": 2}, "cp_seconds_per_key", [1e-9]),
    (analytic, {"num_heads": 4, "head_dim": 64}, "generation", ["v100", ""]),
    (analytic, {"generation": "h100", "head_dim": 64}, "num_heads", [0, -1, 2**40, 2**100, 1.5, "2", None]),
    (analytic, {"generation": "h100", "num_heads": 4, "head_dim": 64}, "num_kv_heads", [0, 3, 2**40, 1.5]),
    (analytic, {"generation": "h100", "num_heads": 4}, "head_dim", [0, -1, 2**40, 1.5, None]),
    (wlb.CostModel, RATES, "attention", [-1.0, NAN, INF, -INF, 10**400, True, np.True_, np.complex128(1 + 2j)]),
    (wlb.CostModel, RATES, "causal", ["yes", 1]),
    (wlb.CostModel, RATES, "linear", [-1.0, NAN, INF, -INF, 10**400, True]),
    (wlb.CostModel, RATES | {"attention": 0.0}, "linear", [0.0]),
    *(
        (wlb.CostModel.from_flops, FLOPS, name, NO_SIZE)
        for name in (*FLOPS, "num_kv_heads", "head_dim", "experts_per_token")
    ),
    (wlb.CostModel.from_flops, FLOPS, "attention_efficiency", [0.0, -1.0, NAN, INF, 10**400, True]),
    (wlb.CostModel.from_flops, FLOPS, "flops_per_second", [0.0, -1.0, NAN, INF, 10**400]),
    (wlb.CostModel.from_flops, FLOPS, "passes", ["sideways", ""]),
    *((wlb.CostModel.from_flops, FLOPS, name, [1, "yes", None]) for name in ("causal", "gated_ffn", "recompute")),
    (pack, SIZES | {"dp_size": 2}, "equal_documents", [1, "yes", None]),
    *((tables, {}, name, [[2.0, 1.0], [-1.0, 2.0], [0.0, 1.0], [1.0, NAN], [1.0, INF]]) for name in TABLE),
    *((tables, {}, name, [[1.0], [1.0, 2.0, 3.0], [], [[1.0, 2.0]], 1.0]) for name in TABLE),
    *((tables, {}, name, ["12", None, [1j, 2j], ["a", "b"]]) for name in TABLE),
    (tables, {}, "lengths", [[20, 10], [10, 10], [0, 10], [1.5, 10]]),
    (assign, {}, "assignment", [[0, 0, 0, 2], [0, 0, 0, -2], [0, 0, 0], [0] * 5, [0.5] * 4, "0000"]),
    (assign, {}, "assignment", [[[0] * 4], [2**63] * 4, 0, None]),
    (assign, {}, "max_tokens", NO_INT32_SIZE),
    (assign, {}, "num_micro_batches", NO_INT32_SIZE),
    (wlb.pack(LENGTHS, **SIZES).deal, {}, "dp_size", [*NO_SIZE, 3, 4]),
    (lambda **kw: wlb.batch_offsets(LENGTHS, **kw), {}, "tokens_per_batch", NO_SIZE),
    (lambda **kw: wlb.split_documents(LENGTHS, **kw), {}, "max_document_tokens", NO_SIZE),
    (tune, SIZES, "num_queues", [-1, 5, 2**63, 2**100, 1.5, "2"]),
    (tune, SIZES, "max_step_cost", [1.5]),
    (tune, SIZES, "max_early", [2]),
    (tune, SIZES, "limits", [[1.0]]),
    (tune_price, SIZES, "max_early", [-1, 1025]),
    (tune_price, SIZES, "limits", [[1.0]]),
    (tune, SIZES, "max_mean_delay", [-1.0, NAN, 10**400, True]),
    (tune, SIZES, "tokens_per_batch", NO_SIZE),
    (tune, SIZES, "max_delay", [-1, 1.5]),
    (tune, SIZES, "method", ["best", "fixed_length"]),
    (tune, SIZES, "max_document_tokens", [0, 1001]),
    (tune_price, SIZES, "max_mean_delay", [-1.0, NAN]),
    (tune_price, SIZES, "tokens_per_batch", NO_SIZE),
    (tune_price, SIZES, "max_delay", [-1, 1.5]),
    (tune_price, SIZES, "method", ["best", "fixed_length"]),
    (tune_price, SIZES, "max_document_tokens", [0, 1001]),
]
# What is not even of the right type may be a TypeError, as everywhere in Python; it names the argument too.
WRONG_TYPES: list[tuple[Callable[..., Any], dict[str, Any], str, list[Any]]] = [
    (pack, SIZES, "num_micro_batches", [[2]]),
    (packer, {}, "num_micro_batches", [None, [2]]),
    (pack, SIZES, "method", [None, 3]),
    (pack, SIZES, "cost_model", [None, 1.0, "llama"]),
    (packer, {}, "cost_model", [None, 1.0]),
    (packer, {"release": "adaptive"}, "delay_price", ["0.1", 1j]),
    (packer, {"release": "adaptive"}, "max_step_cost", ["1.5", 1j]),
    (packer, {}, "oversize", [None]),
    (packer, {}, "method", [None, 3]),
    (shard, {"cp_size": 2}, "cp_size", [None, [2]]),
    (shard, {"cp_size": 2}, "strategy", [None]),
    (wlb.CostModel, RATES, "attention", ["1", None, 1j]),
    (wlb.CostModel.from_flops, FLOPS, "passes", [None]),
    (wlb.CostModel.from_flops, FLOPS, "attention_efficiency", ["1"]),
    (tune, SIZES, "max_mean_delay", ["1"]),
]


def cases(table: list[tuple[Callable[..., Any], dict[str, Any], str, list[Any]]]) -> list[Any]:
    return [
        pytest.param(function, good | {name: bad}, name, id=f"{number}-{name}={bad!r}")
        for number, (function, good, name, values) in enumerate(table)
        for bad in values
    ]


@pytest.mark.parametrize(("function", "arguments", "name"), cases(BAD_ARGUMENTS))
def test_a_bad_argument_is_named(function: Callable[..., Any], arguments: dict[str, Any], name: str) -> None:
    with pytest.raises(wlb.WlbError) as raised:
        function(**arguments)
    assert raised.value.argument == name
    assert name in str(raised.value)


@pytest.mark.parametrize(("function", "arguments", "name"), cases(WRONG_TYPES))
def test_a_wrong_type_is_named(function: Callable[..., Any], arguments: dict[str, Any], name: str) -> None:
    # PyO3 names the argument in a note, which exceptions have from Python 3.11 on.
    with pytest.raises((TypeError, wlb.WlbError), match=name if sys.version_info >= (3, 11) else None):
        function(**arguments)


@pytest.mark.parametrize(
    ("thresholds", "index"),
    [([10, 20, 15], 2), ([10, 10], 1), ([0], 0), ([10, 2000], 1), ([10, 2**60 + 1], 1)],
    ids=repr,
)
def test_the_bad_threshold_is_named(thresholds: list[int], index: int) -> None:
    with pytest.raises(wlb.WlbError) as raised:
        packer(outlier_thresholds=thresholds)
    assert (raised.value.index, raised.value.value) == (index, thresholds[index])


BAD_IDS: list[tuple[Any, int | None, Any]] = [
    ([1, 2, 1], 2, 1),
    ([7, 2, 3], 0, 7),
    ([1, 2], None, None),
    ([1, 2, 3, 4], None, None),
    ([1, 2, 2**63], 2, 2**63),
    ([1, 2, -(2**63) - 1], 2, -(2**63) - 1),
    ([1, 2.5, 3], 1, 2.5),
    ([[1, 2, 3]], None, None),
    ("123", None, None),
    (["1", "2", "3"], None, None),
    ([True, False, True], None, None),
    (5, None, None),
]


@pytest.mark.parametrize(("ids", "index", "value"), BAD_IDS, ids=repr)
def test_bad_ids_change_nothing(ids: Any, index: int | None, value: Any) -> None:
    """Document 7 already waits."""
    waiting = packer(outlier_thresholds=[50])
    waiting.push([60], ids=[7])
    before = waiting.state_dict()
    with pytest.raises(wlb.WlbError) as raised:
        waiting.push([1, 2, 3], ids)
    assert raised.value.argument == "ids"
    assert "ids" in str(raised.value)
    if index is not None:
        assert (raised.value.index, raised.value.value) == (index, value)
        assert str(index) in str(raised.value)
        assert str(value) in str(raised.value)
    assert waiting.state_dict() == before


@pytest.mark.parametrize("case", [*BAD_ENTRIES, *BAD_WHOLES])
def test_bad_lengths_change_nothing(case: str) -> None:
    waiting = packer(outlier_thresholds=[50])
    waiting.push([60, 10])
    before = waiting.state_dict()
    with pytest.raises(wlb.WlbError):
        waiting.push(BAD_ENTRIES[case][0] if case in BAD_ENTRIES else BAD_WHOLES[case])
    assert waiting.state_dict() == before


@pytest.mark.parametrize("method", ["var_length", "refined"])
def test_a_document_over_max_tokens_is_named(method: Any) -> None:
    waiting = packer(outlier_thresholds=[50])
    waiting.push([60])
    before = waiting.state_dict()
    for take in (waiting.push, lambda lengths: wlb.pack(lengths, **SIZES, method=method)):
        with pytest.raises(wlb.WlbError) as raised:
            take([5, 1000, 1001])
        assert (raised.value.argument, raised.value.index, raised.value.value) == ("lengths", 2, 1001)
    assert waiting.state_dict() == before


def test_a_sequence_too_long_for_int32_is_refused() -> None:
    with pytest.raises(wlb.WlbError) as raised:
        wlb.shard([2**30, 2**30], cp_size=2)
    assert raised.value.argument == "lengths"


@pytest.mark.parametrize("cut", [wlb.split_documents, split_by_packer], ids=["split_documents", "Packer"])
def test_more_cuts_than_memory_holds_are_refused(cut: Callable[..., Any]) -> None:
    with pytest.raises(wlb.WlbError) as raised:
        cut([1, 2**23 + 2], max_document_tokens=1)
    assert (raised.value.argument, raised.value.value) == ("max_document_tokens", 1)


def test_an_infinite_cost_is_refused() -> None:
    enormous = wlb.CostModel(attention=1e300, linear=0.0)
    with pytest.raises(wlb.WlbError) as raised:
        enormous.cost([1, 2**30])
    assert (raised.value.argument, raised.value.index, raised.value.value) == ("lengths", 1, 2**30)


def test_results_cannot_be_written_to_by_accident() -> None:
    """Writing into a returned array never changes the plan."""
    packing, shard = wlb.pack(LENGTHS, **SIZES), wlb.shard(LENGTHS, cp_size=2)
    plan = wlb.plan_dynamic_cp(LENGTHS, world_size=2, num_stages=1, max_tokens_per_rank=100, cost_model=COST)
    again = pickle.loads(pickle.dumps(plan))
    digests = packing.digest(), shard.digest()
    for array in (
        plan.cp_sizes,
        plan[0][0].lengths,
        packing.tokens,
        packing.assignment,
        packing.micro_batches[0].lengths,
        shard.rank(0).token_indices,
        shard.restore_indices,
    ):
        if array.flags.writeable:
            array[:] = 0
    assert (packing.digest(), shard.digest()) == digests
    assert plan == again
    assert packing.tokens.sum() == shard.num_tokens == sum(LENGTHS)
    assert packing.micro_batches[0].lengths.sum() > 0
    assert shard.rank(0).token_indices.sum() > 0
    assert shard.restore_indices.sum() > 0


def test_input_arrays_stay_as_they_are() -> None:
    lengths = np.array(LENGTHS)
    wlb.pack(lengths, **SIZES)
    packer(outlier_thresholds=[20]).push(lengths)
    wlb.shard(lengths, cp_size=2)
    assert lengths.tolist() == LENGTHS
