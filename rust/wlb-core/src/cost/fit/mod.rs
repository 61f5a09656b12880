//! Rates of a cost model from measured times.
//!
//! | part | what |
//! | --- | --- |
//! | `least_squares` | rates that are never negative |
//! | `robust` | rates that most times agree on |
//! | `select` | which terms the times show, and which they cannot tell apart |
//! | `terms` | the terms of a cost model in each micro-batch, and the model that comes out |

mod least_squares;
mod robust;
mod select;
mod terms;

pub use least_squares::non_negative_least_squares;
pub use select::{Column, Fit, FittedTerm, fit_rates, least_rows};
pub use terms::FitOptions;
