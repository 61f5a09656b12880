//! What the property tests share: the naive oracles, what must hold whatever the input, and inputs that hit the
//! corners.
//!
//! The oracles are `docs/semantics.md` in code: slow, plain, and without a line of the fast code. `tests/semantics.rs`
//! works an example of each, and `tests/golden` writes down what they answer.
//!
//! | section | oracle |
//! | --- | --- |
//! | Cost | `naive_pairs`, `naive_local_pairs` in `naive`; `tests/cost.rs` |
//! | Documents with costs of their own | `columns` |
//! | What no packing beats | `bound` |
//! | Packing one global batch | `original`, `fixed_length`, `var_length`, `refined` in `naive`; for ranks: `ranks` |
//! | A stream | `Packer` in `naive`: both release rules, `admits`, `split`; `batch_offsets` |
//! | Sharding | `per_sequence`, `per_document`, `per_document_token`, `hybrid` in `naive`; `auto` |
//! | Kernel models | `kernel` |
//! | Pipelines | `pipeline` |
//! | Dynamic-CP | `dynamic_cp`: what must hold of every plan, by one column of costs or several, and how long it takes |

pub(crate) mod auto;
pub(crate) mod bound;
pub(crate) mod check;
pub(crate) mod columns;
pub(crate) mod cost_stream;
pub(crate) mod dynamic_cp;
pub(crate) mod forge;
pub(crate) mod kernel;
pub(crate) mod machines;
pub(crate) mod naive;
pub(crate) mod pipeline;
pub(crate) mod ranks;
pub(crate) mod strategies;
pub(crate) mod stream;
