//! A packing: plain data that can be printed, hashed, saved and sent.

use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::cost::CostModel;
use crate::digest::Digest;
use crate::error::{Error, Result, from_json};
use crate::forest::PrefixForest;

use super::certificate::{Bins, Certificate, raised};
use super::columns::Columns;
use super::options::{Method, Ranks};
use super::over_mean::over_mean;
use super::padding::Padding;
use super::piece::Piece;

/// The micro-batches of one global batch.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Packing {
    /// Method that made the packing; `None` for a forest, and for an assignment that was made elsewhere.
    pub method: Option<Method>,
    /// Most tokens that a micro-batch was allowed.
    pub max_tokens: i32,
    /// Global batches that were packed together: each step trains an equal run of micro-batches.
    pub global_batches: usize,
    /// All placed pieces, micro-batch by micro-batch; in arrival order inside a micro-batch.
    pub pieces: Vec<Piece>,
    /// Micro-batch `j` is `pieces[offsets[j]..offsets[j + 1]]`.
    pub offsets: Vec<usize>,
    /// Micro-batch of each document; -1 for a document that is not whole in one micro-batch.
    pub assignment: Vec<i32>,
    /// Tokens of each micro-batch; of a forest those of its nodes, each shared token once.
    pub tokens: Vec<i64>,
    /// Cost of each micro-batch: the cost of an empty one plus its documents', summed in the order in which they were
    /// placed.
    pub costs: Vec<f64>,
    /// Pieces that were not placed, in the order in which they were tried.
    pub leftover: Vec<Piece>,
    /// Documents that were placed by token count, because the micro-batch with the least cost had no room.
    pub length_fallbacks: usize,
    /// Cost of a micro-batch with only the heaviest placed piece; with several columns, the sum of each column's
    /// heaviest.
    pub largest_cost: f64,
    /// Costs in each column, if documents have several. `costs` are then the sums of all columns that take time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<Columns>,
    /// The ranks that the packing was made for, if any: the first micro-batches are the first rank's, and so on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ranks: Option<Ranks>,
    /// Padding of the micro-batches, if any; `max_tokens` is then the largest padded size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub padding: Option<Padding>,
    /// The forest whose samples are the documents, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forest: Option<Arc<PrefixForest>>,
    /// The inputs of the lower bound.
    #[serde(rename = "lower_bound", default, skip_serializing_if = "Certificate::is_unknown")]
    pub certificate: Certificate,
}

impl Packing {
    /// Number of micro-batches.
    pub fn num_micro_batches(&self) -> usize {
        self.tokens.len()
    }

    /// The range in `pieces` of micro-batch `j`.
    pub fn range(&self, micro_batch: usize) -> Range<usize> {
        self.offsets[micro_batch]..self.offsets[micro_batch + 1]
    }

    /// The pieces of micro-batch `j`.
    pub fn micro_batch(&self, micro_batch: usize) -> &[Piece] {
        &self.pieces[self.range(micro_batch)]
    }

    /// Tokens of each micro-batch when it runs, padding included.
    pub fn padded_tokens(&self) -> Vec<i64> {
        let padded = |&tokens: &i64| self.padding.as_ref().map_or(tokens, |padding| padding.padded(tokens));
        self.tokens.iter().map(padded).collect()
    }

    /// The documents of micro-batch `j`, as samples of a forest.
    pub fn samples(&self, micro_batch: usize) -> Vec<u32> {
        self.micro_batch(micro_batch).iter().map(|piece| piece.id as u32).collect()
    }

    /// Tokens of all micro-batches.
    pub fn num_tokens(&self) -> i64 {
        self.tokens.iter().sum()
    }

    /// Cost of all micro-batches.
    pub fn total_cost(&self) -> f64 {
        self.costs.iter().sum()
    }

    /// Cost of the heaviest micro-batch.
    pub fn max_cost(&self) -> f64 {
        self.costs.iter().copied().fold(0.0, f64::max)
    }

    /// Time of a step: the heaviest rank, or the sum of the heaviest micro-batch of each round, as the ranks of the
    /// packing wait for each other; without ranks the heaviest micro-batch. With several columns, the sum over columns
    /// of the heaviest micro-batch in each.
    pub fn step_cost(&self) -> f64 {
        self.ranks.map_or_else(|| self.heaviest(), |ranks| ranks.step_cost(&self.costs))
    }

    /// Cost of the heaviest micro-batch; with several columns, the sum over columns of the heaviest in each.
    fn heaviest(&self) -> f64 {
        self.columns.as_ref().map_or_else(|| self.max_cost(), Columns::step_cost)
    }

    /// Heaviest micro-batch over the mean: how uneven micro-batches are, whatever ranks they are on. With several
    /// columns, the sum over columns of the heaviest in each. 1 if nothing is placed.
    pub fn imbalance(&self) -> f64 {
        if self.pieces.is_empty() {
            return 1.0;
        }
        over_mean(self.heaviest(), self.num_micro_batches(), self.total_cost())
    }

    /// Time of a step over the time if all ranks were equal. The ranks wait as the packing was made for: the step takes
    /// the time of the heaviest rank, or the sum of the heaviest micro-batch of each round. Without ranks it is
    /// [`Packing::imbalance`].
    pub fn rank_imbalance(&self) -> f64 {
        match self.ranks {
            Some(ranks) if !self.pieces.is_empty() => ranks.imbalance(&self.costs),
            _ => self.imbalance(),
        }
    }

