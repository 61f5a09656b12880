//! A forest's plan: plain data that can be printed, hashed, saved and sent.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::{Error, Result, from_json, saturating_i64};
use crate::packing::{Padding, Ranks, deal, over_mean};

use super::tree::PrefixForest;

/// The micro-batches of a forest. A micro-batch has each token that its samples share once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForestPlan {
    /// The forest.
    pub forest: PrefixForest,
    /// Most unique tokens that a micro-batch was allowed.
    pub max_tokens: i32,
    /// All samples, micro-batch by micro-batch; ascending inside a micro-batch.
    pub samples: Vec<u32>,
    /// Micro-batch `j` has `samples[offsets[j]..offsets[j + 1]]`.
    pub offsets: Vec<usize>,
    /// Unique tokens of each micro-batch.
    pub unique_tokens: Vec<i64>,
    /// Cost of each micro-batch.
    pub costs: Vec<f64>,
    /// The ranks that the plan was made for, if any: the first micro-batches are the first rank's, and so on.
    pub ranks: Option<Ranks>,
    /// Padding of micro-batches when they run, if any.
    pub padding: Option<Padding>,
    /// A lower bound on the step of any plan of these samples.
    pub lower_bound: f64,
}

impl ForestPlan {
    /// Number of micro-batches.
    pub fn num_micro_batches(&self) -> usize {
        self.costs.len()
    }

    /// Samples of a micro-batch, ascending.
    pub fn micro_batch(&self, micro_batch: usize) -> &[u32] {
        &self.samples[self.range(micro_batch)]
    }

    fn range(&self, micro_batch: usize) -> Range<usize> {
        self.offsets[micro_batch]..self.offsets[micro_batch + 1]
    }

    /// Tokens of the samples of each micro-batch.
    pub fn raw_tokens(&self, micro_batch: usize) -> i64 {
        self.micro_batch(micro_batch).iter().map(|&sample| i64::from(self.forest.sample_length(sample as usize))).sum()
    }

    /// Unique tokens of all micro-batches.
    pub fn total_unique_tokens(&self) -> i64 {
        self.unique_tokens.iter().sum()
    }

    /// Tokens of a micro-batch when it runs, padding included.
    pub fn padded_tokens(&self, micro_batch: usize) -> i64 {
        let tokens = self.unique_tokens[micro_batch];
        self.padding.as_ref().map_or(tokens, |padding| padding.padded(tokens))
    }

    /// Time of a step: the heaviest rank, or the sum of the heaviest micro-batch of each round; without ranks the
    /// heaviest micro-batch.
    pub fn step_cost(&self) -> f64 {
        match self.ranks {
            Some(ranks) => ranks.step_cost(&self.costs),
            None => self.costs.iter().copied().fold(0.0, f64::max),
        }
    }

    /// Time of the step over the time if all computed work were spread evenly.
    pub fn imbalance(&self) -> f64 {
        let parts = self.ranks.map_or(self.num_micro_batches(), |ranks| ranks.dp_size);
        if self.samples.is_empty() { 1.0 } else { over_mean(self.step_cost(), parts, self.costs.iter().sum()) }
    }

    /// Deals the micro-batches to `dp_size` ranks, like [`Packing::deal`](crate::Packing::deal).
    ///
    /// # Errors
    /// [`Error::Indivisible`] if `dp_size` does not divide the micro-batches, [`Error::Combination`] if the plan was
    /// made for other ranks.
    pub fn deal(&self, dp_size: usize) -> Result<Vec<usize>> {
        let total = self.num_micro_batches();
        if dp_size == 0 || !total.is_multiple_of(dp_size) {
            return Err(Error::Indivisible { argument: "dp_size", value: saturating_i64(dp_size), total });
        }
        match self.ranks {
            Some(ranks) if ranks.dp_size == dp_size => Ok((0..total).collect()),
            Some(_) => {
                let requirement = "the plan was made for another number of ranks; pack again with this dp_size";
                Err(Error::Combination { argument: "dp_size", requirement })
            }
            None => Ok(deal(&self.costs, dp_size)),
        }
    }

    /// A hash of the place of every token: equal on two ranks if and only if their plans are. If nothing is shared it
    /// is the digest of the samples' [`Packing`](crate::Packing).
    ///
    /// # Complexity
    /// O(samples and nodes), BLAKE3.
    pub fn digest(&self) -> String {
        let mut digest = Digest::new();
        digest.add(&(self.num_micro_batches() as u64).to_le_bytes());
        self.offsets.iter().for_each(|&offset| digest.add(&(offset as u64).to_le_bytes()));
        for &sample in &self.samples {
            digest.add(&i64::from(sample).to_le_bytes());
            digest.add(&0_i32.to_le_bytes());
            digest.add(&self.forest.sample_length(sample as usize).to_le_bytes());
        }
        if self.forest.shares() {
            self.forest.add_to(&mut digest);
        }
        digest.finish()
    }

    /// The plan as JSON, for pickles.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The plan that [`ForestPlan::to_json`] wrote.
    ///
    /// # Errors
    /// [`Error::State`] for anything else.
    pub fn from_json(json: &str) -> Result<Self> {
        let mut plan: Self = from_json(json).map_err(|(path, problem)| Error::State { path, problem })?;
        plan.forest = plan.forest.checked()?;
        let micro_batches = plan.costs.len();
        let (samples, limit) = (plan.forest.num_samples(), i64::from(plan.max_tokens));
        let mut seen = vec![false; samples];
        let once = |&sample: &u32| seen.get_mut(sample as usize).is_some_and(|seen| !std::mem::replace(seen, true));
        let fits = micro_batches > 0
            && plan.unique_tokens.len() == micro_batches
            && plan.offsets.len() == micro_batches + 1
            && plan.offsets.first() == Some(&0)
            && plan.offsets.last() == Some(&samples)
            && plan.offsets.is_sorted()
            && plan.samples.len() == samples
            && plan.samples.iter().all(once)
            && plan.unique_tokens.iter().all(|&tokens| (0..=limit).contains(&tokens))
            && plan.ranks.is_none_or(|ranks| ranks.dp_size > 0 && micro_batches.is_multiple_of(ranks.dp_size))
            && plan
                .padding
                .as_ref()
                .is_none_or(|padding| padding.is_sound() && padding.most(plan.max_tokens) == Ok(plan.max_tokens));
        let problem = "its arrays do not belong together".to_owned();
        if fits { Ok(plan) } else { Err(Error::State { path: "offsets".to_owned(), problem }) }
    }
}
