//! A Dynamic-CP plan: plain data that can be printed, hashed, saved and sent. Also plans under construction
//! ([`Draft`]).

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::digest::Digest;
use crate::error::{Error, Result, from_json};
use crate::packing::{Padding, Sync};
use crate::pipeline::Schedule;

use super::counts::price;
use super::options::DynamicCpOptions;
use super::problem::Document;

/// Ranks that share the documents of one micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// First rank of the group; a multiple of `cp_size` if groups are powers of two.
    pub first_rank: u32,
    /// Number of ranks.
    pub cp_size: u32,
    /// Time through the whole model, forward and backward, on each of its ranks.
    pub seconds: f64,
}

impl Group {
    /// Ranks of the group.
    pub fn ranks(&self) -> Range<usize> {
        self.first_rank as usize..(self.first_rank + self.cp_size) as usize
    }
}

/// Plan of one step: the documents of each micro-batch, and the ranks of a stage that share them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DynamicCpPlan {
    /// Ranks of a pipeline stage.
    pub world_size: usize,
    /// Pipeline stages.
    pub num_stages: usize,
    /// Parts of the model on each stage.
    pub num_virtual_stages: usize,
    /// Pipeline schedule.
    pub schedule: Schedule,
    /// Where the ranks of a stage wait for each other; `seconds` includes this waiting.
    pub sync: Sync,
    /// Most tokens that a rank was allowed in a micro-batch; with padding, the largest padded size.
    pub max_tokens_per_rank: i32,
    /// Padding of each rank's tokens in a micro-batch, if any.
    pub padding: Option<Padding>,
    /// Most documents that a group was allowed.
    pub max_documents: Option<usize>,
    /// Document ids, group by group; in arrival order inside a group.
    pub documents: Vec<i64>,
    /// Tokens of each document in `documents`.
    pub lengths: Vec<i32>,
    /// Groups, micro-batch by micro-batch. Inside a micro-batch they are in the order of their ranks and cover all
    /// ranks. A group may be empty.
    pub groups: Vec<Group>,
    /// Group `g` has `documents[document_offsets[g]..document_offsets[g + 1]]`.
    pub document_offsets: Vec<usize>,
    /// Micro-batch `j` has `groups[group_offsets[j]..group_offsets[j + 1]]`.
    pub group_offsets: Vec<usize>,
    /// Predicted time of the step.
    pub seconds: f64,
    /// Latency between pipeline stages, included in `seconds`.
    pub p2p_seconds: f64,
    /// A lower bound on `seconds` (up to rounding) for any plan with at most as many micro-batches as were tried. If
    /// their number was given, for any plan with that number; if the least was given, for any plan with at least that
    /// number.
    pub lower_bound: f64,
    /// Time if all work were spread evenly over all ranks of all stages and no rank ever waited; no pipeline reaches
    /// it.
    pub balanced_seconds: f64,
    /// Numbers of micro-batches that were tried, ascending, each with its predicted time. For numbers that were given
    /// up early, the time is a lower value (with freely divisible short documents, or with a part of the documents)
    /// that already exceeds the plan's. If exchange costs and documents are very many, most numbers are judged by a
    /// sample of these: their times are as much longer as they are there.
    pub sweep: Vec<(usize, f64)>,
}

impl DynamicCpPlan {
    /// Number of micro-batches of the step, equal on every rank.
    pub fn num_micro_batches(&self) -> usize {
        self.group_offsets.len() - 1
    }

    /// The range in `groups` of a micro-batch.
    pub fn groups_of(&self, micro_batch: usize) -> Range<usize> {
        self.group_offsets[micro_batch]..self.group_offsets[micro_batch + 1]
    }

    /// The range in `documents` and `lengths` of a group.
    pub fn documents_of(&self, group: usize) -> Range<usize> {
        self.document_offsets[group]..self.document_offsets[group + 1]
    }

    /// Tokens of a group.
    pub fn tokens(&self, group: usize) -> i64 {
        self.lengths[self.documents_of(group)].iter().map(|&length| i64::from(length)).sum()
    }

