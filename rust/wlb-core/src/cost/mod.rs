//! Cost of documents: attention is quadratic in the length, everything else is linear.
//!
//! A [`CostModel`] is a short sum of named terms: pairs under the document's mask, pairs under windows and chunks,
//! tokens, documents, micro-batches. The pairs of the mask and the tokens may have measured tables instead of rates.

mod curve;
mod document_costs;
pub mod fit;
mod flops;
mod mask;
mod model;
mod rates;

pub(crate) use curve::Curve;
pub use document_costs::DocumentCosts;
pub(crate) use document_costs::check_limits;
pub use flops::{FlopsOptions, MAX_ATTENTION_EFFICIENCY, Passes};
pub use mask::{LocalMask, Mask};
pub use model::CostModel;
pub use rates::{Rates, Unit};
