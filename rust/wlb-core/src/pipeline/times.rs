//! Times of a micro-batch's passes.

use crate::error::{Error, Result};

/// Seconds of all passes of a schedule. Borrowed, and checked once.
#[derive(Clone, Copy, Debug)]
pub struct Times<'a> {
    pub(super) costs: &'a [f64],
    pub(super) detail: Detail,
    pub(super) p2p_seconds: &'a [f64],
    pub(super) exposed: Option<&'a [f64]>,
}

/// The work that one entry of the costs stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    /// `costs[j]`: micro-batch `j` through the whole model, forward and backward. Each stage takes an equal part of it,
    /// and in each stage forward, input gradient and weight gradient take a third each.
    MicroBatch,
    /// `costs[j * stages + s]`: micro-batch `j` in stage `s` of the model; each of the three passes takes a third.
    Stage,
    /// `costs[(j * stages + s) * 3 + k]`: one pass of micro-batch `j` in stage `s`: forward, input gradient, weight
    /// gradient.
    Pass,
}

impl Detail {
    /// Number of entries in the costs.
    pub fn entries(self, num_micro_batches: usize, total_stages: usize) -> usize {
        match self {
            Self::MicroBatch => num_micro_batches,
            Self::Stage => num_micro_batches * total_stages,
            Self::Pass => num_micro_batches * total_stages * 3,
        }
    }
}

impl<'a> Times<'a> {
    /// Compute times only; [`Detail`] says what an entry is.
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
    /// The errors of [`Times::new`].
    pub fn per_micro_batch(costs: &'a [f64]) -> Result<Self> {
        Self::new(costs, Detail::MicroBatch)
    }

    /// Adds latency: the time from the end of an op until a stage on another rank can use its result. Both ranks may
    /// compute meanwhile. One value for all micro-batches, or one for each.
    ///
    /// # Errors
    /// [`Error::Entry`] for a latency that is negative or not finite.
    pub fn with_p2p(self, p2p_seconds: &'a [f64]) -> Result<Self> {
        check("p2p_seconds", p2p_seconds)?;
        Ok(Self { p2p_seconds, ..self })
    }

    /// Says, entry by entry, which part of the costs is communication that nothing hides. It does not change times,
    /// only how they are reported.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for another number of entries; [`Error::Entry`] for an entry that is negative or above its
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

    /// Checks that there is an entry for all micro-batches and stages.
    pub(super) fn check_shape(&self, num_micro_batches: usize, total_stages: usize) -> Result<()> {
        let entries = self.detail.entries(num_micro_batches, total_stages);
        expect("costs", self.costs.len(), "the schedule", entries)?;
        if self.p2p_seconds.len() == 1 {
            return Ok(());
        }
        expect("p2p_seconds", self.p2p_seconds.len(), "the schedule", num_micro_batches)
    }
}

/// Checks that no amount is negative.
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
