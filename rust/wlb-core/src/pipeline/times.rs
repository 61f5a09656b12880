//! Times of a micro-batch's passes.

use crate::error::{Error, Result};

/// Seconds of everything that a schedule runs. Borrowed, and checked once.
#[derive(Clone, Copy, Debug)]
pub struct Times<'a> {
    pub(super) costs: &'a [f64],
    pub(super) detail: Detail,
    pub(super) p2p_seconds: &'a [f64],
    pub(super) exposed: Option<&'a [f64]>,
}

/// The time that one entry of the costs gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// `costs[j]`: micro-batch `j` through the whole model, forward and backward. Every stage takes an equal part of
    /// it, and of that a third each the forward and the gradients of input and weights.
    MicroBatch,
    /// `costs[j * stages + s]`: micro-batch `j` in stage `s` of the model, a third for each of its passes.
    Stage,
    /// `costs[(j * stages + s) * 3 + k]`: the same for each pass: forward, input gradient, weight gradient.
    Pass,
}

impl Detail {
    /// Entries that the costs have.
    pub fn entries(self, num_micro_batches: usize, total_stages: usize) -> usize {
        match self {
            Self::MicroBatch => num_micro_batches,
            Self::Stage => num_micro_batches * total_stages,
            Self::Pass => num_micro_batches * total_stages * 3,
        }
    }
}

impl<'a> Times<'a> {
    /// Compute time alone; see [`Detail`] for what an entry is.
    ///
    /// # Errors
    /// [`Error::Entry`] for a cost that is negative or not finite.
    pub fn new(costs: &'a [f64], detail: Detail) -> Result<Self> {
        check("costs", costs)?;
        Ok(Self { costs, detail, p2p_seconds: &[0.0], exposed: None })
    }

    /// [`Times::new`] with [`Detail::MicroBatch`].
    ///
    /// # Errors
    /// Those of [`Times::new`].
    pub fn per_micro_batch(costs: &'a [f64]) -> Result<Self> {
        Self::new(costs, Detail::MicroBatch)
    }

    /// Also latency: from the end of an op to when a stage on another rank can start on what it sends. It occupies
    /// neither of the two. One value for all micro-batches, or one for each.
    ///
    /// # Errors
    /// [`Error::Entry`] for a latency that is negative or not finite.
    pub fn with_p2p(self, p2p_seconds: &'a [f64]) -> Result<Self> {
        check("p2p_seconds", p2p_seconds)?;
        Ok(Self { p2p_seconds, ..self })
    }

    /// Also which part of the costs is communication that nothing hides, entry by entry. It changes no time, only what
    /// the time is attributed to.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for another number of entries; [`Error::Entry`] for one that is negative or more than its
    /// cost.
    pub fn with_exposed(self, exposed: &'a [f64]) -> Result<Self> {
        expect("exposed", exposed.len(), "costs", self.costs.len())?;
        check("exposed", exposed)?;
        match exposed.iter().zip(self.costs).position(|(part, whole)| part > whole) {
            None => Ok(Self { exposed: Some(exposed), ..self }),
            Some(index) => {
                let requirement = "must be at most the cost that it is a part of";
                Err(Error::Entry { argument: "exposed", index, value: exposed[index], requirement })
            }
        }
    }

    /// Checks that everything is there for that many micro-batches and stages.
    pub(super) fn check_shape(&self, num_micro_batches: usize, total_stages: usize) -> Result<()> {
        let entries = self.detail.entries(num_micro_batches, total_stages);
        expect("costs", self.costs.len(), "the schedule", entries)?;
        if self.p2p_seconds.len() == 1 {
            return Ok(());
        }
        expect("p2p_seconds", self.p2p_seconds.len(), "the schedule", num_micro_batches)
    }
}

/// Checks amounts that cannot be negative.
pub(super) fn check(argument: &'static str, values: &[f64]) -> Result<()> {
    match values.iter().position(|value| !(0.0..=f64::MAX).contains(value)) {
        None => Ok(()),
        Some(index) => {
            Err(Error::Entry { argument, index, value: values[index], requirement: "must be finite and not negative" })
        }
    }
}

pub(super) fn expect(argument: &'static str, found: usize, other: &'static str, expected: usize) -> Result<()> {
    if found == expected { Ok(()) } else { Err(Error::Mismatch { argument, found, other, expected }) }
}
