"""What an installed wheel has to do, outside the checkout, with nothing but numpy."""

import sys

import wlb

assert wlb.BUILD_PROFILE == "release", wlb.BUILD_PROFILE
cost = wlb.CostModel(attention=1.0, linear=1000.0)
plan = wlb.pack([900, 100, 500, 400, 100], num_micro_batches=2, max_tokens=1500, cost_model=cost)
assert plan.imbalance < 1.2, plan
shard = wlb.shard([900, 100], cp_size=4, strategy="per_document")
assert [shard.rank(rank).num_tokens for rank in range(4)] == [250] * 4, shard
assert not {"torch", "matplotlib", "cyclopts", "jinja2", "rich", "hypothesis", "wlb_tools"} & set(sys.modules)
print(f"wlb {wlb.__version__} from a wheel:", plan)