    /// A lower bound on [`Packing::step_cost`], for any packing of the placed pieces into as many micro-batches of
    /// `max_tokens` on as many ranks.
    ///
    /// # Complexity
    /// O(n log n) for `n` pieces at the first call.
    pub fn lower_bound(&self) -> f64 {
        let known = &self.certificate.bound;
        known.get().unwrap_or_else(|| {
            let heaviest = self.bound();
            let bound = self
                .ranks
                .map_or(heaviest, |ranks| heaviest.max(self.total_cost() / ranks.dp_size as f64).min(self.step_cost()));
            known.set(bound);
            bound
        })
    }

    /// A lower bound on the heaviest micro-batch.
    fn bound(&self) -> f64 {
        if let Some(columns) = &self.columns {
            let of = |column| {
                let costs = || self.certificate.costs(&self.pieces, column, columns.len());
                self.raised(costs, 0.0, columns.least(column), columns.max(column))
            };
            return columns.timed().map(of).sum();
        }
        let mean = self.total_cost() / self.num_micro_batches() as f64;
        let empty_cost = self.certificate.model().map_or(0.0, CostModel::micro_batch);
        let costs = || self.certificate.costs(&self.pieces, 0, 1);
        self.raised(costs, empty_cost, mean.max(self.largest_cost), self.max_cost())
    }

    /// Raises a bound by what `max_tokens` forces; the heaviest micro-batch costs `most`.
    fn raised(&self, costs: impl FnOnce() -> Option<Vec<f64>>, empty_cost: f64, least: f64, most: f64) -> f64 {
        if least >= most {
            return most;
        }
        let bins = Bins { count: self.num_micro_batches(), max_tokens: self.max_tokens, empty_cost };
        costs().map_or(least, |costs| raised(bins, &self.pieces, &costs, least, most))
    }

    /// Memory skew: tokens of the fullest micro-batch over the mean. 1 if nothing is placed.
    pub fn memory_skew(&self) -> f64 {
        let total = self.num_tokens();
        let most = self.tokens.iter().copied().max().unwrap_or(0);
        if total > 0 { most as f64 * self.num_micro_batches() as f64 / total as f64 } else { 1.0 }
    }

    /// A hash of the place of every token: equal on two ranks if and only if their plans are equal. The packing of a
    /// forest that shares nothing has the hash of the packing of its samples.
    ///
    /// # Complexity
    /// O(pieces), BLAKE3.
    pub fn digest(&self) -> String {
        let mut digest = Digest::new();
        digest.add(&(self.num_micro_batches() as u64).to_le_bytes());
        for &offset in &self.offsets {
            digest.add(&(offset as u64).to_le_bytes());
        }
        for piece in self.pieces.iter().chain(&self.leftover) {
            digest.add(&piece.id.to_le_bytes());
            digest.add(&piece.start.to_le_bytes());
            digest.add(&piece.length.to_le_bytes());
        }
        if let Some(forest) = self.forest.as_ref().filter(|forest| forest.shares()) {
            forest.add_to(&mut digest);
        }
        digest.finish()
    }

    /// The packing as JSON, for pickles.
    pub fn to_json(&self) -> String {
        // Documents' costs are not saved, so the bound is computed before.
        self.lower_bound();
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The packing that [`Packing::to_json`] wrote.
    ///
    /// # Errors
    /// [`Error::State`] for anything else.
    pub fn from_json(json: &str) -> Result<Self> {
        let mut packing: Self = from_json(json).map_err(|(path, problem)| Error::State { path, problem })?;
        if let Some(forest) = &mut packing.forest {
            *forest = Arc::new(PrefixForest::clone(forest).checked()?);
        }
        let micro_batches = packing.tokens.len();
        let is_part =
            |piece: &Piece| piece.start >= 0 && piece.length > 0 && piece.start.checked_add(piece.length).is_some();
        let counted = |j: usize| {
            let tokens = match &packing.forest {
                Some(forest) => forest.tokens_of(&packing.samples(j)),
                None => packing.micro_batch(j).iter().map(|piece| i64::from(piece.length)).sum(),
            };
            packing.tokens[j] == tokens && tokens <= i64::from(packing.max_tokens)
        };
        let whole = |forest: &PrefixForest| {
            let mut seen = vec![false; forest.num_samples()];
            let mut once = |piece: &Piece| {
                let seen = usize::try_from(piece.id).ok().and_then(|id| seen.get_mut(id));
                seen.is_some_and(|seen| !std::mem::replace(seen, true))
                    && (piece.start, piece.length) == (0, forest.sample_length(piece.id as usize))
            };
            packing.pieces.len() == forest.num_samples() && packing.pieces.iter().all(&mut once)
        };
        let exists = |&j: &i32| j == -1 || usize::try_from(j).is_ok_and(|j| j < micro_batches);
        let fits = micro_batches > 0
            && packing.costs.len() == micro_batches
            && packing.offsets.len() == micro_batches + 1
            && packing.offsets.first() == Some(&0)
            && packing.offsets.last() == Some(&packing.pieces.len())
            && packing.offsets.is_sorted()
            && packing.global_batches > 0
            && micro_batches.is_multiple_of(packing.global_batches)
            && packing.pieces.iter().chain(&packing.leftover).all(is_part)
            && packing.forest.as_ref().is_none_or(|forest| whole(forest))
            && (0..micro_batches).all(counted)
            && packing.columns.as_ref().is_none_or(|columns| columns.fit(micro_batches))
            && packing
                .padding
                .as_ref()
                .is_none_or(|padding| padding.is_sound() && padding.most(packing.max_tokens) == Ok(packing.max_tokens))
            && packing.ranks.is_none_or(|ranks| {
                packing.global_batches == 1 && ranks.dp_size > 0 && micro_batches.is_multiple_of(ranks.dp_size)
            })
            && packing.assignment.iter().all(exists);
        let problem = "its arrays do not belong together".to_owned();
        if fits { Ok(packing) } else { Err(Error::State { path: "offsets".to_owned(), problem }) }
    }
}