    /// Most tokens of a rank of a group, if documents are cut per document: ranks differ by at most one token.
    pub fn tokens_per_rank(&self, group: usize) -> i64 {
        (self.tokens(group) as u64).div_ceil(u64::from(self.groups[group].cp_size)) as i64
    }

    /// Tokens of every rank of a group including padding. Padding is one more document of `cp_size *
    /// padded_tokens_per_rank - tokens` tokens, so that all ranks have equally many.
    pub fn padded_tokens_per_rank(&self, group: usize) -> i64 {
        let tokens = self.tokens_per_rank(group);
        self.padding.as_ref().map_or(tokens, |padding| padding.padded(tokens))
    }

    /// Tokens of the document of padding that fills all ranks of a group to the same size; 0 without padding.
    pub fn padding_tokens(&self, group: usize) -> i64 {
        let filled = i64::from(self.groups[group].cp_size) * self.padded_tokens_per_rank(group);
        if self.padding.is_some() { filled - self.tokens(group) } else { 0 }
    }

    /// The group that a rank belongs to in a micro-batch.
    ///
    /// # Complexity
    /// O(log groups).
    pub fn group_of(&self, micro_batch: usize, rank: usize) -> usize {
        let range = self.groups_of(micro_batch);
        range.start + self.groups[range].partition_point(|group| group.first_rank as usize <= rank) - 1
    }

    /// A number of its group for each rank, micro-batch by micro-batch.
    ///
    /// # Complexity
    /// O(micro-batches * world_size).
    pub fn of_ranks<T: Copy>(&self, of_group: impl Fn(usize) -> T) -> Vec<T> {
        let ranks = self.groups.iter().enumerate();
        ranks.flat_map(|(index, group)| std::iter::repeat_n(of_group(index), group.cp_size as usize)).collect()
    }

    /// The plan as JSON text.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// The plan that [`DynamicCpPlan::to_json`] wrote.
    ///
    /// # Errors
    /// [`Error::State`] for anything else.
    pub fn from_json(json: &str) -> Result<Self> {
        let plan: Self = from_json(json).map_err(|(path, problem)| Error::State { path, problem })?;
        let refused = |path: &str, problem: String| Err(Error::State { path: path.to_owned(), problem });
        let (offsets, documents) = (&plan.document_offsets, plan.documents.len());
        let ends = (offsets.first(), offsets.last(), offsets.len(), plan.lengths.len());
        if !offsets.is_sorted() || ends != (Some(&0), Some(&documents), plan.groups.len() + 1, documents) {
            return refused("document_offsets", "does not divide the documents among the groups".to_owned());
        }
        let seconds: Vec<f64> = plan.groups.iter().map(|group| group.seconds).collect();
        match plan.step_seconds(&seconds) {
            Ok(_) => Ok(plan),
            Err(error) => refused(error.argument(), error.to_string()),
        }
    }

    /// A hash of which documents run when and where: equal if and only if two plans are, apart from predicted seconds.
    ///
    /// # Complexity
    /// O(documents + groups), BLAKE3.
    pub fn digest(&self) -> String {
        let mut digest = Digest::new();
        for size in [self.world_size, self.num_stages, self.num_virtual_stages, self.num_micro_batches()] {
            digest.add(&(size as u64).to_le_bytes());
        }
        for &offset in self.group_offsets.iter().chain(&self.document_offsets) {
            digest.add(&(offset as u64).to_le_bytes());
        }
        for group in &self.groups {
            digest.add(&group.first_rank.to_le_bytes());
            digest.add(&group.cp_size.to_le_bytes());
        }
        for (id, length) in self.documents.iter().zip(&self.lengths) {
            digest.add(&id.to_le_bytes());
            digest.add(&length.to_le_bytes());
        }
        if self.schedule.is_v_shaped() {
            digest.add(self.schedule.as_str().as_bytes());
        }
        if self.sync == Sync::MicroBatch {
            digest.add(self.sync.as_str().as_bytes());
        }
        if let Some(padding) = &self.padding {
            let sizes = std::iter::once(padding.multiple_of()).chain(padding.buckets().iter().copied());
            sizes.for_each(|size| digest.add(&size.to_le_bytes()));
        }
        if let Some(max_documents) = self.max_documents {
            digest.add(&(max_documents as u64).to_le_bytes());
        }
        digest.finish()
    }
}

