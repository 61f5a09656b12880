"""Tools for testing wlb, and for testing programs that use it.

- `wlb.testing.strategies`: hypothesis strategies for document lengths, cost models and packer settings
  (needs the extra `wlb[testing]`).
- `wlb.testing.cost`, `.packing`, `.packer`, `.sharding`, `.kernel`, `.schedule`, `.dynamic_cp`: naive oracles, one per
  wing of wlb. Each is a second, independent reading of the specification in plain Python: slow, obvious, equal to wlb
  bit for bit (costs from tables and latencies: up to rounding).
"""
