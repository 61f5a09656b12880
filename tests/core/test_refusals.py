"""What the functions of the core refuse, in one table: each error names the argument, its index and its value.

Wrong types, and sizes that no function takes, are in test_input.py.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import wlb

INF, NAN = float("inf"), float("nan")
COST = wlb.CostModel(attention=1.0, linear=40.0)
FLOPS = wlb.CostModel(attention=1.0, linear=1.0, unit="flops")
ONE = np.ones((3, 2))  # costs of three documents in two columns
UNEVEN = [[1.0, 8.0], [1.0, 2.0], [1.0, 2.0]]
ROWS = [[40 + 7 * row, 900 - 31 * row, 11 * row * row + 1] for row in range(20)]
SECONDS = [float(sum(length + length * length / 500 for length in row)) for row in ROWS]
GROUPS = [700, 30, 45, 12, 3000, 90, 90, 60, 900, 15, 15, 400]
MACHINE: dict[str, Any] = {"world_size": 8, "num_stages": 3, "max_tokens_per_rank": 512}
NODE = {"seconds_per_token": 0.5}


def pack(**options: Any) -> Any:
    return wlb.pack([5, 6, 7], **{"num_micro_batches": 2, "max_tokens": 100, **options})


def deal(**options: Any) -> Any:
    """A plan for ranks."""
    return wlb.pack([10, 20, 30, 40], **{"num_micro_batches": None, "max_tokens": 60, "cost_model": COST, **options})


def fit(rows: Any = ROWS, seconds: Any = SECONDS, **options: Any) -> Any:
    return wlb.CostModel.fit(rows, seconds, **options)


def tune(**options: Any) -> Any:
    return wlb.tune([10, 4, 5], num_micro_batches=2, max_tokens=10, **options)


def exchange(**prices: Any) -> Any:
    return wlb.Exchange(**prices)


def groups(lengths: Any = GROUPS, **options: Any) -> Any:
    """Dynamic-CP, with costs of a model."""
    return wlb.plan_dynamic_cp(lengths, **{"cost_model": COST, **MACHINE, **options})


def given(**options: Any) -> Any:
    """Dynamic-CP, with no costs but those that are given."""
    return wlb.plan_dynamic_cp(GROUPS, **MACHINE, **options)


def pipeline(costs: Any = (1.0, 2.0), **options: Any) -> Any:
    return wlb.simulate_pipeline(costs, **{"schedule": "1f1b", "num_stages": 4, **options})


def steps(costs: Any, **options: Any) -> Any:
    return wlb.simulate_steps(costs, num_stages=2, **options)


def packer(**options: Any) -> Any:
    return wlb.Packer(**{"num_micro_batches": 2, "max_tokens": 2048, "cost_model": COST, **options})


def wrong(shape: tuple[int, ...], at: tuple[int, ...], value: float) -> Any:
    """Ones, but for one value."""
    values = np.ones(shape)
    values[at] = value
    return values


# The function, its arguments, and what the error names.
REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str, Any, Any]] = [
    (pack, {"costs": [1.0, -1.0, 1.0]}, "costs", 1, -1.0),
    (pack, {"costs": wrong((3, 2), (2, 1), NAN)}, "costs", (2, 1), NAN),
    (pack, {"costs": [1.0, INF, 1.0]}, "costs", 1, INF),
    (pack, {"costs": [1.0, 1.0]}, "costs", None, 2),
    (pack, {"costs": np.ones((3, 2, 1))}, "costs", None, None),
    (pack, {"costs": np.ones((3, 0))}, "columns of costs", None, 0),
    (pack, {"costs": ["a", "b", "c"]}, "costs", None, ["a", "b", "c"]),
    (pack, {"costs": [0.0, 0.0, 0.0]}, "costs", None, None),
    (pack, {"costs": [[1.0, 0.0]] * 3}, "costs", None, None),
    (pack, {"costs": [0.0, 0.0, 0.0], "num_micro_batches": 4, "dp_size": 2}, "costs", None, None),
    (pack, {"costs": ONE, "limits": [1.0]}, "limits", None, 1),
    (pack, {"costs": ONE, "limits": [1.0, 1.0]}, "limits", None, None),
    (pack, {"costs": ONE, "limits": [INF, -1.0]}, "limits", 1, -1),
    (pack, {"costs": ONE, "limits": [INF, 0.5]}, "costs", (0, 1), 1.0),
    (pack, {"costs": ONE, "limits": [INF, 3.0], "method": "original"}, "limits", None, None),
    (pack, {"costs": ONE, "method": "fixed_length"}, "method", None, None),
    (pack, {"costs": ONE, "cost_model": COST}, "costs", None, None),
    (pack, {"cost_model": COST, "limits": [1.0]}, "limits", None, None),
    (pack, {}, "cost_model", None, None),
    (pack, {"cost_model": COST, "multiple_of": 2}, "multiple_of", None, None),
    (pack, {"cost_model": COST, "num_micro_batches": "few"}, "num_micro_batches", None, "few"),
    (pack, {"cost_model": COST, "num_micro_batches": 2.5}, "num_micro_batches", None, 2.5),
    (pack, {"cost_model": COST, "num_micro_batches": None, "multiple_of": 0}, "multiple_of", None, 0),
    (
        pack,
        {"cost_model": COST, "num_micro_batches": None, "global_batches": 2, "method": "fixed_length"},
        "global_batches",
        None,
        None,
    ),
    (pack, {"cost_model": COST, "multiple_of_tokens": 0}, "multiple_of_tokens", None, 0),
    (pack, {"cost_model": COST, "multiple_of_tokens": 128}, "max_tokens", None, 100),
    (pack, {"cost_model": COST, "token_buckets": [64, 32]}, "token_buckets", 1, 32),
    (pack, {"cost_model": COST, "token_buckets": [48], "multiple_of_tokens": 32}, "token_buckets", 0, 48),
    (pack, {"cost_model": COST, "token_buckets": [128]}, "max_tokens", None, 100),
    (deal, {"sync": "step"}, "sync", None, None),
    (deal, {"groups": [1, 1, 2, 2]}, "groups", None, None),
    (deal, {"dp_size": 2, "together": "half"}, "together", None, "half"),
    (deal, {"dp_size": 2, "together": "micro_batch"}, "together", None, None),
    (deal, {"groups": [1, 2, 3, 3], "together": "micro_batch"}, "groups", 2, 3),
    (deal, {"cp_size": 0}, "cp_size", None, 0),
    (deal, {"equal_documents": True}, "equal_documents", None, None),
    (deal, {"dp_size": 0}, "dp_size", None, 0),
    (deal, {"dp_size": -1}, "dp_size", None, -1),
    (deal, {"dp_size": 2, "sync": "rounds"}, "sync", None, "rounds"),
    (deal, {"dp_size": 2, "groups": [1, 2]}, "groups", None, 2),
    (deal, {"dp_size": 2, "groups": [1, 1, 1, 2], "equal_documents": True}, "equal_documents", None, None),
    (deal, {"dp_size": 2, "method": "original"}, "method", None, None),
    (deal, {"dp_size": 2, "leftover": "return"}, "leftover", None, None),
    (deal, {"dp_size": 2, "num_micro_batches": 3}, "dp_size", None, 2),
    (deal, {"dp_size": 2, "num_micro_batches": 2, "max_tokens": 45}, "num_micro_batches", None, None),
    (deal, {"dp_size": 2, "cost_model": None, "costs": [[1, 2]] * 4}, "costs", None, None),
    (deal, {"max_documents": 0}, "max_documents", None, 0),
    (packer, {"outlier_thresholds": (5,), "release": "adaptive"}, "outlier_thresholds", None, None),
    (packer, {"cost_model": None, "cost_columns": 2}, "cost_columns", None, None),
    (packer, {"max_document_tokens": 2048, "token_buckets": (1024, 1536)}, "max_document_tokens", None, 2048.0),
    (packer, {"max_document_tokens": 2048, "multiple_of_tokens": 2000}, "max_document_tokens", None, 2048.0),
    (fit, {"seconds": [*SECONDS[:6], 0.0, *SECONDS[7:]]}, "seconds", 6, 0),
    (fit, {"seconds": [*SECONDS[:6], NAN, *SECONDS[7:]]}, "seconds", 6, NAN),
    (fit, {"seconds": SECONDS[:-1]}, "seconds", None, 19),
    (fit, {"rows": ROWS[:7], "seconds": SECONDS[:7]}, "micro_batches", None, 7.0),
    (fit, {"rows": [*ROWS[:19], [5, 0]]}, "micro_batches", 19, [5, 0]),
    (fit, {"rows": [*ROWS[:19], 5]}, "micro_batches", 19, 5),
    (fit, {"rows": 7}, "micro_batches", None, 7),
    (fit, {"rows": [[9, 9]] * 20}, "micro_batches", None, None),
    (fit, {"rows": [*ROWS[:19], []], "terms": ["pairs", "tokens"]}, "micro_batches", 19, 0),
    (fit, {"terms": ["pair"]}, "terms", None, "pair"),
    (fit, {"terms": ["micro_batches"]}, "terms", None, None),
    (fit, {"ranks": [1] * 19}, "ranks", None, 19),
    (fit, {"ranks": [1] * 19 + [0]}, "ranks", 19, 0),
    (fit, {"ranks": [1.5] * 20}, "ranks", 0, 1.5),
    (fit, {"windows": [0]}, "windows", None, 0),
    (fit, {"windows": [4], "causal": False}, "windows", None, None),
    (tune, {"costs": [1.0, 2.0]}, "costs", None, 2),
    (tune, {"costs": [1.0, -2.0, 1.0]}, "costs", 1, -2.0),
    (tune, {"costs": [1.0, NAN, 1.0]}, "costs", 1, NAN),
    (tune, {"costs": [0.0, 0.0, 0.0]}, "costs", None, None),
    (tune, {"costs": [[1.0, 0.0]] * 3, "num_queues": 2}, "costs", None, None),
    (tune, {"costs": UNEVEN}, "costs", None, None),
    (tune, {"costs": UNEVEN, "num_queues": 2, "dp_size": 2}, "costs", None, None),
    (tune, {"costs": UNEVEN, "num_queues": 2, "max_documents": 3}, "costs", None, None),
    (tune, {"costs": UNEVEN, "num_queues": 2, "limits": [INF, 7.0]}, "costs", (0, 1), 8.0),
    (tune, {"costs": [1.0, 2.0, 3.0], "cost_model": COST}, "costs", None, None),
    (tune, {"costs": [1.0, 2.0, 3.0], "max_early": 2}, "max_early", None, None),
    (tune, {"cost_model": COST, "num_queues": 2, "max_early": 2}, "max_early", None, None),
    (tune, {"cost_model": COST, "num_queues": 2, "max_step_cost": 1.5}, "max_step_cost", None, None),
    (tune, {"cost_model": COST, "limits": [1.0]}, "limits", None, None),
    (tune, {}, "cost_model", None, None),
    (groups, {"lengths": [10, 5000]}, "lengths", 1, 5000),
    (groups, {"lengths": [10, 0]}, "lengths", 1, 0),
    (groups, {"world_size": 0}, "world_size", None, 0),
    (groups, {"world_size": 2.5}, "world_size", None, 2.5),
    (groups, {"num_stages": 0}, "num_stages", None, 0),
    (groups, {"num_virtual_stages": 0}, "num_virtual_stages", None, 0),
    (groups, {"max_tokens_per_rank": -1}, "max_tokens_per_rank", None, -1),
    (groups, {"max_cp_size": 9}, "max_cp_size", None, 9),
    (groups, {"num_micro_batches": 0}, "num_micro_batches", None, 0),
    (groups, {"num_micro_batches": 1, "max_tokens_per_rank": 400}, "num_micro_batches", None, None),
    (groups, {"min_micro_batches": 0}, "min_micro_batches", None, 0),
    (groups, {"min_micro_batches": 2.5}, "min_micro_batches", None, 2.5),
    (groups, {"min_micro_batches": 5, "max_micro_batches": 4}, "min_micro_batches", None, None),
    (groups, {"min_micro_batches": 5, "num_micro_batches": 5}, "min_micro_batches", None, None),
    (groups, {"max_micro_batches": 1, "max_tokens_per_rank": 400}, "max_micro_batches", None, None),
    (groups, {"max_documents": 0}, "max_documents", None, 0),
    (groups, {"max_documents": 1, "num_micro_batches": 1}, "num_micro_batches", None, None),
    (groups, {"multiple_of_tokens": 0}, "multiple_of_tokens", None, 0),
    (groups, {"multiple_of_tokens": 513}, "max_tokens_per_rank", None, 512),
    (groups, {"token_buckets": [600]}, "max_tokens_per_rank", None, 512),
    (groups, {"token_buckets": [64, 32]}, "token_buckets", 1, 32),
    (groups, {"multiple_of_tokens": 64, "token_buckets": [96]}, "token_buckets", 0, 96),
    (groups, {"multiple_of_tokens": 2, "max_tokens_per_rank": 2**31 - 1}, "max_cp_size", None, None),
    (groups, {"token_buckets": [256], "lengths": [2049]}, "lengths", 0, 2049),
    (exchange, {"overlap": 1.01}, "overlap", None, 1.01),
    (groups, {"group_sizes": "all"}, "group_sizes", None, "all"),
    (groups, {"ranks_per_node": 0}, "ranks_per_node", None, 0),
    (groups, {"exchange": wlb.Exchange(**NODE, seconds_per_token_in_node=0.25)}, "exchange", None, None),
    (groups, {"exchange": wlb.Exchange(**NODE), "cost_model": FLOPS}, "exchange.seconds_per_token", None, None),
    (exchange, {"seconds_per_token_in_node": 1.0}, "seconds_per_token_in_node", None, None),
    (exchange, {**NODE, "seconds_per_exchange_in_node": -1.0}, "seconds_per_exchange_in_node", None, -1.0),
    (exchange, {**NODE, "seconds_per_token_in_node": 1.0}, "seconds_per_token_in_node", None, None),
    (exchange, {"seconds_per_token": -1.0}, "seconds_per_token", None, -1.0),
    (exchange, {"seconds_per_exchange": INF}, "seconds_per_exchange", None, INF),
    (groups, {"p2p_seconds": -2.0}, "p2p_seconds", None, -2.0),
    (groups, {"micro_batch_seconds": -2.0}, "micro_batch_seconds", None, -2.0),
    (groups, {"micro_batch_seconds": 1.7e308}, "micro_batch_seconds", None, 1.7e308),
    (groups, {"p2p_seconds": True}, "p2p_seconds", None, True),
    (exchange, {"overlap": "all"}, "overlap", None, "all"),
    (groups, {"ids": [1, 2]}, "ids", None, 2),
    (
        groups,
        {"cost_model": FLOPS, "p2p_seconds": 1.0},
        "p2p_seconds",
        None,
        None,
    ),
    (given, {}, "cost_model", None, None),
    (given, {"costs": np.ones(12), "cost_model": COST}, "costs", None, None),
    (given, {"costs": np.ones((12, 2))}, "costs", None, None),
    (given, {"costs": np.ones(11)}, "costs", None, 11),
    (given, {"costs": np.full(12, -1.0)}, "costs", 0, -1.0),
    (given, {"costs": np.ones(12), "exchange": wlb.Exchange(seconds_per_token=1.0)}, "attention_costs", None, None),
    (given, {"cost_model": COST, "attention_costs": np.ones(12)}, "attention_costs", None, None),
    (given, {"costs": np.ones(12), "attention_costs": np.full(12, 1.5)}, "attention_costs", 0, 1.5),
    (given, {"costs": np.ones(12), "attention_costs": np.ones(11)}, "attention_costs", None, 11),
    (pipeline, {"costs": []}, "num_micro_batches", None, 0),
    (pipeline, {"costs": [1.0, -1.0]}, "costs", 1, -1.0),
    (pipeline, {"costs": [1.0, NAN]}, "costs", 1, NAN),
    (pipeline, {"costs": wrong((2, 4), (1, 1), INF)}, "costs", (1, 1), INF),
    (pipeline, {"costs": [[1.0, 2.0]]}, "costs", None, None),
    (pipeline, {"costs": np.ones((2, 4, 2))}, "costs", None, None),
    (pipeline, {"costs": 1.0}, "costs", None, 1.0),
    (pipeline, {"costs": ["a"]}, "costs", None, ["a"]),
    (pipeline, {"costs": np.ones((2, 4, 3, 1))}, "costs", None, None),
    (pipeline, {"schedule": "2f2b"}, "schedule", None, "2f2b"),
    (pipeline, {"num_stages": 0}, "num_stages", None, 0),
    (pipeline, {"num_stages": 1.5}, "num_stages", None, 1.5),
    (pipeline, {"num_stages": 10**9}, "num_stages", None, 1000000000),
    (pipeline, {"num_virtual_stages": 2}, "num_virtual_stages", None, 2),
    (pipeline, {"schedule": "zbv"}, "num_virtual_stages", None, 1),
    (
        pipeline,
        {"schedule": "interleaved_1f1b", "num_virtual_stages": 2, "costs": np.ones(9)},
        "num_micro_batches",
        None,
        9,
    ),
    (pipeline, {"p2p_seconds": -1.0}, "p2p_seconds", None, -1.0),
    (pipeline, {"p2p_seconds": [0.0, NAN]}, "p2p_seconds", 1, NAN),
    (pipeline, {"p2p_seconds": [0.0]}, "p2p_seconds", None, None),
    (pipeline, {"p2p_seconds": True}, "p2p_seconds", None, True),
    (pipeline, {"p2p_seconds": np.True_}, "p2p_seconds", None, np.True_),
    (pipeline, {"p2p_seconds": "1"}, "p2p_seconds", None, "1"),
    (pipeline, {"activation": [1.0]}, "activation", None, None),
    (pipeline, {"activation": [1.0, -2.0]}, "activation", 1, -2.0),
    (pipeline, {"exposed": [1.0]}, "exposed", None, None),
    (pipeline, {"exposed": [0.0, 2.5]}, "exposed", 1, 2.5),
    (pipeline, {"costs": [1.7e308] * 8}, "costs", None, INF),
    (steps, {"costs": wrong((3, 2, 4), (2, 1, 3), -1.0)}, "costs", (2, 1, 3), -1.0),
    (
        steps,
        {"costs": np.ones((3, 2, 4)), "activation": wrong((3, 2, 4), (1, 0, 2), NAN)},
        "activation",
        (1, 0, 2),
        NAN,
    ),
    (steps, {"costs": np.zeros((3, 0, 4))}, "costs", None, None),
]


@pytest.mark.parametrize(
    ("function", "arguments", "argument", "index", "value"),
    [pytest.param(*row, id=f"{number}-{row[0].__name__}-{row[2]}") for number, row in enumerate(REFUSED)],
)
def test_the_argument_its_index_and_its_value_are_named(
    function: Callable[..., Any], arguments: dict[str, Any], argument: str, index: Any, value: Any
) -> None:
    with pytest.raises(wlb.WlbError) as caught:
        function(**arguments)
    assert (caught.value.argument, caught.value.index) == (argument, index)
    np.testing.assert_equal(caught.value.value, value)


ENGINE: Any = wlb  # whose types would refuse these calls
CALLS: dict[str, tuple[Any, str]] = {
    "pack": (lambda: ENGINE.pack([1], max_token=3), "max_tokens"),
    "shard": (lambda: ENGINE.shard([1], cp_sise=2), "cp_size"),
    "plan_dynamic_cp": (lambda: ENGINE.plan_dynamic_cp([1], word_size=2), "world_size"),
    "from_flops": (lambda: ENGINE.CostModel.from_flops(hiden_size=2), "hidden_size"),
    "from_tokens": (lambda: ENGINE.PrefixForest.from_tokens([1], [0, 1], group=[0]), "groups"),
    "deal": (lambda: pack(cost_model=COST).deal(dp_sise=2), "dp_size"),
    "push": (lambda: packer().push([1], id=[3]), "ids"),
    "Packer": (lambda: packer(max_document=3), "max_documents"),
    "Exchange": (lambda: ENGINE.Exchange(overlapp=1.0), "overlap"),
    "CostModel": (lambda: ENGINE.CostModel(attention=1.0, linear=1.0, micro_bach=1.0), "micro_batch"),
}


@pytest.mark.parametrize("name", [*CALLS])
def test_a_misspelt_option_is_answered_with_the_nearest(name: str) -> None:
    call, nearest = CALLS[name]
    with pytest.raises(TypeError, match=rf"got an unexpected keyword argument '\w+'; did you mean '{nearest}'\?$"):
        call()


def test_errors_of_types_stay_as_they_are() -> None:
    with pytest.raises(TypeError, match=r"^pack\(\) missing 1 required positional argument: 'lengths'$"):
        ENGINE.pack()
    assert pickle.loads(pickle.dumps(ENGINE.pack)) is ENGINE.pack
    assert pickle.loads(pickle.dumps(ENGINE.CostModel.from_flops)) is ENGINE.CostModel.from_flops