/// Documents that share a group of ranks.
#[derive(Clone, Copy, Debug)]
pub(super) struct DraftGroup {
    pub(super) first_rank: u32,
    pub(super) cp_size: u32,
    pub(super) seconds: f64,
    /// End of its documents in [`Draft::documents`] (one past the last).
    pub(super) end: u32,
}

impl DraftGroup {
    /// The group without its documents, as a plan stores it.
    pub(super) fn planned(&self) -> Group {
        let &Self { first_rank, cp_size, seconds, .. } = self;
        Group { first_rank, cp_size, seconds }
    }
}

/// A plan under construction.
#[derive(Clone, Debug, Default)]
pub(super) struct Draft {
    /// Indices in [`Problem::documents`], group by group.
    pub(super) documents: Vec<u32>,
    /// Groups, micro-batch by micro-batch; inside one in the order of ranks, and covering all ranks.
    pub(super) groups: Vec<DraftGroup>,
    /// Micro-batch `j` is `groups[offsets[j]..offsets[j + 1]]`.
    pub(super) offsets: Vec<usize>,
}

impl Draft {
    /// Seconds of each micro-batch on its slowest rank.
    pub(super) fn costs(&self) -> Vec<f64> {
        let slowest = |groups: &[DraftGroup]| groups.iter().map(|group| group.seconds).fold(0.0, f64::max);
        self.offsets.windows(2).map(|ends| slowest(&self.groups[ends[0]..ends[1]])).collect()
    }

    /// The draft with its micro-batches in another order, and documents in arrival order inside each group.
    pub(super) fn in_order(&self, order: &[usize], documents: &[Document]) -> Self {
        let mut draft = Self { offsets: vec![0], ..Self::default() };
        for &j in order {
            for index in self.offsets[j]..self.offsets[j + 1] {
                let group = self.groups[index];
                let start = if index == 0 { 0 } else { self.groups[index - 1].end } as usize;
                let first = draft.documents.len();
                draft.documents.extend_from_slice(&self.documents[start..group.end as usize]);
                draft.documents[first..].sort_unstable_by_key(|&document| documents[document as usize].index);
                draft.groups.push(DraftGroup { end: draft.documents.len() as u32, ..group });
            }
            draft.offsets.push(draft.groups.len());
        }
        draft
    }

    /// Tokens of each micro-batch on its fullest rank, padding included.
    pub(super) fn fullest(&self, documents: &[Document], padding: Option<&Padding>) -> Vec<i64> {
        let mut start = 0;
        let mut of_group = |group: &DraftGroup| {
            let inside = &self.documents[start..group.end as usize];
            start = group.end as usize;
            let tokens: i64 = inside.iter().map(|&document| documents[document as usize].load.tokens).sum();
            let ranks = i64::from(group.cp_size);
            let tokens = (tokens + ranks - 1) / ranks;
            padding.map_or(tokens, |padding| padding.padded(tokens))
        };
        let mut of_micro_batch = |groups: &[DraftGroup]| groups.iter().map(&mut of_group).fold(0, i64::max);
        self.offsets.windows(2).map(|ends| of_micro_batch(&self.groups[ends[0]..ends[1]])).collect()
    }
}

/// A solution: a draft, the order of its micro-batches, and the seconds of its step.
#[derive(Clone)]
pub(super) struct Best {
    pub(super) num_micro_batches: usize,
    pub(super) draft: Draft,
    /// Order of the draft's micro-batches.
    pub(super) order: Vec<usize>,
    pub(super) seconds: f64,
}

impl Best {
    pub(super) fn price(&self, options: &DynamicCpOptions) -> f64 {
        price(options, self.num_micro_batches, self.seconds)
    }
}
