//! Tuning: finds thresholds or a delay price with the best balance on a sample, within a limit on the mean delay.

mod held_out;
mod options;
mod price;
mod reading;
mod sample;
mod search;
mod thresholds;
mod trials;
mod tuned;

pub use held_out::{FEWEST_BATCHES, ORDERS, halves, reordered};
pub use options::{MAX_MEAN_DELAY, TuneOptions};
pub use sample::Sample;
pub use search::tune;
pub use tuned::{HeldOut, Tuned, TunedPoint};
